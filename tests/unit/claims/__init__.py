"""Unit tests of the claim check."""
