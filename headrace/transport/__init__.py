"""Connections between two stages: memory channels in one process, topics between processes."""
