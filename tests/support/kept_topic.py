"""A control topic that outlasts the commands that change it, without a broker."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import Settings
from headrace.control.topic import ControlTopic
from headrace.log.memory import MemoryLog
from headrace.log.port import Consumer, Record, TopicPartition
from headrace.protocol.codec.control import encode_control
from headrace.protocol.codec.events import encode_event
from headrace.protocol.control import ControlRecord
from headrace.protocol.events import ExecutorEvent
from headrace.topics import Topic
from tests.support.logs import write_to
from tests.support.pipelines import log_for


class KeptTopic:
    """The records between commands: each command gets an embedded log that has them.

    Attributes:
        settings: name a broker, which nothing connects to.
        records: of the control topic, the oldest first.
        announcements: of processes, which a command hears that listens: one group at each poll.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.records: list[ControlRecord] = []
        self.announcements: deque[list[ExecutorEvent]] = deque()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have commands open this log in place of Kafka, whose module they import when needed."""
        stand_in = SimpleNamespace(KafkaLog=lambda *_, **__: self._open())
        monkeypatch.setitem(sys.modules, "headrace.log.kafka.log", stand_in)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[_AnnouncingLog]:
        async with await log_for(self.settings) as log:
            await copy_records(log, self.settings, self.records)
            try:
                yield _AnnouncingLog(log, self.settings.topic(Topic.EVENTS), self.announcements)
            finally:
                self.records = await ControlTopic(log, self.settings).read()


class _AnnouncingLog:
    """A log on which processes announce themselves whenever a reader of `events` polls.

    So a reader that polls again has already seen the announcements before.
    """

    def __init__(
        self, log: MemoryLog, events: str, announcements: deque[list[ExecutorEvent]]
    ) -> None:
        self._log = log
        self._events = TopicPartition(events, 0)
        self._announcements = announcements

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    @asynccontextmanager
    async def reader(self, partitions: Sequence[TopicPartition]) -> AsyncIterator[Consumer]:
        async with self._log.reader(partitions) as reader:
            yield self._announcing(reader) if self._events in partitions else reader

    def _announcing(self, reader: Consumer) -> Any:
        async def poll(*limits: Any) -> Mapping[TopicPartition, Sequence[Record]]:
            group = self._announcements.popleft() if self._announcements else []
            await write_to(self._log, self._events, *map(encode_event, group))
            return await reader.poll(*limits)

        return SimpleNamespace(poll=poll)


async def copy_records(log: MemoryLog, settings: Settings, records: list[ControlRecord]) -> None:
    """Write records to the control topic of another log."""
    control = TopicPartition(settings.topic(Topic.CONTROL), 0)
    await write_to(log, control, *map(encode_control, records))
