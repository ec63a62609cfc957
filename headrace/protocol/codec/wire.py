"""Encode and decode records between stages in different processes: items, batches and results.

A record holds a chunk of requests in columns (`headrace.protocol.messages.WireChunk`): values that
all share once, others in a list, and the payloads one after the other. A tensor that is a view of
its request's value is encoded as its position there, so that no bytes are sent twice. A large value
is not sent at all: `refer_to_source` releases it, the chunk says how large it is, and a process
that needs it reads the source record (`headrace.transport.source_values`). Decoding creates new
`Request` objects, whose values and tensors are views of the record. Envelopes are parsed from the
headers again; only deadlines are taken from the record, because ingest may have set them by its own
default timeout.

A request without companions travels in a record of its own, `headrace.protocol.codec.wire_single`,
which is also the format of the minor version before. A record of a later format ends the process,
because dropping it would leave its requests unanswered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import add, attrgetter, gt
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.errors import Fatal, Rejected
from headrace.protocol.ack import AckHandle
from headrace.protocol.codec import wire_single
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.protocol.codec.views import start_in
from headrace.protocol.codec.wire_single import (
    HeaderList,
    encode_record,
    read_failure,
    unreadable,
)
from headrace.protocol.headers import NO_HEADERS, is_utf8, parse_envelopes
from headrace.protocol.messages import (
    NO_BATCH,
    Batch,
    BatchSummary,
    ChunkedBatchRecord,
    Envelope,
    ItemChunk,
    ItemChunkRecord,
    Request,
    ResultChunkRecord,
    Tensor,
    WireChunk,
    WireFailure,
    WireTensors,
    WireTrace,
    find_runs,
)
from headrace.protocol.tensors import check_tensor
from headrace.protocol.trace_context import Trace, parse_traceparent
from headrace.tuning import TUNING

FORMAT = 3
"""Latest format that this release reads and writes: columns, with values that are only in the
source record.
"""
_COLUMNS_FORMAT = 2
"""Format of columns without these; format 1 is a record for each request."""

T = TypeVar("T")
_Place = tuple[int, int]
_EMPTY = memoryview(b"")
_NOT_SHARED = ("", 0)

_TUNING = TUNING.protocol
_UNCHECKED = frozenset({"BYTES", "BOOL"})
"""Datatypes whose content must be checked; of others only the size."""

_new = tuple.__new__  # half the cost of calling a NamedTuple's class
_items_decoder = msgspec.msgpack.Decoder(ItemChunkRecord)
_batch_decoder = msgspec.msgpack.Decoder(ChunkedBatchRecord)
_results_decoder = msgspec.msgpack.Decoder(ResultChunkRecord)


class _Format(msgspec.Struct):
    """The only field that every format from 2 on has."""

    format: int = 0


_format_decoder = msgspec.msgpack.Decoder(_Format)


# --- items and batches ------------------------------------------------------------------------


def refer_to_source(request: Request, from_bytes: int) -> None:
    """Release the value of a request, and the inputs in it, if it has at least so many bytes: the
    source record holds them, or the object of its claim.
    """
    value = request.value
    if not value or len(value) < from_bytes:
        return
    places = request.places
    if places is None:
        places, _ = _places(request.inputs, value)
    size_bytes = len(value)
    request.inputs = tuple(
        [
            _new(Tensor, (name, datatype, shape, _EMPTY if start < size_bytes else data))
            for (name, datatype, shape, data), (start, _) in zip(
                request.inputs, places, strict=True
            )
        ]
    )
    request.value, request.item = None, None
    request.places, request.referenced, request.shared = places, size_bytes, None


def refer_all_to_source(
    requests: Sequence[Request], from_bytes: int
) -> dict[Request, bytes | memoryview]:
    """Release the values of requests, see `refer_to_source`, and return those that were released.

    Requests with one input that differ in its data alone, as those of one client mostly do, share
    one object of inputs, which later steps look for. A value that the request's chunk holds stays
    there, as the process that wrote it has decided.
    """
    released: dict[Request, bytes | memoryview] = {}
    inputs: tuple[Tensor, ...] | None = None  # of the last request, without their data
    places: tuple[_Place, ...] | None = None
    name, datatype = "", ""
    shape: tuple[int, ...] = ()
    size_bytes = 0
    for request in requests:
        value = request.value
        if value is None:
            continue
        if request.referenced > 0:  # without its inputs already
            request.value = None
            released[request] = value
            continue
        if len(value) < from_bytes:
            continue
        if inputs is not None and request.places is places and len(value) == size_bytes:
            ((own_name, own_datatype, own_shape, _),) = request.inputs
            if own_name is name and own_datatype is datatype and own_shape is shape:
                request.inputs, request.referenced = inputs, size_bytes
                request.value = request.item = request.shared = None
                released[request] = value
                continue
        refer_to_source(request, from_bytes)
        if request.referenced:  # an empty value is not worth a reference
            released[request] = value
            inputs = None
            if len(request.inputs) == 1 and not request.inputs[0].data:
                inputs, places, size_bytes = request.inputs, request.places, request.referenced
                ((name, datatype, shape, _),) = inputs
    return released


def has_inputs_in_source(request: Request) -> bool:
    """Return True if inputs of the request are only in its source record."""
    referenced = request.referenced
    if referenced:
        for start, size in request.places or ():
            if size and start < referenced:
                return True
    return False


def restore_value(request: Request, value: bytes | memoryview) -> None:
    """Set the value of a request that refers to its source record or a claim, and the inputs in it.

    Raises:
        Rejected: `INVALID_TENSOR`: the value does not hold the inputs.
    """
    content = memoryview(value)
    inputs: list[Tensor] = []
    places = request.places
    placed = places or () if request.inputs else ()
    for tensor, (start, size) in zip(request.inputs, placed, strict=True):
        name, datatype, shape, data = tensor
        if start < request.referenced:
            data = content[start : start + size]
        check_tensor(datatype, shape, data, name)
        inputs.append(_new(Tensor, (name, datatype, shape, data)))
        if start + size > len(value):
            places = None  # some inputs lie behind this value, so its places do not hold
    # Only now: a value that is refused may be read again from elsewhere.
    request.inputs, request.places = tuple(inputs), places
    request.value, request.referenced, request.chunk = value, 0, None


def restore_values(requests: Sequence[Request], content: memoryview) -> list[Request]:
    """Set the values of requests, which lie one after the other, and the inputs in them.

    Of requests that share one object of inputs and one of places, as those of one record do, the
    first is checked. If they follow each other in a chunk, that holds their values from then on.

    Returns:
        Those whose values do not hold their inputs; they are unchanged.
    """
    if _put_into_chunk(requests, content):
        return []
    refused: list[Request] = []
    inputs: tuple[Tensor, ...] | None = None  # of the last request, before that was restored
    places: tuple[_Place, ...] | None = None
    name, datatype = "", ""
    shape: tuple[int, ...] = ()
    start = stop = checked_bytes = end = 0
    for request in requests:
        value_bytes = request.referenced
        value = content[end : end + value_bytes]
        end += value_bytes
        own, own_places = request.inputs, request.places
        if own is inputs and own_places is places and value_bytes == checked_bytes:
            request.inputs = (_new(Tensor, (name, datatype, shape, value[start:stop])),)
            request.value, request.referenced, request.chunk = value, 0, None
            continue
        inputs = None
        try:
            restore_value(request, value)
        except Rejected:  # its source record tells why
            refused.append(request)
            continue
        if len(own) == 1 and own_places and request.places is own_places:
            ((name, datatype, shape, _),) = own
            ((start, size),) = own_places
            stop = start + size
            if datatype not in _UNCHECKED:
                inputs, places, checked_bytes = own, own_places, value_bytes
    return refused


def _put_into_chunk(requests: Sequence[Request], content: memoryview) -> bool:
    """Let a chunk hold the values of requests, which lie one after the other; return False if they
    do not follow each other in one, or their inputs have to be taken out to be checked.
    """
    (chunk, taken), *others = find_runs(requests)
    if chunk is None or others or not all(map(_is_uniform, chunk.record.inputs)):
        return False
    first = requests[0]
    size_bytes, count = first.referenced, len(chunk.record.offset)
    if any(start + size > size_bytes for start, size in first.places or ()):
        return False  # an input is not in the value
    record = msgspec.structs.replace(
        chunk.record,
        format=_COLUMNS_FORMAT,
        value=size_bytes,
        part=size_bytes,
        referenced=0,
        shared="",
        shared_at=0,
    )
    # The places of other requests of the record are outside the content, and never asked for.
    bases = range(-taken.start * size_bytes, (count - taken.start) * size_bytes, size_bytes)
    sizes = [size_bytes] * count
    restored = ItemChunk(record, content, bases, sizes, sizes)
    for index, (name, datatype, shape, _) in enumerate(first.inputs):
        (data,) = restored.data(index, slice(taken.start, taken.start + 1))
        try:
            check_tensor(datatype, shape, data, name)
        except Rejected:
            return False
    for request in requests:
        request.chunk, request.referenced = restored, 0
    return True


class ChunkLimits(NamedTuple):
    """Most requests of a chunk, and most bytes: of values or outputs in it, and of values that are
    only in the source records. A larger request is a chunk by itself.
    """

    requests: int
    size_bytes: int
    source_bytes: int


def divide_items(requests: Sequence[Request], limits: ChunkLimits) -> list[list[Request]]:
    """Divide requests of one source partition into chunks, one for each `items` record."""
    return _divide(requests, _item_group, _are_items_alike, limits)


def encode_items(requests: Sequence[Request]) -> bytes:
    """Return the value of an `items` record; the requests are one chunk of `divide_items`."""
    if len(requests) == 1 and not requests[0].referenced:
        return wire_single.encode_item(requests[0])
    return encode_record(ItemChunkRecord(**_item_columns(requests)))


def decode_items(value: bytes, ack_handle: AckHandle) -> list[Request]:
    """Decode the requests of an `items` record; their values and tensors are views of `value`.

    Raises:
        Rejected: `INTERNAL` or `INVALID_TENSOR`: the record was not written by Headrace.
        Fatal: a later release wrote the record.
    """
    if _is_single(value):
        return [wire_single.decode_item(value, ack_handle)]
    record = _decoded(_items_decoder, value)
    return _requests_of_items(record, ack_handle)


def encode_batch(batch: Batch) -> bytes:
    """Return the value of a `batches` record."""
    if all(request.item is not None for request in batch.requests):
        return wire_single.encode_batch(batch)  # their records are copied as they are
    columns = [ItemChunkRecord(**each) for each in _batch_columns(batch.requests)]
    return encode_record(
        ChunkedBatchRecord(
            format=max([each.format for each in columns]),
            batch_id=batch.batch_id,
            reason=batch.reason,
            chunks=columns,
        )
    )


def decode_batch(value: bytes, ack_handle: AckHandle) -> Batch:
    """Decode the batch of a `batches` record; all its requests share `ack_handle`.

    Raises:
        Rejected: `INTERNAL` or `INVALID_TENSOR`: the record was not written by Headrace.
        Fatal: a later release wrote the record.
    """
    if _is_single(value):
        return wire_single.decode_batch(value, ack_handle)
    record = _decoded(_batch_decoder, value)
    requests = [
        request for chunk in record.chunks for request in _requests_of_items(chunk, ack_handle)
    ]
    return Batch(record.batch_id, requests, record.reason)


def _item_group(request: Request) -> Hashable:
    """Return what the requests of an item chunk have in common."""
    if request.envelope.cancels is not None:
        # In a chunk begun earlier, it would be read before the request that it cancels.
        return request.offset
    inputs = request.inputs
    if len(inputs) == 1:
        name, datatype, shape, _ = inputs[0]
        names: Hashable = (name, datatype, len(shape))
    else:
        names = tuple([(tensor.name, tensor.datatype) for tensor in inputs])
    # The tenant, because the records of an `items` topic are charged to model and tenant.
    tenant = request.envelope.tenant
    is_here = not request.referenced
    return (request.model, request.version, request.shape_class, tenant, names, is_here)


def _are_items_alike(one: Request, other: Request) -> bool:
    if one.model is not other.model or one.version is not other.version:
        return False
    envelope, other_envelope = one.envelope, other.envelope
    if envelope is not other_envelope and envelope.tenant != other_envelope.tenant:
        return False
    if one.shape_class != other.shape_class or (one.referenced == 0) != (other.referenced == 0):
        return False
    inputs, other_inputs = one.inputs, other.inputs
    if inputs is other_inputs:
        return True
    if len(inputs) != 1 or len(other_inputs) != 1:
        return False
    ((name, datatype, shape, _),) = inputs
    ((other_name, other_datatype, other_shape, _),) = other_inputs
    return (
        name == other_name
        and datatype == other_datatype
        and (shape is other_shape or len(shape) == len(other_shape))
    )


def _batch_columns(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Yield the columns of the chunks of a batch."""
    runs = [(chunk, places) for chunk, places in find_runs(requests) if chunk is not None]
    if (
        sum([len(places) for _, places in runs])
        == len(requests)
        >= _TUNING.cut_run_requests * len(runs)
    ):
        for chunk, places in runs:
            yield _cut_columns(requests[: len(places)], chunk, places)
            requests = requests[len(places) :]
        return
    last = requests[0]
    alike = [last]
    for request in requests[1:]:
        if _are_items_alike(last, request) or _item_group(last) == _item_group(request):
            alike.append(request)
        else:
            yield _item_columns(alike)
            alike = [request]
        last = request
    yield _item_columns(alike)


