"""Infer a broker's Kafka release from the requests that it supports.

Brokers do not report their release. They report the supported versions of each request, and some of
those were added, or lost their old versions, in one release: KIP-896 removed Fetch below version 4
with Kafka 4.0 (old versions of Produce are still listed, for clients that insist on them), and
KIP-664 added DescribeTransactions with 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FETCH: Final = 1
DESCRIBE_TRANSACTIONS: Final = 65


def oldest_release(versions: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the oldest release (major, minor) that a broker can be; (0, 0) when older than 3.0.

    Args:
        versions: the lowest and highest supported version, by API key.
    """
    if versions.get(FETCH, (0, 0))[0] >= 4:
        return 4, 0
    return (3, 0) if DESCRIBE_TRANSACTIONS in versions else (0, 0)
