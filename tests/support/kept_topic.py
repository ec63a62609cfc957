"""A control topic that outlasts the commands that change it, without a broker."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from headrace.config import Settings
from headrace.control.topic import ControlTopic
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.protocol.codec.control import encode_control
from headrace.protocol.control import ControlRecord
from headrace.topics import Topic
from tests.support.logs import write_to
from tests.support.pipelines import log_for


class KeptTopic:
    """The records between commands: each command gets an embedded log that has them.

    Attributes:
        settings: name a broker, which nothing connects to.
        records: of the control topic, the oldest first.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.records: list[ControlRecord] = []

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have commands open this log in place of Kafka, whose module they import when needed."""
        stand_in = SimpleNamespace(KafkaLog=lambda *_, **__: self._open())
        monkeypatch.setitem(sys.modules, "headrace.log.kafka.log", stand_in)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[MemoryLog]:
        async with await log_for(self.settings) as log:
            await copy_records(log, self.settings, self.records)
            try:
                yield log
            finally:
                self.records = await ControlTopic(log, self.settings).read()


async def copy_records(log: MemoryLog, settings: Settings, records: list[ControlRecord]) -> None:
    """Write records to the control topic of another log."""
    control = TopicPartition(settings.topic(Topic.CONTROL), 0)
    await write_to(log, control, *map(encode_control, records))
