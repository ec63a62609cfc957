"""The messages: what travels on the topics, and what travels inside a process.

The first half are the wire types of the contract, one class for each kind of record value; the
schemas in `schemas/` are generated from them. They follow the Open Inference Protocol v2 where
it has a name for a thing. All are MessagePack maps; unknown fields are ignored, new fields have
defaults, nothing is renamed.

The second half are the working types. A `Request` is made once, when its record is read, and is
the one object that passes through all stages of a process; at a topic between two stages
`headrace.protocol.codec` turns it into a record and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

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
    """An output that the caller wants; without any, all are sent."""

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
    """The value of a response record. `parameters` has the timings, in microseconds
    (`queue_us`, `batch_us`, `compute_us`), and `batch_size`, in rows.
    """

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
    parameters: dict[str, Parameter] = {}


class ErrorDetails(Struct, kw_only=True, omit_defaults=True):
    """What a program needs to know of an error."""

    code: str
    stage: str
    retriable: bool
    retry_after_ms: int | None = None


class ErrorResponse(Struct, kw_only=True, omit_defaults=True):
    """The value of a response record when the request failed; `error` is for people."""

    id: str | None = None
    error: str
    error_details: ErrorDetails


# --- on the wire: between the stages ----------------------------------------------------------


class WireOrigin(Struct, kw_only=True, omit_defaults=True):
    """Where a request came from. `previous` is the source offset delivered before this one:
    everything between the two was never there (transaction markers, compaction). `after` is that
    of the last earlier record with the same key, where answers keep the order of their keys.
    """

    partition: int
    offset: int
    previous: int
    timestamp_ms: int
    after: int = -1


class WireTensor(Struct, kw_only=True, omit_defaults=True):
    """A tensor between two stages: `data`, or `size` bytes from `start` of the request's value."""

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
    span, and when that stage was done, in epoch microseconds.
    """

    traceparent: Annotated[str, Meta(max_length=64)]
    since_us: int = 0


class ItemRecord(Struct, kw_only=True, omit_defaults=True):
    """The value of an `items` record: a request that was checked and can run."""

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
    is when the batch closed; where it is 0, its items say that.
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
    """The value of a `results` record: a request with its outcome, of either kind.

    `value` is there only where a dead letter may be made of it. A header whose name is not UTF-8
    has none in `headers`; `raw_names` has its place and its name. One that is `skipped` stands for
    a range of the source that was never read, from after `origin.previous` up to `origin.offset`.
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


# --- inside a process -------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A named tensor whose bytes were checked against its shape.

    Attributes:
        datatype: a name of the Open Inference Protocol, such as `FP32`.
        shape: including the batch dimension where the model has one.
        data: raw little-endian, row-major; a view of the record's value where it can be.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


Head: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor."""


class Failure(NamedTuple):
    """Why a request has no outputs. `code` is a `headrace.errors.Code`."""

    code: str
    message: str
    stage: str
    retry_after_ms: int | None = None


class Envelope(NamedTuple):
    """What a request record's headers say, parsed once.

    Attributes:
        content_type: lower case, without parameters; empty when the header is absent.
        correlation_id: opaque; echoed.
        reply_topic, reply_partition: where the answer shall go, if the caller said so.
        deadline_ms: epoch milliseconds; 0 means none.
        model, version: from `x-model`; empty when absent.
        traceparent, tracestate: as they came.
        fault: what is wrong with the headers, if anything is: the answer is then an error.
        cancels: topic, partition and offset of the request that the record cancels, or
            `headrace.protocol.headers.BY_CORRELATION`.
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


class Request(Struct, eq=False):
    """A request on its way through a process.

    Ingest fills it up to `wanted`; the batcher and the executor add to the timings; whoever ends
    it sets either `outputs` or `failure`, and the responder answers what stands there. It is a
    struct for speed, and is never encoded.

    Attributes:
        ack handle: of the record by which it came into this process.
        partition, offset, previous, timestamp_ms, after: its origin, see `WireOrigin`.
        key, value, headers: its source record's, untouched.
        ingested_us, formed_us: when it was read, and when its batch closed; epoch microseconds.
        came_us, due_us: when it came to the batcher, and its deadline, 0 where it has none; both on
            the batcher's steady clock.
        inputs: in the order of the model's signature.
        rows: the size of the batch dimension; 1 where the model has none.
        shape_class: requests of one model may share a batch when these are equal.
        size_bytes: of all inputs together.
        wanted: names of the outputs asked for; None for all.
        checked_us, done_us: when ingest, and the last stage before the responder, was done with
            it, in epoch microseconds; 0 where nothing is traced.
        batch_id: of its batch; empty where nothing is traced, or it joined none.
        item: the value of the `items` record by which it came; None where it did not.
        trace: None unless it is sampled.
        compute_us: how long its run took; `batch_rows` how many rows ran with it.
        own_sizes: None until it was padded, see `headrace.models.padding`.
        heads, contents: of the outputs, and their bytes; `contents` is None until it has run.
            Requests that ran together share one object of `heads` where their bytes are as many;
            of texts each has its own. So nobody has to look at each of them.
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
    came_us: int = 0
    due_us: int = 0
    formed_us: int = 0
    compute_us: int = 0
    batch_rows: int = 0
    checked_us: int = 0
    done_us: int = 0
    batch_id: str = ""
    item: bytes | None = None
    trace: Trace | None = None
    own_sizes: dict[str, tuple[int, int]] | None = None
    heads: tuple[Head, ...] = ()
    contents: tuple[memoryview | bytes, ...] | None = None
    failure: Failure | None = None

    @property
    def outputs(self) -> tuple[Tensor, ...] | None:
        """The tensors of the answer; None where there are none."""
        if self.contents is None:
            return None
        return tuple(
            [
                Tensor(*head, content)
                for head, content in zip(self.heads, self.contents, strict=True)
            ]
        )

    @outputs.setter
    def outputs(self, outputs: tuple[Tensor, ...] | None) -> None:
        self.heads = () if outputs is None else tuple([each[:3] for each in outputs])
        self.contents = None if outputs is None else tuple([each[3] for each in outputs])

    @property
    def skipped(self) -> bool:
        """Of one that has ended: it stands for a range of the source that was never read."""
        return self.contents is None and self.failure is None

    def fail(self, failure: Failure) -> None:
        """End the request with an error; its inputs are let go."""
        self.failure = failure
        self.inputs = ()


class Batch:
    """Requests of one model, version and shape class that run together.

    Attributes:
        reason: why it closed: `full`, `idle`, `just_in_time`, `delay`, `deadline`, `bytes` or
            `drain`; `bisected`, when it is one half of a batch that failed.
        rows: of all requests together.
        end_us: when its run should be done, as predicted; epoch microseconds, 0: not predicted.
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


def plain(value: Any) -> Any:
    """A wire type as dicts and lists, for people and for tests."""
    return msgspec.to_builtins(value, builtin_types=(bytes, memoryview))
