"""The log: a port (`port.py`) and two adapters, Kafka (`kafka.py`) and memory (`memory.py`)."""
