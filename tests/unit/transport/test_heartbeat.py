"""An executor's announcements: what it can run, what it reads, and which batches have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from headrace.log.memory import MemoryLog
from headrace.log.port import Record, TopicInfo, TopicPartition
from headrace.models.version import ModelVersion, State
from headrace.protocol.codec.events import decode_event
from headrace.protocol.events import Completion, ExecutorEvent, HostedModel, UnreadyVersion
from headrace.protocol.messages import Batch, BatchSummary, Failure, Request
from headrace.transport.heartbeat import ControlHeartbeat, ExecutorHeartbeat, ExecutorIdentity
from headrace.tuning import TUNING, TransportTuning
from tests.support.conditions import eventually
from tests.support.services import digits_models
from tests.support.work import make_request

EVENTS = TopicPartition("events", 0)


class HeartbeatHarness:
    """An announcer at work, and what it has said."""

    def __init__(
        self, announcer: ExecutorHeartbeat, partitions: list[int], version: ModelVersion
    ) -> None:
        self.announcer = announcer
        self.version = version
        self.partitions = partitions
        self.said: list[ExecutorEvent] = []

    def completions(self) -> list[Completion]:
        """All that were announced."""
        return [each for event in self.said for each in event.completions]

    async def completed(self, count: int) -> list[Completion]:
        """Wait until so many batches were announced as ended."""
        await eventually(lambda: len(self.completions()) >= count)
        return self.completions()


@asynccontextmanager
async def announcing(
    repository: Path, tuning: TransportTuning = TUNING.transport
) -> AsyncIterator[HeartbeatHarness]:
    """An announcer with one ready model, until the end of the context."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("events", 1, {})], replication_factor=1)
    models = digits_models(repository)
    partitions: list[int] = []
    async with log.producer() as producer, log.reader([EVENTS]) as reader:
        announcer = ExecutorHeartbeat(
            producer,
            TopicPartition("events", 1),
            ExecutorIdentity("me", 10.0),
            lambda: list(partitions),
            lambda: models.catalog.versions(State.READY),
            tuning,
        )
        bench = HeartbeatHarness(announcer, partitions, models.catalog.lookup("digits"))

        async def listen() -> None:
            while not (bench.said and bench.said[-1].leaving):
                for records in (await reader.poll(0.05, 100)).values():
                    bench.said += [decode_event(record.value or b"") for record in records]

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(announcer.run())
            tasks.create_task(listen())
            yield bench
            announcer.close()


def batch_of(count: int, batch_id: str = "b-1") -> Batch:
    """A batch that has just come."""
    return Batch(batch_id, [make_request() for _ in range(count)], "full")


def ran(requests: list[Request], *, rows: int, compute_us: int) -> list[Request]:
    """Requests after a run together."""
    for request in requests:
        request.batch = BatchSummary(compute_us=compute_us, rows=rows)
    return requests


async def test_heartbeat_carries_identity_and_models(tmp_path: Path) -> None:
    """The announcement has its timeout, after which silence means that the executor is gone."""
    async with announcing(tmp_path) as bench:
        await eventually(lambda: bench.said)
    first = bench.said[0]
    assert (first.executor, first.silent_after_ms) == ("me", 10_000)
    assert first.models == [HostedModel(name="digits", version="1", instances=1, max_batch_size=32)]


async def test_heartbeat_carries_memory_of_all_instances_by_device(tmp_path: Path) -> None:
    """The heartbeat carries what was measured when they were loaded."""
    async with announcing(tmp_path) as bench:
        version = bench.version
        version.memory_bytes = {"host": [1000, 200], "cuda:0": [5000, 5000]}
        await eventually(lambda: bench.said and bench.said[-1].models[0].memory_bytes)
    assert bench.said[-1].models[0].memory_bytes == {"host": 1200, "cuda:0": 10000}


async def test_heartbeat_is_sent_when_partitions_change(tmp_path: Path) -> None:
    """The announcement does not wait for the next interval."""
    async with announcing(tmp_path, replace(TUNING.transport, heartbeat_s=3600.0)) as bench:
        await eventually(lambda: bench.said)
        bench.partitions += [0, 3]
        await eventually(lambda: bench.said[-1].partitions == [0, 3])


async def test_stopping_executor_announces_leaving(tmp_path: Path) -> None:
    """A running executor does not announce it."""
    async with announcing(tmp_path) as bench:
        await eventually(lambda: bench.said)
    assert [event.leaving for event in bench.said].index(True) == len(bench.said) - 1


async def test_completion_of_whole_batch_carries_run_time(tmp_path: Path) -> None:
    """Batchers learn run times from it."""
    async with announcing(tmp_path) as bench:
        batch = batch_of(3)
        bench.announcer.received(batch)
        bench.announcer.finished("b-1", ran(batch.requests, rows=3, compute_us=120))
        (done,) = await bench.completed(1)
    assert (done.batch_id, done.model, done.version) == ("b-1", "digits", "1")
    assert (done.shape_class, done.rows, done.compute_us) == ([64], 3, 120)


