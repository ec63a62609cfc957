"""One process: its stages, their shared log, start-up and shutdown."""
