"""What can be seen from outside: health, metrics, logs."""