async def test_completion_of_halved_batch_follows_last_part(tmp_path: Path) -> None:
    """The completion is sent once and without a time, since the batch did not run as one."""
    async with announcing(tmp_path) as bench:
        batch = batch_of(3)
        first, second, third = batch.requests
        bench.announcer.received(batch)
        bench.announcer.finished("b-1.0", ran([first], rows=1, compute_us=50))
        bench.announcer.finished("b-1.1.0", ran([second], rows=1, compute_us=50))
        third.fail(Failure("MODEL_FAILED", "poison", "executor"))
        bench.announcer.finished("b-1.1.1", [third])
        bench.announcer.received(batch_of(1, "b-2"))
        bench.announcer.finished("b-2", ran(batch_of(1).requests, rows=1, compute_us=50))
        done = await bench.completed(2)
    assert [each.batch_id for each in done] == ["b-1", "b-2"]
    assert done[0].compute_us == 0


async def test_completion_of_partial_batch_carries_its_own_id(tmp_path: Path) -> None:
    """A batch that was too large for a record travels as its single requests."""
    async with announcing(tmp_path) as bench:
        part = batch_of(1, "b-1.7")
        bench.announcer.received(part)
        bench.announcer.finished("b-1.7", ran(part.requests, rows=1, compute_us=50))
        (done,) = await bench.completed(1)
    assert done.batch_id == "b-1.7"


async def test_requests_without_announced_batch_send_no_completion(tmp_path: Path) -> None:
    """There is nobody to tell of them."""
    async with announcing(tmp_path) as bench:
        bench.announcer.finished("b-9.0", [make_request()])
        await eventually(lambda: bench.said)
    assert bench.completions() == []


async def test_completions_of_short_runs_are_sent_together(tmp_path: Path) -> None:
    """An announcement for many batches, and none of them late."""
    async with announcing(tmp_path) as bench:
        await eventually(lambda: bench.said)
        batches = [batch_of(1, f"b-{number}") for number in range(8)]
        for batch in batches:
            bench.announcer.received(batch)
        for batch in batches:
            bench.announcer.finished(batch.batch_id, ran(batch.requests, rows=1, compute_us=50))
        await bench.completed(8)
    assert [len(event.completions) for event in bench.said if event.completions] == [8]


async def test_completion_of_long_run_is_sent_at_once(tmp_path: Path) -> None:
    """Its instance waits for what the batcher sends next."""
    tuning = replace(TUNING.transport, completion_delay_s=0.0, heartbeat_s=3600.0)
    async with announcing(tmp_path, tuning) as bench:
        await eventually(lambda: bench.said)
        batch = batch_of(1)
        bench.announcer.received(batch)
        bench.announcer.finished("b-1", ran(batch.requests, rows=1, compute_us=50))
        await bench.completed(1)  # long before the next heartbeat


async def test_batch_time_counts_from_previous_completion(
    tmp_path: Path,
) -> None:
    """Time that the batch waited before is not counted."""
    async with announcing(tmp_path) as bench:
        first, second = batch_of(1, "b-1"), batch_of(1, "b-2")
        bench.announcer.received(first)
        bench.announcer.received(second)
        bench.partitions.append(1)
        await eventually(lambda: bench.said and bench.said[-1].partitions == [1])
        bench.announcer.finished("b-1", ran(first.requests, rows=1, compute_us=50))
        bench.announcer.finished("b-2", ran(second.requests, rows=1, compute_us=50))
        one, two = await bench.completed(2)
    assert one.busy_us == one.stay_us
    assert two.busy_us < two.stay_us // 2


async def test_announced_versions_are_failed_or_under_way_whatever_their_reasons_say() -> None:
    """The announcement carries the state beside the text, which may be an error of model code."""
    unready = [
        UnreadyVersion("digits", "1", "a hook ended with: loading", is_under_way=False),
        UnreadyVersion("digits", "2", "loading again, since version 1 failed", is_under_way=True),
        UnreadyVersion("digits", "3", "no ONNX model", is_rejected=True),
    ]
    log = MemoryLog()
    await log.create_topics([TopicInfo("events", 1, {})], replication_factor=1)
    async with (
        log.producer() as producer,
        log.reader([EVENTS]) as reader,
        asyncio.TaskGroup() as tasks,
    ):
        heartbeat = ControlHeartbeat(
            producer, TopicPartition("events", 1), "me", list, lambda: (1, unready, False)
        )
        announcing = tasks.create_task(heartbeat.run())
        polled: Mapping[TopicPartition, Sequence[Record]] = {}
        while not polled:
            polled = await reader.poll(0.05, 1)
        announcing.cancel()
    event = decode_event(polled[EVENTS][0].value or b"")
    assert event.unready_versions() == unready
    assert not event.is_following
