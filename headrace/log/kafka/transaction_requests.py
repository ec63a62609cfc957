"""Requests of Kafka's transactions that aiokafka does not have.

Offsets of a transaction carry their member's generation since TxnOffsetCommit 3, so that the
coordinator refuses those of a generation that is over.

In the second version brokers add partitions and groups to a transaction by themselves, so that
AddPartitionsToTxn and AddOffsetsToTxn are not needed, and each end of a transaction begins a new
epoch, so that a delayed request cannot reach a later transaction. All brokers support it once the
feature `transaction.version` of the cluster is at least 2, as in every new cluster of Kafka 4.

Source: KIP-447, "Producer scalability for exactly once semantics"; KIP-890, "Transactions
Server-Side Defense"; the message definitions of Kafka 4.0 (ApiVersions 3, Produce 12,
TxnOffsetCommit 3 and 5, EndTxn 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, Final

from aiokafka.protocol.api import RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

from headrace.log.port import Committed, Membership, TopicPartition

_TEXT: Final = CompactString("utf-8")
_TAGS: Final = ("tags", TaggedFields)
_NO_TAGS: Final[Mapping[int, bytes]] = {}

_FEATURE: Final = "transaction.version"
_FINALIZED_FEATURES_TAG: Final = 2


def _many(*fields: tuple[str, Any]) -> CompactArray:
    return CompactArray(*fields, _TAGS)


_FINALIZED_FEATURES: Final = _many(
    ("name", _TEXT), ("max_version_level", Int16), ("min_version_level", Int16)
)

_NO_MEMBERSHIP: Final = Membership(-1, "")
_NO_INSTANCE: Final = None
_NO_LEADER_EPOCH: Final = -1


# --- messages ----------------------------------------------------------------------------------


class _ApiVersionsResponse(Response):  # type: ignore[misc]  # aiokafka publishes no types
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        ("api_keys", _many(("api_key", Int16), ("min_version", Int16), ("max_version", Int16))),
        ("throttle_time_ms", Int32),
        _TAGS,
    )


class _ApiVersions(RequestStruct):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ApiVersionsResponse
    SCHEMA = Schema(("client_software_name", _TEXT), ("client_software_version", _TEXT), _TAGS)

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> ResponseHeader_v0:
        """Return the header. It never has tags, since a broker of any age can answer."""
        return ResponseHeader_v0.decode(read_buffer)


class _ProduceResponse(Response):  # type: ignore[misc]
    API_KEY = 0
    API_VERSION = 12
    SCHEMA = Schema(
        (
            "topics",
            _many(
                ("topic", _TEXT),
                (
                    "partitions",
                    _many(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("offset", Int64),
                        ("timestamp", Int64),
                        ("log_start_offset", Int64),
                        ("record_errors", _many(("batch_index", Int32), ("message", _TEXT))),
                        ("error_message", _TEXT),
                    ),
                ),
            ),
        ),
        ("throttle_time_ms", Int32),
        _TAGS,
    )


class _Produce(RequestStruct):  # type: ignore[misc]
    API_KEY = 0
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ProduceResponse
    SCHEMA = Schema(
        ("transactional_id", _TEXT),
        ("required_acks", Int16),
        ("timeout", Int32),
        (
            "topics",
            _many(
                ("topic", _TEXT),
                ("partitions", _many(("partition", Int32), ("records", CompactBytes))),
            ),
        ),
        _TAGS,
    )


class _TxnOffsetCommitResponse(Response):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 5
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "errors",
            _many(
                ("topic", _TEXT),
                ("partitions", _many(("partition", Int32), ("error_code", Int16))),
            ),
        ),
        _TAGS,
    )


class _TxnOffsetCommit(RequestStruct):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 5
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _TxnOffsetCommitResponse
    SCHEMA = Schema(
        ("transactional_id", _TEXT),
        ("group_id", _TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        (
            "topics",
            _many(
                ("topic", _TEXT),
                (
                    "partitions",
                    _many(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", _TEXT),
                    ),
                ),
            ),
        ),
        _TAGS,
    )


class _TxnOffsetCommitResponseV3(_TxnOffsetCommitResponse):
    API_VERSION = 3


class _TxnOffsetCommitV3(_TxnOffsetCommit):
    API_VERSION = 3
    RESPONSE_TYPE = _TxnOffsetCommitResponseV3


class _EndTxnResponse(Response):  # type: ignore[misc]
    API_KEY = 26
    API_VERSION = 5
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        _TAGS,
    )


class _EndTxn(RequestStruct):  # type: ignore[misc]
    API_KEY = 26
    API_VERSION = 5
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _EndTxnResponse
    SCHEMA = Schema(
        ("transactional_id", _TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("committed", Boolean),
        _TAGS,
    )


# --- requests ----------------------------------------------------------------------------------


class _OneVersion:
    """A request whose version is known. aiokafka's connections call `prepare` of what they send."""

    struct: type[RequestStruct]

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def prepare(self, _: Mapping[int, tuple[int, int]]) -> RequestStruct:
        """Return the message, whatever versions the broker announces."""
        return self.struct(*self._fields, dict(_NO_TAGS))


