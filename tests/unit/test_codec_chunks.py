"""Records that hold many requests in columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from headrace.errors import Code, Fatal, Rejected
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
    refer_all_to_source,
    refer_to_source,
    restore_value,
    restore_values,
    wire_single,
)
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Batch, BatchSummary, Envelope, Failure, Request, Tensor
from headrace.protocol.trace_context import Trace, new_trace
from tests.support.work import make_request

PIXELS = np.arange(4, dtype=np.float32)


def chunk_of(count: int, **arguments: Any) -> list[Request]:
    """Requests of one model, each with a tensor of its own."""
    chunk = [
        make_request(inputs={"x": (PIXELS + n).reshape(1, 4)}, shape_class=(4,), **arguments)
        for n in range(count)
    ]
    for request in chunk:
        request.size_bytes = 16
    return chunk


def limits_of(requests: int, size_bytes: int) -> ChunkLimits:
    """Limits of a chunk that are the same wherever values are."""
    return ChunkLimits(requests, size_bytes, size_bytes)


def with_headers(request: Request, *headers: tuple[str, bytes | None]) -> Request:
    """The request, as ingest has read it with these headers."""
    request.headers = list(headers)
    request.envelope = parse_envelope(request.headers, request.timestamp_ms, 0)
    return request


def bytes_of(request: Request) -> list[bytes]:
    """Contents of the tensors of a request."""
    request.restore()
    return [bytes(tensor.data) for tensor in request.inputs]


SEEN = (
    "partition", "offset", "previous", "timestamp_ms", "after", "key", "envelope", "id",
    "model", "version", "rows", "shape_class", "wanted", "size_bytes", "ingested_us", "batch",
)  # fmt: skip


def assert_alike(received: Sequence[Request], sent: Sequence[Request]) -> None:
    """Compare what the next stage reads."""
    assert len(received) == len(sent)
    for after, before in zip(received, sent, strict=True):
        after.restore()
        for name in SEEN:
            assert getattr(after, name) == getattr(before, name), name
        assert [tuple(each) for each in after.headers] == list(before.headers)
        assert bytes_of(after) == bytes_of(before)
        assert bytes(after.value or b"") == bytes(before.value or b"")


def test_requests_that_differ_in_all_their_own_arrive_as_they_were() -> None:
    """Offsets, keys, ids, deadlines and headers of each are there again."""
    sent = chunk_of(3)
    sent[1].previous -= 5
    sent[2].after, sent[2].key, sent[0].id = 4, None, "r"
    sent[1].wanted = ("y",)
    sent[2].value = b"another value"
    with_headers(sent[0], ("kafka_correlationId", b"0"))
    with_headers(sent[1], ("kafka_correlationId", b"1"), ("x-deadline-ms", b"1700000001000"))
    with_headers(sent[2], ("caf\udce9", b"1"), ("kafka_replyTopic", b"mine"))

    received = decode_items(encode_items(sent), NULL_ACK)

    assert_alike(received, sent)


def test_headers_with_own_correlation_ids_arrive_as_they_were() -> None:
    """All other headers are equal, and are written and parsed once."""
    sent = [
        with_headers(request, ("kafka_replyTopic", b"mine"), ("kafka_correlationId", b"c%d" % n))
        for n, request in enumerate(chunk_of(3))
    ]

    record = encode_items(sent)

    assert record.count(b"mine") == record.count(b"kafka_correlationId") == 1
    assert_alike(decode_items(record, NULL_ACK), sent)


def test_values_and_tensors_of_chunk_are_views_of_its_record() -> None:
    """Nothing is copied when they are read."""
    record = encode_items(chunk_of(2))

    for request in decode_items(record, NULL_ACK):
        request.restore()
        assert isinstance(request.value, memoryview)
        assert request.value.obj is record
        assert isinstance(request.inputs[0].data, memoryview)
        assert request.inputs[0].data.obj is record


def test_one_request_travels_in_record_of_minor_version_before() -> None:
    """For it columns would be dearer."""
    (request,) = chunk_of(1)
    result = chunk_of(1)[0]
    result.outputs = result.inputs

    assert encode_items([request]) == wire_single.encode_item(request)
    assert encode_results([result]) == wire_single.encode_result(result)


def test_batch_keeps_order_in_which_its_requests_run() -> None:
    """Its requests come from several records and partitions, and some have inputs of their own."""
    requests = [*decode_items(encode_items(chunk_of(3)), NULL_ACK), *chunk_of(2)]
    requests[1].partition = 4
    odd = make_request(inputs={"z": PIXELS})
    odd.size_bytes = 16
    requests.insert(2, odd)

    batch = decode_batch(encode_batch(Batch("b-1", requests, "full")), NULL_ACK)

    assert (batch.batch_id, batch.reason) == ("b-1", "full")
    assert_alike(batch.requests, requests)


def in_columns(request: Request, n: int) -> None:
    """Give all columns of a chunk a value for each request."""
    request.partition, request.after, request.key = n, n, b"k%d" % n
    request.timestamp_ms, request.ingested_us, request.checked_us = n, n, n
    request.id, request.wanted, request.rows = f"r-{n}", ("y",) * (n % 3), n + 1
    request.previous -= n
    request.value = bytes(n)  # so that the inputs, which lie behind it, begin elsewhere
    with_headers(request, ("kafka_correlationId", b"%d" % n), ("x-deadline-ms", b"%d" % (n + 9)))


def of_two_names(request: Request, n: int) -> None:
    """Give requests headers of different names, some of which are not UTF-8."""
    with_headers(request, ("own" if n % 2 else "caf\udce9", b"1"))


def of_two_inputs(request: Request, n: int) -> None:
    """Give requests a second input."""
    request.inputs += (Tensor("z", "INT8", (1, 1), bytes([n])),)
    request.size_bytes += 1


@pytest.mark.parametrize("change", [lambda *_: None, in_columns, of_two_names, of_two_inputs])
@pytest.mark.parametrize("places", [(0, 12), (3, 16), (8, 24), (0, 24)])
def test_run_of_chunk_becomes_batch_without_restoring_its_requests(
    change: Callable[[Request, int], None], places: tuple[int, int]
) -> None:
    """Its columns are cut out of those of the chunk; batch and trace are those of now."""
    sent = chunk_of(24)
    for n, request in enumerate(sent):
        change(request, n)
    received = decode_items(encode_items(sent), NULL_ACK)[slice(*places)]
    sent = sent[slice(*places)]
    summary = BatchSummary(77)
    traces = [Trace(new_trace()) for _ in sent]
    for n, (mine, theirs, trace) in enumerate(zip(sent, received, traces, strict=True)):
        mine.batch = theirs.batch = summary
        trace.advance(n)
        theirs.trace = trace

    batch = decode_batch(encode_batch(Batch("b-1", received, "full")), NULL_ACK)

    assert all(request.chunk is not None for request in received)
    assert [request.trace and request.trace.since_us for request in batch.requests] == [
        trace.since_us for trace in traces
    ]
    assert_alike(batch.requests, sent)


@pytest.mark.parametrize(
    "shared",
    [
        lambda _n: None,
        lambda n: ("ring", 100 + 16 * n),
        lambda n: ("ring", 100 + 40 * n),
        lambda n: (f"ring-{n}", 0),
        lambda n: ("ring", 0) if n % 2 else None,
    ],
)
def test_run_of_referring_requests_keeps_where_their_values_are(
    shared: Callable[[int], tuple[str, int] | None],
) -> None:
    """In their source records and in shared memory, whether they lie there in a row or not."""
    sent = chunk_of(24)
    for n, request in enumerate(sent):
        request.value = bytes(request.inputs[0].data)
        request.inputs = (request.inputs[0]._replace(data=memoryview(request.value)),)
        refer_to_source(request, 1)
        request.shared = shared(n)
    received = decode_items(encode_items(sent), NULL_ACK)[3:20]

    batch = decode_batch(encode_batch(Batch("b-1", received, "full")), NULL_ACK)

    assert all(request.chunk is not None for request in received)
    for after, before in zip(batch.requests, sent[3:20], strict=True):
        assert (after.referenced, after.shared, after.places) == (16, before.shared, ((0, 16),))
    assert_alike(batch.requests, sent[3:20])


@pytest.mark.parametrize(("each", "chunks"), [(12, 3), (8, 1)])
def test_batch_out_of_many_chunks_is_one_where_its_runs_are_short(each: int, chunks: int) -> None:
    """A chunk costs its reader about as much as some dozens of requests."""
    sent = chunk_of(3 * each)
    received = [
        request
        for start in range(0, len(sent), each)
        for request in decode_items(encode_items(sent[start : start + each]), NULL_ACK)
    ]

    record = encode_batch(Batch("b-1", received, "full"))

    assert len(msgpack.unpackb(record)["chunks"]) == chunks
    assert_alike(decode_batch(record, NULL_ACK).requests, sent)


def test_headers_beside_mixed_ones_are_ignored() -> None:
    """Only other programs write both."""
    record = changed(
        encode_items(chunk_of(24)),
        lambda fields: fields.update(mixed_headers=[[]] * 24, headers=[["h", []]]),
    )
    received = decode_items(record, NULL_ACK)

    batch = decode_batch(encode_batch(Batch("b-1", received, "full")), NULL_ACK)

    assert [list(request.headers) for request in batch.requests] == [[]] * 24


def test_items_are_encoded_again_out_of_chunk() -> None:
    """In a chunk and singly."""
    sent = chunk_of(3)
    received = decode_items(encode_items(sent), NULL_ACK)
    single = decode_items(encode_items(sent), NULL_ACK)[1:2]

    assert_alike(decode_items(encode_items(received), NULL_ACK), sent)
    assert_alike(decode_items(encode_items(single), NULL_ACK), sent[1:2])


def referring_to(chunk: list[Request]) -> tuple[list[Request], list[bytes]]:
    """Return requests with the same inputs as they arrive without their values, and these."""
    values = [b"head" + bytes(request.inputs[0].data) for request in chunk]
    for request, value in zip(chunk, values, strict=True):
        request.value = value
        request.inputs = (request.inputs[0]._replace(data=memoryview(value)[4:]),)
        refer_to_source(request, 1)
    return decode_items(encode_items(chunk), NULL_ACK), values


def encoded_again(requests: list[Request]) -> list[Request]:
    """Return requests as they arrive with a batch."""
    return decode_batch(encode_batch(Batch("b-1", requests, "full")), NULL_ACK).requests


def test_request_whose_value_was_read_is_in_no_chunk() -> None:
    """What the chunk says of it is not true any more."""
    (received, *_), (value, *_) = referring_to(chunk_of(8))

    restore_value(received, value)

    assert received.chunk is None
    assert [bytes_of(request) for request in encoded_again([received])] == [[value[4:]]]


def test_chunk_holds_values_that_were_read_together() -> None:
    """They are of some of its requests, and the others still refer to their sources."""
    received, values = referring_to(chunk_of(16))

    assert restore_values(received[3:11], memoryview(b"".join(values[3:11]))) == []

    assert [each.referenced > 0 for each in received] == [True] * 3 + [False] * 8 + [True] * 5
    assert received[10].chunk is received[3].chunk is not received[2].chunk
    assert [bytes_of(each) for each in received[3:11]] == [[each[4:]] for each in values[3:11]]
    assert [bytes(each.value or b"") for each in received[3:11]] == values[3:11]


def test_values_that_were_read_together_are_cut_out_of_their_chunk_again() -> None:
    """As for a batcher that is not in the process that has read them."""
    received, values = referring_to(chunk_of(40))
    restore_values(received[3:], memoryview(b"".join(values[3:])))

    batch = encoded_again(received[4:36])

    assert received[4].chunk is not None  # nothing has taken them out
    assert [each.offset for each in batch] == [each.offset for each in received[4:36]]
    assert [bytes_of(each) for each in batch] == [[each[4:]] for each in values[4:36]]
    assert [bytes(each.value or b"") for each in batch] == values[4:36]


def test_values_of_requests_that_do_not_follow_each_other_are_taken_out() -> None:
    """A chunk says where values are by their order alone."""
    received, values = referring_to(chunk_of(4))
    some = [received[0], received[2]]

    assert restore_values(some, memoryview(values[0] + values[2])) == []

    assert [each.chunk for each in some] == [None, None]
    assert [bytes_of(each) for each in some] == [[values[0][4:]], [values[2][4:]]]


def test_values_that_are_too_short_for_inputs_of_chunk_are_refused() -> None:
    """The size of each was written by another process."""
    received, _ = referring_to(chunk_of(3))
    for request in received:
        request.referenced = 6

    assert restore_values(received, memoryview(bytes(18))) == received
    assert [each.referenced for each in received] == [6, 6, 6]


def test_failed_request_takes_its_value_out_of_chunk() -> None:
    """Its dead letter needs it, and nothing needs its inputs."""
    sent = chunk_of(3)
    request = decode_items(encode_items(sent), NULL_ACK)[1]

    request.fail(Failure(Code.MODEL_FAILED, "no", "executor"))

    assert request.chunk is None
    assert bytes(request.value or b"") == sent[1].value
    assert request.inputs == ()


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES"])
def test_inputs_whose_content_is_checked_are_set_at_once(datatype: str) -> None:
    """A chunk holds only what is right if its size is."""
    content = b"\1" * 5 if datatype == "BOOL" else b"\1\0\0\0a"
    sent = chunk_of(2)
    for request in sent:
        request.inputs = (Tensor("x", datatype, (5 if datatype == "BOOL" else 1,), content),)

    received = decode_items(encode_items(sent), NULL_ACK)

    assert all(request.chunk is None for request in received)
    assert [bytes(request.inputs[0].data) for request in received] == [content, content]


def test_batch_of_items_that_came_singly_copies_their_records() -> None:
    """Byte by byte."""
    items = [encode_items([request]) for request in chunk_of(2)]
    requests = [request for item in items for request in decode_items(item, NULL_ACK)]

    record = encode_batch(Batch("b-1", requests, "full"))

    assert all(item in record for item in items)


def test_outputs_of_chunk_are_one_array() -> None:
    """The rows of all requests follow each other, and the requests share their metadata."""
    sent = chunk_of(3)
    for request in sent:
        request.outputs, request.inputs, request.value = request.inputs, (), None

    record = encode_results(sent)

    received = decode_results(record, NULL_ACK)
    assert b"".join((PIXELS + n).tobytes() for n in range(3)) in record
    assert [one.outputs and bytes(one.outputs[0].data) for one in received] == [
        (PIXELS + n).tobytes() for n in range(3)
    ]
    assert len({id(one.output_metadata) for one in received}) == 1


def test_outputs_of_different_sizes_arrive_as_they_were() -> None:
    """Metadata are shared by requests of equal sizes only."""
    sent = chunk_of(3)
    for rows, request in enumerate(sent):
        array = np.zeros((rows, 4), np.float32)
        request.outputs = make_request(inputs={"y": array}).inputs

    received = decode_results(encode_results(sent), NULL_ACK)

    assert [one.output_metadata[0][2] for one in received] == [(0, 4), (1, 4), (2, 4)]
    assert [len(one.output_data[0]) for one in received if one.output_data] == [0, 16, 32]


def test_failures_of_chunk_arrive_with_values_for_dead_letters() -> None:
    """Those that may succeed if they are sent again leave theirs behind."""
    sent = chunk_of(2)
    sent[0].fail(Failure(Code.MODEL_FAILED, "no", "executor"))
    sent[1].fail(Failure(Code.OVERLOADED, "later", "batcher", 5))

    received = decode_results(encode_results(sent), NULL_ACK)

    assert [one.failure for one in received] == [one.failure for one in sent]
    assert [one.value and bytes(one.value) for one in received] == [b"value", None]


def test_requests_are_divided_by_what_chunk_shares() -> None:
    """Model, version, shape class and tenant: records are charged to model and tenant."""
    requests = [
        *chunk_of(2),
        make_request("another", inputs={"x": PIXELS}),
        *chunk_of(1, envelope=Envelope(tenant="t")),
        *chunk_of(1),
    ]

    chunks = divide_items(requests, limits_of(256, 10_000))

    assert [[requests.index(one) for one in chunk] for chunk in chunks] == [[0, 1, 4], [2], [3]]


def test_cancelling_record_does_not_overtake_requests_before_it() -> None:
    """It would find nothing to cancel. Those that follow each other share a record nevertheless."""
    requests = chunk_of(7)
    for place in (0, 3, 4, 6):
        requests[place] = with_headers(make_request(""), ("x-cancel", b"requests/0/1"))
        requests[place].inputs = ()
    for offset, request in enumerate(requests):
        request.offset = offset

    chunks = divide_items(requests, limits_of(256, 10_000))

    assert [[one.offset for one in chunk] for chunk in chunks] == [[0], [1, 2, 5], [3, 4], [6]]


def test_outcomes_are_divided_into_outputs_failures_and_skipped() -> None:
    """One record has one kind."""
    requests = chunk_of(5)
    for request in requests[:2]:
        request.outputs = request.inputs
    for request in requests[2:4]:
        request.fail(Failure(Code.MODEL_FAILED, "no", "executor"))

    assert list(map(len, divide_results(requests, limits_of(256, 10_000)))) == [2, 2, 1]


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
@pytest.mark.parametrize(
    ("max_requests", "max_bytes", "sizes"),
    [(2, 1000, [2, 2, 1]), (100, 35, [2, 2, 1]), (100, 1, [1, 1, 1, 1, 1]), (5, 80, [5])],
)
def test_chunks_of_outputs_that_share_metadata_are_bounded(
    datatype: str, max_requests: int, max_bytes: int, sizes: list[int]
) -> None:
    """In requests and in bytes; a larger one travels alone."""
    requests = chunk_of(5)
    metadata = (("x", datatype, (1, 4)),)
    for request in requests:
        request.output_metadata, request.output_data = metadata, (bytes(16),)

    chunks = divide_results(requests, limits_of(max_requests, max_bytes))

    assert list(map(len, chunks)) == sizes
    assert [request for chunk in chunks for request in chunk] == requests


def test_chunks_of_inputs_beside_payloads_are_bounded() -> None:
    """These inputs travel in the record, although the payloads of which they were made do not."""
    requests = chunk_of(5)
    for request in requests:
        request.value = b"payload"
        refer_to_source(request, 1)

    chunks = divide_items(requests, ChunkLimits(256, size_bytes=40, source_bytes=400))

    assert list(map(len, chunks)) == [2, 2, 1]


def test_chunks_of_outputs_are_bounded_whatever_source_records_hold() -> None:
    """The payloads of such requests were left there, and no result refers to them."""
    requests = chunk_of(5)
    metadata = (("", "BYTES", (1,)),)
    for request, payload_bytes in zip(requests, [1, 1, 1, 500, 500], strict=True):
        request.referenced = payload_bytes
        request.output_metadata, request.output_data = metadata, (bytes(16),)

    chunks = divide_results(requests, ChunkLimits(256, size_bytes=40, source_bytes=400))

    assert list(map(len, chunks)) == [2, 2, 1]


@pytest.mark.parametrize(
    ("max_requests", "max_bytes", "sizes"),
    [(2, 1000, [2, 2, 1]), (100, 10, [2, 2, 1]), (100, 1, [1, 1, 1, 1, 1])],
)
def test_chunks_are_bounded(max_requests: int, max_bytes: int, sizes: list[int]) -> None:
    """In requests and in bytes; a larger request travels alone."""
    assert list(map(len, divide_items(chunk_of(5), limits_of(max_requests, max_bytes)))) == sizes


def changed(record: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The record with other fields."""
    fields = msgpack.unpackb(record)
    change(fields)
    content: bytes = msgpack.packb(fields)
    return content


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["offset"].append(1),
        lambda fields: fields.update(offset=[]),
        lambda fields: fields.update(gap=[1]),
        lambda fields: fields.update(part=1000),
        lambda fields: fields.update(part=[3, -3]),
        lambda fields: fields.update(value=1000),
        lambda fields: fields.update(headers=[["h", [b"1"]]]),
        lambda fields: fields.update(headers=[["h", []]]),
        lambda fields: fields.update(mixed_headers=[]),
        lambda fields: fields.update(checked_us=[]),
        lambda fields: fields.update(done_us=[]),
        lambda fields: fields.update(rows=[]),
        lambda fields: fields.update(wanted_each=[]),
        lambda fields: fields.update(deadline_ms=[1, 2, 3]),
        lambda fields: fields["inputs"][0].update(start=-1),
        lambda fields: fields["inputs"][0].update(size=1000),
        lambda fields: fields["inputs"][0].update(size=[16]),
        lambda fields: fields["inputs"][0].update(shape=[1, 5]),
        lambda fields: fields["inputs"][0].update(shapes=[[1, 4]]),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    """A view outside of its request would be another's memory."""
    with pytest.raises(Rejected):
        decode_items(changed(encode_items(chunk_of(2)), change), NULL_ACK)


