"""Devices: the port to their memory, streams and events, and its adapters.

The CUDA adapter has not run on a GPU yet: it is experimental, and off unless enabled twice.
"""
