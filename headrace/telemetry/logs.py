"""Logs: event names and fields, JSON for machines, `key=value` for a terminal.

Lines of other libraries (aiokafka, asyncio) take the same form. An event's name is a constant here,
so that one can search for it and set alerts on it; variable parts are fields. Lines above debug are
rate-limited; the next one of the kind says how many were `suppressed`.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from headrace.primitives.token_bucket import TokenBucket
from headrace.printable import printable
from headrace.tuning import TUNING, RuntimeTuning

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor


class Event(StrEnum):
    """The names of all events that Headrace logs; those of requests are in `request_log`."""

    STARTING = "process.starting"
    NO_BROKER = "process.without_broker"
    READY = "process.ready"
    DRAINING = "process.draining"
    STOPPED = "process.stopped"
    CUT_OFF = "process.cut_off"
    FAILED = "process.failed"
    STUCK = "process.stuck"
    HEAP_TRIMMED = "heap.trimmed"
    DRAIN_INCOMPLETE = "drain.incomplete"
    WORKER_STARTED = "worker.started"
    WORKER_ENDED = "worker.ended"
    HTTP_ACCEPT_FAILED = "http.accept_failed"
    ACCESS_FILES_RELOADED = "access.files_reloaded"
    ACCESS_FILES_REJECTED = "access.files_rejected"
    GATEWAY_LISTENING = "gateway.listening"
    GATEWAY_FAILED = "gateway.request_failed"

    REQUEST = "request"
    REQUEST_EXPIRED = "request.expired"
    REQUEST_REFUSED = "request.refused"
    REQUEST_FAILED = "request.failed"
    REQUEST_POISONED = "request.poisoned"
    RUN_RETRIED = "run.retried"
    INLINE_RUN_CUT_OFF = "run.inline_cut_off"
    ANSWERS_STALLED = "answers.stalled"
    ANSWER_TOO_LARGE = "answer.too_large"
    DEAD_LETTER_TOO_LARGE = "dead_letter.too_large"
    REPLY_TOPIC_UNKNOWN = "reply_topic.lookup_failed"
    INTERNAL_RECORD_UNREADABLE = "internal_record.unreadable"
    COMPLETION_MISSING = "completion.missing"

    MODEL_READY = "model.ready"
    MODEL_FAILED = "model.failed"
    MODEL_NOT_WARMED_UP = "model.not_warmed_up"
    MODEL_CONTRADICTED = "model.contradicted"
    MODEL_UNLOADED = "model.unloaded"
    MODEL_UNLOAD_FAILED = "model.unload_failed"
    MODEL_WITHOUT_RING = "model.without_ring"
    MODEL_BATCHING_DECIDED = "model.batching_decided"
    CONTROL_CHANGED = "control.changed"
    CONTROL_UNREADABLE = "control.unreadable"
    STORE_UNAVAILABLE = "models.store_unavailable"
    SCHEMAS_DELAYED = "schemas.delayed"
    CLAIM_DELAYED = "claim.delayed"
    TRANSFORM_WORKER_ENDED = "transform.worker_ended"
    MODELS_RELOADED = "models.reloaded"
    MODELS_RELOAD_SLOW = "models.reload_slow"
    MODELS_RELOAD_FAILED = "models.reload_failed"
    REPOSITORY_EMPTIED = "models.repository_emptied"
    MODELS_RELOAD_REFUSED = "models.reload_refused"

    ASSIGNED = "partitions.assigned"
    REVOKED = "partitions.revoked"
    ASSIGNMENT_DELAYED = "partitions.assignment_delayed"
    SEEK_DELAYED = "partitions.seek_delayed"
    RECORDS_SKIPPED = "records.skipped"
    REREADING_DELAYED = "records.rereading_delayed"
    SOURCE_VALUES_DELAYED = "source_values.delayed"
    SOURCE_VALUE_LOST = "source_value.lost"
    SHARED_VALUES_OFF = "shared_values.off"
    RECORDS_UNREADABLE = "records.unreadable"
    QUARANTINE_STARTED = "quarantine.started"
    QUARANTINE_ENDED = "quarantine.ended"
    CRASH_MARKER_DELAYED = "crash_marker.delayed"
    CRASH_MARKER_UNREADABLE = "crash_marker.unreadable"
    MEMBER_REMOVED = "member.removed"
    OFFSET_BEYOND_END = "offset.beyond_end"
    TOPIC_REPLACED = "topic.replaced"
    BASE_STUCK = "base.stuck"
    CONSUMER_CUT_OFF = "consumer.cut_off"
    ACKED_OFFSETS_UNKNOWN = "acked_offsets.unknown"
    END_UNKNOWN = "end_offsets.unknown"
    COMMIT_FAILED = "commit.failed"
    COMMIT_REFUSED = "commit.refused"
    TRANSACTION_FAILED = "transaction.failed"
    TRANSACTION_DELAYED = "transaction.delayed"
    TRANSACTION_TIMED_OUT = "transaction.timed_out"
    TRANSACTION_LEFT_OPEN = "transaction.left_open"
    LOST = "partitions.lost"
    SEND_FAILED = "send.failed"
    SEND_RETRIED = "send.retried"

    TRACE_EXPORT_FAILED = "trace_export.failed"


_LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_CHATTY = ("aiokafka", "aiohttp.access", "asyncio")
"""Loggers whose info lines repeat what Headrace's own events and metrics say."""

