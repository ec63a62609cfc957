"""Follow the control topic: keep the models of a process at the wanted state.

Two tasks: one reads the topic, and moves labels and defaults at once; the other scans the
repository after each change, which may take long where versions are downloaded. A change that comes
during a scan is followed by another scan, so the last state is reached however many there were. A
version that failed is tried again when its files change, or when a change loads it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from typing import Protocol, Self

import structlog

from headrace.control.topic import ControlReader, ControlTopic
from headrace.errors import ConfigurationError, Fatal
from headrace.log.errors import OffsetOutOfRange
from headrace.models.wanted import Deployment, FormerNames, Wanted, find_requested, fold
from headrace.primitives.backoff import Backoff, Pauses
from headrace.protocol.control import ControlRecord
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ControlTuning

log = structlog.get_logger(__name__)


class ScanResult(Protocol):
    """The part of `headrace.models.registry.Reloaded` that is used here."""

    @property
    def outages(self) -> tuple[str, ...]: ...
    @property
    def faults(self) -> tuple[str, ...]: ...


class FollowingModels(Protocol):
    """The part of `headrace.models.registry.Models` that follows a wanted state."""

    @property
    def outages(self) -> tuple[str, ...]: ...
    def want(self, wanted: Wanted, former: FormerNames) -> None: ...
    async def reload(self, *, retry: Collection[tuple[str, str]]) -> ScanResult: ...


class ControlFollower:
    """Follows the control topic while its context lasts.

    Entering reads the topic to its end, so that the first scan of the repository finds the wanted
    state.

    Args:
        topic: the control topic.
        models: the models of this process.
        tuning: pauses.

    Attributes:
        state: what has been read.
        is_following: False after records that cannot be followed.

    Raises (on entering):
        ConfigurationError: there is no such topic.
        Fatal: its records cannot be followed.
        LogUnavailable: no broker answered.
    """

    def __init__(
        self, topic: ControlTopic, models: FollowingModels, tuning: ControlTuning = TUNING.control
    ) -> None:
        self._topic = topic
        self._models = models
        self._pauses = Pauses(Backoff(tuning.retry_first_s, tuning.retry_max_s))
        self._stack = AsyncExitStack()
        self._reader: ControlReader | None = None
        self._changed = asyncio.Event()
        self._requested: set[tuple[str, str]] = set()
        self.state = Deployment()
        self.is_following = True

    async def __aenter__(self) -> Self:
        await self._topic.require()
        async with AsyncExitStack() as stack:
            self._reader = await stack.enter_async_context(self._topic.open_reader())
            self.state = fold(await self._reader.read_to_end())
            self._models.want(self.state.models, self.state.former)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Follow until cancelled. Call it once the models have been opened.

        If records cannot be followed, the models stay as they are, and the log says why.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scan(), name="control-scan")
            try:
                await self._read()
            except (Fatal, OffsetOutOfRange) as error:
                # Nothing is read from the beginning after `OffsetOutOfRange`: a topic that was made
                # anew is empty, and would unload every model while requests come.
                self.is_following = False
                log.error(
                    Event.CONTROL_UNREADABLE, reason=str(error), generation=self.state.generation
                )

    async def _read(self) -> None:
        assert self._reader is not None
        while True:
            records = await self._reader.poll()
            if not records:
                continue
            try:
                for record in records:
                    self.state = self.state.after(record)
                    self._requested |= find_requested(record)
                    _log_change(record)
            finally:  # also what comes before a record that cannot be followed
                # The names first: they need no scan, and a scan may take long.
                self._models.want(self.state.models, self.state.former)
                self._changed.set()

    async def _scan(self) -> None:
        faults: tuple[str, ...] = ()
        if self._models.outages:  # when the models were opened
            await self._wait_to_try_again()
        while True:
            await self._changed.wait()
            self._changed.clear()
            # A version that failed is not loaded again because something else changes: each try
            # takes time and memory.
            requested, self._requested = self._requested, set()
            try:
                reloaded = await self._models.reload(retry=requested)
            except ConfigurationError as error:
                log.error(Event.MODELS_RELOAD_FAILED, reason=str(error))
            else:
                for fault in reloaded.faults:
                    if fault not in faults:
                        log.error(Event.MODEL_FAILED, reason=fault)
                faults = reloaded.faults
                for reason in reloaded.outages:
                    log.warning(Event.STORE_UNAVAILABLE, reason=reason)
                if not reloaded.outages:
                    self._pauses.reset()
                    continue
            self._requested |= requested
            await self._wait_to_try_again()

    async def _wait_to_try_again(self) -> None:
        """Wait until the repository is to be read again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pauses.next_s()):
                await self._changed.wait()  # a change may be about another model
        self._changed.set()


def _log_change(record: ControlRecord) -> None:
    log.info(
        Event.CONTROL_CHANGED,
        generation=record.generation,
        action=record.action,
        who=record.who,
        why=record.why,
        models=sorted(record.after),
    )