def _cut_columns(requests: Sequence[Request], chunk: ItemChunk, places: range) -> dict[str, Any]:
    """Return the columns of requests that follow each other in a chunk; only the batch and the
    traces are new.
    """
    record, cut = chunk.record, slice(places.start, places.stop)
    columns: dict[str, Any] = {
        "format": _COLUMNS_FORMAT,
        "offset": record.offset[cut],
        "model": record.model,
        "version": record.version,
        "raw_names": record.raw_names,
        "shape_class": record.shape_class,
        "wanted": record.wanted,
    }
    for name in _CUT_COLUMNS:
        columns[name] = _cut(getattr(record, name), cut)
    if record.mixed_headers is None:
        columns["headers"] = [(name, _cut(column, cut)) for name, column in record.headers]
    else:
        columns["mixed_headers"] = record.mixed_headers[cut]
    if record.wanted_each is not None:
        columns["wanted_each"] = record.wanted_each[cut]
    _set_batch(columns, requests)
    referenced, shared_at = record.referenced, record.shared_at
    if referenced:
        columns["format"], columns["referenced"] = FORMAT, referenced
        columns["shared"] = _cut(record.shared, cut)
        if isinstance(shared_at, list):
            columns["shared_at"] = shared_at[cut]  # even if they are equal: in different rings
        elif record.shared:
            assert isinstance(referenced, int)  # see `_are_inputs_equal`
            columns["shared_at"] = shared_at + places.start * referenced
    last = places.stop - 1
    columns["payload"] = chunk.payload[
        chunk.bases[places.start] : chunk.bases[last] + chunk.parts[last]
    ]
    columns["inputs"] = [
        WireTensors(
            name=each.name,
            datatype=each.datatype,
            shape=each.shape,
            size=each.size,
            start=_cut(each.start, cut),
        )
        for each in record.inputs
    ]
    return columns


