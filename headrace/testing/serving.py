"""All four services and a client of them in one process, on the embedded log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from os import PathLike
from pathlib import Path

from headrace.client import Client, SyncClient
from headrace.config import ModelSettings, Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics


@asynccontextmanager
async def serving(
    repository: str | PathLike[str],
    *,
    settings: Settings | None = None,
    log: MemoryLog | None = None,
) -> AsyncIterator[Client]:
    """Serve the models of a directory while the context lasts, and give a client of them.

    All requests pass the same code as in production, except for Kafka: the log is the embedded
    one, whatever the settings and the environment say.

    Args:
        repository: the directory of the models, as in `models.repository`.
        settings: limits, batching, and so on; by default, the environment over the defaults.
        log: the embedded log to use, whose `faults` the test injects; a new one by default.

    Raises:
        ConfigurationError: the repository cannot be served from.
    """
    chosen = (settings or make_settings({})).model_copy(
        update={"kafka": None, "models": ModelSettings(repository=Path(repository))}
    )
    log = MemoryLog() if log is None else log
    await log.create_topics(list(plan_topics(chosen).values()), replication_factor=1)
    failure: BaseException | None = None
    try:
        async with (
            running(Pipeline(chosen, log)),
            Client(log=log, settings=chosen) as client,
        ):
            try:
                yield client
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised below
                # Kept out of the services' TaskGroup, which would wrap it in an ExceptionGroup.
                failure = error
    except BaseExceptionGroup as group:
        raise _single(group) from None
    if failure is not None:
        raise failure


@contextmanager
def serving_sync(
    repository: str | PathLike[str], *, settings: Settings | None = None
) -> Iterator[SyncClient]:
    """Serve models as `serving` does, for code without an event loop."""
    with SyncClient.of(lambda: serving(repository, settings=settings)) as client:
        yield client


def _single(error: BaseException) -> BaseException:
    """Return the one exception inside nested groups, or the group if there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
