"""The attributes of the spans: their names, and those of each kind of span.

`messaging.*` and `error.type` are those of OpenTelemetry's semantic conventions in the version that
`SCHEMA_URL` names; `headrace.*` are ours. `docs/tracing.md` has the table of all of them. Durations
are in microseconds (`_us`) or milliseconds (`_ms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.clock import Clock, wall_clock_us
from headrace.errors import Code
from headrace.protocol.messages import Batch, Failure, Request
from headrace.protocol.trace_context import AttributeValue, SpanId
from headrace.topics import Stage

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
OFFSET = "messaging.kafka.offset"
KEY = "messaging.kafka.message.key"
BODY_SIZE = "messaging.message.body.size"
CONVERSATION = "messaging.message.conversation_id"
ERROR_TYPE = "error.type"

STAGE = "headrace.stage"
REQUEST = "headrace.request"
REQUEST_ID = "headrace.request.id"
MODEL = "headrace.model.name"
VERSION = "headrace.model.version"
ROWS = "headrace.rows"
SLACK_MS = "headrace.deadline.slack_ms"
AFTER_THE_FACT = "headrace.after_the_fact"
WAIT_US = "headrace.wait_us"
QUEUE_US = "headrace.queue_us"
GATHER_US = "headrace.gather_us"
COMPUTE_US = "headrace.compute_us"
ENCODE_US = "headrace.encode_us"
SEND_US = "headrace.send_us"
RUNS = "headrace.runs"
ATTEMPTS = "headrace.run.attempts"
BATCH_ID = "headrace.batch.id"
BATCH_REASON = "headrace.batch.reason"
BATCH_ROWS = "headrace.batch.rows"
BATCH_REQUESTS = "headrace.batch.requests"
BATCH_TRACE_ID = "headrace.batch.trace_id"
BATCH_SPAN_ID = "headrace.batch.span_id"
STATUS = "headrace.status"
FAILURE_STAGE = "headrace.failure.stage"
DEAD_LETTER = "headrace.dead_letter"
CHANGE = "headrace.change"
GENERATION = "headrace.control.generation"
OUTCOME = "headrace.load.outcome"
LOAD_US = "headrace.load_us"
DEFAULT = "headrace.default"
DEFAULT_BEFORE = "headrace.default.before"
LABELS = "headrace.labels"
LABELS_BEFORE = "headrace.labels.before"

Attributes = dict[str, AttributeValue]


class Input(NamedTuple):
    """Input topic of a stage, and its consumer group; `group` is empty if unknown."""

    system: str
    topic: str
    group: str


class Answering(NamedTuple):
    """Times of a chunk of answers: encoding begun, encoded, acknowledged, and dead letters, if any,
    written; epoch microseconds.
    """

    began_us: int
    encoded_us: int
    acknowledged_us: int
    dead_letters_us: int


@dataclass(slots=True)
class ModelRun:
    """One run of a model: its executor, times (epoch microseconds) and result.

    Attributes:
        requests: those of the batch that were still wanted.
        gathered_us: when the inputs were gathered; 0 if the run ended before.
        attempts: how often the backend was called.
        failure: the failure of the whole run.
        has_hung: it failed because it took longer than `max_execution_s`.
        clock: the clock of its timestamps.
        ended_steady_us: when it ended, on the steady clock that the batcher's predictions use.
    """

    batch: Batch
    requests: list[Request]
    began_us: int
    gathered_us: int = 0
    ended_us: int = 0
    compute_us: int = 0
    attempts: int = 0
    failure: Failure | None = None
    has_hung: bool = False
    clock: Clock = wall_clock_us
    ended_steady_us: int = 0


def common(stage: Stage, request: Request, requests_topic: str, now_us: int) -> Attributes:
    """Return the attributes of a request that each stage's span has."""
    attributes: Attributes = {
        STAGE: str(stage),
        REQUEST: f"{requests_topic}/{request.partition}/{request.offset}",
    }
    if request.id is not None:
        attributes[REQUEST_ID] = request.id
    # The version is set only once the request was bound to a known model.
    if request.version and request.model:
        attributes[MODEL] = request.model
        attributes[VERSION] = request.version
    deadline_ms = request.envelope.deadline_ms
    if deadline_ms:
        attributes[SLACK_MS] = deadline_ms - now_us // 1000
    return attributes


def reading(stage: Stage, request: Request, source: Input) -> Attributes:
    """Return the attributes for a stage that has read its request from the log."""
    attributes: Attributes = {
        SYSTEM: source.system,
        OPERATION_NAME: "process",
        OPERATION_TYPE: "process",
        DESTINATION: source.topic,
    }
    if source.group:
        attributes[GROUP] = source.group
    if stage is not Stage.EXECUTOR:  # all topics but `batches` have the source's partitions
        attributes[PARTITION] = str(request.partition)
    if stage is Stage.INGEST:
        attributes[OFFSET] = request.offset
        attributes |= _record(request)
    return attributes


