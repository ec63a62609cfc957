"""What the project needs to make its own files; none of it is installed."""
