"""Batcher: requests that can run come in; batches go out, each when somebody can run it."""
