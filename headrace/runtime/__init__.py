"""One process: its stages, the log they share, and how it starts and stops."""
