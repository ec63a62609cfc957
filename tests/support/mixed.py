"""A caller whose requests end in all ways, and who checks the order of their answers."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_request
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS
from tests.support.visible import source_of, status_of, visible

KEYS = [b"one", b"two", b"three", b"four", b"five", None]


class Mixed:
    """A caller whose requests end in all ways: well, late, refused, and at fault in a batch."""

    def __init__(self, settings: Settings, log: MemoryLog) -> None:
        self._log = log
        self.settings = settings
        self._random = random.Random(7)
        self.keys: dict[tuple[int, int], bytes | None] = {}
        self.expected: dict[tuple[int, int], str] = {}

    async def send(self, count: int) -> None:
        """Send so many requests to all partitions in turn, with one of a few keys or none."""
        async with self._log.producer() as producer:
            for _ in range(count):
                number = len(self.keys)
                place = (number % PARTITIONS, number // PARTITIONS)
                record, self.expected[place] = self._record()
                self.keys[place] = record.key
                target = TopicPartition("headrace.requests", place[0])
                for sent in await producer.send(target, [record]):
                    await sent.acknowledged

    async def send_one(self, model: str, key: bytes) -> None:
        """A request of this model, to the first partition."""
        await self._write([model], key)

    async def send_more(self, count: int, key: bytes) -> None:
        """Requests that end well and soon, to the first partition."""
        await self._write(["embedding"] * count, key)

    async def _write(self, models: list[str], key: bytes) -> None:
        records = []
        for model in models:
            value = encode_request(
                "application/msgpack", model, {"index": np.array([[1]], np.int64)}
            )
            place = (0, len(self.keys))
            self.keys[place], self.expected[place] = key, "ok"
            records.append(NewRecord(key, value))
        async with self._log.producer() as producer:
            for sent in await producer.send(TopicPartition("headrace.requests", 0), records):
                await sent.acknowledged

    def _record(self) -> tuple[NewRecord, str]:
        kind = self._random.choices(["ok", "late", "refused", "failed"], [80, 5, 5, 10])[0]
        index = np.array([[99 if kind == "failed" else self._random.randrange(8)]], np.int64)
        model = "missing" if kind == "refused" else "embedding"
        value = encode_request("application/msgpack", model, {"index": index})
        headers = [("x-deadline-ms", b"1")] if kind == "late" else []
        status = {
            "ok": "ok",
            "late": "DEADLINE_EXCEEDED",
            "refused": "UNKNOWN_MODEL",
            "failed": "MODEL_FAILED",
        }[kind]
        return NewRecord(self._random.choice(KEYS), value, headers), status

    async def all_answered(self) -> None:
        """Wait until each request has an answer."""

        async def enough() -> bool:
            return len(set(map(source_of, await self.answers()))) >= len(self.keys)

        await eventually(enough, recheck_s=0.05)

    async def answers(self) -> list[Any]:
        return list(await visible(self._log, "headrace.responses"))

    async def check(self) -> None:
        """Each has the answer that it must have, and none has overtaken another."""
        answers = await self.answers()
        assert {source_of(each): status_of(each) for each in answers} == self.expected
        if self.settings.delivery.guarantee == "exactly_once":
            assert Counter(map(source_of, answers)) == Counter(list(self.expected))
        lines: dict[Any, list[int]] = defaultdict(list)
        for partition, offset in dict.fromkeys(map(source_of, answers)):  # the first one counts
            key = self.keys[partition, offset]
            if self.settings.delivery.order == "partition":
                lines[partition].append(offset)
            elif key is not None:
                lines[partition, key].append(offset)
        for line, offsets in lines.items():
            assert offsets == sorted(offsets), line
