"""Encode and decode internal records that hold one request, and batches of these.

`headrace.protocol.codec.wire` writes them where a chunk has one request, for which columns would be
dearer. They are also the format of the minor version before.

A tensor that is a view of its request's value is encoded as its position there, so that no bytes
are sent twice. A result contains the value only if a dead letter may be made of it.

Decoding creates a new `Request`, whose envelope is parsed from the headers again; only the
deadline is taken from the record, because ingest may have set it by its own default timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from headrace.errors import Code, Rejected
from headrace.primitives.bounded_cache import BoundedCache
from headrace.protocol.ack import AckHandle
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.codec.views import start_in
from headrace.protocol.headers import NO_HEADERS, Headers, is_utf8, parse_envelope
from headrace.protocol.messages import (
    NO_BATCH,
    Batch,
    BatchRecord,
    BatchSummary,
    Failure,
    ItemRecord,
    Request,
    ResultRecord,
    Tensor,
    TensorMetadata,
    WireFailure,
    WireOrigin,
    WireTensor,
    WireTimings,
    WireTrace,
)
from headrace.protocol.tensors import check_tensor
from headrace.protocol.trace_context import Trace, parse_traceparent
from headrace.tuning import TUNING

_Record = TypeVar("_Record", ItemRecord, BatchRecord, ResultRecord)


class _RawBatchRecord(Struct, kw_only=True, omit_defaults=True):
    """`BatchRecord` whose items are already encoded."""

    batch_id: str
    reason: str
    formed_us: int = 0
    items: list[msgspec.Raw]


HeaderList = list[tuple[str, bytes | None]]
_CODES = frozenset(Code)
_TUNING = TUNING.protocol
_metadata: BoundedCache[
    tuple[tuple[str, str, tuple[int, ...], int], ...], tuple[TensorMetadata, ...]
] = BoundedCache(_TUNING.cached_output_metadata)

encode_record = msgspec.msgpack.Encoder().encode
_item_decoder = msgspec.msgpack.Decoder(ItemRecord)
_batch_decoder = msgspec.msgpack.Decoder(BatchRecord)
_result_decoder = msgspec.msgpack.Decoder(ResultRecord)


# --- items and batches ------------------------------------------------------------------------


def encode_item(request: Request) -> bytes:
    """Return the value of an `items` record."""
    return encode_record(_item(request))


def decode_item(value: bytes, ack_handle: AckHandle) -> Request:
    """Decode the request of an `items` record; its tensors are views of `value`.

    Raises:
        Rejected: `INTERNAL` or `INVALID_TENSOR`: the record was not written by Headrace.
    """
    request = _request_of_item(_decoded(_item_decoder, value), ack_handle)
    request.item = value
    return request


def encode_batch(batch: Batch) -> bytes:
    """Return the value of a `batches` record. Requests received as items are not encoded again."""
    formed_us = 0
    items: list[msgspec.Raw] = []
    for request in batch.requests:
        item = request.item
        # The batcher has added to the trace of a sampled request, so its item is encoded again;
        # when the batch closed is written once for all other items.
        if item is None or request.trace is not None:
            item = encode_item(request)
        else:
            formed_us = request.batch.formed_us
        items.append(msgspec.Raw(item))
    return encode_record(
        _RawBatchRecord(
            batch_id=batch.batch_id, reason=batch.reason, formed_us=formed_us, items=items
        )
    )


def decode_batch(value: bytes, ack_handle: AckHandle) -> Batch:
    """Decode the batch of a `batches` record; all its requests share `ack_handle`.

    Raises:
        Rejected: `INTERNAL` or `INVALID_TENSOR`: the record was not written by Headrace.
    """
    record = _decoded(_batch_decoder, value)
    if not record.items:
        raise unreadable("at least one item", "none")
    requests = [_request_of_item(item, ack_handle) for item in record.items]
    if record.formed_us:
        summary = BatchSummary(record.formed_us)
        for request in requests:
            request.batch = summary
    return Batch(record.batch_id, requests, record.reason)


def _item(request: Request) -> ItemRecord:
    request.restore()
    value = request.value
    return ItemRecord(
        origin=_origin(request),
        key=request.key,
        headers=list(request.headers),
        value=None if value is None else memoryview(value),
        deadline_ms=request.envelope.deadline_ms,
        model=request.model,
        version=request.version,
        id=request.id,
        inputs=_placed(request.inputs, value),
        rows=request.rows,
        shape_class=request.shape_class,
        wanted=request.wanted,
        timings=_timings(request),
        trace=WireTrace.of(request.trace),
    )


def _request_of_item(record: ItemRecord, ack_handle: AckHandle) -> Request:
    request = _request(record, ack_handle, record.headers)
    value = record.value
    size_bytes = 0
    inputs: list[Tensor] = []
    for wired in record.inputs:
        tensor = _tensor(wired, value)
        name, datatype, shape, content = tensor
        check_tensor(datatype, shape, content, name)
        size_bytes += len(content)
        inputs.append(tensor)
    request.inputs = tuple(inputs)
    request.size_bytes = size_bytes
    request.rows = record.rows
    request.shape_class = record.shape_class
    request.wanted = record.wanted
    return request


# --- results ----------------------------------------------------------------------------------


def encode_result(request: Request) -> bytes:
    """Return the value of a `results` record of a request with its outputs or its failure."""
    failure = request.failure
    value = request.value if request.keeps_value else None
    raw_names = _raw_names(request.headers)
    return encode_record(
        ResultRecord(
            origin=_origin(request),
            key=request.key,
            headers=_without_names(request.headers, raw_names),
            value=None if value is None else memoryview(value),
            deadline_ms=request.envelope.deadline_ms,
            model=request.model,
            version=request.version,
            id=request.id,
            outputs=_outputs(request),
            failure=None if failure is None else WireFailure(**failure._asdict()),
            timings=_timings(request),
            batch_id=request.batch_id,
            trace=WireTrace.of(request.trace),
            skipped=request.skipped,
            raw_names=raw_names,
        )
    )


def decode_result(value: bytes, ack_handle: AckHandle) -> Request:
    """Decode the request of a `results` record, with `outputs` or `failure` set.

    Raises:
        Rejected: `INTERNAL`: the record was not written by Headrace.
    """
    record = _decoded(_result_decoder, value)
    request = _request(record, ack_handle, _with_names(record.headers, record.raw_names))
    request.batch_id = record.batch_id
    failure = record.failure
    if record.skipped:
        return request
    if failure is None:
        tensors = [_tensor(tensor, None) for tensor in record.outputs]
        request.output_data = tuple([tensor[3] for tensor in tensors])
        request.output_metadata = shared_metadata(tensors)
    else:
        request.failure = read_failure(failure)
    return request


def _raw_names(headers: Headers) -> list[tuple[int, bytes]]:
    """Return index and name of each header whose name is not UTF-8, which text cannot hold."""
    return [
        (place, name.encode("utf-8", "surrogateescape"))
        for place, (name, _) in enumerate(headers)
        if not is_utf8(name)
    ]


def read_failure(record: WireFailure) -> Failure:
    """Return the failure of a request from its record."""
    # A newer release may have codes unknown to this one.
    code = record.code if record.code in _CODES else Code.INTERNAL
    return Failure(code, record.message, record.stage, record.retry_after_ms)


def _without_names(headers: Headers, places: Sequence[tuple[int, bytes]]) -> HeaderList:
    changed = list(headers)
    for place, _ in places:
        changed[place] = ("", changed[place][1])
    return changed


def _with_names(headers: HeaderList, names: Sequence[tuple[int, bytes]]) -> HeaderList:
    for place, name in names:
        if 0 <= place < len(headers):
            headers[place] = (name.decode("utf-8", "surrogateescape"), headers[place][1])
    return headers


def _outputs(request: Request) -> list[WireTensor]:
    return [
        WireTensor(name=name, datatype=datatype, shape=shape, data=memoryview(content))
        for (name, datatype, shape), content in zip(
            request.output_metadata, request.output_data or (), strict=True
        )
    ]


def shared_metadata(tensors: Sequence[Tensor]) -> tuple[TensorMetadata, ...]:
    """Return one shared object for outputs that differ only in their bytes, as in one batch."""
    known = tuple([(*tensor[:3], len(tensor[3])) for tensor in tensors])
    metadata = _metadata.get(known)
    if metadata is None:
        metadata = _metadata.add(known, tuple([tensor[:3] for tensor in tensors]))
    return metadata


# --- common parts -----------------------------------------------------------------------------


def _request(record: ItemRecord | ResultRecord, ack_handle: AckHandle, headers: Headers) -> Request:
    origin, timings = record.origin, record.timings
    envelope = parse_envelope(headers, origin.timestamp_ms, 0) if headers else NO_HEADERS
    if envelope.deadline_ms != record.deadline_ms:
        envelope = envelope._replace(deadline_ms=record.deadline_ms)
    request = Request(
        ack_handle,
        origin.partition,
        origin.offset,
        origin.previous,
        origin.timestamp_ms,
        record.key,
        record.value,
        headers,
        envelope,
        timings.ingested_us,
        record.model,
        record.version,
        id=record.id,
        after=origin.after,
        batch=_summary(timings),
        checked_us=timings.checked_us,
        done_us=timings.done_us,
    )
    if record.trace is not None:
        parent = parse_traceparent(record.trace.traceparent.encode())
        if parent is not None:
            request.trace = Trace(parent, record.trace.since_us)
    return request


def _origin(request: Request) -> WireOrigin:
    return WireOrigin(
        partition=request.partition,
        offset=request.offset,
        previous=request.previous,
        timestamp_ms=request.timestamp_ms,
        after=request.after,
    )


def _summary(timings: WireTimings) -> BatchSummary:
    formed_us, compute_us, rows = timings.formed_us, timings.compute_us, timings.batch_rows
    if formed_us or compute_us or rows:
        return BatchSummary(formed_us, compute_us, rows)
    return NO_BATCH


def _timings(request: Request) -> WireTimings:
    batch = request.batch
    return WireTimings(
        ingested_us=request.ingested_us,
        formed_us=batch.formed_us,
        compute_us=batch.compute_us,
        batch_rows=batch.rows,
        checked_us=request.checked_us,
        done_us=request.done_us,
    )


def _placed(tensors: Sequence[Tensor], value: bytes | memoryview | None) -> list[WireTensor]:
    """Encode tensors that are views of `value` by their position there, others with their data."""
    if not value:
        return [_carried(tensor) for tensor in tensors]
    placed: list[WireTensor] = []
    for tensor in tensors:
        start = start_in(value, tensor.data)
        if start < 0:
            placed.append(_carried(tensor))
        else:
            placed.append(
                WireTensor(
                    name=tensor.name,
                    datatype=tensor.datatype,
                    shape=tensor.shape,
                    start=start,
                    size=len(tensor.data),
                )
            )
    return placed


def _carried(tensor: Tensor) -> WireTensor:
    return WireTensor(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=tensor.shape,
        data=memoryview(tensor.data),
    )


def _tensor(record: WireTensor, value: memoryview | None) -> Tensor:
    content = record.data
    if content is None:
        start = record.start
        stop = start + record.size
        if value is None or not 0 <= start <= stop <= len(value):
            size = 0 if value is None else len(value)
            raise unreadable(f"a tensor within {size} bytes", f"{start} to {stop}")
        content = value[start:stop]
    # Half the cost of calling the NamedTuple class.
    return tuple.__new__(Tensor, (record.name, record.datatype, record.shape, content))


def _decoded(decoder: msgspec.msgpack.Decoder[_Record], value: bytes) -> _Record:
    try:
        return decoder.decode(value)
    except DECODE_ERRORS as error:
        raise unreadable("one of Headrace's", str(error)) from error


def unreadable(expected: str, got: str) -> Rejected:
    """Return the error of a record that Headrace did not write."""
    return Rejected.mismatch(Code.INTERNAL, "record", expected=expected, got=got)
