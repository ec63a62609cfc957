"""Messages: the record values on the topics, and the working types inside a process.

The first half are the wire types of the contract, one class for each kind of record value; the
schemas in `schemas/` are generated from them. They use the names of the Open Inference Protocol v2
where it has one. All are MessagePack maps; unknown fields are ignored, new fields have defaults,
and no field is renamed.

The second half are the working types. A `Request` is created once, when its record is read, and
the same object passes through all stages of a process; at a topic between two stages
`headrace.protocol.codec` encodes it into a record and decodes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from headrace.errors import Code
from headrace.protocol.ack import AckHandle
from headrace.protocol.trace_context import Trace

MAX_RANK = 16
MAX_INPUTS = 64
MAX_OUTPUTS = 256
MAX_NAME_LENGTH = 256
MAX_PARAMETERS = 64

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
Text = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Shape = Annotated[list[int], Meta(max_length=MAX_RANK)]
Parameter = str | int | float | bool
Parameters = Annotated[dict[Text, Parameter], Meta(max_length=MAX_PARAMETERS)]

# --- on the wire: the public contract ---------------------------------------------------------


class InputTensor(Struct, kw_only=True, omit_defaults=True):
    """One input of a request. `data` is raw little-endian and row-major; `BYTES` elements are
    each preceded by their length in 4 bytes, little-endian.
    """

    name: Name
    datatype: Text
    shape: Shape
    data: memoryview
    parameters: Parameters | None = None


class RequestedOutput(Struct, kw_only=True, omit_defaults=True):
    """An output that the caller requests; without any, all are sent."""

    name: Name
    parameters: Parameters | None = None


class InferenceRequest(Struct, kw_only=True, omit_defaults=True):
    """The value of a request record in MessagePack."""

    model_name: Text = ""
    model_version: Text | None = None
    id: Text | None = None
    parameters: Parameters | None = None
    inputs: Annotated[list[InputTensor], Meta(max_length=MAX_INPUTS)]
    outputs: Annotated[list[RequestedOutput], Meta(max_length=MAX_OUTPUTS)] | None = None


class OutputTensor(Struct, kw_only=True, omit_defaults=True):
    """One output of a response, encoded like an input."""

    name: str
    datatype: str
    shape: list[int]
    data: memoryview


class InferenceResponse(Struct, kw_only=True, omit_defaults=True):
    """The value of a response record. `parameters` contains the timings in microseconds
    (`queue_us`, `batch_us`, `compute_us`) and `batch_size` in rows.
    """

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
    parameters: dict[str, Parameter] = {}


class ErrorDetails(Struct, kw_only=True, omit_defaults=True):
    """The machine-readable part of an error."""

    code: str
    stage: str
    retriable: bool
    retry_after_ms: int | None = None


class ErrorResponse(Struct, kw_only=True, omit_defaults=True):
    """The value of a response record of a failed request; `error` is a human-readable text."""

    id: str | None = None
    error: str
    error_details: ErrorDetails


# --- on the wire: between the stages ----------------------------------------------------------


class WireOrigin(Struct, kw_only=True, omit_defaults=True):
    """Position of a request in the source. `previous` is the source offset delivered before this
    one: no records exist between the two (transaction markers, compaction). `after` is the offset
    of the last earlier record with the same key, if answers keep the order of their keys.
    """

    partition: int
    offset: int
    previous: int
    timestamp_ms: int
    after: int = -1


class WireTensor(Struct, kw_only=True, omit_defaults=True):
    """A tensor between two stages: `data`, or the `size` bytes of the request's value from
    `start`.
    """

    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None = None
    start: int = 0
    size: int = 0
    name: str = ""


class WireTimings(Struct, kw_only=True, omit_defaults=True):
    """See `Timings`."""

    ingested_us: int = 0
    formed_us: int = 0
    compute_us: int = 0
    batch_rows: int = 0
    checked_us: int = 0
    done_us: int = 0


class WireTrace(Struct, kw_only=True, omit_defaults=True):
    """The trace of a sampled request: the `traceparent` (W3C Trace Context) of its last stage's
    span, and the time when that stage finished, in epoch microseconds.
    """

    traceparent: Annotated[str, Meta(max_length=64)]
    since_us: int = 0

    @classmethod
    def of(cls, trace: Trace | None) -> WireTrace | None:
        """Return the trace of a request; None if it has none."""
        if trace is None:
            return None
        return cls(traceparent=trace.traceparent(trace.parent_id), since_us=trace.since_us)


class ItemRecord(Struct, kw_only=True, omit_defaults=True):
    """The value of an `items` record: a validated request that can run."""

    origin: WireOrigin
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []
    value: memoryview | None = None
    deadline_ms: int = 0
    model: str
    version: str
    id: str | None = None
    inputs: list[WireTensor]
    rows: int
    shape_class: tuple[int, ...] = ()
    wanted: tuple[str, ...] | None = None
    timings: WireTimings
    trace: WireTrace | None = None


class BatchRecord(Struct, kw_only=True, omit_defaults=True):
    """The value of a `batches` record: items of one model, version and shape class. `formed_us`
    is when the batch closed; if it is 0, the timings of the items say that.
    """

    batch_id: str
    reason: str
    formed_us: int = 0
    items: list[ItemRecord]


class WireFailure(Struct, kw_only=True, omit_defaults=True):
    """See `Failure`."""

    code: str
    message: str
    stage: str
    retry_after_ms: int | None = None


class ResultRecord(Struct, kw_only=True, omit_defaults=True):
    """The value of a `results` record: a request with its outputs or its failure.

    `value` is present only if a dead letter may be made of it. A header whose name is not UTF-8
    has an empty name in `headers`; `raw_names` has its index and its name. A `skipped` record
    stands for a range of the source that was never read, from after `origin.previous` up to
    `origin.offset`.
    """

    origin: WireOrigin
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []
    value: memoryview | None = None
    deadline_ms: int = 0
    model: str = ""
    version: str = ""
    id: str | None = None
    outputs: list[WireTensor] = []
    failure: WireFailure | None = None
    timings: WireTimings
    batch_id: str = ""
    trace: WireTrace | None = None
    skipped: bool = False
    raw_names: list[tuple[int, bytes]] = []


# --- on the wire: many requests in one record -------------------------------------------------


Ints: TypeAlias = int | list[int]
"""A column of numbers: one number that all requests of a chunk share, or one for each."""


class WireTensors(Struct, kw_only=True, omit_defaults=True):
    """One tensor of each request of a chunk.

    Of an input, the `size` bytes from `start` of the request's part of the payload; of the source
    record's value and that part, one after the other, if the chunk has `referenced` values. Of an
    output, `size` bytes of `data`, which holds the bytes of all requests one after the other: one
    array of all rows, if the output has a batch dimension. `shapes` is set if the shapes differ.
    """

    name: str = ""
    datatype: str
    shape: tuple[int, ...] = ()
    shapes: list[tuple[int, ...]] | None = None
    size: Ints
    start: Ints = 0
    data: memoryview | None = None


class WireChunk(Struct, kw_only=True, omit_defaults=True):
    """Requests of one model and version in columns: what all share is written once.

    A column is one value, or a list with one for each request; `offset` is always a list, and its
    length is the number of requests. `gap` is the distance from the source offset delivered before:
    no records exist between the two (transaction markers, compaction). `after` is the offset of the
    last earlier record with the same key, if answers keep the order of their keys.

    Each header in `headers` is its name and its column, if all requests have headers of the same
    names in the same order; otherwise `mixed_headers` has the headers of each request. If any name
    is not UTF-8, `raw_names` is set, and the text of all names is their bytes as Latin-1.

    The payload holds one part for each request, of `part` bytes: first its value, of `value` bytes
    (-1 if it is absent), then the tensors that are not in the value. If `referenced` is set, the
    value has so many bytes and is only in the source record: read that to get it, and check that
    its timestamp and key are the request's. If the request has a header `x-claim`, the value is the
    object to which that refers. `formed_us`, `compute_us` and `batch_rows` are those of
    `BatchSummary`.
    """

    format: int
    partition: Ints
    offset: Annotated[list[int], Meta(min_length=1)]
    gap: Ints = 1
    timestamp_ms: Ints
    after: Ints = -1
    key: bytes | list[bytes | None] | None = None
    headers: list[tuple[str, bytes | list[bytes | None] | None]] = []
    mixed_headers: list[list[tuple[str, bytes | None]]] | None = None
    raw_names: bool = False
    deadline_ms: Ints = 0
    id: str | list[str | None] | None = None
    model: str = ""
    version: str = ""
    ingested_us: Ints = 0
    formed_us: Ints = 0
    compute_us: Ints = 0
    batch_rows: Ints = 0
    checked_us: Ints = 0
    done_us: Ints = 0
    trace: list[WireTrace | None] | None = None
    value: Ints = -1
    part: Ints = 0
    payload: memoryview | None = None
    referenced: Ints = 0


class ItemChunkRecord(WireChunk, kw_only=True, omit_defaults=True):
    """The value of an `items` record: a chunk of checked requests of one source partition, tenant
    and shape class. `wanted_each` is set if `wanted` differs.

    A `referenced` value may also be in shared memory, in the ring `shared` at `shared_at`
    (`headrace.transport.shared_values`); with one ring and one position, all values of the chunk
    lie there one after the other.
    """

    rows: Ints
    shape_class: tuple[int, ...] = ()
    inputs: list[WireTensors]
    wanted: tuple[str, ...] | None = None
    wanted_each: list[tuple[str, ...] | None] | None = None
    shared: str | list[str] = ""
    shared_at: Ints = 0


class ChunkedBatchRecord(Struct, kw_only=True, omit_defaults=True):
    """The value of a `batches` record: the requests of a batch in the order in which they run, in
    one chunk if all have the same inputs.
    """

    format: int
    batch_id: str
    reason: str
    chunks: Annotated[list[ItemChunkRecord], Meta(min_length=1)]


class ResultChunkRecord(WireChunk, kw_only=True, omit_defaults=True):
    """The value of a `results` record: ended requests of one source partition, all with outputs,
    all with failures, or all `skipped`.

    A value is present only if a dead letter may be made of it. A `skipped` request stands for a
    range of the source that was never read, from after its previous offset up to its own.
    """

    batch_id: str | list[str] = ""
    outputs: list[WireTensors] = []
    failures: list[WireFailure] | None = None
    skipped: bool = False


# --- inside a process -------------------------------------------------------------------------


class Tensor(NamedTuple):
    """Named tensor whose bytes were checked against its shape.

    Attributes:
        datatype: a name of the Open Inference Protocol, such as `FP32`.
        shape: including the batch dimension if the model has one.
        data: raw little-endian, row-major; a view of the record's value where possible.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


