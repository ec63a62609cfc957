"""Devices: the port to their memory, streams and events, and its adapters.

The CUDA adapter is experimental, and off unless enabled twice: its tests pass on a GPU, but it has
not been under load for hours.
"""
