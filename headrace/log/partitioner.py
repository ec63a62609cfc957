"""Choose the partition of a record by the rules of Kafka's Java client.

Records with the same key go to the same partition from any producer, so a Python client and a Java
producer that share keys share their order as well. The hash is MurmurHash2 with Kafka's seed
(`org.apache.kafka.common.utils.Utils.murmur2`), the partition its non-negative value modulo the
number of partitions (`BuiltInPartitioner.partitionForKey`).

Records without a key go to one partition until that partition has had `batch.size` bytes of them,
and then to the next (KIP-794, the uniform sticky partitioner). Requests that are sent together then
share a produce request, a fetch and a batch, instead of having one of each for every partition.
"""

from __future__ import annotations

_SEED = 0x9747B28C
_M = 0x5BD1E995
_R = 24
_MASK = 0xFFFFFFFF


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition of a key, 0 to `partitions` - 1."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(key: bytes) -> int:
    """Return the hash as an unsigned 32-bit number (Java shows the same bits signed)."""
    whole = len(key) & ~3
    result = _SEED ^ len(key)
    for start in range(0, whole, 4):
        k = int.from_bytes(key[start : start + 4], "little") * _M & _MASK
        k = (k ^ (k >> _R)) * _M & _MASK
        result = (result * _M & _MASK) ^ k
    if len(key) > whole:
        result = (result ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    result = (result ^ (result >> 13)) * _M & _MASK
    return result ^ (result >> 15)


class StickyPartitioner:
    """Choose the partition of records without a key.

    Args:
        first: number of the first partition, taken modulo the number of partitions. Clients
            should begin at different ones.
        sticky_bytes: bytes for one partition, after which the next has its turn.
        sticky_s: longest time for one partition. It is not Kafka's: it limits how many requests
            of a client with little traffic wait if their partition has no leader.
    """

    def __init__(self, first: int, sticky_bytes: int = 16_384, sticky_s: float = 0.1) -> None:
        self._sticky_bytes = sticky_bytes
        self._sticky_s = sticky_s
        self._current = first
        self._bytes_left = sticky_bytes
        self._until_s: float | None = None

    def choose(self, size_bytes: int, partitions: int, now_s: float) -> int:
        """Return the partition of a record, 0 to `partitions` - 1; `now_s` is monotonic."""
        if self._until_s is None:
            self._until_s = now_s + self._sticky_s
        elif self._bytes_left <= 0 or now_s >= self._until_s:
            self._current += 1
            self._bytes_left = self._sticky_bytes
            self._until_s = now_s + self._sticky_s
        self._bytes_left -= size_bytes
        return self._current % partitions