TensorMetadata: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor, as in the Open Inference Protocol's model metadata."""


RECORD_ANSWER: tuple[TensorMetadata, ...] = (("", "BYTES", (1,)),)
"""Metadata of the outputs of a request whose answer is the only element, as it is; no output of a
model has an empty name.
"""
_OF_TYPE = "\0"


def whole_answer(content_type: str) -> tuple[TensorMetadata, ...]:
    """Return the same for an answer of a content type of its own, whatever the request's is."""
    return ((_OF_TYPE + content_type, "BYTES", (1,)),)


def is_whole_answer(metadata: tuple[TensorMetadata, ...]) -> bool:
    """Return True for `RECORD_ANSWER` and the metadata of `whole_answer`."""
    return len(metadata) == 1 and metadata[0][0][:1] in ("", _OF_TYPE)


def whole_answer_type(metadata: tuple[TensorMetadata, ...]) -> str:
    """Return the content type in the metadata of a whole answer; empty for `RECORD_ANSWER`."""
    return metadata[0][0][1:]


class Failure(NamedTuple):
    """Reason why a request has no outputs. `code` is a `headrace.errors.Code`."""

    code: str
    message: str
    stage: str
    retry_after_ms: int | None = None


class StoredAnswer(NamedTuple):
    """The value of an answer that is in a store.

    Attributes:
        claim: header that refers to it.
        expires_ms: when it may be deleted, in epoch milliseconds.
        coding: the value's coding; empty for none.
    """

    claim: bytes
    expires_ms: int
    coding: str