@pytest.mark.parametrize("decode", [decode_items, decode_batch, decode_results])
def test_record_of_later_format_ends_process_that_names_both(decode: Callable[..., Any]) -> None:
    """To drop it would leave its requests unanswered."""
    record = msgpack.packb({"format": 4, "rows": {"in": "another form"}})

    with pytest.raises(Fatal, match="expected a format up to 3, got 4"):
        decode(record, NULL_ACK)


def test_fields_of_newer_release_are_ignored() -> None:
    """Unknown fields are ignored if the format is the same."""
    sent = chunk_of(2)

    record = changed(encode_items(sent), lambda fields: fields.update(colour="red"))

    assert_alike(decode_items(record, NULL_ACK), sent)


# --- values that only the source record holds -------------------------------------------------


def in_value(count: int, *, beside: bool = False) -> list[Request]:
    """Requests whose tensor is a view of their value, of 24 bytes, and one that is not."""
    chunk = chunk_of(count)
    for n, request in enumerate(chunk):
        value = b"head" + (PIXELS + n).tobytes() + b"tail"
        pixels = Tensor("x", "FP32", (1, 4), memoryview(value)[4:20])
        request.value, request.inputs = value, (pixels,)
        if beside:
            request.inputs = pixels, Tensor("own", "UINT8", (1, 2), bytes([n, n]))
            request.size_bytes = 18
    return chunk


