"""Choose the partition of a key by the rule of Kafka's Java client.

Records with the same key go to the same partition from any producer, so a Python client and a Java
producer that share keys share their order as well. The hash is MurmurHash2 with Kafka's seed
(`org.apache.kafka.common.utils.Utils.murmur2`), the partition its non-negative value modulo the
number of partitions (`BuiltInPartitioner.partitionForKey`).
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
