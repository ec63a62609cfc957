"""Tests of the connections between stages."""
