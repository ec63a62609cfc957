"""Ingest: decode and check request records; runnable requests go on, the others are answered."""
