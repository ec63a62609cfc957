"""Workers that run user code on payloads and outputs: threads, or child processes."""