def _record(request: Request) -> Attributes:
    attributes: Attributes = {}
    if request.value is not None:
        attributes[BODY_SIZE] = len(request.value)
    for name, content in ((KEY, request.key), (CONVERSATION, request.envelope.correlation_id)):
        if content is not None:
            attributes[name] = _text(content)
    return attributes


def _text(content: bytes) -> str:
    """Return opaque bytes as text if they are text, otherwise in hexadecimal."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.hex()
    return text if text.isprintable() else content.hex()


def ingest(request: Request, since_us: int) -> Attributes:
    """Return the attributes of ingest's span besides `common`."""
    return {WAIT_US: max(request.ingested_us - since_us, 0), ROWS: request.rows}


def batcher(request: Request, until_us: int, batch: Batch | None) -> Attributes:
    """Return the attributes of the batcher's span; `batch` is None if the request joined none."""
    attributes: Attributes = {QUEUE_US: max(until_us - request.ingested_us, 0)}
    if batch is not None:
        attributes |= of_batch(batch)
    elif request.batch_id:
        attributes[BATCH_ID] = request.batch_id
    return attributes


def of_batch(batch: Batch) -> Attributes:
    """Return the attributes of a batch, on any span."""
    return {
        BATCH_ID: batch.batch_id,
        BATCH_REASON: batch.reason,
        BATCH_ROWS: batch.rows,
        BATCH_REQUESTS: len(batch.requests),
    }


def run(one: ModelRun) -> Attributes:
    """Return the attributes of a run, on its own span and on those of its requests."""
    attributes = {**of_batch(one.batch), ATTEMPTS: one.attempts}
    if one.gathered_us:
        attributes[GATHER_US] = max(one.gathered_us - one.began_us, 0)
    if one.attempts:
        attributes[COMPUTE_US] = one.compute_us
    return attributes


def executor(
    request: Request, last_run: Mapping[str, AttributeValue], runs: Sequence[SpanId]
) -> Attributes:
    """Return the attributes of the executor's span; without runs, those known from the request."""
    attributes = dict(last_run)
    if runs:
        attributes[RUNS] = len(runs)
        attributes[BATCH_TRACE_ID] = f"{runs[-1].trace_id:032x}"
        attributes[BATCH_SPAN_ID] = f"{runs[-1].span_id:016x}"
    else:
        if request.batch_id:
            attributes[BATCH_ID] = request.batch_id
        if request.batch.rows:
            attributes[BATCH_ROWS] = request.batch.rows
            attributes[COMPUTE_US] = request.batch.compute_us
    return attributes


def responder(request: Request, since_us: int, times: Answering) -> Attributes:
    """Return the attributes of the responder's span."""
    failure = request.failure
    attributes: Attributes = {
        WAIT_US: max(times.began_us - since_us, 0),
        ENCODE_US: max(times.encoded_us - times.began_us, 0),
        SEND_US: max(times.acknowledged_us - times.encoded_us, 0),
        STATUS: "ok" if failure is None else str(failure.code),
    }
    if failure is not None:
        attributes[FAILURE_STAGE] = str(failure.stage)
        attributes[DEAD_LETTER] = Code(failure.code).is_dead_letter
    return attributes


def sending(system: str, topic: str, request: Request) -> Attributes:
    """Return the attributes of a span that ends with an acknowledgement."""
    attributes: Attributes = {
        SYSTEM: system,
        OPERATION_NAME: "send",
        OPERATION_TYPE: "send",
        DESTINATION: topic,
    }
    if request.envelope.correlation_id is not None:
        attributes[CONVERSATION] = _text(request.envelope.correlation_id)
    return attributes


def load(number: str, outcome: str, load_s: float | None) -> Attributes:
    """Return the attributes of loading a version; no number means the model as a whole."""
    attributes: Attributes = {OUTCOME: outcome}
    if number:
        attributes[VERSION] = number
    if load_s is not None:
        attributes[LOAD_US] = round(load_s * 1e6)
    return attributes


def label(before: Mapping[str, str], after: Mapping[str, str]) -> Attributes:
    """Return the attributes of a change of numbers by label; under "" is the default."""
    both = {
        DEFAULT: after.get("", ""),
        DEFAULT_BEFORE: before.get("", ""),
        LABELS: _list_labels(after),
        LABELS_BEFORE: _list_labels(before),
    }
    return {name: text for name, text in both.items() if text}


def _list_labels(names: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={number}" for name, number in sorted(names.items()) if name)
