"""Files of a gateway that are read anew when they change: certificates, and the keys of callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """What some files say. Whoever needs it asks each time; the files are looked at once in an
    interval.

    While they cannot be used, such as between the writing of a certificate and that of its key,
    what they said before stays in use. Any thread may ask: those of gRPC do.

    Args:
        files: the files.
        load: reads them; raises `ConfigurationError` if they cannot be used.
        check_interval_s: between two looks.
        now_s: monotonic clock.

    Raises:
        ConfigurationError: the files cannot be used.
    """

    def __init__(
        self,
        files: Sequence[Path],
        load: Callable[[], T],
        check_interval_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._load = load
        self._check_interval_s = check_interval_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._looked_s = now_s()
        self._seen = self._look()
        self._current = load()

    def current(self) -> T:
        """Return what the files say."""
        with self._lock:
            now_s = self._now_s()
            if now_s - self._looked_s >= self._check_interval_s:
                self._looked_s = now_s
                self._reload()
            return self._current

    def _reload(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._current = self._load()
        except ConfigurationError as error:
            log.error(Event.GATEWAY_FILES_REJECTED, reason=str(error))
        else:
            log.info(Event.GATEWAY_FILES_RELOADED, files=[str(file) for file in self._files])

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return what shows a change: a file that was replaced has another inode."""
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                stat = file.stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found


def read_file(setting: str, file: Path) -> bytes:
    """Return the bytes of a file that a setting of `gateway` names. Raises `ConfigurationError`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"gateway.{setting}: {file}: expected a file that can be read: {error.strerror}"
        ) from error
