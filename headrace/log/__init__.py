"""The log: a port (`port.py`) and its two adapters, Kafka (`kafka.py`) and in memory (`memory.py`)."""
