"""Decode records into requests, and check all that can be checked before a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, Protocol

from headrace.clock import Clock
from headrace.config import LimitSettings
from headrace.consumer.ready_queue import PolledRecords
from headrace.crash_isolation.isolation import Isolation
from headrace.delivery.failures import deadline_passed, poisoned_failure, rejection
from headrace.delivery.inflight import (
    RECORD_OVERHEAD_BYTES,
    AssignedPartition,
    InFlightAck,
    key_and_header_bytes,
    record_bytes,
)
from headrace.delivery.ordering import KeyChains
from headrace.errors import Code, Rejected
from headrace.log.port import Record
from headrace.models.inputs.binding import Bound
from headrace.models.version import ModelVersion
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.claims import Claim, refuse_claim
from headrace.protocol.codec import (
    Contradiction,
    callers_id,
    check_value,
    decode_request,
    plain_value,
    takes_long,
)
from headrace.protocol.headers import (
    BY_CORRELATION,
    DECODED_TYPES,
    JSON,
    MSGPACK_TYPES,
    NO_HEADERS,
    parse_envelope,
    tensor_types,
)
from headrace.protocol.messages import (
    Envelope,
    Failure,
    IngestedRequest,
    Request,
    Tensor,
)
from headrace.protocol.negotiation import require_content_type
from headrace.services.ingest.decode_cache import DecodeCache, DecodeTemplate
from headrace.services.ingest.decompression import InlineDecompressor
from headrace.services.ingest.schemas import find_unknown
from headrace.topics import Stage
from headrace.transforms.workers import (
    PendingCompressed,
    PendingTensors,
    PendingTransform,
    PendingValue,
)
from headrace.tuning import TUNING, IngestTuning

_new = tuple.__new__  # half the cost of calling a NamedTuple's class


class ModelLookup(Protocol):
    """The part of `headrace.models.catalog.ModelCatalog` that is needed here."""

    def lookup(self, name: str, version: str | None) -> ModelVersion:
        """Raises `Rejected`."""
        ...


class Admission(Protocol):
    """The part of a batcher in the same process that ingest needs."""

    def __call__(self, envelope: Envelope) -> Failure | None:
        """Return why a request with these headers is refused; None if they give no reason."""
        ...


class PendingClaim(NamedTuple):
    """A request whose value is in a store, and the claim that refers to it."""

    request: Request
    claim: Claim


@dataclass(frozen=True, slots=True)
class IngestRules:
    """Models, limits and callbacks that records are checked against.

    Attributes:
        admission: None if the batcher is in another process.
        decompressor: decompresses small values; without it, all are decompressed immediately.
        transform_later: receives payloads whose transform is user code or may take long, and
            values that take long to decompress or to decode, for a worker; without it, all of
            this is done immediately.
        fetch_schema_later: receives payloads whose schemas must be fetched first.
        read_claim: returns the claim in a header, or raises `Rejected`; see
            `headrace.claims.fetcher.ClaimFetcher`. None where no claims are allowed.
        fetch_later: receives claims.
        cache: layouts of the values that were decoded.
        copied_tensor_bytes, inline_record_bytes, inline_json_bytes, inline_texts_bytes: see
            `headrace.tuning.IngestTuning`.
    """

    models: ModelLookup
    limits: LimitSettings
    admission: Admission | None = None
    decompressor: InlineDecompressor | None = None
    transform_later: Callable[[PendingValue], None] | None = None
    fetch_schema_later: Callable[[PendingTransform], None] | None = None
    read_claim: Callable[[bytes], Claim] | None = None
    fetch_later: Callable[[PendingClaim], None] | None = None
    cache: DecodeCache = field(default_factory=DecodeCache)
    copied_tensor_bytes: int = TUNING.ingest.copied_tensor_bytes
    inline_record_bytes: int = TUNING.ingest.inline_record_bytes
    inline_json_bytes: int = TUNING.ingest.inline_json_bytes
    inline_texts_bytes: int = TUNING.ingest.inline_texts_bytes


class RequestReader:
    """Make requests of polled records, in turns that are short.

    Args:
        rules: models and limits that records are checked against.
        decompressor: that of the rules; it ends a turn in which it has made enough.
        clock: wall clock, in which deadlines are given.
    """

    def __init__(
        self,
        rules: IngestRules,
        decompressor: InlineDecompressor,
        clock: Clock,
        tuning: IngestTuning = TUNING.ingest,
    ) -> None:
        self._rules = rules
        self._decompressor = decompressor
        self._clock = clock
        self._tuning = tuning

    def read(self, polled: PolledRecords, records: Iterator[Record]) -> list[Request]:
        """Admit and check records for about `hold_loop_s`; return their requests.

        The list is empty when no records are left. Records answered before this assignment are
        skipped.
        """
        assignment, isolation = polled.assignment, polled.isolation
        tuning = self._tuning
        now_us = self._clock()
        self._decompressor.begin_reading()
        began_s = time.perf_counter()
        requests: list[Request] = []
        count = 1  # records read between two looks at the clock
        while some := list(islice(records, count)):
            if (
                isolation is not None
                or polled.is_reread
                or some[0].offset < assignment.progress.highest
            ):
                requests += self._read_singly(some, assignment, isolation, now_us)
            else:
                decoded = decode_records(some, assignment, self._rules, now_us)
                _chain(decoded, assignment.chains)
                requests += decoded
            elapsed_s = time.perf_counter() - began_s
            if requests and (elapsed_s >= tuning.hold_loop_s or self._decompressor.is_exhausted):
                break
            if elapsed_s < tuning.double_records_for_s:
                count = min(2 * count, tuning.max_records_at_once)
        return requests

    def _read_singly(
        self,
        records: Sequence[Record],
        assignment: AssignedPartition,
        isolation: Isolation | None,
        now_us: int,
    ) -> list[Request]:
        """Read records one by one: some may be answered, poisoned or suspects."""
        if isolation is not None and isolation.isolated is not None:
            isolated = isolation.isolated
            request = decode_record(
                isolated.record, assignment, self._rules, now_us, isolated.ack_handle
            )
            request.after = isolated.after  # its place in the order since it was parked
            return [request]
        read: list[Request] = []
        for record in records:
            if record.offset in assignment.progress:
                assignment.skip_answered(record.offset)
                continue
            if isolation is not None and (record.offset, 0) in isolation.poisoned:
                request = fail_poisoned(record, assignment, self._rules, now_us)
            elif (
                isolation is not None
                and isolation.is_suspect(record.offset)
                and not cancels_another(record)
            ):
                isolation.park_record(assignment, record)
                continue
            else:
                request = decode_record(record, assignment, self._rules, now_us)
            # One by one: a suspect between two requests of its key is chained when it is parked.
            _chain([request], assignment.chains)
            read.append(request)
        return read


def _chain(requests: Sequence[IngestedRequest], chains: KeyChains | None) -> None:
    """Set `after` of each request to the request with the same key that precedes it, if answers are
    ordered by key.
    """
    if chains is None:
        return
    for request in requests:
        # A cancelling record is not admitted and has no answer, so nothing can wait for it.
        if request.ack_handle is not NULL_ACK:
            request.after = chains.follow(request.key, request.offset)


def decode_records(
    records: Sequence[Record], assignment: AssignedPartition, rules: IngestRules, now_us: int
) -> list[Request]:
    """Admit records and return a request for each, in order; see `decode_record`."""
    templates = _TemplatesByLength(rules)
    timeout_ms = rules.limits.default_timeout_ms
    number = assignment.partition.partition
    copied_bytes, left_bytes = rules.copied_tensor_bytes, sys.maxsize
    if rules.admission is None:  # requests are written to a topic
        # They refer to their tensors in the value, so nothing is copied, and leave a large value in
        # its source record (`refer_all_to_source`): no tensor of it is looked at here.
        copied_bytes, left_bytes = 0, max(1, rules.limits.inline_payload_bytes)
    requests: list[Request] = []
    # Records of known layouts are admitted together.
    previous, count, charged_bytes = assignment.last_delivered, 0, 0
    for record in records:
        value, headers, envelope = record.value, record.headers, NO_HEADERS
        if headers or timeout_ms:
            envelope = parse_envelope(headers, record.timestamp, timeout_ms)
        known = None if value is None else templates[len(value)]
        if (
            known is None
            or value is None
            or not value.startswith(known.head)
            or not value.endswith(known.tail)
            or not (envelope is NO_HEADERS or _is_plain(envelope, now_us))
        ):
            # `_decode` admits its record itself, and offsets are tracked in order.
            assignment.count_admitted(previous, count, charged_bytes)
            requests.append(_decode(record, envelope, assignment, rules, now_us))
            previous, count, charged_bytes = assignment.last_delivered, 0, 0
            continue
        _, _, start, stop, name, datatype, shape, model, version, bound, places, inputs = known
        rows, shape_class, tensor_bytes, wanted = bound
        key, offset, referenced = record.key, record.offset, len(value)
        size_bytes = RECORD_OVERHEAD_BYTES + referenced
        if referenced < left_bytes:
            content = value if tensor_bytes <= copied_bytes else memoryview(value)
            inputs = (_new(Tensor, (name, datatype, shape, content[start:stop])),)
            referenced = 0
        if key is not None or headers:
            size_bytes += key_and_header_bytes(key, headers)
        # All fields by position: most requests take this path, and keywords take longer.
        request = Request(
            InFlightAck(assignment, previous, offset, size_bytes),
            number,
            offset,
            previous,
            record.timestamp,
            key,
            value,
            headers,
            envelope,
            now_us,
            model,
            version,
            inputs,
            rows,
            shape_class,
            tensor_bytes,
            wanted,
            None,
            -1,
            None,
            places,
            referenced,
        )
        requests.append(request)
        previous, count, charged_bytes = offset, count + 1, charged_bytes + size_bytes
    assignment.count_admitted(previous, count, charged_bytes)
    return requests


class _TemplatesByLength(dict[int, DecodeTemplate | None]):
    """Templates of known layouts by length, during one chunk; see `DecodeCache.template`."""

    def __init__(self, rules: IngestRules) -> None:
        self._rules = rules

    def __missing__(self, length: int) -> DecodeTemplate | None:
        known = None
        if length <= self._rules.limits.max_request_bytes:
            known = self._rules.cache.template(length, self._rules.models.lookup)
        self[length] = known
        return known


def _is_plain(envelope: Envelope, now_us: int) -> bool:
    """Return True if the headers need no special handling and the deadline has not passed."""
    if envelope.fault is not None or envelope.cancels is not None or envelope.model:
        return False
    if envelope.content_encoding or envelope.claim is not None or envelope.accept:
        return False
    deadline_ms = envelope.deadline_ms
    in_time = not deadline_ms or now_us < deadline_ms * 1000
    return in_time and envelope.content_type in MSGPACK_TYPES


def decode_record(
    record: Record,
    assignment: AssignedPartition,
    rules: IngestRules,
    now_us: int,
    ack_handle: InFlightAck | None = None,
) -> Request:
    """Admit a record and return its request.

    A request that cannot run is returned with its failure set, not raised, because it must be
    answered. A request that is late, or would be by its headers, is not charged for its value. A
    cancelling record is not admitted: it goes on to the batcher, where the named request may wait,
    as a request without a model and with a null ack. Pass `ack_handle` if the record was admitted
    before.
    """
    timeout_ms = rules.limits.default_timeout_ms
    envelope = parse_envelope(record.headers, record.timestamp, timeout_ms)
    return _decode(record, envelope, assignment, rules, now_us, ack_handle)


def cancels_another(record: Record) -> bool:
    """Return whether a record asks for the cancellation of a request instead of being one."""
    return parse_envelope(record.headers, record.timestamp, 0).cancels is not None


def _decode(
    record: Record,
    envelope: Envelope,
    assignment: AssignedPartition,
    rules: IngestRules,
    now_us: int,
    ack_handle: InFlightAck | None = None,
) -> Request:
    """Take the steps of `decode_record` for a record whose headers are parsed."""
    # A cancelling record is no request: it must not be admitted, since nothing answers it.
    if envelope.cancels is not None and envelope.fault is None:
        fault = _cancel_fault(record, envelope, envelope.cancels)
        if not fault:
            return _cancel_request(record, assignment, envelope)
        envelope = envelope._replace(fault=fault)
    value = record.value
    size_bytes = record_bytes(record)
    # Before anything can refuse the request: its error is an answer, too, and needs an ack handle.
    ack_handle = ack_handle or assignment.admit(record.offset, size_bytes)
    origin = (record.partition, record.offset, ack_handle.previous, record.timestamp)
    request = Request(ack_handle, *origin, record.key, value, record.headers, envelope)
    request.ingested_us = now_us
    request.model, request.version = envelope.model, envelope.version
    # Before the value is looked at, which may take long: a late request must cost next to nothing.
    if envelope.deadline_ms:
        request.failure = deadline_passed(request, now_us, Stage.INGEST)
        if request.failure is None and envelope.model and rules.admission is not None:
            request.failure = rules.admission(envelope)
        if request.failure is not None:
            request.value = None
            request.version = ""
            ack_handle.resize(size_bytes - len(value or b""))
            return request
    if envelope.fault is not None:
        _refuse(request, Rejected(Code.INVALID_REQUEST, envelope.fault), value)
        return request
    # Before the coding is looked at: of a claim that is the coding of the object.
    if envelope.claim is not None:
        return _take_claim(request, envelope.claim, rules)
    if envelope.content_encoding:
        return _decode_compressed(request, value, rules)
    _decode_plain(request, ack_handle, rules)
    return request


def _decode_plain(request: Request, ack_handle: InFlightAck, rules: IngestRules) -> None:
    value, envelope = request.value, request.envelope
    try:
        _bind_value(request, value, envelope, rules)
    except Rejected as error:
        _refuse(request, error, value)
    if envelope.content_type not in MSGPACK_TYPES:
        # These tensors are no views of the value, so they take memory besides it.
        ack_handle.resize(ack_handle.size_bytes + request.size_bytes)


def _take_claim(request: Request, header: bytes, rules: IngestRules) -> Request:
    """Check a claim, and leave its object to be fetched; return the request."""
    envelope = request.envelope
    try:
        if rules.read_claim is None or rules.fetch_later is None:
            raise refuse_claim("none, since claims.allowed is empty", "a claim")
        if request.value:
            raise refuse_claim("a record without a value", f"{len(request.value)} bytes")
        if not envelope.model:
            # Its share of the budget is charged before the object is here.
            raise refuse_claim("a header x-model beside it", "none")
        version = rules.models.lookup(envelope.model, envelope.version or None)
        version.choose_whole_type(envelope)  # raises before the object is fetched
        claim = rules.read_claim(header)
    except Rejected as error:
        _refuse(request, error, None)
        return request
    request.model, request.version = version.name, version.version
    request.value = None  # not an empty one: this is how it shows that the object is not here
    rules.fetch_later(PendingClaim(request, claim))
    return request


def decode_claimed(
    request: Request,
    rules: IngestRules,
    awaiting_schema: list[PendingTransform],
    awaiting_worker: list[PendingValue],
) -> int:
    """Decode the object of a claim, which is the value of its request. Any thread may do this.

    Args:
        request: with the object as its value.
        rules: `limits.max_request_bytes` is the limit of claims.
        awaiting_schema: receives payloads whose schemas must be fetched first.
        awaiting_worker: receives payloads and requests that are for a worker.

    Returns:
        The bytes that the request holds besides the object.
    """
    value, envelope = request.value, request.envelope
    plain: bytes | memoryview | None = None
    own = replace(
        rules,
        fetch_schema_later=awaiting_schema.append,
        transform_later=awaiting_worker.append,
    )
    try:
        plain = plain_value(value, envelope, rules.limits.max_request_bytes)
        _bind_value(request, plain, envelope, own)
    except Rejected as error:
        _refuse(request, error, plain)
        return 0
    if envelope.content_type in MSGPACK_TYPES:
        return 0 if plain is value else len(plain or b"")
    return request.size_bytes


def _decode_compressed(request: Request, value: bytes | None, rules: IngestRules) -> Request:
    """Decode a compressed value, unless it is left to a worker."""
    limits, decompressor, later = rules.limits, rules.decompressor, rules.transform_later
    try:
        compressed = check_value(value, limits)
        if decompressor is None or later is None:
            plain = plain_value(compressed, request.envelope, limits.max_request_bytes)
        else:
            plain = decompressor.decompress(compressed, request.envelope.content_encoding)
            if plain is None:
                later(PendingCompressed(request, compressed, limits))
    except Rejected as error:
        _refuse(request, error, None)
        return request
    return request if plain is None else bind_decompressed(request, plain, rules)


def bind_decompressed(request: Request, plain: bytes | memoryview, rules: IngestRules) -> Request:
    """Decode what was compressed in the value of a request; return the request."""
    envelope, ack_handle = request.envelope, request.ack_handle
    kept_bytes = 0
    try:
        _bind_value(request, plain, envelope, rules)
        # In MessagePack the tensors are views of all that was decompressed.
        is_viewed = envelope.content_type in MSGPACK_TYPES
        kept_bytes = len(plain) if is_viewed else request.size_bytes
    except Rejected as error:
        _refuse(request, error, plain)
    assert isinstance(ack_handle, InFlightAck)
    ack_handle.resize(ack_handle.size_bytes + kept_bytes)
    return request


def _refuse(request: Request, error: Rejected, plain: bytes | memoryview | None) -> None:
    """Fail a request whose value, decompressed, was refused."""
    request.fail(rejection(error, Stage.INGEST))
    request.version = ""  # named by the caller; this version may not exist
    request.id = request.id or callers_id(plain, request.envelope)


def fail_poisoned(
    record: Record, assignment: AssignedPartition, rules: IngestRules, now_us: int
) -> Request:
    """Admit a poisoned record without decoding it; return it as a failed request."""
    envelope = parse_envelope(record.headers, record.timestamp, rules.limits.default_timeout_ms)
    ack_handle = assignment.admit(record.offset, record_bytes(record))
    origin = (record.partition, record.offset, ack_handle.previous, record.timestamp)
    request = Request(ack_handle, *origin, record.key, record.value, record.headers, envelope)
    request.ingested_us = now_us
    request.model, request.version = envelope.model, envelope.version
    if not envelope.content_encoding:
        request.id = callers_id(record.value, envelope)
    request.fail(poisoned_failure(Stage.INGEST))
    return request


def _cancel_fault(record: Record, envelope: Envelope, target: tuple[str, int, int]) -> str:
    """Return what is wrong with a cancelling record, or "".

    It must follow the request that it names in the same partition.
    """
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


def _cancel_request(record: Record, assignment: AssignedPartition, envelope: Envelope) -> Request:
    assignment.ignore(record.offset)
    origin = (record.partition, record.offset, record.offset - 1, record.timestamp)
    # The model is not set, even if its headers name one: its queue would treat it as a request.
    return Request(NULL_ACK, *origin, None, None, record.headers, envelope)


def _bind_value(
    request: Request,
    value: bytes | memoryview | None,
    envelope: Envelope,
    rules: IngestRules,
) -> None:
    content_type = envelope.content_type
    if content_type not in DECODED_TYPES:
        _bind_payload(request, value, envelope, rules)
    elif content_type == JSON and envelope.model:
        _bind_json(request, value, envelope, rules)
    else:
        _bind(request, value, envelope, rules)


def _bind_json(
    request: Request, value: bytes | memoryview | None, envelope: Envelope, rules: IngestRules
) -> None:
    """Bind JSON beside `x-model`: a payload if that model takes some, else a map of tensors."""
    try:
        version = rules.models.lookup(envelope.model, envelope.version or None)
    except Rejected as absent:
        try:
            # The value may name a version that is there.
            _bind(request, value, envelope, rules, absent)
        except Rejected as error:
            raise _find_cause(error, absent) from None
        return
    bind = _bind_payload if version.config.takes_json else _bind
    bind(request, value, envelope, rules)


def _find_cause(error: Rejected, absent: Rejected | None) -> Rejected:
    """Return why a value with tensors is refused, if the model in `x-model` is absent or not."""
    if absent is None or error.code is not Code.INVALID_REQUEST:
        return error
    if isinstance(error, Contradiction):
        return error  # it is an inference request, whose model is meant to be another one
    return absent  # as a payload the value may be right, so the model is what is wrong


def _bind(
    request: Request,
    value: bytes | memoryview | None,
    envelope: Envelope,
    rules: IngestRules,
    absent: Rejected | None = None,
) -> None:
    if envelope.accept:
        require_content_type(envelope.accept, tensor_types(envelope.content_type))
    # Only a value that names its model itself determines the request.
    cacheable: bytes | None = None
    if type(value) is bytes and not envelope.model and envelope.content_type in MSGPACK_TYPES:
        cacheable = value
    layout = None if cacheable is None else rules.cache.find(cacheable)
    if layout is None and _leave_to_worker(request, value, envelope, rules, absent):
        return
    if cacheable is None or layout is None or len(cacheable) > rules.limits.max_request_bytes:
        message = decode_request(value, envelope, rules.limits)
        request.id = message.id
        version = rules.models.lookup(message.model_name, message.model_version)
        bound = version.bind(message.inputs, message.outputs)
        if cacheable is not None and layout is None:
            rules.cache.learn(cacheable, message)
    else:
        message = layout.message
        version = rules.models.lookup(message.model_name, message.model_version)
        bound = layout.bind(cacheable, version)
    _set_bound(request, version, bound)


def _leave_to_worker(
    request: Request,
    value: bytes | memoryview | None,
    envelope: Envelope,
    rules: IngestRules,
    absent: Rejected | None,
) -> bool:
    """Leave a request that takes long to decode to a worker; return whether it was."""
    later = rules.transform_later
    if later is None or value is None or len(value) > rules.limits.max_request_bytes:
        return False
    inline = rules.inline_json_bytes, rules.inline_texts_bytes
    if not takes_long(value, envelope.content_type, *inline):
        return False
    later(PendingTensors(request, value, envelope, rules.limits, rules.models.lookup, absent))
    return True


def _bind_payload(
    request: Request,
    value: bytes | memoryview | None,
    envelope: Envelope,
    rules: IngestRules,
) -> None:
    payload = bytes(check_value(value, rules.limits))
    version = rules.models.lookup(envelope.model, envelope.version or None)
    version.choose_whole_type(envelope)  # raises before anything of the payload is converted
    if rules.fetch_schema_later is not None and find_unknown(version, payload) is not None:
        rules.fetch_schema_later(PendingTransform(request, version, payload, envelope.content_type))
        return
    content_type, inline_bytes = envelope.content_type, rules.inline_record_bytes
    if rules.transform_later is not None and version.transform.is_slow(
        payload, content_type, inline_bytes
    ):
        rules.transform_later(PendingTransform(request, version, payload, content_type))
        return
    _set_bound(request, version, version.bind(version.transform(payload, content_type), None))


def _set_bound(request: IngestedRequest, version: ModelVersion, bound: Bound) -> None:
    """Set the version and the checked inputs of a request that can run."""
    request.model, request.version = version.name, version.version
    request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = bound


def bind_transformed(payload: PendingValue) -> Request:
    """Give a request the inputs that a worker has made, or its failure; return the request."""
    request = payload.request
    if request.failure is not None:  # it ended while it waited
        return request
    try:
        if payload.error is not None:
            raise payload.error
        if isinstance(payload, PendingCompressed):
            return request  # `bind_decompressed` follows
        assert payload.version is not None
        assert payload.bound is not None
        if isinstance(payload, PendingTensors) and payload.message is not None:
            request.id = payload.message.id
        _set_bound(request, payload.version, payload.bound)
    except Rejected as error:
        if isinstance(payload, PendingCompressed):
            _refuse(request, error, None)
            return request
        if isinstance(payload, PendingTensors):
            _refuse(request, _find_cause(error, payload.absent), payload.value)
            return request
        request.fail(rejection(error, Stage.INGEST))
        request.id = callers_id(payload.value, request.envelope)
    if payload.content_type in MSGPACK_TYPES:
        return request  # its inputs are views of the value
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, InFlightAck)
    ack_handle.resize(ack_handle.size_bytes + request.size_bytes)
    return request
