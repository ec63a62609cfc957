"""Rules for commits: requests in flight, answered offsets, commits and transactions."""
