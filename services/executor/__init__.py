"""Executor: batches come in, pulled by instances of their model; results go out."""
