"""Log lines of requests: enough to find them, and nothing of their content."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from headrace.errors import Code
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import BatchSummary, Envelope, Failure, Request
from headrace.protocol.trace_context import Trace, new_trace
from headrace.telemetry.request_log import log_answered
from headrace.topics import Stage

NOW_US = 1_700_000_000_500_000
SECRET = b"a caller's secret"
MAX_LINES = 5


@pytest.fixture(autouse=True)
def _all_levels() -> Iterator[None]:
    """Log all levels, whatever a test before has configured."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def request(code: Code | None = None, *, offset: int = 7) -> Request:
    """One that has run, or was refused."""
    headers = [("authorization", SECRET)]
    made = Request(
        NULL_ACK, 3, offset, 6, NOW_US // 1000 - 500, SECRET, SECRET, headers, Envelope()
    )
    made.model, made.version = "digits", "1"
    made.ingested_us = NOW_US - 400_000
    made.batch = BatchSummary(NOW_US - 300_000, compute_us=120)
    if code is not None:
        made.failure = Failure(code, "expected this, got that", Stage.EXECUTOR)
    return made


def test_answered_request_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Answered requests are logged only at debug."""
    with caplog.at_level(logging.INFO), capture_logs() as lines:
        log_answered([request(), request()], NOW_US)
    assert lines == []


def test_answered_request_is_logged_once_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """It says where the time went."""
    with caplog.at_level(logging.DEBUG), capture_logs() as lines:
        log_answered([request()], NOW_US)
    assert lines == [
        {
            "event": "request",
            "log_level": "debug",
            "partition": 3,
            "offset": 7,
            "model": "digits",
            "version": "1",
            "code": "ok",
            "rows": 1,
            "total_us": 500_000,
            "log_wait_us": 100_000,
            "queue_us": 100_000,
            "compute_us": 120,
            "batch_rows": 0,
        }
    ]


@pytest.mark.parametrize(
    ("code", "event", "level"),
    [
        (Code.INVALID_TENSOR, "request.refused", "info"),
        (Code.DEADLINE_EXCEEDED, "request.expired", "info"),
        (Code.MODEL_FAILED, "request.failed", "warning"),
    ],
)
def test_failed_request_is_logged_with_its_identity(code: Code, event: str, level: str) -> None:
    """The line has the trace as well, if there is one."""
    failed = request(code)
    failed.trace = Trace(new_trace())
    with capture_logs() as lines:
        log_answered([request(), failed], NOW_US)
    assert lines == [
        {
            "event": event,
            "log_level": level,
            "partition": 3,
            "offset": 7,
            "model": "digits",
            "version": "1",
            "trace_id": f"{failed.trace.trace_id:032x}",
            "code": str(code),
            "stage": "executor",
        }
    ]


def test_message_of_failure_is_logged_only_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """It may quote what the caller sent."""
    with caplog.at_level(logging.DEBUG), capture_logs() as debug:
        log_answered([request(Code.INVALID_TENSOR)], NOW_US)
    with caplog.at_level(logging.INFO), capture_logs() as info:
        log_answered([request(Code.INVALID_TENSOR)], NOW_US)

    assert debug[-1]["reason"] == "expected this, got that"
    assert "got that" not in repr(info)


def test_failures_of_chunk_are_logged_in_few_lines() -> None:
    """The last line says how many more there are."""
    failed = [request(Code.INTERNAL, offset=offset) for offset in range(MAX_LINES + 12)]
    with capture_logs() as lines:
        log_answered(failed, NOW_US, MAX_LINES)
    assert [line["offset"] for line in lines] == list(range(MAX_LINES))
    assert [line.get("more") for line in lines] == [None] * (MAX_LINES - 1) + [12]


def test_data_of_caller_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No value, key or header, at any level."""
    with caplog.at_level(logging.DEBUG), capture_logs() as lines:
        log_answered([request(), request(Code.INTERNAL)], NOW_US)
    assert "secret" not in repr(lines)