class Envelope(NamedTuple):
    """Parsed headers of a request record.

    Attributes:
        content_type: lower case, without parameters; empty if the header is absent.
        correlation_id: opaque; repeated in the answer.
        reply_topic, reply_partition: destination of the answer, if the caller gave one.
        deadline_ms: epoch milliseconds; 0 means none.
        priority: larger is more urgent; orders the requests of one tenant.
        tenant: empty if the caller gave none.
        model, version: from `x-model`; empty if absent.
        traceparent, tracestate: unchanged values of the headers.
        fault: what is wrong with the headers, if anything; the answer is then an error.
        cancels: topic, partition and offset of the request that the record cancels, or
            `headrace.protocol.headers.BY_CORRELATION`.
        content_encoding: coding of the value; empty for none.
        answer_encoding: coding that the caller wants for the answer; empty for none.
        claim: reference to the value, which is in a store, see `headrace.protocol.claims`.
        accept: content types that the caller wants for the answer, in lower case, see
            `headrace.protocol.negotiation.choose_content_type`; empty for any.
    """

    content_type: str = ""
    correlation_id: bytes | None = None
    reply_topic: str | None = None
    reply_partition: int | None = None
    deadline_ms: int = 0
    priority: int = 0
    tenant: str = ""
    model: str = ""
    version: str = ""
    traceparent: bytes | None = None
    tracestate: bytes | None = None
    fault: str | None = None
    cancels: tuple[str, int, int] | None = None
    content_encoding: str = ""
    answer_encoding: str = ""
    claim: bytes | None = None
    accept: str = ""


