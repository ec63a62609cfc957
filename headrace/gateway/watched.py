"""Files of a gateway that are read anew when they change: certificates, and the keys of callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from headrace.errors import ConfigurationError
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """The content of some files, loaded again by `refresh` when they have changed.

    While they cannot be used, such as between the writing of a certificate and that of its key,
    the former content stays in use.

    Args:
        files: the files.
        load: reads them; raises `ConfigurationError` if they cannot be used.

    Raises:
        ConfigurationError: the files cannot be used.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        self._files = files
        self._load = load
        # Looked at before it is read: a change in between is found by the next look.
        self._seen = self._look()
        self._current = load()

    def current(self) -> T:
        """Return the content. Reads no file; any thread may call this, and those of gRPC do."""
        return self._current

    def refresh(self) -> None:
        """Load the files again if they have changed. Blocks while it reads them."""
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen  # before it is read, as at the start
        try:
            self._current = self._load()
        except ConfigurationError as error:
            log.error(Event.GATEWAY_FILES_REJECTED, reason=str(error))
        except Exception as error:  # noqa: BLE001 - a file that breaks its parser ends no gateway
            reason = f"{', '.join(map(str, self._files))}: {error!r}"
            log.error(Event.GATEWAY_FILES_REJECTED, reason=reason)
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


@asynccontextmanager
async def refreshing(
    watched: Sequence[Watched[Any]], check_interval_s: float
) -> AsyncIterator[None]:
    """Refresh files at an interval while the context lasts.

    A thread reads them, so that a slow file system delays no request.
    """
    if not watched:
        yield
        return
    task = asyncio.create_task(_refresh(watched, check_interval_s), name="gateway-files")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _refresh(watched: Sequence[Watched[Any]], check_interval_s: float) -> None:
    while True:
        await asyncio.sleep(check_interval_s)
        for each in watched:
            await asyncio.to_thread(each.refresh)


def read_file(setting: str, file: Path) -> bytes:
    """Return the bytes of a file that a setting of `gateway` names. Raises `ConfigurationError`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"gateway.{setting}: {file}: expected a file that can be read: {error.strerror}"
        ) from error
