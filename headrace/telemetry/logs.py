"""Logs: event names and fields, JSON for machines, `key=value` for a terminal.

Lines of other libraries (aiokafka, asyncio) take the same form. An event's name is a constant here,
so that one can search for it and set alerts on it; variable parts are fields. Lines above debug are
rate-limited (`headrace.telemetry.flood`); the next one of the kind says how many were `suppressed`.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from headrace.printable import printable
from headrace.telemetry.flood import LogRateLimiter
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
    FAILED = "process.failed"
    STUCK = "process.stuck"
    HEAP_TRIMMED = "heap.trimmed"
    DRAIN_INCOMPLETE = "drain.incomplete"

    REQUEST = "request"
    REQUEST_EXPIRED = "request.expired"
    REQUEST_REFUSED = "request.refused"
    REQUEST_FAILED = "request.failed"
    REQUEST_CONDEMNED = "request.condemned"
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
    MODEL_UNLOAD_FAILED = "model.unload_failed"
    MODEL_WITHOUT_RING = "model.without_ring"
    MODEL_BATCHING_DECIDED = "model.batching_decided"
    MODELS_RELOADED = "models.reloaded"
    MODELS_RELOAD_SLOW = "models.reload_slow"
    MODELS_RELOAD_FAILED = "models.reload_failed"
    MODELS_RELOAD_REFUSED = "models.reload_refused"

    ASSIGNED = "partitions.assigned"
    REVOKED = "partitions.revoked"
    ASSIGNMENT_DELAYED = "partitions.assignment_delayed"
    SEEK_DELAYED = "partitions.seek_delayed"
    RECORDS_SKIPPED = "records.skipped"
    REREADING_DELAYED = "records.rereading_delayed"
    RECORDS_UNREADABLE = "records.unreadable"
    SUSPECTS_FOUND = "suspects.found"
    SUSPECTS_CLEARED = "suspects.cleared"
    MARK_DELAYED = "mark.delayed"
    MARK_UNREADABLE = "mark.unreadable"
    MEMBER_REMOVED = "member.removed"
    POSITION_BEYOND_END = "position.beyond_end"
    TOPIC_REPLACED = "topic.replaced"
    BASE_STUCK = "base.stuck"
    READING_CUT_OFF = "reading.cut_off"
    PROGRESS_UNKNOWN = "progress.unknown"
    END_UNKNOWN = "end_offsets.unknown"
    COMMIT_FAILED = "commit.failed"
    COMMIT_REFUSED = "commit.refused"
    SEAL_FAILED = "seal.failed"
    SEAL_DELAYED = "seal.delayed"
    TRANSACTION_TIMED_OUT = "transaction.timed_out"
    SEAT_LEFT_OPEN = "seal.left_open"
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
"""A logger whose debug lines hold what a client logs in with: the bytes of SASL exchanges."""


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
    stream = stream if stream is not None else sys.stderr
    threshold = _LEVELS[level]
    flood = LogRateLimiter(tuning)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            _Sieve(flood).sift,
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
    root.addHandler(_output(stream, flood, shared))
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(
            threshold if threshold == logging.DEBUG else max(threshold, logging.WARNING)
        )
    if threshold < logging.INFO:
        logging.getLogger(_SECRETIVE).setLevel(logging.INFO)
    return flood


def _output(stream: TextIO, flood: LogRateLimiter, shared: list[Processor]) -> logging.Handler:
    lines = logging.StreamHandler(stream)
    lines.addFilter(_Sieve(flood))
    lines.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(for_people=stream.isatty()),
            ],
        )
    )
    return lines


class _Sieve(logging.Filter):
    """Rate-limits log lines: our own before they are formatted, others' when they arrive."""

    def __init__(self, flood: LogRateLimiter) -> None:
        super().__init__()
        self._flood = flood

    def sift(self, logger: Any, method: str, line: EventDict) -> EventDict:
        """Rate-limit our own lines; a processor of structlog."""
        if method != "debug":
            suppressed = self._flood.admit(str(line["event"]), time.monotonic())
            if suppressed is None:
                raise structlog.DropEvent
            if suppressed:
                line["suppressed"] = suppressed
        return line

    def filter(self, record: logging.LogRecord) -> bool:
        """Rate-limit lines of libraries; their kind is the text before arguments are inserted."""
        if isinstance(record.msg, dict) or record.levelno < logging.INFO:
            return True
        suppressed = self._flood.admit(f"{record.name}: {record.msg}", time.monotonic())
        if suppressed:
            record.suppressed = suppressed
        return suppressed is not None


def _escape(logger: Any, method: str, line: EventDict) -> EventDict:
    """Escape control characters that a terminal would interpret; a processor of structlog."""
    return {
        name: printable(value) if isinstance(value, str) else value for name, value in line.items()
    }


def _escaped_traceback(stream: TextIO, exc_info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write("\n".join(map(printable, text.getvalue().splitlines())))


def _rendering(*, for_people: bool) -> list[Processor]:
    if for_people:
        return [_escape, structlog.dev.ConsoleRenderer(exception_formatter=_escaped_traceback)]
    # Local variables would put payloads and credentials into the log.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]
