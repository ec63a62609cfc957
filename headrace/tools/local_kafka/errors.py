"""What can go wrong with a local broker."""

from __future__ import annotations

from headrace.errors import Fatal


class BrokerUnavailable(Fatal):
    """No broker can be had on this machine: no Java, or no way to fetch Kafka."""


class ChecksumMismatch(Fatal):
    """A fetched file is not the file that the lock names."""


class BrokerFailed(Fatal):
    """A broker was started and did not come up, or ended by itself."""
