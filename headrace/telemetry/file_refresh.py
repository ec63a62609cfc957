"""Refresh the files of certificates and keys while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from headrace.access.watched import Watched
from headrace.errors import ConfigurationError
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)


@asynccontextmanager
async def refreshing(
    watched: Sequence[Watched[Any]], check_interval_s: float
) -> AsyncIterator[None]:
    """Refresh files at an interval while the context lasts.

    A thread reads them, so that a slow file system delays no request, and one that never answers
    does not keep the process from ending.
    """
    if not watched:
        yield
        return
    task = asyncio.create_task(_refresh(watched, check_interval_s), name="refresh-files")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _refresh(watched: Sequence[Watched[Any]], check_interval_s: float) -> None:
    while True:
        await asyncio.sleep(check_interval_s)
        for each in watched:
            try:
                changed = await run_on_daemon_thread(each.refresh)
            except ConfigurationError as error:
                log.error(Event.ACCESS_FILES_REJECTED, reason=str(error))
            else:
                if changed:
                    log.info(Event.ACCESS_FILES_RELOADED, files=[str(file) for file in each.files])
