"""The form of log lines."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest
import structlog

from headrace.telemetry.logs import Event, configure_logging
from headrace.tuning import TUNING

BURST = TUNING.runtime.log_burst_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Leave the logging of the test run as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_log_lines_are_json() -> None:
    """Without a terminal every line is one JSON object, with what happened, where and when."""
    stream = io.StringIO()
    configure_logging("info", stream)
    structlog.get_logger("headrace.test").info(Event.READY, http_port=8080)
    (line,) = lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "process.ready",
        "level": "info",
        "logger": "headrace.test",
        "http_port": 8080,
        "pid": os.getpid(),
    }


def test_console_log_lines_are_key_and_value() -> None:
    """On a terminal fields are written as key=value."""
    stream = Terminal()
    configure_logging("info", stream)
    structlog.get_logger("headrace.test").info(Event.READY, http_port=8080)
    assert "process.ready" in stream.getvalue()
    assert "{" not in stream.getvalue()


def test_console_log_escapes_control_characters() -> None:
    """In fields, and in the text of an exception."""
    stream = Terminal()
    configure_logging("info", stream)
    logger = structlog.get_logger("headrace.test")
    logger.warning(Event.SEND_FAILED, reason="got\x07that")
    try:
        raise ValueError("got\x1b]0;title\x07")
    except ValueError:
        logger.exception(Event.FAILED)
    assert r"got\x07that" in stream.getvalue()
    assert r"got\x1b]0;title\x07" in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_log_lines_below_level_are_dropped() -> None:
    """Lines below the level are not written."""
    stream = io.StringIO()
    configure_logging("warning", stream)
    structlog.get_logger("headrace.test").info("too quiet")
    assert stream.getvalue() == ""


def test_log_lines_of_libraries_have_same_format() -> None:
    """A warning of aiokafka is JSON too, and its chatter is left out."""
    stream = io.StringIO()
    configure_logging("info", stream)
    logging.getLogger("aiokafka.cluster").info("left out")
    logging.getLogger("aiokafka.cluster").warning("node %s away", 1)
    (line,) = lines(stream)
    assert (line["event"], line["logger"]) == ("node 1 away", "aiokafka.cluster")


def test_debug_lines_of_aiokafka_are_dropped() -> None:
    """Even where debug lines are wanted: at that level it logs the bytes of SASL exchanges."""
    stream = io.StringIO()
    configure_logging("debug", stream)
    logging.getLogger("aiokafka.conn").debug("Request: SaslBytesRequest(payload=hunter2)")
    logging.getLogger("aiokafka.conn").info("connected")
    assert [line["event"] for line in lines(stream)] == ["connected"]


def test_logged_exceptions_hide_local_variables() -> None:
    """A traceback in the log does not give away what a secret variable held."""
    stream = io.StringIO()
    configure_logging("info", stream)
    password = "hunter" + "2"
    try:
        len(password) // 0
    except ZeroDivisionError:
        structlog.get_logger("headrace.test").exception(Event.FAILED)
    assert "ZeroDivisionError" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_flood_of_log_lines_is_limited() -> None:
    """Our own lines and those of libraries alike; the next one says how many were left out."""
    stream = io.StringIO()
    flood = configure_logging("info", stream)
    for _ in range(BURST + 10):
        structlog.get_logger("headrace.test").warning(Event.COMMIT_FAILED)
        logging.getLogger("aiokafka").warning("node %s away", 1)
    assert len(lines(stream)) == 2 * BURST
    assert flood.suppressed == {"commit.failed": 10, "aiokafka: node %s away": 10}


def test_debug_lines_are_never_limited() -> None:
    """The debug level logs every request."""
    stream = io.StringIO()
    configure_logging("debug", stream)
    for _ in range(BURST + 10):
        structlog.get_logger("headrace.test").debug(Event.REQUEST)
    assert len(lines(stream)) == BURST + 10