class BatchSummary(Struct, frozen=True):
    """Facts that all requests of a batch share: one object for all of them.

    The batcher creates it when the batch closes. The executor replaces it after the run, by that of
    the half if the batch was bisected.

    Attributes:
        formed_us: when the batch closed, in epoch microseconds; 0 if the request is in none.
        compute_us: duration of the run.
        rows: number of rows in that run; 0 before it.
    """

    formed_us: int = 0
    compute_us: int = 0
    rows: int = 0


NO_BATCH = BatchSummary()
"""Summary of requests that have joined no batch."""


class ItemChunk(Struct, eq=False):
    """A decoded record of items. Unless its requests refer to their sources, it holds their values
    and inputs, until a step needs those of one request by themselves. Values that were read since
    then are in a chunk of their own, where the requests have the same places.

    Attributes:
        record: each of its inputs has one datatype, shape and size for all requests.
        bases: where the part of each request begins in the payload.
        parts: size of each part.
        values: size of the value with which each part begins; -1 if there is none.
    """

    record: ItemChunkRecord
    payload: memoryview
    bases: Sequence[int]
    parts: Sequence[int]
    values: Sequence[int]

    def value(self, place: int) -> memoryview | None:
        """Return the value of a request."""
        base, size_bytes = self.bases[place], self.values[place]
        return None if size_bytes < 0 else self.payload[base : base + size_bytes]

    def data(self, index: int, places: slice) -> list[memoryview]:
        """Return the bytes of one input of some requests."""
        tensors, payload = self.record.inputs[index], self.payload
        start, size = tensors.start, tensors.size
        assert isinstance(size, int)  # see `record`
        bases = self.bases[places]
        if isinstance(start, int):
            stop = start + size
            return [payload[base + start : base + stop] for base in bases]
        begins = map(add, bases, start[places])
        return [payload[begin : begin + size] for begin in begins]