def referring(count: int, *, beside: bool = False) -> list[Request]:
    """The same requests after they have let go of their values."""
    chunk = in_value(count, beside=beside)
    for request in chunk:
        refer_to_source(request, 24)
    return chunk


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_restored_requests_equal_those_that_carry_their_values(count: int, beside: bool) -> None:
    """From items to batches, each process knows the places in values that it has not seen."""
    sent = in_value(count, beside=beside)

    items = decode_items(encode_items(referring(count, beside=beside)), NULL_ACK)
    received = decode_batch(encode_batch(Batch("b", items, "full")), NULL_ACK).requests
    for after, before in zip(received, sent, strict=True):
        assert (after.referenced, after.value, after.size_bytes) == (24, None, before.size_bytes)
        restore_value(after, bytes(before.value or b""))
        after.partition, after.offset = before.partition, before.offset
        after.previous = before.previous

    assert_alike(received, sent)
    assert [request.referenced for request in received] == [0] * count


def test_value_below_limit_is_kept() -> None:
    """It travels with its bytes, in the format of the release before."""
    (request, other) = in_value(2)

    refer_to_source(request, 25)

    assert (len(request.value or b""), request.referenced) == (24, 0)
    assert msgpack.unpackb(encode_items([request, other]))["format"] == 2


