"""Loops written by hand: consume, decode, run, encode, produce, commit.

Each module is a program of its own that knows nothing of Headrace. `served` holds what they
share: the messages, the session, the arguments.
"""
