"""From a record to a request: decode it and check all that can be checked before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from headrace.config import LimitSettings
from headrace.delivery.failures import deadline_passed, ran_alone, rejection
from headrace.delivery.inflight import (
    RECORD_OVERHEAD_BYTES,
    AssignedPartition,
    InFlightAck,
    beside_bytes,
    record_bytes,
)
from headrace.errors import Code, Rejected
from headrace.log.port import Record
from headrace.models.version import ModelVersion
from headrace.protocol.codec import callers_id, check_value, decode_request
from headrace.protocol.headers import (
    BY_CORRELATION,
    JSON,
    MSGPACK_TYPES,
    NO_HEADERS,
    parse_envelope,
)
from headrace.protocol.messages import Envelope, Failure, InputTensor, Request, Tensor
from headrace.services.ingest.layouts import DecodeCache, DecodeTemplate
from headrace.services.ingest.transforming import Payload
from headrace.topics import Stage

DECODED_TYPES = MSGPACK_TYPES | {JSON}
"""Of these the value has the tensors; any other payload is made into tensors by the model."""

_layouts = DecodeCache()
"""A cache, like `functools.lru_cache`: what is in it follows from the values alone."""

COPIED_BYTES = 512
"""A tensor that has no more is copied: that takes a third of a view's time, and no more memory."""


_new = tuple.__new__  # half the cost of calling a NamedTuple's class


class _NullAck:
    """The ack handle of a record that nobody answers."""

    revoked = False

    @property
    def assignment(self) -> _NullAck:
        """Itself: nobody takes it away."""
        return self

    def ack(self) -> None:
        """There is nothing to acknowledge."""


NULL_ACK = _NullAck()


class ModelLookup(Protocol):
    """The part of `headrace.models.registry.Models` that is needed here."""

    def lookup(self, name: str, version: str | None) -> ModelVersion:
        """Raises `Rejected`."""
        ...


class Admission(Protocol):
    """The part of a batcher beside it that ingest asks."""

    def __call__(self, envelope: Envelope) -> Failure | None:
        """Why a request with these headers is refused; None if it is not, as far as they say."""
        ...


class Rules(NamedTuple):
    """What a record is held against.

    Attributes:
        admission: None where the batcher is another process.
        defer: takes payloads whose transform is a user's code, to be run elsewhere; without it
            they are transformed on the spot.
    """

    models: ModelLookup
    limits: LimitSettings
    admission: Admission | None = None
    defer: Callable[[Payload], None] | None = None


def read_requests(
    records: Sequence[Record], assignment: AssignedPartition, rules: Rules, now_us: int
) -> list[Request]:
    """Admit records and make a request of each, in order; see `read_request`."""
    turn = _Turn(assignment, rules, now_us)
    timeout_ms = rules.limits.default_timeout_ms
    alike, read_alike = turn.alike, turn.read_alike
    requests: list[Request] = []
    for record in records:
        value, headers, envelope = record.value, record.headers, NO_HEADERS
        if headers or timeout_ms:
            envelope = parse_envelope(headers, record.timestamp, timeout_ms)
        known = None if value is None else alike[len(value)]
        if (
            known is not None
            and value is not None
            and value.startswith(known.head)
            and value.endswith(known.tail)
            and (envelope is NO_HEADERS or _is_plain(envelope, now_us))
        ):
            requests.append(read_alike(record, value, envelope, known))
        else:
            turn.sync()
            requests.append(_read(record, envelope, assignment, rules, now_us))
            turn.previous = assignment.last_delivered
    turn.sync()
    return requests