def test_record_of_referring_requests_has_no_byte_of_their_values() -> None:
    """Their sizes and places are all that is written."""
    record = encode_items(referring(2, beside=True))

    assert b"tail" not in record
    fields = msgpack.unpackb(record)
    assert (fields["format"], fields["referenced"], fields["part"]) == (3, 24, 2)


def test_requests_with_and_without_values_travel_in_records_of_their_own() -> None:
    """A chunk has one layout."""
    mixed = [*referring(1), *in_value(1), *referring(1)]

    chunks = divide_items(mixed, limits_of(10, 1000))
    batch = decode_batch(encode_batch(Batch("b", mixed, "full")), NULL_ACK)

    assert [[each.referenced for each in chunk] for chunk in chunks] == [[24, 24], [0]]
    assert [each.referenced for each in batch.requests] == [24, 0, 24]


def test_values_that_are_not_written_count_against_chunk() -> None:
    """Its record is charged, deferred and read again as a whole, with all values."""
    limits = ChunkLimits(256, 1000, 50)
    assert [len(each) for each in divide_items(referring(5), limits)] == [2, 2, 1]


@pytest.mark.parametrize(("code", "referenced"), [(Code.MODEL_FAILED, 24), (Code.OVERLOADED, 0)])
@pytest.mark.parametrize("count", [1, 2])
def test_failure_refers_to_value_if_dead_letter_is_made_of_it(
    count: int, code: Code, referenced: int
) -> None:
    """No other answer needs it."""
    failed = referring(count)
    for request in failed:
        request.fail(Failure(code, "it failed", "executor"))

    received = decode_results(encode_results(failed), NULL_ACK)

    assert [(each.value, each.referenced) for each in received] == [(None, referenced)] * count


