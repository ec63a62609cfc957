"""Processes of a deployment, as they announce on `events` how far they have followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple

from headrace.config import Settings
from headrace.errors import ConfigurationError, Rejected
from headrace.log.port import Consumer, Log, TopicPartition
from headrace.protocol.codec.events import decode_event
from headrace.protocol.events import NOT_CONTROLLED, UnreadyVersion
from headrace.topics import Topic
from headrace.tuning import TUNING, ControlTuning


class ProcessReport(NamedTuple):
    """One process.

    Attributes:
        generation: the last change that it has read.
        ready: versions that are ready, as `name/version`.
        unready: wanted versions that are not.
        memory_bytes: measured memory of ready versions, by `name/version` and device.
        is_following: False if it has stopped following.
        stages: those that it has.
    """

    generation: int
    ready: tuple[str, ...]
    unready: tuple[UnreadyVersion, ...]
    memory_bytes: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    is_following: bool = True
    stages: tuple[str, ...] = ()

    def has_followed(
        self, generation: int, awaited: Collection[tuple[str, str]] | None = None
    ) -> bool:
        """Return whether it is at the generation, with these versions ready, by model and number;
        None stands for all that are wanted.
        """
        has_read = self.is_following and self.generation >= generation
        return has_read and not self._missing(awaited)

    def has_ended(
        self, generation: int, awaited: Collection[tuple[str, str]] | None = None
    ) -> bool:
        """Return whether it has followed the generation as far as it can: what is missing of these
        versions has failed, or it follows no more.
        """
        if not self.is_following:
            return True
        missing = self._missing(awaited)
        return self.generation >= generation and not any(each.is_under_way for each in missing)

    def _missing(self, awaited: Collection[tuple[str, str]] | None) -> list[UnreadyVersion]:
        return [
            each for each in self.unready if awaited is None or (each.name, each.version) in awaited
        ]


class Processes:
    """The processes heard since `open_processes`.

    Attributes:
        reports: the last one of each process that is not silent, by its name.
    """

    def __init__(self, reader: Consumer, tuning: ControlTuning = TUNING.control) -> None:
        self._reader = reader
        self._tuning = tuning
        self.reports: dict[str, ProcessReport] = {}
        self._heard_s: dict[str, float] = {}
        self._since_s = asyncio.get_running_loop().time()

    async def listen(self, until: Callable[[], bool] = lambda: True, limit_s: float = 0.0) -> bool:
        """Listen until each process must have been heard, and then until a condition holds.

        Args:
            until: the condition.
            limit_s: how long to listen for it at most.

        Returns:
            False if it did not hold within the limit.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        heard_s = self._since_s + self._tuning.listen_s
        deadline_s = max(heard_s, start_s + limit_s)
        while True:
            polled = await self._reader.poll(self._tuning.poll_s, self._tuning.poll_records)
            for records in polled.values():
                for record in records:
                    self._apply(record.value, loop.time())
            now_s = loop.time()
            self._forget_silent(now_s)
            if now_s >= heard_s and until():
                return True
            if now_s >= deadline_s:
                return False

    def _forget_silent(self, now_s: float) -> None:
        """Forget processes that have ended; each that runs is heard every second."""
        for name, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > self._tuning.silent_s:
                del self._heard_s[name], self.reports[name]

    def _apply(self, value: bytes | None, now_s: float) -> None:
        try:
            event = decode_event(value or b"")
        except Rejected:
            return  # batchers log it
        if event.generation == NOT_CONTROLLED:
            return
        ready = tuple(f"{model.name}/{model.version}" for model in event.models)
        memory_bytes = {
            f"{model.name}/{model.version}": model.memory_bytes
            for model in event.models
            if model.memory_bytes
        }
        unready = tuple(event.unready_versions())
        self.reports[event.executor] = ProcessReport(
            event.generation,
            ready,
            unready,
            memory_bytes,
            event.is_following,
            tuple(event.stages),
        )
        self._heard_s[event.executor] = now_s


@asynccontextmanager
async def open_processes(
    log: Log, settings: Settings, tuning: ControlTuning = TUNING.control
) -> AsyncIterator[Processes]:
    """Listen to the processes from now on.

    Raises:
        ConfigurationError: there is no topic of events.
        LogUnavailable: no broker answered.
    """
    name = settings.topic(Topic.EVENTS)
    info = (await log.describe_topics([name]))[name]
    if info is None:
        raise ConfigurationError(f"topic {name}: expected it to exist; `headrace topics create`")
    async with log.reader(
        [TopicPartition(name, each) for each in range(info.partitions)]
    ) as reader:
        yield Processes(reader, tuning)
