"""Observability: health, metrics, logs, traces."""
