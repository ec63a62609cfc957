"""Instances whose batches pass through a ring of slots on a device."""
