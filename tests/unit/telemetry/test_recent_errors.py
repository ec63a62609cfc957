"""The ring of the last errors."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog
from msgspec.structs import replace

from headrace.telemetry.logs import Event, RecentErrors, configure_logging
from headrace.tuning import TUNING


@pytest.fixture
def errors() -> Iterator[RecentErrors]:
    """A ring that listens to a log that is set up as in a process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("info", io.StringIO())
    ring = RecentErrors()
    with ring.listening():
        yield ring
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_recent_errors_keep_warning_with_its_trace(errors: RecentErrors) -> None:
    """Time, event, reason and trace; nothing of fields that are not known to be harmless."""
    structlog.get_logger("t").warning(
        Event.REQUEST_FAILED, reason="why", trace_id="ab", partition=1, offset=2, key="secret"
    )
    (entry,) = errors.entries()
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "event": "request.failed",
        "reason": "why",
        "trace_id": "ab",
        "partition": 1,
        "offset": 2,
    }


def test_recent_errors_keep_refusals_and_drop_info(errors: RecentErrors) -> None:
    """A request without outputs is an error for the one who asked, whatever its level."""
    logger = structlog.get_logger("t")
    logger.info(Event.READY)
    logger.info(Event.REQUEST_REFUSED, reason="wrong shape")
    assert [entry["event"] for entry in errors.entries()] == ["request.refused"]


def test_recent_errors_keep_lines_of_libraries(errors: RecentErrors) -> None:
    """Under the name of their logger."""
    logging.getLogger("aiokafka.client").warning("node %s away", 1)
    (entry,) = errors.entries()
    assert (entry["event"], entry["reason"]) == ("aiokafka.client", "node 1 away")


def test_line_that_cannot_be_formatted_fails_nobody_who_logs(
    errors: RecentErrors, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is kept without its arguments. The log reports it, within its rate limit."""
    line = {"msg": "%s of %d", "args": ("one",), "levelno": logging.WARNING}
    errors.handle(logging.makeLogRecord(line))  # pytest's own handler would raise it
    assert [entry["reason"] for entry in errors.entries()] == ["%s of %d"]
    assert capsys.readouterr().err == ""


def test_recent_errors_merge_repeated_error(errors: RecentErrors) -> None:
    """One fault that repeats does not push all other errors out."""
    logger = structlog.get_logger("t")
    for _ in range(3):
        logger.warning(Event.COMMIT_FAILED, reason="away")
    assert [entry.get("times") for entry in errors.entries()] == [3]


def test_recent_errors_drop_oldest_over_limit() -> None:
    """Memory is bounded."""
    ring = RecentErrors(replace(TUNING.runtime, recent_errors=10))
    for number in range(10 + 5):
        ring.emit(logging.LogRecord("t", logging.ERROR, "", 0, {"event": f"e{number}"}, None, None))
    names = [entry["event"] for entry in ring.entries()]
    assert names == [f"e{number}" for number in range(5, 10 + 5)]


def test_recent_errors_stop_listening_after_context() -> None:
    """Leaving takes the ring off the log."""
    ring = RecentErrors()
    with ring.listening():
        assert ring in logging.getLogger().handlers
    assert ring not in logging.getLogger().handlers