class _AlikeByLength(dict[int, DecodeTemplate | None]):
    """What holds for requests of known layouts, during a turn; see `DecodeCache.alike`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def __missing__(self, length: int) -> DecodeTemplate | None:
        known = None
        if length <= self._rules.limits.max_request_bytes:
            known = _layouts.alike(length, self._rules.models.lookup)
        self[length] = known
        return known


class _Turn:
    """Records that are read without a pause: what holds for all of them is looked up once.

    Attributes:
        alike: what is known of layouts, by the lengths of values.
        previous: the offset of the record that was read last.
    """

    def __init__(self, assignment: AssignedPartition, rules: Rules, now_us: int) -> None:
        self.alike = _AlikeByLength(rules)
        self.previous = assignment.last_delivered
        self._assignment = assignment
        self._partition = assignment.partition.partition
        self._now_us = now_us
        # Where items are written to a topic, they say where in the value their tensors are.
        self._copied_bytes = 0 if rules.admission is None else COPIED_BYTES
        self._records = 0
        self._size_bytes = 0

    def sync(self) -> None:
        """Enter in the in-flight tracker what was read by `read_alike`."""
        self._assignment.admitted(self.previous, self._records, self._size_bytes)
        self._records = self._size_bytes = 0

    def read_alike(
        self, record: Record, value: bytes, envelope: Envelope, alike: DecodeTemplate
    ) -> Request:
        """The request in a record of this layout."""
        _, _, start, stop, name, datatype, shape, model, version, bound = alike
        rows, shape_class, tensor_bytes, wanted = bound
        content = (
            value[start:stop]
            if tensor_bytes <= self._copied_bytes
            else memoryview(value)[start:stop]
        )
        key, headers, offset, previous = record.key, record.headers, record.offset, self.previous
        size_bytes = RECORD_OVERHEAD_BYTES + len(value)
        if key is not None or headers:
            size_bytes += beside_bytes(key, headers)
        self.previous = offset
        self._records += 1
        self._size_bytes += size_bytes
        return Request(
            InFlightAck(self._assignment, previous, offset, size_bytes),
            self._partition,
            offset,
            previous,
            record.timestamp,
            key,
            value,
            headers,
            envelope,
            self._now_us,
            model,
            version,
            (_new(Tensor, (name, datatype, shape, content)),),
            rows,
            shape_class,
            tensor_bytes,
            wanted,
        )


def _is_plain(envelope: Envelope, now_us: int) -> bool:
    """Nothing in the headers asks for more than the request's answer in time."""
    if envelope.fault is not None or envelope.cancels is not None or envelope.model:
        return False
    deadline_ms = envelope.deadline_ms
    in_time = not deadline_ms or now_us < deadline_ms * 1000
    return in_time and envelope.content_type in MSGPACK_TYPES


def read_request(
    record: Record,
    assignment: AssignedPartition,
    rules: Rules,
    now_us: int,
    ack_handle: InFlightAck | None = None,
) -> Request:
    """Admit a record and make a request of it.

    What cannot run comes back with its failure set: a request is never refused by an exception,
    because it has to be answered. A request that is late already, or would be, by its headers,
    is charged nothing for its value. A record that cancels a request is not admitted: it goes on
    to where that request may wait, as one without a model and with nothing owed for it. With a
    ack handle, the record was admitted before.
    """
    timeout_ms = rules.limits.default_timeout_ms
    envelope = parse_envelope(record.headers, record.timestamp, timeout_ms)
    return _read(record, envelope, assignment, rules, now_us, ack_handle)


def cancels_another(record: Record) -> bool:
    """Return whether a record asks for the cancellation of a request instead of being one."""
    return parse_envelope(record.headers, record.timestamp, 0).cancels is not None


def _read(
    record: Record,
    envelope: Envelope,
    assignment: AssignedPartition,
    rules: Rules,
    now_us: int,
    ack_handle: InFlightAck | None = None,
) -> Request:
    if envelope.cancels is not None and envelope.fault is None:
        fault = _misdirected(record, envelope, envelope.cancels)
        if not fault:
            return _cancelling(record, assignment, envelope)
        envelope = envelope._replace(fault=fault)
    value = record.value
    size_bytes = record_bytes(record)
    ack_handle = ack_handle or assignment.admit(record.offset, size_bytes)
    origin = (record.partition, record.offset, ack_handle.previous, record.timestamp)
    request = Request(ack_handle, *origin, record.key, value, record.headers, envelope)
    request.ingested_us = now_us
    request.model, request.version = envelope.model, envelope.version
    if envelope.deadline_ms:
        request.failure = deadline_passed(request, now_us, Stage.INGEST)
        if request.failure is None and envelope.model and rules.admission is not None:
            request.failure = rules.admission(envelope)
        if request.failure is not None:
            request.value = None
            request.version = ""
            ack_handle.resize(size_bytes - len(value or b""))
            return request
    try:
        if envelope.fault is not None:
            raise Rejected(Code.INVALID_REQUEST, envelope.fault)
        if envelope.content_type not in DECODED_TYPES:
            _bind_raw(request, value, envelope, rules)
        else:
            _bind(request, value, envelope, rules)
    except Rejected as error:
        request.fail(rejection(error, Stage.INGEST))
        request.version = ""  # a caller's word for a version that may not be there
        request.id = request.id or callers_id(value, envelope)
    if envelope.content_type not in MSGPACK_TYPES:
        # Tensors that are no views of the value are kept beside it.
        ack_handle.resize(ack_handle.size_bytes + request.size_bytes)
    return request


