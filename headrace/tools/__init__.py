"""Tools beside the product: load, replay, dead letters, offsets, demo, a local Kafka."""
