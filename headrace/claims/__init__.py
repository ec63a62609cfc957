"""The claim check: fetching and putting values that records refer to."""
