"""Executor: instances pull batches of their model, run them, and send the results on."""