_CUT_COLUMNS = (
    "partition",
    "gap",
    "timestamp_ms",
    "after",
    "key",
    "deadline_ms",
    "id",
    "ingested_us",
    "checked_us",
    "done_us",
    "value",
    "part",
    "rows",
)


def _cut(column: T | list[T], places: slice) -> T | list[T]:
    return _column(column[places]) if isinstance(column, list) else column


def _item_columns(requests: Sequence[Request]) -> dict[str, Any]:
    for request in requests:
        if request.chunk is not None:
            request.restore()
    columns = _columns(requests)
    first = requests[0]
    if first.referenced:
        sizes = [request.referenced for request in requests]
        _set_referenced(columns, sizes)
        _set_shared(columns, [request.shared or _NOT_SHARED for request in requests], sizes)
    placed = _add_payload(columns, requests)
    columns["rows"] = _column([request.rows for request in requests])
    columns["shape_class"] = first.shape_class
    columns["inputs"] = [
        _input_columns(requests, place, [each[place] for each in placed])
        for place in range(len(first.inputs))
    ]
    _set_shared_or_each(columns, "wanted", [request.wanted for request in requests])
    return columns


def _add_payload(columns: dict[str, Any], requests: Sequence[Request]) -> list[tuple[_Place, ...]]:
    """Add the columns of the payload; return the places of each request's inputs in its part."""
    contents = [request.value for request in requests if request.value]
    inside = [request.places for request in requests if request.places]
    if len(contents) == len(inside) == len(requests):  # the values are all that there is
        columns["value"] = columns["part"] = _column([len(content) for content in contents])
        columns["payload"] = memoryview(b"".join(contents))
        return inside
    values: list[int] = []
    parts: list[int] = []
    payload: list[bytes | memoryview] = []
    placed: list[tuple[_Place, ...]] = []
    last: tuple[Tensor, ...] | None = None
    behind: list[bytes | memoryview] = []
    for request in requests:
        value, places = request.value, request.places
        part = 0
        if value is None:
            values.append(-1)
        else:
            part = len(value)
            values.append(part)
            payload.append(value)
        beside: Sequence[bytes | memoryview] = ()
        if places is None:
            places, beside = _places(request.inputs, value)
        elif request.referenced:
            if request.inputs is not last:
                last = request.inputs
                behind = [tensor.data for tensor in last if tensor.data]  # not in the value
            beside = behind
        for content in beside:
            part += len(content)
            payload.append(content)
        parts.append(part)
        placed.append(places)
    columns["value"], columns["part"] = _column(values), _column(parts)
    columns["payload"] = memoryview(b"".join(payload))
    return placed


