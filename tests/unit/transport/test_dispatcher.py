"""Batches go to executors that are free, and no more than they have room for."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.log.memory import MemoryLog
from headrace.log.port import Consumer, TopicInfo, TopicPartition
from headrace.models.registry import Models
from headrace.protocol.codec import decode_batch
from headrace.protocol.codec.events import encode_event
from headrace.protocol.events import Completion, ExecutorEvent, HostedModel
from headrace.protocol.messages import Batch
from headrace.telemetry.metrics import Metrics
from headrace.transport.batch_io import BatchWriter
from headrace.transport.channels import BatchQueue
from headrace.transport.dispatcher import BatchDispatcher
from headrace.transport.heartbeat import ExecutorEventReader
from headrace.tuning import TUNING, TransportTuning
from tests.support.conditions import eventually
from tests.support.logs import write_to
from tests.support.services import digits_models
from tests.support.work import TestReceipt, Tray, make_request, requests_alive

PARTITIONS = 4
BATCHES = [TopicPartition("batches", number) for number in range(PARTITIONS)]
EVENTS = TopicPartition("events", 0)
RUN_US = 10_000_000
"""Longer than any way there and back, so that two batches are under way at a time."""
SILENT_AFTER_MS = 60_000
"""Longer than `eventually` waits: nobody is forgotten meanwhile."""
DIGITS = ("digits", "1")
PIXELS = {"pixels": np.zeros((1, 64), np.float32)}


class DispatcherHarness:
    """A dispatcher of endless batches of one model, and what it writes."""

    def __init__(self, log: MemoryLog, models: Models, reader: Consumer, metrics: Metrics) -> None:
        self.log = log
        self._reader = reader
        self._registry = metrics.registry
        self.models = models
        self.left = 1000
        self.batch_queue: BatchQueue[tuple[str, str], Batch] = BatchQueue(self._supply)
        self.written: dict[str, int] = {}

    def _supply(self, key: tuple[str, str] | None, _ask: object) -> Batch | None:
        if not self.left or key not in (None, DIGITS):
            return None
        self.left -= 1
        name, version = DIGITS
        request = make_request(name, version=version, inputs=PIXELS)
        return Batch(f"b-{self.left}", [request], "idle")

    async def announce(
        self,
        executor: str,
        *partitions: int,
        model: str = "digits",
        instances: int = 1,
        ended: list[str] | None = None,
        leaving: bool = False,
        rows: int = 4,
    ) -> None:
        """Have an executor speak, and wait until it was heard."""
        hosted = HostedModel(name=model, version="1", instances=instances, max_batch_size=7)
        event = ExecutorEvent(
            executor=executor,
            silent_after_ms=SILENT_AFTER_MS,
            partitions=list(partitions),
            models=[hosted],
            completions=[
                Completion(
                    batch_id=batch_id,
                    model="digits",
                    version="1",
                    shape_class=[64],
                    rows=rows,
                    compute_us=RUN_US,
                    busy_us=RUN_US,
                )
                for batch_id in ended or []
            ],
            leaving=leaving,
        )
        await write_to(self.log, EVENTS, encode_event(event))

    async def listening(self) -> None:
        """Wait until the dispatcher reads the topic, which it does from its end."""

        async def is_heard() -> bool:
            await self.announce("first", 0)
            return self.known() == 1

        await eventually(is_heard)
        await self.announce("first", leaving=True)
        await eventually(lambda: self.known() == 0)

    def known(self) -> float | None:
        """Number of executors that the dispatcher knows."""
        return self._registry.get_sample_value("headrace_known_executors")

    async def look(self) -> dict[str, int]:
        """The batches that are there, with their partitions."""
        for partition, records in (await self._reader.poll(0.05, 1000)).items():
            for record in records:
                batch = decode_batch(record.value or b"", TestReceipt())
                self.written[batch.batch_id] = partition.partition
        return self.written

    async def settles(self, count: int) -> dict[str, int]:
        """Wait until so many batches were written, and see that no more come."""

        async def there() -> bool:
            return len(await self.look()) >= count

        await eventually(there)
        for _ in range(3):
            await self.look()
        assert len(self.written) == count
        return self.written


@asynccontextmanager
async def running(
    repository: Path, tuning: TransportTuning = TUNING.transport
) -> AsyncIterator[DispatcherHarness]:
    """A running dispatcher, until the end of the context."""
    log = MemoryLog()
    topics = [TopicInfo("batches", PARTITIONS, {}), TopicInfo("events", 1, {})]
    await log.create_topics(topics, replication_factor=1)
    metrics = Metrics(CollectorRegistry())
    models = digits_models(repository)
    async with log.producer() as producer, log.reader(BATCHES) as reader:
        bench = DispatcherHarness(log, models, reader, metrics)
        bench.left = 0  # nobody is known yet
        writer = BatchWriter(producer, TopicPartition("batches", PARTITIONS), Tray(), metrics)
        hearing = ExecutorEventReader(log, TopicPartition("events", 1))
        dispatcher = BatchDispatcher(bench.batch_queue, writer, models, hearing, metrics, tuning)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            await bench.listening()
            yield bench
            bench.left = 0
            bench.batch_queue.close()


async def heard(bench: DispatcherHarness, count: int) -> None:
    """Wait until so many executors are known, then let batches come."""
    await eventually(lambda: bench.known() == count)
    bench.left = 1000
    bench.batch_queue.notify()


async def test_dispatcher_sends_two_batches_for_each_instance(tmp_path: Path) -> None:
    """No more until one of them has ended."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 1, 3, instances=2)
        await heard(bench, 1)
        await bench.settles(4)


