"""Records from a partition to the first stage: polling, waiting, backpressure, lag."""