_SECRETIVE = "aiokafka"
"""Logger whose debug lines hold the client's credentials: the bytes of SASL exchanges."""


def configure_logging(
    level: str, stream: TextIO | None = None, tuning: RuntimeTuning = TUNING.runtime
) -> LogRateLimiter:
    """Set up logging for the process; call it once, where the process starts.

    Returns:
        The rate limiter, which counts suppressed lines.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        stream: where the lines go; standard error if not given.
        tuning: the rate limit.

    Raises:
        KeyError: on any other level.
    """
    # Otherwise gRPC's core would write a line of its own for each handshake that fails, whoever
    # begins it. It looks when it is first used, which is later.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    stream = stream if stream is not None else sys.stderr
    threshold = _LEVELS[level]
    rate_limiter = LogRateLimiter(tuning)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            _RateLimitFilter(rate_limiter).limit_event,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Loggers follow the current configuration; none is called for each request.
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(_make_output(stream, rate_limiter, shared))
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(
            threshold if threshold == logging.DEBUG else max(threshold, logging.WARNING)
        )
    if threshold < logging.INFO:
        logging.getLogger(_SECRETIVE).setLevel(logging.INFO)
    return rate_limiter


def _make_output(
    stream: TextIO, rate_limiter: LogRateLimiter, shared: list[Processor]
) -> logging.Handler:
    lines = logging.StreamHandler(stream)
    lines.addFilter(_RateLimitFilter(rate_limiter))
    lines.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(for_people=stream.isatty()),
            ],
        )
    )
    return lines


class _RateLimitFilter(logging.Filter):
    """Rate-limits log lines: our own before they are formatted, others' when they arrive."""

    def __init__(self, rate_limiter: LogRateLimiter) -> None:
        super().__init__()
        self._rate_limiter = rate_limiter

    def limit_event(self, logger: Any, method: str, line: EventDict) -> EventDict:
        """Rate-limit our own lines; a processor of structlog."""
        if method != "debug":
            suppressed = self._rate_limiter.admit(str(line["event"]), time.monotonic())
            if suppressed is None:
                raise structlog.DropEvent
            if suppressed:
                line["suppressed"] = suppressed
        return line

    def filter(self, record: logging.LogRecord) -> bool:
        """Rate-limit lines of libraries; their kind is the text before arguments are inserted."""
        if isinstance(record.msg, dict) or record.levelno < logging.INFO:
            return True
        suppressed = self._rate_limiter.admit(f"{record.name}: {record.msg}", time.monotonic())
        if suppressed:
            record.suppressed = suppressed
        return suppressed is not None


def _escape(logger: Any, method: str, line: EventDict) -> EventDict:
    """Escape control characters that a terminal would interpret; a processor of structlog."""
    return {
        name: printable(value) if isinstance(value, str) else value for name, value in line.items()
    }