def read_condemned(
    record: Record, assignment: AssignedPartition, rules: Rules, now_us: int
) -> Request:
    """Admit a record that is not run any more; it is not even decoded for a model."""
    envelope = parse_envelope(record.headers, record.timestamp, rules.limits.default_timeout_ms)
    ack_handle = assignment.admit(record.offset, record_bytes(record))
    origin = (record.partition, record.offset, ack_handle.previous, record.timestamp)
    request = Request(ack_handle, *origin, record.key, record.value, record.headers, envelope)
    request.ingested_us = now_us
    request.model, request.version = envelope.model, envelope.version
    request.id = callers_id(record.value, envelope)
    request.fail(ran_alone(Stage.INGEST))
    return request


def _misdirected(record: Record, envelope: Envelope, target: tuple[str, int, int]) -> str:
    """What is wrong with a cancelling record: it has to lie beside the request that it names."""
    if target == BY_CORRELATION:
        if envelope.correlation_id is not None:
            return ""
        return (
            "header x-cancel: expected topic/partition/offset, or a kafka_correlationId beside it"
        )
    topic, partition, offset = target
    if (topic, partition) == (record.topic, record.partition) and offset < record.offset:
        return ""
    return (
        f"header x-cancel: expected a request before this record in "
        f"{record.topic}/{record.partition}, got {topic}/{partition}/{offset}"
    )


def _cancelling(record: Record, assignment: AssignedPartition, envelope: Envelope) -> Request:
    assignment.pass_over(record.offset)
    origin = (record.partition, record.offset, record.offset - 1, record.timestamp)
    # Its headers may name a model as well, whose queue would take it for a request.
    return Request(NULL_ACK, *origin, None, None, record.headers, envelope)


def _bind(
    request: Request,
    value: bytes | None,
    envelope: Envelope,
    rules: Rules,
) -> None:
    plain: bytes | None = None
    if type(value) is bytes and not envelope.model and envelope.content_type in MSGPACK_TYPES:
        plain = value
    layout = None if plain is None else _layouts.find(plain)
    if plain is None or layout is None or len(plain) > rules.limits.max_request_bytes:
        message = decode_request(value, envelope, rules.limits)
        request.id = message.id
        version = rules.models.lookup(message.model_name, message.model_version)
        bound = version.bind(message.inputs, message.outputs)
        if plain is not None and layout is None:
            _layouts.learn(plain, message)
    else:
        message = layout.message
        version = rules.models.lookup(message.model_name, message.model_version)
        bound = layout.bound(plain, version)
    request.model, request.version = version.name, version.version
    request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = bound


def _bind_raw(
    request: Request,
    value: bytes | None,
    envelope: Envelope,
    rules: Rules,
) -> None:
    payload = bytes(check_value(value, rules.limits))
    version = rules.models.lookup(envelope.model, envelope.version or None)
    if rules.defer is not None and version.config.transform == "python":
        rules.defer(Payload(request, version, payload, envelope.content_type))
        return
    _take(request, version, version.transform(payload, envelope.content_type))


def _take(request: Request, version: ModelVersion, inputs: list[InputTensor]) -> None:
    bound = version.bind(inputs, None)
    request.model, request.version = version.name, version.version
    request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = bound


def read_transformed(payload: Payload) -> Request:
    """The request of a payload that was deferred, once it has been transformed."""
    request = payload.request
    try:
        if payload.error is not None:
            raise payload.error
        _take(request, payload.version, payload.inputs or [])
    except Rejected as error:
        request.fail(rejection(error, Stage.INGEST))
        request.id = callers_id(request.value, request.envelope)
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, InFlightAck)
    ack_handle.resize(ack_handle.size_bytes + request.size_bytes)
    return request
