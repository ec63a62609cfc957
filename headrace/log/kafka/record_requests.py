"""Encode the requests that carry records, and decode their responses: Fetch 11 and Produce 7.

aiokafka opens no fetch sessions (KIP-227): each request lists all partitions that a process reads
from a broker, and each response has a part for each of them, nearly all empty. Its own codec makes
about 30 calls for each partition in both directions. Here each is packed and unpacked in one step.
What that saves, and when to undo it, is in docs/decisions/0020. Other versions, of brokers older
than 2.3, are still read and written by aiokafka.

Source of the layouts: "Fetch API" and "Produce API" in Kafka's protocol guide.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any, Final

from aiokafka.errors import NotLeaderForPartitionError
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.protocol.produce import ProduceRequest_v7

_REQUEST = struct.Struct(">iiiibii")  # replica, wait, two sizes, isolation, session and its epoch
_REQUESTED = struct.Struct(">iiqqi")  # partition, leader epoch, offset, log start, most bytes
_RESPONSE = struct.Struct(">ihii")  # throttled, error, session, number of topics
_PART = struct.Struct(">ihqqqi")  # partition, error, three offsets, number of transactions
_PART_END = struct.Struct(">ii")  # replica, size of the batches
_TRANSACTION = struct.Struct(">qq")
_PRODUCE = struct.Struct(">hii")  # acknowledgements, timeout, number of topics
_PART_BEGIN = struct.Struct(">ii")  # partition, size of the batches
_PRODUCED = struct.Struct(">ihqqq")  # partition, error, offset, timestamp, log start
_COUNT = struct.Struct(">i")
_LENGTH = struct.Struct(">h")
_NO_STRING: Final = _LENGTH.pack(-1)
_NO_REPLICA: Final = -1
_LEADER_UNFIT: Final = frozenset({9, 56, 74, 78})
"""REPLICA_NOT_AVAILABLE, KAFKA_STORAGE_ERROR, FENCED_LEADER_EPOCH and OFFSET_NOT_AVAILABLE."""


class FetchResponse:
    """A fetch response.

    Args:
        topics: (topic, parts) of each topic. A part is (partition, error code, high watermark, last
            stable offset, log start offset, aborted transactions, preferred replica, batches), as
            aiokafka's own response has it. But parts without records, error and replica are left
            out: aiokafka would only remember their offsets. And errors of a leader that may have
            been replaced, such as one whose disk failed, are NOT_LEADER_OR_FOLLOWER: after this one
            alone aiokafka asks for the leader anew, as Kafka's own client does after all of them.

    Attributes:
        errors: topic, partition and error code of each part with an error.
        is_refused: True if there are errors and no records. A broker answers so at once, and
            aiokafka would send the same request again at once.
    """

    API_VERSION: Final = 11

    def __init__(self, topics: list[tuple[str, list[tuple[Any, ...]]]]) -> None:
        self.topics = topics
        self.errors = [
            (name, part[0], part[1]) for name, parts in topics for part in parts if part[1]
        ]
        self.is_refused = bool(self.errors) and not any(
            part[-1] for _, parts in topics for part in parts
        )

    @classmethod
    def decode(cls, frame: BytesIO) -> FetchResponse:
        """Decode the rest of a frame, behind its header.

        Raises:
            struct.error: the frame is cut off.
            ValueError: it is cut off within the batches of a partition.
        """
        data, at = frame.getvalue(), frame.tell()
        _, _, _, topic_count = _RESPONSE.unpack_from(data, at)
        at += _RESPONSE.size
        topics: list[tuple[str, list[tuple[Any, ...]]]] = []
        for _ in range(topic_count):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            topic = data[at - length : at].decode()
            (part_count,) = _COUNT.unpack_from(data, at)
            at += _COUNT.size
            parts: list[tuple[Any, ...]] = []
            for _ in range(part_count):
                *fields, transaction_count = _PART.unpack_from(data, at)
                at += _PART.size
                if fields[1] in _LEADER_UNFIT:
                    fields[1] = NotLeaderForPartitionError.errno
                aborted = None
                if transaction_count >= 0:
                    start = at
                    at += transaction_count * _TRANSACTION.size
                    aborted = list(_TRANSACTION.iter_unpack(data[start:at]))
                replica, size = _PART_END.unpack_from(data, at)
                at += _PART_END.size
                batches = None
                if size >= 0:
                    batches = data[at : at + size]
                    if len(batches) < size:
                        raise ValueError(f"expected batches of {size} bytes, got {len(batches)}")
                    at += size
                if batches or fields[1] or replica != _NO_REPLICA:
                    parts.append((*fields, aborted, replica, batches))
            topics.append((topic, parts))
        return cls(topics)


def encode_fetch(request: FetchRequest_v11) -> bytes:
    """Encode a fetch request, without the header of the frame."""
    encoded = [
        _REQUEST.pack(
            request.replica_id,
            request.max_wait_time,
            request.min_bytes,
            request.max_bytes,
            request.isolation_level,
            request.session_id,
            request.session_epoch,
        ),
        _COUNT.pack(len(request.topics)),
    ]
    for topic, partitions in request.topics:
        encoded += (_string(topic), _COUNT.pack(len(partitions)))
        encoded += [_REQUESTED.pack(*partition) for partition in partitions]
    # No topics are forgotten without a session.
    encoded += (_COUNT.pack(0), _string(request.rack_id))
    return b"".join(encoded)


class ProduceResponse:
    """A response to a produce request.

    Args:
        topics: (topic, parts) of each topic. A part is (partition, error code, base offset,
            timestamp, log start offset), as aiokafka's own response has it.
        throttle_time_ms: how long the broker reads nothing more from the connection.
    """

    API_VERSION: Final = 7

    def __init__(
        self, topics: list[tuple[str, list[tuple[int, ...]]]], throttle_time_ms: int
    ) -> None:
        self.topics = topics
        self.throttle_time_ms = throttle_time_ms

    @classmethod
    def decode(cls, frame: BytesIO) -> ProduceResponse:
        """Decode the rest of a frame, behind its header.

        Raises:
            struct.error: the frame is cut off.
            UnicodeDecodeError: it is cut off within the name of a topic.
        """
        data, at = frame.getvalue(), frame.tell()
        (topic_count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        topics: list[tuple[str, list[tuple[int, ...]]]] = []
        for _ in range(topic_count):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            topic = data[at - length : at].decode()
            (part_count,) = _COUNT.unpack_from(data, at)
            at += _COUNT.size
            parts: list[tuple[int, ...]] = []
            for _ in range(part_count):
                parts.append(_PRODUCED.unpack_from(data, at))
                at += _PRODUCED.size
            topics.append((topic, parts))
        return cls(topics, *_COUNT.unpack_from(data, at))


def encode_produce(request: ProduceRequest_v7) -> bytes:
    """Encode a produce request, without the header of the frame."""
    name = request.transactional_id
    encoded = [
        _NO_STRING if name is None else _string(name),
        _PRODUCE.pack(request.required_acks, request.timeout, len(request.topics)),
    ]
    for topic, partitions in request.topics:
        encoded += (_string(topic), _COUNT.pack(len(partitions)))
        for number, batches in partitions:
            encoded += (_PART_BEGIN.pack(number, len(batches)), batches)
    return b"".join(encoded)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded
