"""The device port and its adapters."""
