"""Tools that make the project's own files; none of them is installed."""