def _set_referenced(columns: dict[str, Any], sizes: list[int]) -> None:
    columns["format"], columns["referenced"] = FORMAT, _column(sizes)


def _set_shared(
    columns: dict[str, Any], shared: Sequence[tuple[str, int]], sizes: Sequence[int]
) -> None:
    names = _column([name for name, _ in shared])
    if not names:
        return
    starts = [start for _, start in shared]
    first = starts[0]
    is_run = type(names) is str and starts == list(accumulate(sizes[:-1], initial=first))
    columns["shared"], columns["shared_at"] = names, first if is_run else starts


def _input_columns(
    requests: Sequence[Request], index: int, placed: Sequence[_Place]
) -> WireTensors:
    first = requests[0].inputs[index]
    shapes = [request.inputs[index].shape for request in requests]
    start: int | list[int]
    size: int | list[int]
    if placed.count(placed[0]) == len(placed):
        start, size = placed[0]
    else:
        start, size = _column([each[0] for each in placed]), _column([each[1] for each in placed])
    tensors = WireTensors(name=first.name, datatype=first.datatype, start=start, size=size)
    _set_shapes(tensors, shapes)
    return tensors


def _places(
    tensors: Sequence[Tensor], value: bytes | memoryview | None
) -> tuple[tuple[_Place, ...], list[bytes | memoryview]]:
    """Return the position of each tensor in its request's part of the payload, and the tensors
    that follow the value there because they are no views of it.
    """
    places: list[_Place] = []
    beside: list[bytes | memoryview] = []
    end = 0 if value is None else len(value)
    for tensor in tensors:
        content = tensor.data
        size = len(content)
        start = start_in(value, content) if value else -1
        if start < 0:
            start = end
            end += size
            beside.append(content)
        places.append((start, size))
    return tuple(places), beside


class _Inputs(NamedTuple):
    """Inputs of each request, their places and their sizes together; `chunk` is None unless batches
    may be cut out of the record.
    """

    inputs: Iterable[tuple[Tensor, ...]]
    places: Iterable[tuple[_Place, ...] | None]
    sizes: Iterable[int]
    chunk: ItemChunk | None = None


def _requests_of_items(record: ItemChunkRecord, ack_handle: AckHandle) -> list[Request]:
    layout = _layout(record)
    count = len(record.offset)
    values: Iterable[memoryview | None]
    if record.referenced:
        values, inputs = _values(layout), _inputs_at_source(record, layout)
    elif all(map(_is_uniform, record.inputs)):
        values, inputs = repeat(None, count), _inputs_in_chunk(record, layout)
    else:
        values, inputs = _values(layout), _inputs_here(record, layout)
    wanted = repeat(record.wanted, count) if record.wanted_each is None else record.wanted_each
    rows = _repeated(record.rows, count)
    requests = _requests(
        record, ack_handle, values, inputs, rows=rows, wanted=wanted, shape_class=record.shape_class
    )
    if record.referenced:
        _spread(requests, "referenced", record.referenced)
        if record.shared != "":
            _spread_shared(requests, record)
    return requests


def _is_uniform(wired: WireTensors) -> bool:
    """Return True if the tensors of all requests are right if the first one is."""
    return type(wired.size) is int and wired.shapes is None and wired.datatype not in _UNCHECKED


def _inputs_in_chunk(record: ItemChunkRecord, layout: _Layout) -> _Inputs:
    """Return inputs without data, one object for all requests: the chunk holds the data."""
    chunk = ItemChunk(record, *layout)
    count = len(record.offset)
    inputs: list[Tensor] = []
    is_inside = True
    size_bytes = 0
    first = None
    if type(record.part) is int and type(record.value) is int:
        # What is in the first part is in all.
        first = _Layout(layout.payload, layout.bases, layout.parts[:1], layout.values[:1])
    for index, wired in enumerate(record.inputs):
        name, datatype, shape, size = wired.name, wired.datatype, wired.shape, wired.size
        assert isinstance(size, int)  # see `_is_uniform`
        if first is not None and type(wired.start) is int:
            stops = _stops([wired.start], [size], first)
        else:
            stops = _stops(_each(wired.start, record.offset), repeat(size), layout)
        is_inside = is_inside and not any(map(gt, stops, layout.values))
        check_tensor(datatype, shape, chunk.data(index, slice(0, 1))[0], name)
        inputs.append(_new(Tensor, (name, datatype, shape, _EMPTY)))
        size_bytes += size
    places = _wired_places(record.inputs if is_inside else (), record.offset)
    return _Inputs(repeat(tuple(inputs), count), places, repeat(size_bytes, count), chunk=chunk)


def _inputs_here(record: ItemChunkRecord, layout: _Layout) -> _Inputs:
    """Return inputs whose data is in the payload."""
    tensors: list[list[Tensor]] = []
    is_inside = True
    payload = layout.payload
    for wired in record.inputs:
        starts, sizes = _each(wired.start, record.offset), _each(wired.size, record.offset)
        stops = _stops(starts, sizes, layout)
        is_inside = is_inside and not any(map(gt, stops, layout.values))
        contents = [
            payload[base + start : base + stop]
            for base, start, stop in zip(layout.bases, starts, stops, strict=True)
        ]
        tensors.append(_tensors(wired, contents, is_checked=True))
    return _Inputs(
        zip(*tensors, strict=True),
        _wired_places(record.inputs if is_inside else (), record.offset),
        _sum_sizes(record.inputs, record.offset),
    )


