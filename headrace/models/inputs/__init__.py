"""Inputs of requests: the check against the signature, value ranges, padding, raw payloads."""