def _add_pid(logger: Any, method: str, line: EventDict) -> EventDict:
    """Tell apart the lines of processes that share a stream; a processor of structlog."""
    line.setdefault("pid", os.getpid())
    return line


def _write_escaped_traceback(stream: TextIO, exc_info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write("\n".join(map(printable, text.getvalue().splitlines())))


def _renderers(*, for_people: bool) -> list[Processor]:
    if for_people:
        return [
            _escape,
            structlog.dev.ConsoleRenderer(exception_formatter=_write_escaped_traceback),
        ]
    # Local variables would put payloads and credentials into the log.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        _add_pid,
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]


# --- rate limit ----------------------------------------------------------------------------------


_OWN_KINDS = frozenset(map(str, Event))


class LogRateLimiter:
    """Admits a burst of events of each kind at once, and a steady rate after that.

    Attributes:
        suppressed: how many were not admitted, by kind, since the start.
    """

    def __init__(self, tuning: RuntimeTuning = TUNING.runtime) -> None:
        self._tuning = tuning
        self._buckets: dict[str, TokenBucket] = {}
        self._since_last: dict[str, int] = {}
        self.suppressed: dict[str, int] = {}

    def admit(self, kind: str, now_s: float) -> int | None:
        """Return how many of the kind were suppressed since the last admitted one; None if this one
        is suppressed too.

        Args:
            kind: the kind of event; beyond `log_max_kinds` further kinds share one bucket, except
                for Headrace's own.
            now_s: monotonic seconds.
        """
        is_new = kind not in self._buckets and kind not in _OWN_KINDS
        if is_new and len(self._buckets) >= self._tuning.log_max_kinds:
            kind = ""
        bucket = self._buckets.get(kind)
        if bucket is None:
            bucket = self._buckets[kind] = TokenBucket(
                self._tuning.log_burst_lines, self._tuning.log_lines_per_s
            )
        if bucket.take(now_s):
            return self._since_last.pop(kind, 0)
        self._since_last[kind] = self._since_last.get(kind, 0) + 1
        self.suppressed[kind] = self.suppressed.get(kind, 0) + 1
        return None


# --- the last errors -----------------------------------------------------------------------------


_ANSWERED_WITH_ERRORS = frozenset({Event.REQUEST_EXPIRED, Event.REQUEST_REFUSED})
_SHOWN_FIELDS = (
    "topic",
    "partition",
    "offset",
    "model",
    "version",
    "code",
    "stage",
    "suppressed",
    "more",
)


class RecentErrors(logging.Handler):
    """A ring of lines at `warning` and above, and of requests without outputs; few of their fields.

    Repetitions of a line share one entry, with `times`.
    """

    def __init__(self, tuning: RuntimeTuning = TUNING.runtime) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[dict[str, Any]] = deque(maxlen=tuning.recent_errors)
        self._reason_characters = tuning.recent_error_characters

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record log lines while the context lasts."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries, newest last. `time` is in UTC."""
        return list(self._ring)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line if it tells of a fault; `logging` calls this on any thread."""
        line: Mapping[str, Any]
        if isinstance(record.msg, dict):
            line = record.msg
            reason = line.get("reason", "")
        else:
            line, reason = {"event": record.name}, _text_of(record)
        event = str(line.get("event", ""))
        if record.levelno < logging.WARNING and event not in _ANSWERED_WITH_ERRORS:
            return
        entry = {
            "time": _format_utc(record.created),
            "level": record.levelname.lower(),
            "event": event,
            "reason": str(reason)[: self._reason_characters],
            "trace_id": line.get("trace_id"),
            **{name: line[name] for name in _SHOWN_FIELDS if name in line},
        }
        if self._ring and _is_same(self._ring[-1], entry):
            entry["times"] = self._ring.pop().get("times", 1) + 1
        self._ring.append(entry)


def _text_of(record: logging.LogRecord) -> str:
    """Return the text of a library's line; without its arguments if they do not fit it.

    The handler that writes the line reports that, within the rate limit.
    """
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - of the arguments; who logs the line goes on
        return record.msg if isinstance(record.msg, str) else ""


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("event", "reason", *_SHOWN_FIELDS[:3]))


def _format_utc(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