async def test_waiting_dispatcher_does_not_keep_last_batch(tmp_path: Path) -> None:
    """What is written is charged to no budget, with all of its inputs."""
    before = requests_alive()
    async with running(tmp_path) as bench:
        await bench.announce("a", 1)
        await heard(bench, 1)
        await bench.settles(2)

        assert requests_alive() == before


async def test_burst_is_divided_among_idle_executors(tmp_path: Path) -> None:
    """Either has room for all of it; the other one would have nothing to do."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 0, instances=32)
        await bench.announce("b", 1, instances=32)
        await eventually(lambda: bench.known() == 2)
        bench.left = 40
        bench.batch_queue.notify()
        assert Counter((await bench.settles(40)).values()) == {0: 20, 1: 20}


async def test_partitions_of_executor_take_turns(tmp_path: Path) -> None:
    """Batches written together go to one announced partition, the next ones to another."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 1, 3)
        await heard(bench, 1)
        first = dict(await bench.settles(2))
        await bench.announce("a", 1, 3, ended=list(first))
        await bench.settles(4)
        later = {bench.written[name] for name in bench.written.keys() - first.keys()}
        assert [set(first.values()), later] in ([{1}, {3}], [{3}, {1}])


async def test_completion_lets_dispatcher_send_next_batch(tmp_path: Path) -> None:
    """One completion makes room for one."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 2)
        await heard(bench, 1)
        written = await bench.settles(2)
        await bench.announce("a", 2, ended=[next(iter(written))])
        await bench.settles(3)


async def test_completion_by_new_owner_of_partition_counts(tmp_path: Path) -> None:
    """A batch of a partition that moved is run, and announced, by its new owner."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 0, 1)
        await heard(bench, 1)
        written = dict(await bench.settles(2))
        await bench.announce("b", 1, ended=list(written))
        await bench.settles(6)  # two for each of them
        later = [partition for name, partition in bench.written.items() if name not in written]
        assert sorted(later) == [0, 0, 1, 1]


async def test_batches_of_dead_executor_do_not_fill_window(tmp_path: Path) -> None:
    """Another one has announced all its partitions, so that its room is open at once."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 0)
        await heard(bench, 1)
        await bench.settles(2)
        await bench.announce("b", 0)
        await bench.settles(4)


async def test_requests_of_removed_model_are_sent_to_be_refused(tmp_path: Path) -> None:
    """Nobody else will pull it: no executor has the model, and the repository neither."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 0)
        await heard(bench, 1)
        await bench.settles(2)
        bench.left = 3
        shutil.rmtree(tmp_path / "digits")
        await bench.models.reload()
        await bench.announce("a", 0, model="other")
        await bench.settles(5)


async def test_dispatcher_without_executors_alternates_partitions(tmp_path: Path) -> None:
    """A few batches at a time, as many as are acknowledged."""
    async with running(tmp_path) as bench:
        bench.left = 8
        bench.batch_queue.notify()
        written = await bench.settles(8)
        assert set(written.values()) == {0, 1, 2, 3}


async def test_dispatcher_after_last_executor_left_alternates_partitions(tmp_path: Path) -> None:
    """The next executor finds the batches."""
    async with running(tmp_path) as bench:
        await bench.announce("a", 0)
        await eventually(lambda: bench.known() == 1)
        await bench.announce("a", leaving=True)
        await eventually(lambda: bench.known() == 0)
        bench.left = 8
        bench.batch_queue.notify()
        await bench.settles(8)


async def test_batcher_learns_limits_and_run_times_from_events(tmp_path: Path) -> None:
    """How large batches may be, and how long runs take."""
    async with running(tmp_path) as bench:
        version = bench.models.catalog.lookup("digits")
        await bench.announce("a", 0, ended=["b-1"])
        await eventually(lambda: version.latency.predict_us((64,), 4) == RUN_US)
        assert version.max_batch_size == 7


async def test_foreign_records_on_events_are_ignored(tmp_path: Path) -> None:
    """Any other records on the topic are ignored."""
    async with running(tmp_path) as bench:
        await write_to(bench.log, EVENTS, b"nonsense")
        await bench.announce("a", 0)
        await eventually(lambda: bench.known() == 1)


async def test_completion_of_no_rows_is_not_a_run_time(tmp_path: Path) -> None:
    """No batch has none, and no run time follows from it."""
    async with running(tmp_path) as bench:
        version = bench.models.catalog.lookup("digits")
        await bench.announce("a", 0, ended=["b-1"], rows=0)
        await bench.announce("a", 0, ended=["b-2"], rows=0)
        await bench.announce("a", 0, ended=["b-3"])
        await eventually(lambda: version.latency.predict_us((64,), 4) == RUN_US)


async def test_executor_of_partition_that_is_not_there_gets_no_batches(tmp_path: Path) -> None:
    """They go to partitions that exist."""
    async with running(tmp_path) as bench:
        await bench.announce("a", PARTITIONS, -1)
        await bench.announce("b", 1)
        await heard(bench, 1)
        assert set((await bench.settles(2)).values()) == {1}


async def test_missing_completion_times_out(tmp_path: Path) -> None:
    """An announcement may be lost; the room that it would have made is open again in the end."""
    tuning = replace(TUNING.transport, completion_timeout_s=0.05)
    async with running(tmp_path, tuning) as bench:
        await bench.announce("a", 0)
        await heard(bench, 1)

        async def more_came() -> bool:
            return len(await bench.look()) > 2

        await eventually(more_came)
