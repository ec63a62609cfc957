"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

# Some tests use ONNX Runtime by itself, which would report to its makers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

pytest_plugins = ["tests.support.broker", "tests.support.command_line", "tests.support.go_tools"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage less often than Python does by default.

    While tests are collected nearly nothing becomes garbage, and what exists afterwards lasts as
    long as the process. Whole collections, which cost most, then come at a fifth of the rate.
    Together they took 8 % of the processor time of unit and flow tests, and take half of that now.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, 5 * old)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix files whose tests mostly wait with those that mostly compute, the longest of each first.

    Each process of `make test` takes the next file when it has none. So the cores are busy all the
    time, and short files at the end let all processes end together. A test on a broker, or a slow
    one, waits, for its time limit at most; others compute, flows and properties for about half a
    second each.
    """
    default_s = float(config.getini("timeout"))
    waits_s: defaultdict[Path, float] = defaultdict(float)
    computes_s: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        if limit or item.get_closest_marker("broker") or item.get_closest_marker("slow"):
            waits_s[item.path] += limit.args[0] if limit else default_s
        else:
            is_long = item.nodeid.startswith(("tests/flow/", "tests/property/"))
            computes_s[item.path] += 0.5 if is_long else 0.02
    for path in waits_s.keys() & computes_s.keys():
        del computes_s[path]
    places: dict[Path, float] = {}
    for lengths_s in (waits_s, computes_s):
        total_s, before_s = sum(lengths_s.values()), 0.0
        for path, length_s in sorted(lengths_s.items(), key=lambda each: -each[1]):
            places[path] = before_s / total_s
            before_s += length_s
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test, or a command that it calls, has set up for logging."""
    root = logging.getLogger()
    levels = {logger: logger.level for logger in (root, *_loggers())}
    yield
    for logger in (root, *_loggers()):
        if logger.level != (level := levels.get(logger, logging.NOTSET)):
            logger.setLevel(level)  # each call empties the caches of all loggers
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of other types
            root.removeHandler(handler)
    structlog.reset_defaults()


class _LostErrors(logging.Handler):
    """Collects what asyncio logs of tasks and futures whose errors nobody has read."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message with its task, and with the error."""
        message = record.getMessage()
        if "never retrieved" in message:
            self.found.append(
                message + logging.Formatter().formatException(record.exc_info or (None, None, None))
            )


@pytest.fixture(autouse=True, scope="module")
def no_error_of_a_task_is_lost() -> Iterator[None]:
    """Fail a file whose tests leave a task with an error that nobody has read.

    asyncio only logs such an error, when the task is collected.
    """
    lost = _LostErrors()
    logger = logging.getLogger("asyncio")
    logger.addHandler(lost)
    yield
    gc.collect(1)  # the young objects: a whole collection takes a tenth of a second
    logger.removeHandler(lost)
    assert not lost.found, "\n".join(lost.found)


@pytest.fixture
def asyncio_logs_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test if asyncio logs anything: an error that nothing has read, or a task that was
    destroyed while it was pending.
    """
    yield
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.records]
    assert [each.getMessage() for each in records if each.name == "asyncio"] == []


_UNNAMED = ("Thread-", "asyncio_", "ThreadPoolExecutor-", "Dummy-")
"""Beginnings of the names of threads that libraries start and keep."""


@pytest.fixture(autouse=True, scope="module")
def no_thread_stays_behind() -> Iterator[None]:
    """Fail a file whose tests leave a thread that runs, as a model that hangs would.

    An interruption that such a thread never sees makes CPython 3.11 loop for ever when a later test
    has calls counted by a profiler.
    """
    before = set(threading.enumerate())
    yield
    left = [each for each in threading.enumerate() if each not in before]
    left = [each for each in left if not each.name.startswith(_UNNAMED)]
    end_s = time.monotonic() + 20.0
    for thread in left:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert not [thread for thread in left if thread.is_alive()]


def _loggers() -> list[logging.Logger]:
    """Return the loggers that exist by now, without the root."""
    known = logging.root.manager.loggerDict.values()
    return [logger for logger in known if isinstance(logger, logging.Logger)]
