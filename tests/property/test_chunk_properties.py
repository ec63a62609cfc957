"""Any mixture of requests comes out of chunks as it went in."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import Code, Rejected
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    ChunkLimits,
    decode_batch,
    decode_items,
    decode_results,
    divide_items,
    divide_results,
    encode_batch,
    encode_items,
    encode_results,
    refer_to_source,
    restore_value,
    restore_values,
)
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request, Tensor

relaxed = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
SMALL = st.integers(0, 3)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["kafka_correlationId", "kafka_replyTopic", "x-tenant", "own", "a\udcff"]),
        st.none() | st.binary(max_size=4),
    ),
    max_size=3,
)


@st.composite
def tensors(draw: st.DrawFn, value: bytes | None) -> tuple[Tensor, ...]:
    """Inputs that are views of the value, or stand beside it."""
    found = []
    for place in range(draw(st.integers(1, 2))):
        data: bytes | memoryview = draw(st.binary(max_size=6))
        if value and draw(st.booleans()):
            start = draw(st.integers(0, len(value)))
            data = memoryview(value)[start : draw(st.integers(start, len(value)))]
        name, datatype = draw(st.sampled_from([("x", "UINT8"), ("y", "INT8")]))
        found.append(Tensor(f"{name}{place}", datatype, (len(data),), data))
    return tuple(found)


@st.composite
def requests(draw: st.DrawFn, offset: int) -> Request:
    """A request as ingest passes it on."""
    value = draw(st.none() | st.binary(max_size=12))
    headers = draw(HEADERS)
    envelope = parse_envelope(headers, 1, 0)
    deadline_ms = draw(st.sampled_from([0, 0, 77]))
    request = Request(
        NULL_ACK, 3, offset, offset - 1 - draw(SMALL), draw(SMALL), draw(st.none() | st.just(b"k")),
        value, headers, envelope._replace(deadline_ms=deadline_ms),
    )  # fmt: skip
    request.after, request.ingested_us = draw(st.sampled_from([-1, 1])), draw(SMALL)
    request.model, request.version = draw(st.sampled_from(["m", "n"])), "1"
    request.id = draw(st.none() | st.text(max_size=2))
    request.rows, request.shape_class = draw(SMALL), draw(st.sampled_from([(), (4,)]))
    request.wanted = draw(st.sampled_from([None, None, (), ("y",)]))
    request.inputs = draw(tensors(value))
    request.size_bytes = sum(len(tensor.data) for tensor in request.inputs)
    request.batch = draw(st.sampled_from([BatchSummary(), BatchSummary(1), BatchSummary(1, 2, 3)]))
    request.checked_us, request.done_us = draw(SMALL), draw(SMALL)
    return request


MIXTURES = st.integers(0, 8).flatmap(
    lambda count: st.tuples(*[requests(10 * offset) for offset in range(count)])
)
MOST = st.integers(1, 4)


def seen(request: Request, *but: str) -> dict[str, Any]:
    """Return the fields that the next stage reads; a fault in the headers is not passed on."""
    request.restore()
    names = (
        "partition", "offset", "previous", "timestamp_ms", "after", "key", "id", "model",
        "version", "rows", "shape_class", "wanted", "size_bytes", "ingested_us", "batch",
        "checked_us", "done_us", "failure",
    )  # fmt: skip
    return {
        **{name: getattr(request, name) for name in names if name not in but},
        "envelope": request.envelope._replace(fault=None),
        "headers": [tuple(each) for each in request.headers],
        "value": None if request.value is None else bytes(request.value),
        "inputs": [(*each[:3], bytes(each.data)) for each in request.inputs],
        "outputs": [(*each[:3], bytes(each.data)) for each in request.outputs or ()],
    }


@relaxed
@given(MIXTURES, MOST)
def test_items_and_their_batch_come_back(sent: tuple[Request, ...], most: int) -> None:
    """Requests survive encoding, whatever they share and however many travel together."""
    sent = tuple(each for each in sent if not _has_raw_name(each))  # ingest has refused these

    received = [
        request
        for chunk in divide_items(sent, ChunkLimits(most, 1000, 1000))
        for request in decode_items(encode_items(chunk), NULL_ACK)
    ]

    received.sort(key=lambda request: request.offset)
    record = encode_batch(Batch("b", received, "full")) if sent else b""
    assert list(map(seen, received)) == list(map(seen, sent))
    if sent:
        batch = decode_batch(record, NULL_ACK)
        # One time of closing holds for all requests of a batch.
        assert [seen(each, "batch") for each in batch.requests] == [
            seen(each, "batch") for each in sent
        ]


@relaxed
@given(MIXTURES, MOST, st.integers(0, 12))
def test_items_by_reference_come_back_with_their_values(
    sent: tuple[Request, ...], most: int, from_bytes: int
) -> None:
    """Inputs may lie in a value or beside it; any of the values may have stayed in the source."""
    sent = tuple(each for each in sent if not _has_raw_name(each))
    values = {request.offset: request.value for request in sent}
    expected = list(map(seen, sent))
    for request in sent:
        refer_to_source(request, from_bytes)

    received = [
        request
        for chunk in divide_items(sent, ChunkLimits(most, 1000, 1000))
        for request in decode_items(encode_items(chunk), NULL_ACK)
    ]
    received.sort(key=lambda request: request.offset)
    if sent:
        batch = decode_batch(encode_batch(Batch("b", received, "full")), NULL_ACK)
        received = batch.requests
    for request in received:
        if request.referenced:
            value = values[request.offset]
            assert isinstance(value, bytes)
            assert request.value is None
            restore_value(request, value)

    assert [{**seen(each), "batch": None} for each in received] == [
        {**each, "batch": None} for each in expected
    ]


@relaxed
@given(st.integers(1, 6), st.binary(min_size=2, max_size=8), st.data())
def test_values_read_together_are_those_read_one_by_one(
    count: int, first: bytes, data: st.DataObject
) -> None:
    """Whether the inputs of alike requests lie in their values or beside them, for any requests
    of their record that follow each other.
    """
    size = len(first)
    values = [first] + [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(1, count)]
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    beside = data.draw(st.booleans())
    datatype = data.draw(st.sampled_from(["UINT8", "BOOL"]))
    first_read = data.draw(st.integers(0, count - 1))

    def arrived() -> list[Request]:
        sent = []
        for offset, value in enumerate(values):
            request = Request(
                NULL_ACK, 3, offset, offset - 1, 1, None, value, [], parse_envelope([], 1, 0)
            )
            inputs = [Tensor("x", datatype, (stop - start,), memoryview(value)[start:stop])]
            if beside:
                inputs.append(Tensor("y", "INT8", (1,), value[:1]))
            request.inputs, request.model, request.version = tuple(inputs), "m", "1"
            refer_to_source(request, 1)
            sent.append(request)
        return decode_items(encode_items(sent), NULL_ACK)[first_read:]

    together, one_by_one = arrived(), arrived()
    refused = restore_values(together, memoryview(b"".join(values[first_read:])))
    expected = []
    for request, value in zip(one_by_one, values[first_read:], strict=True):
        try:
            restore_value(request, value)
        except Rejected:
            expected.append(request.offset)

    assert [request.offset for request in refused] == expected
    assert [seen(each) for each in together] == [seen(each) for each in one_by_one]


@relaxed
@given(MIXTURES, MOST, st.data())
def test_outcomes_come_back(sent: tuple[Request, ...], most: int, data: st.DataObject) -> None:
    """Outputs, failures and ranges that were never read, in any order."""
    for request in sent:
        kind = data.draw(st.sampled_from(["outputs", "failed", "skipped"]))
        if kind == "outputs":
            request.outputs = request.inputs
        elif kind == "failed":
            code = data.draw(st.sampled_from([Code.MODEL_FAILED, Code.OVERLOADED]))
            request.fail(Failure(code, "no", "executor"))
        if request.failure is None or not Code(request.failure.code).is_dead_letter:
            request.value = None
        request.inputs, request.wanted = (), None

    received = [
        request
        for chunk in divide_results(sent, ChunkLimits(most, 1000, 1000))
        for request in decode_results(encode_results(chunk), NULL_ACK)
    ]

    but = ("rows", "shape_class", "size_bytes", "wanted")
    received.sort(key=lambda request: request.offset)
    assert [seen(each, *but) for each in received] == [seen(each, *but) for each in sent]


def _has_raw_name(request: Request) -> bool:
    return any(not name.isascii() for name, _ in request.headers)
