"""Answers in the order of their source offsets, through all that lets requests overtake."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.codec import encode_request
from headrace.config import Settings, make_settings
from headrace.flow import sealing
from headrace.flow.lifecycle import Stop
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import SealFault
from headrace.log.port import NewRecord, TopicPartition
from headrace.pipeline import Pipeline
from headrace.services.responder import sealed
from headrace.topics import STAGES, Stage
from tests.support.conditions import eventually
from tests.support.models import add_version, embedding
from tests.support.pipelines import PARTITIONS, Grouping, log_for, serving
from tests.support.visible import source_of, status_of, visible

FUSED: Grouping = [STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
KEYS = [b"one", b"two", b"three", b"four", b"five", None]

pytestmark = [
    pytest.mark.parametrize("form", [FUSED, THREE], ids=["fused", "three"]),
    pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"]),
    pytest.mark.parametrize("order", ["partition", "key"]),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr(sealing, "RETRY_S", 0.01)
    monkeypatch.setattr(sealed, "RETRY_S", 0.01)


@pytest.fixture
def settings(tmp_path: Path, guarantee: str, order: str) -> Settings:
    """With a model that fails on some values, so that its batches are halved."""
    add_version(tmp_path, "embedding", 1, embedding())
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": {"guarantee": guarantee, "order": order},
        }
    )


class Mixed:
    """A caller whose requests end in all ways: well, late, refused, and at fault in a batch."""

    def __init__(self, settings: Settings, log: MemoryLog) -> None:
        self._log = log
        self.settings = settings
        self._random = random.Random(7)
        self.keys: dict[tuple[int, int], bytes | None] = {}
        self.expected: dict[tuple[int, int], str] = {}

    async def send(self, count: int) -> None:
        """So many, to all partitions in turn, with one of a few keys or none."""
        async with self._log.producer() as producer:
            for _ in range(count):
                number = len(self.keys)
                place = (number % PARTITIONS, number // PARTITIONS)
                record, self.expected[place] = self._record()
                self.keys[place] = record.key
                target = TopicPartition("headrace.requests", place[0])
                for run in await producer.send(target, [record]):
                    await run.acknowledged

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
            for run in await producer.send(TopicPartition("headrace.requests", 0), records):
                await run.acknowledged

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

        await eventually(enough, recheck_s=0.05, deadline_s=30)

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


async def test_none_overtakes_another(settings: Settings, form: Grouping) -> None:
    """What is refused or late ends at once, and a failed batch runs in halves."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form):
        await caller.send(400)
        await caller.all_answered()

    await caller.check()


async def test_nor_when_partitions_change_hands(settings: Settings, form: Grouping) -> None:
    """Another process comes and goes, under load."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form):
        await caller.send(150)
        async with serving(settings, log, form):
            await caller.send(150)
        await caller.send(150)
        log.faults.force_rebalance("headrace")
        await caller.all_answered()

    await caller.check()


async def test_nor_when_a_process_dies(settings: Settings, form: Grouping) -> None:
    """Whoever follows goes on in order, from what is committed."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    dying = [asyncio.create_task(Pipeline(settings, log, each).run(Stop())) for each in form]
    await caller.send(300)
    await eventually(caller.answers)
    for each in dying:
        each.cancel()
    await asyncio.wait(dying)
    async with serving(settings, log, form):
        await caller.send(100)
        await caller.all_answered()

    await caller.check()


async def test_nor_when_sealing_or_sending_fails(settings: Settings, form: Grouping) -> None:
    """What is tried again goes before what comes after it."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form):
        await caller.send(100)
        log.faults.spoil_seals(*[SealFault.UNKNOWN_AND_OPEN, SealFault.UNKNOWN_BUT_COMMITTED] * 3)
        await caller.send(100)
        log.faults.take_down()
        await asyncio.sleep(0)
        log.faults.bring_back()
        await caller.send(100)
        await caller.all_answered()

    await caller.check()


async def test_what_is_held_does_not_keep_out_what_it_waits_for(
    settings: Settings, form: Grouping, tmp_path: Path
) -> None:
    """One request takes its time, and the answers behind it are more than the budget."""
    add_version(tmp_path, "late", 1, embedding(), "max_queue_delay_ms = 1500\n")
    limits = {"max_in_flight_bytes": 1024 * 1024}
    settings = Settings.model_validate(settings.model_dump() | {"limits": limits})
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form):
        await caller.send_one("late", b"one")
        await caller.send_more(3000, b"one")
        await caller.all_answered()

    await caller.check()