def alike(count: int) -> list[Request]:
    """Requests of `in_value` with the same objects around their data, as decoding makes them."""
    chunk = in_value(count)
    shape, places = (1, 4), ((4, 16),)
    for request in chunk:
        (tensor,) = request.inputs
        request.inputs, request.places = (Tensor("x", "FP32", shape, tensor.data),), places
    return chunk


def test_alike_requests_share_inputs_without_data() -> None:
    """Later steps look for the same object before they compare."""
    chunk = alike(3)

    refer_all_to_source(chunk, 24)

    assert {id(request.inputs) for request in chunk} == {id(chunk[0].inputs)}
    assert bytes_of(chunk[0]) == [b""]


def test_requests_without_their_inputs_only_let_go_of_values() -> None:
    """As ingest makes them, which knows that it will write no values of this size."""
    chunk = alike(2)
    values = [request.value for request in chunk]
    inputs = chunk[0].inputs
    for request in chunk:
        request.inputs, request.referenced = inputs, 24

    released = refer_all_to_source(chunk, 1 << 20)

    assert [released[request] for request in chunk] == values
    assert [(each.value, each.inputs, each.referenced) for each in chunk] == [
        (None, inputs, 24),
        (None, inputs, 24),
    ]


def test_requests_of_other_shape_share_no_inputs() -> None:
    """The same places can be those of another tensor."""
    chunk = alike(2)
    (tensor,) = chunk[1].inputs
    chunk[1].inputs = (tensor._replace(shape=(4, 1)),)

    refer_all_to_source(chunk, 24)

    assert [request.inputs[0].shape for request in chunk] == [(1, 4), (4, 1)]


