"""Logs: event names and fields, JSON for machines, `key=value` for a terminal.

Lines of other libraries (aiokafka, asyncio) take the same form. An event's name is a constant
here, so that it can be searched for and alarmed on; what differs from case to case is a field.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor


class Event(StrEnum):
    """The names of log events that more than one module, or an operator's alarm, relies on."""

    STARTING = "process.starting"
    READY = "process.ready"
    DRAINING = "process.draining"
    STOPPED = "process.stopped"
    FAILED = "process.failed"


_LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_CHATTY = ("aiokafka", "aiohttp.access", "asyncio")
"""Loggers whose info lines repeat what Headrace's own events and metrics say."""


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Set up logging for the process; call it once, where the process starts.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        stream: where the lines go; standard error when not given.

    Raises:
        KeyError: on any other level.
    """
    stream = stream if stream is not None else sys.stderr
    threshold = _LEVELS[level]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(for_people=stream.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(
            threshold if threshold == logging.DEBUG else max(threshold, logging.WARNING)
        )


def _rendering(*, for_people: bool) -> list[Processor]:
    if for_people:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    # Local variables would put payloads and credentials into the log.
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]