def _inputs_at_source(record: ItemChunkRecord, layout: _Layout) -> _Inputs:
    """Return inputs whose data is in the source records, except what lies behind their values."""
    # Without their bytes, inputs are equal if their places are: one for all is enough then.
    are_equal = _are_inputs_equal(record)
    some = record.offset[:1] if are_equal else record.offset
    first_bytes = layout.bases[: len(some)]
    chunk = ItemChunk(record, *layout) if are_equal else None
    layout = _layout_behind_values(record, layout, len(some))
    tensors: list[list[Tensor]] = []
    for wired in record.inputs:
        starts, sizes = _each(wired.start, some), _each(wired.size, some)
        contents = _contents_behind(layout, starts, _stops(starts, sizes, layout), first_bytes)
        # A tensor in a source record is checked when that is read.
        tensors.append(_tensors(wired, contents, is_checked=False))
    inputs = list(zip(*tensors, strict=True)) if tensors else [()] * len(some)
    return _Inputs(
        repeat(inputs[0], len(record.offset)) if are_equal else inputs,
        # Without its value, a request is known by the places of all inputs.
        _wired_places(record.inputs, record.offset),
        _sum_sizes(record.inputs, record.offset),
        chunk,
    )


def _stops(starts: Sequence[int], sizes: Iterable[int], layout: _Layout) -> list[int]:
    """Return where the tensors of requests end in their parts of the payload.

    Raises:
        Rejected: a tensor is not within its part.
    """
    stops = list(map(add, starts, sizes))
    if min(starts) < 0 or any(map(gt, starts, stops)) or any(map(gt, stops, layout.parts)):
        raise unreadable(
            f"a tensor within {max(layout.parts)} bytes", f"{min(starts)} to {max(stops)}"
        )
    return stops


def _are_inputs_equal(record: ItemChunkRecord) -> bool:
    """Return True if the inputs of all requests are at the same places of values of one size."""
    columns = [record.referenced, record.part]
    for wired in record.inputs:
        columns += (wired.start, wired.size)
    return (
        not record.part
        and not any(isinstance(column, list) for column in columns)
        and all(wired.shapes is None for wired in record.inputs)
    )


def _wired_places(
    wired: Sequence[WireTensors], requests: Sequence[object]
) -> Iterable[tuple[_Place, ...] | None]:
    """Return the places of each request's inputs: one object for all if they are the same."""
    if not wired:
        return repeat(None, len(requests))
    shared = [
        (each.start, each.size)
        for each in wired
        if isinstance(each.start, int) and isinstance(each.size, int)
    ]
    if len(shared) == len(wired):
        return repeat(tuple(shared), len(requests))
    columns = [
        zip(_each(each.start, requests), _each(each.size, requests), strict=True) for each in wired
    ]
    return zip(*columns, strict=True)


def _spread_shared(requests: Sequence[Request], record: ItemChunkRecord) -> None:
    """Set where in shared memory the values of requests are."""
    names = _each(record.shared, requests)
    if isinstance(record.shared_at, int):
        sizes = [request.referenced for request in requests]
        starts = list(accumulate(sizes[:-1], initial=record.shared_at))
    else:
        starts = _each(record.shared_at, requests)
    for request, name, start in zip(requests, names, starts, strict=True):
        if name:
            request.shared = (name, start)


def _layout_behind_values(record: ItemChunkRecord, layout: _Layout, count: int) -> _Layout:
    """Return a layout of the first requests, whose parts begin with the values, which the payload
    does not hold.
    """
    payload, bases, parts, values = layout
    referenced = _each(record.referenced, record.offset)[:count]
    if min(referenced) < 1:
        raise unreadable("all values in their source records, or none", f"{min(referenced)}")
    bases = [base - size for base, size in zip(bases[:count], referenced, strict=True)]
    parts = [part + size for part, size in zip(parts[:count], referenced, strict=True)]
    return _Layout(payload, bases, parts, values[:count])


def _contents_behind(
    layout: _Layout, starts: Sequence[int], stops: Sequence[int], first_bytes: Sequence[int]
) -> list[memoryview]:
    """Return the bytes of each request's tensor; none if they lie before the request's first byte
    in the payload, in a value that is not here.

    Raises:
        Rejected: a tensor lies in both.
    """
    payload = layout.payload
    contents: list[memoryview] = []
    for base, start, stop, first in zip(layout.bases, starts, stops, first_bytes, strict=True):
        if base + start >= first:
            contents.append(payload[base + start : base + stop])
        elif base + stop > first:
            raise unreadable(f"a tensor within {first - base} bytes", f"{start} to {stop}")
        else:
            contents.append(_EMPTY)
    return contents


def _sum_sizes(wired: Sequence[WireTensors], requests: Sequence[object]) -> Iterable[int]:
    """Return the size of all inputs of each request."""
    if len(wired) == 1:
        return _each(wired[0].size, requests)
    if not wired:
        return repeat(0, len(requests))
    return map(sum, zip(*[_each(each.size, requests) for each in wired], strict=True))


# --- results ----------------------------------------------------------------------------------


def divide_results(requests: Sequence[Request], limits: ChunkLimits) -> list[list[Request]]:
    """Divide requests of one source partition into chunks, one for each `results` record."""
    first = requests[0] if requests else None
    if (
        first is not None
        and first.output_data
        and _are_equal(list(map(_result_kind, requests)))
        and all(datatype != "BYTES" for _, datatype, _ in first.output_metadata)
    ):
        # Equal shapes of a datatype with elements of one size.
        most = limits.size_bytes // max(1, sum(map(len, first.output_data)))
        most = max(1, min(most, limits.requests))
        return [list(requests[start : start + most]) for start in range(0, len(requests), most)]
    return _divide(requests, _result_group, _are_results_alike, limits)