def test_requests_whose_inputs_lie_beside_values_share_none() -> None:
    """These inputs stay with their requests."""
    chunk = alike(2)
    beside = ((24, 16),)
    for request in chunk:
        request.places = beside

    refer_all_to_source(chunk, 24)

    assert [bytes_of(request) for request in chunk] == [bytes_of(each) for each in alike(2)]


def test_values_that_follow_each_other_are_restored_to_alike_requests() -> None:
    """Each gets its own value, and the inputs in it."""
    sent, chunk = alike(3), alike(3)
    refer_all_to_source(chunk, 24)

    refused = restore_values(chunk, memoryview(b"".join([each.value or b"" for each in sent])))

    assert refused == []
    assert [bytes(each.value or b"") for each in chunk] == [each.value for each in sent]
    assert [bytes_of(each) for each in chunk] == [bytes_of(each) for each in sent]
    assert [each.referenced for each in chunk] == [0, 0, 0]


def test_booleans_of_each_alike_request_are_checked() -> None:
    """Their bytes decide, so those of the first say nothing about others."""
    chunk = alike(3)
    for request in chunk:
        request.inputs = (Tensor("x", "BOOL", (1, 16), request.inputs[0].data),)
    refer_all_to_source(chunk, 24)

    wrong = chunk[1]
    refused = restore_values(chunk, memoryview(bytes(24) + b"\2" * 24 + bytes(24)))

    assert refused == [wrong]
    assert [each.referenced for each in chunk] == [0, 24, 0]


