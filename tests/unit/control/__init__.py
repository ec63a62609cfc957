"""Writing and following the control topic."""
