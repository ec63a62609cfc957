"""The log: a port (`port.py`) and its two adapters, the packages `kafka` and `memory`."""
