"""Errors of a local broker."""

from __future__ import annotations

from headrace.errors import Fatal


class BrokerUnavailable(Fatal):
    """No broker can run on this machine: there is no Java, or no way to fetch Kafka."""


class ChecksumMismatch(Fatal):
    """A fetched file differs from the one in the lock."""


class BrokerFailed(Fatal):
    """A broker did not start, or ended on its own."""
