"""The last warnings and errors of a process, kept for `/status`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, RuntimeTuning

_ANSWERED_WITH_ERRORS = frozenset({Event.REQUEST_EXPIRED, Event.REQUEST_REFUSED})
_TOLD = ("topic", "partition", "offset", "model", "version", "code", "stage", "suppressed", "more")


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
        """Called by `logging`, from any thread."""
        line: Mapping[str, Any]
        if isinstance(record.msg, dict):
            line = record.msg
            reason = line.get("reason", "")
        else:
            line, reason = {"event": record.name}, record.getMessage()
        event = str(line.get("event", ""))
        if record.levelno < logging.WARNING and event not in _ANSWERED_WITH_ERRORS:
            return
        entry = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "event": event,
            "reason": str(reason)[: self._reason_characters],
            "trace_id": line.get("trace_id"),
            **{name: line[name] for name in _TOLD if name in line},
        }
        if self._ring and _is_same(self._ring[-1], entry):
            entry["times"] = self._ring.pop().get("times", 1) + 1
        self._ring.append(entry)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("event", "reason", *_TOLD[:3]))


def _utc(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
