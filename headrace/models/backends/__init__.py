"""Libraries that run models: the port and its adapters, warm-up, and output checks."""
