"""What may be committed: requests in flight, answered offsets, commits and transactions."""