class IngestedRequest(Struct, eq=False):
    """The part of a request that ingest fills; read-only from then on.

    There are three exceptions. Rebinding replaces the version and what depends on it. `inputs` and
    `value` are released as soon as no later step needs them, and those that a record holds as well
    are read from there again. A request that runs alone gets another ack handle.

    Nothing enforces this, since that would cost too much of the 13.4 µs and six memory blocks that
    a request takes. A frozen struct, to which each `Request` would refer, takes one block more, and
    0.6 µs for ten reads of its fields; a check in `__setattr__` takes 2.2 µs.

    Attributes:
        ack_handle: ack handle of the record by which the request entered this process.
        partition, offset, previous, timestamp_ms, after: its origin, see `WireOrigin`.
        key, value, headers: those of its source record, unchanged.
        ingested_us: when it was read, in epoch microseconds.
        inputs: in the order of the model's signature.
        rows: size of the batch dimension; 1 if the model has none.
        shape_class: requests of one model may share a batch if their shape classes are equal.
        size_bytes: size of all inputs together.
        wanted: names of the requested outputs; None for all.
        item: value of the `items` record of its own by which it came; None if it came otherwise.
        places: place of each input in `value`, as (start, size); None if it is not known.
        referenced: size of a value that is only in the source record, or in a claim's object, or
            will be when ingest has written the request and drops `value`; 0 otherwise. Inputs that
            lie in it are empty, and `places` has the places of all inputs: those behind the value
            are here.
        shared: where in shared memory a value that is only in the source record is as well: name
            and position, see `headrace.transport.shared_values`.
        chunk, place: the record by which it came, and its place there, as long as the chunk says
            what the request is; None otherwise. Unless the request refers to its source, `value`
            and the data of `inputs` are unset until `restore` takes them out of the record.
    """

    ack_handle: AckHandle
    partition: int
    offset: int
    previous: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | memoryview | None
    headers: Sequence[tuple[str, bytes | None]]
    envelope: Envelope
    ingested_us: int = 0
    model: str = ""
    version: str = ""
    inputs: tuple[Tensor, ...] = ()
    rows: int = 1
    shape_class: tuple[int, ...] = ()
    size_bytes: int = 0
    wanted: tuple[str, ...] | None = None
    id: str | None = None
    after: int = -1
    item: bytes | None = None
    places: tuple[tuple[int, int], ...] | None = None
    referenced: int = 0
    shared: tuple[str, int] | None = None
    chunk: ItemChunk | None = None
    place: int = 0

    def restore(self) -> None:
        """Take the value and the inputs out of the request's chunk, if it is in one."""
        chunk, place = self.chunk, self.place
        self.chunk = None
        if chunk is not None and not self.referenced:
            self.value = chunk.value(place)
            if self.inputs:
                data = [
                    chunk.data(index, slice(place, place + 1))[0]
                    for index in range(len(self.inputs))
                ]
                self.inputs = tuple(
                    [
                        tensor._replace(data=content)
                        for tensor, content in zip(self.inputs, data, strict=True)
                    ]
                )


