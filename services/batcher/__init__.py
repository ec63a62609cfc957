"""Batcher: form batches of runnable requests, each when an executor instance can run it."""
