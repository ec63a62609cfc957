"""Requests that carry records, and their responses, are encoded and decoded as aiokafka would."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.protocol.fetch import FetchRequest, FetchRequest_v11, FetchResponse_v11
from aiokafka.protocol.produce import ProduceRequest, ProduceRequest_v7, ProduceResponse_v7
from aiokafka.protocol.struct import Struct
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.kafka.record_requests import (
    FetchResponse,
    ProduceResponse,
    encode_fetch,
    encode_produce,
)

int16 = st.integers(-(2**15), 2**15 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
topics_of = st.text(st.characters(codec="utf-8"), max_size=8)
parts = st.tuples(
    int32,
    int16.filter(lambda code: code not in {9, 56, 74, 78}),
    int64,
    int64,
    int64,
    st.none() | st.lists(st.tuples(int64, int64), max_size=3),
    int32,
    st.none() | st.binary(max_size=40),
)
responses = st.builds(
    FetchResponse_v11,
    int32,
    int16,
    int32,
    st.lists(st.tuples(topics_of, st.lists(parts, max_size=4)), max_size=3),
)
requests = st.builds(
    FetchRequest,
    int32,
    int32,
    int32,
    st.integers(0, 1),
    st.lists(
        st.tuples(topics_of, st.lists(st.tuples(int32, int64, int32), max_size=4)), max_size=3
    ),
    topics_of,
)
produced = st.builds(
    ProduceResponse_v7,
    st.lists(
        st.tuples(topics_of, st.lists(st.tuples(int32, int16, int64, int64, int64), max_size=4)),
        max_size=3,
    ),
    int32,
)
produce_requests = st.builds(
    ProduceRequest,
    st.none() | topics_of,
    int16,
    int32,
    st.lists(
        st.tuples(topics_of, st.lists(st.tuples(int32, st.binary(max_size=40)), max_size=4)),
        max_size=3,
    ),
)


@given(responses, st.binary(max_size=6))
def test_fetch_response_is_decoded_as_by_aiokafka(
    response: FetchResponse_v11, header: bytes
) -> None:
    """All topics, and parts that say something, are equal, whatever header the frame has."""
    frame = BytesIO(header + response.encode())
    frame.seek(len(header))
    assert FetchResponse.decode(frame).topics == [
        (topic, [part for part in parts if has_news(*part)]) for topic, parts in response.topics
    ]


def has_news(_number: int, code: int, *fields: Any) -> bool:
    """Return whether a part has records, an error or a preferred replica."""
    *_, replica, batches = fields
    return bool(code or batches or replica != -1)


@pytest.mark.parametrize(
    ("code", "decoded"),
    [
        (errors.NoError.errno, errors.NoError),
        (errors.OffsetOutOfRangeError.errno, errors.OffsetOutOfRangeError),
        (errors.NotLeaderForPartitionError.errno, errors.NotLeaderForPartitionError),
        (errors.ReplicaNotAvailableError.errno, errors.NotLeaderForPartitionError),
        (errors.KafkaStorageError.errno, errors.NotLeaderForPartitionError),
    ],
)
def test_error_of_replaced_leader_is_decoded_as_not_leader(
    code: int, decoded: type[errors.KafkaError]
) -> None:
    """After it aiokafka asks for the leader anew; otherwise it would within a minute."""
    part = (0, code, -1, -1, -1, None, -1, b"v")
    response = FetchResponse_v11(0, 0, 0, [("requests", [part])])
    [(_, [found])] = FetchResponse.decode(BytesIO(response.encode())).topics
    assert errors.for_code(found[1]) is decoded


@given(requests)
def test_fetch_request_is_encoded_as_by_aiokafka(request: FetchRequest) -> None:
    """The bytes are equal, for any partitions."""
    built = request.build(FetchRequest_v11)
    assert encode_fetch(built) == Struct.encode(built)


@given(responses, st.data())
def test_fetch_response_that_is_cut_off_is_refused(
    response: FetchResponse_v11, data: st.DataObject
) -> None:
    """A frame that ends anywhere before its end raises an error."""
    whole = response.encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((struct.error, ValueError)):
        FetchResponse.decode(BytesIO(whole[:cut]))


@given(produced, st.binary(max_size=6))
def test_produce_response_is_decoded_as_by_aiokafka(
    response: ProduceResponse_v7, header: bytes
) -> None:
    """All topics and parts are equal, whatever header the frame has."""
    frame = BytesIO(header + response.encode())
    frame.seek(len(header))
    decoded = ProduceResponse.decode(frame)
    assert (decoded.topics, decoded.throttle_time_ms) == (
        response.topics,
        response.throttle_time_ms,
    )


@given(produce_requests)
def test_produce_request_is_encoded_as_by_aiokafka(request: ProduceRequest) -> None:
    """The bytes are equal, for any batches, with a transactional id and without."""
    built = request.build(ProduceRequest_v7)
    assert encode_produce(built) == Struct.encode(built)


@given(produced, st.data())
def test_produce_response_that_is_cut_off_is_refused(
    response: ProduceResponse_v7, data: st.DataObject
) -> None:
    """A frame that ends anywhere before its end raises an error."""
    whole = response.encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((struct.error, UnicodeDecodeError)):
        ProduceResponse.decode(BytesIO(whole[:cut]))