class Request(IngestedRequest, eq=False):
    """Request that passes through the stages of a process.

    The batcher adds its times and the batch; the stage that ends the request sets the outcome,
    either `outputs` or `failure`, which the responder answers. It is a struct for speed, and is
    never encoded.

    Attributes:
        arrived_us, due_us: arrival at the batcher, and its deadline (0 if it has none); both on the
            batcher's steady clock.
        deadline_number: of its deadline in the batcher; 0 if it has none.
        batch: facts of its batch and run; `NO_BATCH` until it joins one.
        own_sizes: None until it was padded, see `headrace.models.inputs.padding`.
        checked_us, done_us: when ingest, and the last stage before the responder, finished with
            it, in epoch microseconds; 0 if nothing is traced.
        batch_id: id of its batch; empty if nothing is traced, or it joined no batch.
        trace: None unless it is sampled.
        output_metadata, output_data: metadata and bytes of each output; `output_data` is None
            unless the run succeeded. Requests that ran together share one `output_metadata` object
            if their outputs have equal sizes, so that it need not be compared item by item; with
            BYTES outputs each request has its own.
        failure: why it has no outputs; None unless it failed.
        compressed: value of its answer in `envelope.answer_encoding`; None unless it was made.
        stored: refers to the value of its answer; None unless it is in a store.
    """

    arrived_us: int = 0
    due_us: int = 0
    deadline_number: int = 0
    batch: BatchSummary = NO_BATCH
    own_sizes: dict[str, tuple[int, int]] | None = None
    checked_us: int = 0
    done_us: int = 0
    batch_id: str = ""
    trace: Trace | None = None
    output_metadata: tuple[TensorMetadata, ...] = ()
    output_data: tuple[memoryview | bytes, ...] | None = None
    failure: Failure | None = None
    compressed: bytes | None = None
    stored: StoredAnswer | None = None

    @property
    def keeps_value(self) -> bool:
        """True if a dead letter is made of it that holds its value. The one of a claim does not: it
        has the claim, in its headers.
        """
        failure = self.failure
        is_dead_letter = failure is not None and Code(failure.code).is_dead_letter
        return is_dead_letter and self.envelope.claim is None

    @property
    def outputs(self) -> tuple[Tensor, ...] | None:
        """Return the tensors of the answer; None if it has none."""
        if self.output_data is None:
            return None
        return tuple(
            [
                Tensor(*metadata, data)
                for metadata, data in zip(self.output_metadata, self.output_data, strict=True)
            ]
        )

    @outputs.setter
    def outputs(self, outputs: tuple[Tensor, ...] | None) -> None:
        self.output_metadata = () if outputs is None else tuple([each[:3] for each in outputs])
        self.output_data = None if outputs is None else tuple([each[3] for each in outputs])

    @property
    def skipped(self) -> bool:
        """True if an ended request stands for a range of the source that was never read."""
        return self.output_data is None and self.failure is None

    def fail(self, failure: Failure) -> None:
        """End the request with an error, and release its inputs; a dead letter has its value."""
        self.failure = failure
        self.inputs = ()
        self.restore()
        if self.value is not None:
            self.referenced = 0


def find_runs(requests: Sequence[IngestedRequest]) -> list[tuple[ItemChunk | None, range]]:
    """Divide requests into runs: those that follow each other in a chunk, as their places in it,
    and those of no chunk, as their places in `requests`.
    """
    runs: list[tuple[ItemChunk | None, range]] = []
    last: ItemChunk | None = None
    first = end = 0
    for index, request in enumerate(requests):
        chunk = request.chunk
        place = index if chunk is None else request.place
        if chunk is not last or place != end:
            if index:
                runs.append((last, range(first, end)))
            last, first = chunk, place
        end = place + 1
    runs.append((last, range(first, end)))
    return runs


class Batch:
    """Requests of one model, version and shape class that run together.

    Attributes:
        reason: why it closed: `full`, `idle`, `just_in_time`, `delay`, `deadline`, `bytes`,
            `drain` or `alone`; `bisected` if it is one half of a batch that failed; `retried` if
            that batch was retried before, in vain; `apart` if it is one request of a batch that
            must not run together.
        rows: rows of all requests together.
        end_us: predicted end of its run in epoch microseconds; 0 if not predicted.
    """

    __slots__ = ("batch_id", "end_us", "model", "reason", "requests", "rows", "version")

    def __init__(
        self, batch_id: str, requests: list[Request], reason: str, end_us: int = 0
    ) -> None:
        self.end_us = end_us
        self.batch_id = batch_id
        self.requests = requests
        self.reason = reason
        self.model = requests[0].model
        self.version = requests[0].version
        self.rows = sum([request.rows for request in requests])