class FeaturesRequest(_OneVersion):
    """Request for the features of the cluster."""

    struct = _ApiVersions

    def __init__(self) -> None:
        super().__init__("headrace", "1")


def has_second_version(response: Any) -> bool:
    """Return whether the cluster has the second version, by the response to `FeaturesRequest`."""
    features = response.tags.get(_FINALIZED_FEATURES_TAG)
    if features is None:
        return False
    levels = {name: highest for name, highest, *_ in _FINALIZED_FEATURES.decode(BytesIO(features))}
    return bool(levels.get(_FEATURE, 0) >= 2)


class ProduceRequest(_OneVersion):
    """Records of a transaction, and the partitions that it needs to know.

    Args:
        transactional_id: the id.
        required_acks: acknowledgements to wait for; -1 for those of all replicas.
        timeout_ms: how long the broker may wait for them.
        topics: by topic, the partitions and their batches.
    """

    struct = _Produce

    def __init__(
        self,
        transactional_id: str,
        required_acks: int,
        timeout_ms: int,
        topics: Iterable[tuple[str, list[tuple[int, bytes]]]],
    ) -> None:
        super().__init__(
            transactional_id,
            required_acks,
            timeout_ms,
            [
                (topic, [(number, batch, _NO_TAGS) for number, batch in batches], _NO_TAGS)
                for topic, batches in topics
            ],
        )


class TxnOffsetCommitRequest(_OneVersion):
    """Offsets of a transaction, and, in the second version, the group that it needs to know.

    Args:
        identity: the transactional id, the producer id and the epoch.
        group: the group.
        offsets: the offsets.
        membership: of the member whose offsets they are; None if it is none.
        is_second_version: whether the cluster has the second version.
    """

    def __init__(
        self,
        identity: tuple[str, int, int],
        group: str,
        offsets: Mapping[TopicPartition, Committed],
        membership: Membership | None,
        *,
        is_second_version: bool,
    ) -> None:
        self.struct = _TxnOffsetCommit if is_second_version else _TxnOffsetCommitV3
        transactional_id, producer_id, epoch = identity
        topics: dict[str, list[Any]] = {}
        for (topic, number), (offset, metadata) in offsets.items():
            topics.setdefault(topic, []).append(
                (number, offset, _NO_LEADER_EPOCH, metadata, _NO_TAGS)
            )
        super().__init__(
            transactional_id,
            group,
            producer_id,
            epoch,
            *(membership or _NO_MEMBERSHIP),
            _NO_INSTANCE,
            [(topic, partitions, _NO_TAGS) for topic, partitions in topics.items()],
        )


class EndTxnRequest(_OneVersion):
    """The commit of a transaction. The response has the identity of the next one."""

    struct = _EndTxn

    def __init__(self, identity: tuple[str, int, int]) -> None:
        super().__init__(*identity, True)
