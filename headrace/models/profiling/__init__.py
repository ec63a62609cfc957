"""Measurements of a model: whether its rows may share runs, and how long runs take."""
