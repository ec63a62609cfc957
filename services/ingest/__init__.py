"""Ingest: request records come in; requests that can run go on, the others to their answer."""
