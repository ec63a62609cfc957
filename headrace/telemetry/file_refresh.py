"""Read the files of certificates and keys at the start of a server, and refresh them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from headrace.access.watched import Watched
from headrace.errors import ConfigurationError
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

T = TypeVar("T")


async def read_first(make: Callable[[], T], timeout_s: float) -> T:
    """Make, on a thread, what reads such files when it is made. A thread that a file system never
    answers keeps the process neither from ending nor from hearing signals.

    Raises:
        ConfigurationError: it was not made in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await run_on_daemon_thread(make)
    except TimeoutError as error:
        raise ConfigurationError(
            "expected to read the files of certificates and keys (tls_cert_file, keys_file and "
            f"such) within {timeout_s:g} s, and their file system did not answer"
        ) from error


@asynccontextmanager
async def refreshing(
    watched: Sequence[Watched[Any]], check_interval_s: float
) -> AsyncIterator[None]:
    """Refresh files at an interval while the context lasts.

    Threads read them, so that a slow file system delays no request, and one that never answers
    keeps neither the process from ending nor the other files from being read.
    """
    tasks = [
        asyncio.create_task(_refresh(each, check_interval_s), name="refresh-files")
        for each in watched
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refresh(watched: Watched[Any], check_interval_s: float) -> None:
    while True:
        await asyncio.sleep(check_interval_s)
        try:
            changed = await run_on_daemon_thread(watched.refresh)
        except (ConfigurationError, RuntimeError) as error:  # the latter: no thread can be started
            log.error(Event.ACCESS_FILES_REJECTED, reason=str(error))
        else:
            if changed:
                log.info(Event.ACCESS_FILES_RELOADED, files=[str(file) for file in watched.files])
