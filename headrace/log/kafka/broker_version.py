"""Which Kafka a broker is, as far as it lets clients know.

Brokers do not tell their release. They tell which requests they take, and some of those came, or
lost their old forms, with one release: KIP-896 removed Fetch below version 4 with Kafka 4.0 (of
Produce the old versions are still listed, for clients that insist on them), and KIP-664 brought
DescribeTransactions with 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FETCH: Final = 1
DESCRIBE_TRANSACTIONS: Final = 65


def oldest_release(versions: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """The oldest release, major and minor, that a broker can be; (0, 0) when older than 3.0.

    Args:
        versions: the lowest and highest version taken, by the request's key.
    """
    if versions.get(FETCH, (0, 0))[0] >= 4:
        return 4, 0
    return (3, 0) if DESCRIBE_TRANSACTIONS in versions else (0, 0)
