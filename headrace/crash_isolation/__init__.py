"""Crash isolation: find the record that ended a process, and run suspects alone meanwhile."""
