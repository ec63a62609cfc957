"""Headrace: inference on Kafka, one answer record for every request record."""

__version__ = "0.1.0"
