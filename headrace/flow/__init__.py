"""How work flows through a process: what is in flight, how stages are joined, how it all ends."""