def encode_results(requests: Sequence[Request]) -> bytes:
    """Return the value of a `results` record; the requests are one chunk of `divide_results`."""
    first = requests[0]
    if len(requests) == 1 and not (first.failure is not None and first.referenced):
        return wire_single.encode_result(first)
    columns = _columns(requests)
    if first.failure is not None:
        failures: list[WireFailure] = []
        values: list[int] = []
        referenced: list[int] = []
        payload: list[bytes | memoryview] = []
        for request in requests:
            failure = request.failure
            assert failure is not None  # all requests of a chunk have failures
            failures.append(WireFailure(**failure._asdict()))
            is_kept = request.keeps_value
            referenced.append(request.referenced if is_kept else 0)
            value = request.value if is_kept else None
            values.append(-1 if value is None else len(value))
            if value is not None:
                payload.append(value)
        columns["failures"] = failures
        columns["value"] = _column(values)
        columns["part"] = _column([max(0, size) for size in values])
        columns["payload"] = memoryview(b"".join(payload)) if payload else None
        if any(referenced):
            _set_referenced(columns, referenced)
    elif first.output_data is not None:
        columns["outputs"] = [
            _output_columns(requests, index) for index in range(len(first.output_data))
        ]
    else:
        columns["skipped"] = True
    columns["batch_id"] = _column([request.batch_id for request in requests])
    return encode_record(ResultChunkRecord(**columns))


def decode_results(value: bytes, ack_handle: AckHandle) -> list[Request]:
    """Decode the requests of a `results` record, with `outputs` or `failure` set.

    Raises:
        Rejected: `INTERNAL`: the record was not written by Headrace.
        Fatal: a later release wrote the record.
    """
    if _is_single(value):
        return [wire_single.decode_result(value, ack_handle)]
    record = _decoded(_results_decoder, value)
    count = len(record.offset)
    requests = _requests(
        record,
        ack_handle,
        _values(_layout(record)),
        _Inputs(repeat((), count), repeat(None, count), repeat(0, count)),
        rows=repeat(1, count),
        wanted=repeat(None, count),
        shape_class=(),
    )
    if record.batch_id:
        _spread(requests, "batch_id", record.batch_id)
    if record.skipped:
        return requests
    if record.failures is not None:
        failures: list[WireFailure] = _each(record.failures, requests)
        if record.referenced:
            _spread(requests, "referenced", record.referenced)
        for request, failure in zip(requests, failures, strict=True):
            request.failure = read_failure(failure)
        return requests
    _set_outputs(requests, record.outputs)
    return requests


def _result_group(request: Request) -> Hashable:
    """Return what the requests of a result chunk have in common."""
    names: Hashable = None
    if request.failure is not None:
        names = "failed"
    elif request.output_data is not None:
        names = tuple([metadata[:2] for metadata in request.output_metadata])
    return (request.model, request.version, names)


_result_kind = attrgetter("model", "version", "output_metadata", "failure")


def _are_results_alike(one: Request, other: Request) -> bool:
    return (
        one.output_data is not None
        and other.output_data is not None
        and one.output_metadata is other.output_metadata
        and one.model is other.model
        and one.version is other.version
    )


def _output_columns(requests: Sequence[Request], index: int) -> WireTensors:
    name, datatype, _ = requests[0].output_metadata[index]
    contents = [request.output_data[index] for request in requests if request.output_data]
    tensors = WireTensors(
        name=name,
        datatype=datatype,
        size=_column([len(content) for content in contents]),
        data=memoryview(b"".join(contents)),
    )
    _set_shapes(tensors, [request.output_metadata[index][2] for request in requests])
    return tensors


def _set_outputs(requests: Sequence[Request], outputs: Sequence[WireTensors]) -> None:
    if not outputs:
        for request in requests:
            request.output_data = ()
        return
    contents: list[list[memoryview]] = []
    for wired in outputs:
        data = _EMPTY if wired.data is None else wired.data
        sizes = _each(wired.size, requests)
        stops = list(accumulate(sizes))
        if min(sizes) < 0 or stops[-1] != len(data):
            raise unreadable(f"an output of {stops[-1]} bytes", f"{len(data)} bytes")
        contents.append([data[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)])
    # Outputs that differ only in their bytes share one metadata object, as in one batch.
    is_uniform = all(type(each.size) is int and each.shapes is None for each in outputs)
    tensors = [
        _tensors(wired, content[:1] if is_uniform else content, is_checked=False)
        for wired, content in zip(outputs, contents, strict=True)
    ]
    metadata = [wire_single.shared_metadata(own) for own in zip(*tensors, strict=True)]
    if is_uniform:
        metadata *= len(requests)
    rows = zip(requests, metadata, zip(*contents, strict=True), strict=True)
    for request, own_metadata, own_data in rows:
        request.output_metadata, request.output_data = own_metadata, own_data


# --- columns ----------------------------------------------------------------------------------


def _divide(
    requests: Sequence[Request],
    group: Callable[[Request], Hashable],
    is_alike: Callable[[Request, Request], bool],
    limits: ChunkLimits,
) -> list[list[Request]]:
    """Divide requests into chunks of one group each that are not too large.

    Args:
        requests: requests of one source partition, by offset.
        group: returns what the requests of a chunk have in common.
        is_alike: returns True if two requests are of one group, as a quick look tells.
        limits: of a chunk.
    """
    chunks: list[list[Request]] = []
    open_chunks: dict[Hashable, tuple[list[Request], int]] = {}
    chunk: list[Request] = []
    size_bytes = 0
    key: Hashable = None
    last: Request | None = None
    for request in requests:
        if last is None or not is_alike(last, request):
            if last is not None:
                open_chunks[key] = (chunk, size_bytes)
            key = group(request)
            chunk, size_bytes = open_chunks.get(key) or ([], 0)
        last = request
        added_bytes, max_bytes = request.referenced, limits.source_bytes
        # Neither outputs nor the inputs that were made of a payload are left with it in its record.
        is_made = request.inputs and request.size_bytes > added_bytes
        if not added_bytes or is_made or request.output_data is not None:
            added_bytes, max_bytes = _carried_bytes(request), limits.size_bytes
        if not chunk or len(chunk) >= limits.requests or size_bytes + added_bytes > max_bytes:
            chunk, size_bytes = [], 0
            chunks.append(chunk)
        chunk.append(request)
        size_bytes += added_bytes
    return chunks


def _carried_bytes(request: Request) -> int:
    """Return an estimate of the bytes that a request adds to its chunk."""
    data = request.output_data
    if data is not None:
        return len(data[0]) if len(data) == 1 else sum(map(len, data))
    value = request.value
    return request.size_bytes if value is None else len(value)