def test_value_of_failed_request_is_restored_without_inputs() -> None:
    """It has let go of them, and its dead letter needs the bytes alone."""
    (failed,) = referring(1)
    failed.fail(Failure(Code.MODEL_FAILED, "it failed", "executor"))

    restore_value(failed, b"v" * 24)

    assert (failed.value, failed.inputs, failed.referenced) == (b"v" * 24, (), 0)


def test_value_that_does_not_hold_inputs_is_refused() -> None:
    """A tensor of another size would be another request's."""
    (request,) = referring(1)

    with pytest.raises(Rejected, match="expected 16 bytes"):
        restore_value(request, b"too short")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(referenced=-24),
        lambda fields: fields.update(referenced=[24, 0]),
        lambda fields: fields.update(referenced=[24]),
        lambda fields: fields.update(shared=[]),
        lambda fields: fields.update(shared="ring", shared_at=[]),
        lambda fields: fields.update(part=0, payload=b"four"),
        lambda fields: fields["inputs"][0].update(start=30),
        lambda fields: fields["inputs"][0].update(start=9),
        lambda fields: fields["inputs"][1].update(start=-2),
        lambda fields: fields["inputs"][1].update(size=3),
    ],
)
def test_references_that_do_not_fit_are_refused(change: Callable[[dict[str, Any]], object]) -> None:
    """A view outside of its request would be another's memory."""
    with pytest.raises(Rejected):
        decode_items(changed(encode_items(referring(2, beside=True)), change), NULL_ACK)