def _columns(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the columns of `WireChunk`, without the payload."""
    first = requests[0]
    offsets = [request.offset for request in requests]
    columns: dict[str, Any] = {
        "format": _COLUMNS_FORMAT,
        "partition": _column([request.partition for request in requests]),
        "offset": offsets,
        "gap": _column([request.offset - request.previous for request in requests]),
        "model": first.model,
        "version": first.version,
    }
    for name, getter in _SIMPLE_COLUMNS:
        columns[name] = _column(list(map(getter, requests)))
    _set_batch(columns, requests)
    _add_headers(columns, requests)
    return columns


def _set_batch(columns: dict[str, Any], requests: Sequence[Request]) -> None:
    """Set what a batcher and an executor change in the columns of requests."""
    batch = requests[0].batch
    for request in requests:
        if request.batch is not batch:
            batches = [each.batch for each in requests]
            columns["formed_us"] = _column([each.formed_us for each in batches])
            columns["compute_us"] = _column([each.compute_us for each in batches])
            columns["batch_rows"] = _column([each.rows for each in batches])
            break
    else:
        if batch is not NO_BATCH:
            columns["formed_us"] = batch.formed_us
            columns["compute_us"], columns["batch_rows"] = batch.compute_us, batch.rows
    if any(request.trace is not None for request in requests):
        columns["trace"] = [WireTrace.of(request.trace) for request in requests]


_SIMPLE_COLUMNS = tuple(
    (name, attrgetter(path))
    for name, path in (
        ("timestamp_ms", "timestamp_ms"),
        ("after", "after"),
        ("key", "key"),
        ("deadline_ms", "envelope.deadline_ms"),
        ("id", "id"),
        ("ingested_us", "ingested_us"),
        ("checked_us", "checked_us"),
        ("done_us", "done_us"),
    )
)


def _add_headers(columns: dict[str, Any], requests: Sequence[Request]) -> None:
    headers = [request.headers for request in requests]
    if not any(headers):
        return
    if not all(is_utf8(name) for each in headers for name, _ in each):
        columns["raw_names"] = True
        headers = [[(_raw_name(name), value) for name, value in each] for each in headers]
    names = [name for name, _ in headers[0]]
    if all([name for name, _ in each] == names for each in headers):
        values = zip(*[[value for _, value in each] for each in headers], strict=True)
        columns["headers"] = [
            (name, _column(list(column))) for name, column in zip(names, values, strict=True)
        ]
    else:
        columns["mixed_headers"] = [list(each) for each in headers]


def _requests(
    record: WireChunk,
    ack_handle: AckHandle,
    values: Iterable[memoryview | None],
    inputs: _Inputs,
    *,
    rows: Iterable[int],
    wanted: Iterable[tuple[str, ...] | None],
    shape_class: tuple[int, ...],
) -> list[Request]:
    """Return the requests of a chunk, without their outcomes."""
    offsets = record.offset
    headers = _headers(record)
    model, version = record.model, record.version
    chunk = inputs.chunk
    count = len(offsets)
    try:
        requests = [
            Request(
                ack_handle,
                partition,
                offset,
                offset - gap,
                timestamp_ms,
                key,
                value,
                own_headers,
                envelope,
                ingested_us,
                model,
                version,
                tensors,
                own_rows,
                shape_class,
                size_bytes,
                own_wanted,
                id_,
                after,
                None,
                places,
                0,
                None,
                chunk,
                place,
            )
            for (
                partition,
                offset,
                gap,
                timestamp_ms,
                key,
                value,
                own_headers,
                envelope,
                ingested_us,
                tensors,
                own_rows,
                size_bytes,
                own_wanted,
                id_,
                after,
                places,
                place,
            ) in zip(
                _repeated(record.partition, count),
                offsets,
                _repeated(record.gap, count),
                _repeated(record.timestamp_ms, count),
                _repeated(record.key, count),
                values,
                headers,
                _envelopes(record, headers),
                _repeated(record.ingested_us, count),
                inputs.inputs,
                rows,
                inputs.sizes,
                wanted,
                _repeated(record.id, count),
                _repeated(record.after, count),
                inputs.places,
                range(count),
                strict=True,
            )
        ]
    except ValueError as error:
        raise unreadable(f"columns of {count} requests", str(error)) from error
    if record.checked_us != 0:
        _spread(requests, "checked_us", record.checked_us)
    if record.done_us != 0:
        _spread(requests, "done_us", record.done_us)
    if record.formed_us or record.compute_us or record.batch_rows:
        _set_summaries(requests, record)
    if record.trace is not None:
        traces: list[WireTrace | None] = _each(record.trace, requests)
        for request, trace in zip(requests, traces, strict=True):
            parent = None if trace is None else parse_traceparent(trace.traceparent.encode())
            if trace is not None and parent is not None:
                request.trace = Trace(parent, trace.since_us)
    return requests


def _set_summaries(requests: Sequence[Request], record: WireChunk) -> None:
    formed, compute, rows = record.formed_us, record.compute_us, record.batch_rows
    if isinstance(formed, int) and isinstance(compute, int) and isinstance(rows, int):
        summary = BatchSummary(formed, compute, rows)
        for request in requests:
            request.batch = summary
        return
    # Requests of one batch share one summary.
    known: dict[tuple[int, int, int], BatchSummary] = {(0, 0, 0): NO_BATCH}
    facts = zip(
        _each(formed, requests), _each(compute, requests), _each(rows, requests), strict=True
    )
    last, summary = (0, 0, 0), NO_BATCH
    for request, fact in zip(requests, facts, strict=True):
        if fact != last:  # those of a batch mostly follow each other
            last, summary = fact, known.get(fact) or known.setdefault(fact, BatchSummary(*fact))
        request.batch = summary


class _Layout(NamedTuple):
    """Offset and size of each request's part in a chunk's payload, and the size of its value."""

    payload: memoryview
    bases: Sequence[int]
    parts: list[int]
    values: list[int]


def _layout(record: WireChunk) -> _Layout:
    payload = _EMPTY if record.payload is None else record.payload
    part, value, count = record.part, record.value, len(record.offset)
    bases: Sequence[int]
    if isinstance(part, int) and isinstance(value, int):
        parts, values, end = [part] * count, [value] * count, part * count
        bases = range(0, end, part) if part > 0 else parts
        is_right = part >= 0 and value <= part
    else:
        parts, values = _each(part, record.offset), _each(value, record.offset)
        *bases, end = accumulate(parts, initial=0)
        is_right = min(parts) >= 0 and not any(map(gt, values, parts))
    if not is_right or end != len(payload):
        raise unreadable(f"a payload of {end} bytes", f"{len(payload)} bytes")
    return _Layout(payload, bases, parts, values)


def _values(layout: _Layout) -> list[memoryview | None]:
    payload = layout.payload
    return [
        None if size < 0 else payload[base : base + size]
        for base, size in zip(layout.bases, layout.values, strict=True)
    ]


def _headers(record: WireChunk) -> Sequence[HeaderList]:
    """Return the headers of each request; one list for all if they are equal."""
    count = len(record.offset)
    if record.mixed_headers is not None:
        mixed: list[HeaderList] = _each(record.mixed_headers, record.offset)
        if record.raw_names:
            return [[(_name(name), value) for name, value in each] for each in mixed]
        return mixed
    names = [name for name, _ in record.headers]
    if record.raw_names:
        names = list(map(_name, names))
    columns = [column for _, column in record.headers]
    if not any(type(column) is list for column in columns):
        return [list(zip(names, columns, strict=True))] * count  # type: ignore[arg-type]
    rows = zip(*[_each(column, record.offset) for column in columns], strict=True)
    return [list(zip(names, row, strict=True)) for row in rows]


def _envelopes(record: WireChunk, headers: Sequence[HeaderList]) -> Iterable[Envelope]:
    count = len(record.offset)
    deadlines = _each(record.deadline_ms, record.offset)
    if record.mixed_headers is None:
        if not record.headers and not record.deadline_ms:
            return repeat(NO_HEADERS, count)
        varying = [name for name, column in record.headers if type(column) is list]
    else:
        varying = None
    return parse_envelopes(headers, deadlines, varying)


def _tensors(
    wired: WireTensors, contents: Sequence[memoryview], *, is_checked: bool
) -> list[Tensor]:
    """Return the tensor of each request, after checking its bytes against its shape."""
    name, datatype = wired.name, wired.datatype
    shapes = _shared_or_each(wired.shape, wired.shapes, contents)
    if is_checked:
        is_uniform = wired.shapes is None and type(wired.size) is int and datatype not in _UNCHECKED
        for shape, content in zip(shapes, contents[:1] if is_uniform else contents, strict=False):
            check_tensor(datatype, shape, content, name)
    return [
        _new(Tensor, (name, datatype, shape, content))
        for shape, content in zip(shapes, contents, strict=True)
    ]


def _are_equal(values: list[T]) -> bool:
    return values.count(values[0]) == len(values)


def _column(values: list[T]) -> T | list[T]:
    """Return the value that all share, or the list."""
    return values[0] if _are_equal(values) else values


def _each(column: T | list[T], of: Sequence[object]) -> list[T]:
    """Return the value of each request; raises `Rejected` if there are more or fewer."""
    if not isinstance(column, list):
        return [column] * len(of)
    if len(column) != len(of):
        raise unreadable(f"columns of {len(of)} requests", str(len(column)))
    return column


def _repeated(column: T | list[T], count: int) -> Iterable[T]:
    return column if isinstance(column, list) else repeat(column, count)


def _spread(requests: Sequence[Request], name: str, column: object) -> None:
    """Set an attribute of each request."""
    for request, value in zip(requests, _each(column, requests), strict=True):
        setattr(request, name, value)


def _set_shapes(tensors: WireTensors, shapes: list[tuple[int, ...]]) -> None:
    if shapes.count(shapes[0]) == len(shapes):
        tensors.shape = tuple(shapes[0])
    else:
        tensors.shapes = shapes


def _set_shared_or_each(columns: dict[str, Any], name: str, values: list[Any]) -> None:
    """Set the column of values that are lists themselves."""
    if values.count(values[0]) == len(values):
        columns[name] = values[0]
    else:
        columns[f"{name}_each"] = values


def _shared_or_each(shared: T, each: list[T] | None, of: Sequence[object]) -> list[T]:
    return [shared] * len(of) if each is None else _each(each, of)


# --- common parts -----------------------------------------------------------------------------


def _raw_name(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("latin-1")


def _name(raw: str) -> str:
    return raw.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


_Record = TypeVar("_Record", ItemChunkRecord, ChunkedBatchRecord, ResultChunkRecord)


def _is_single(value: bytes) -> bool:
    """Return True unless a record names a format: those of format 1 do not."""
    return not value.startswith(_FORMAT_KEY, 1) and not value.startswith(_FORMAT_KEY, 3)


_FORMAT_KEY = b"\xa6format"
"""First key of a record: after a map's head of 1 byte, or of 3 if it has more than 15 keys."""


def _decoded(decoder: msgspec.msgpack.Decoder[_Record], value: bytes) -> _Record:
    """Return a record in columns.

    Raises:
        Rejected: it is none.
        Fatal: it has a later format.
    """
    try:
        record = decoder.decode(value)
    except DECODE_ERRORS as error:
        _check_format(value)
        raise unreadable("one of Headrace's", str(error)) from error
    if record.format > FORMAT:
        _check_format(value)
    return record


def _check_format(value: bytes) -> None:
    try:
        found = _format_decoder.decode(value).format
    except DECODE_ERRORS:
        return
    if found > FORMAT:
        raise Fatal(
            f"internal record: expected a format up to {FORMAT}, got {found}: a later "
            "release wrote it; upgrade the processes that read a topic before those that write it"
        )
