"""What a source lets in after an unclean end, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from headrace.flow import aside, probation
from headrace.flow.answered import Progress
from headrace.flow.delivery import Trial
from headrace.flow.inflight import LedgerReceipt
from headrace.flow.marks import NOBODY, Marks
from headrace.flow.source import Source
from headrace.flow.source_settings import SourceSettings
from headrace.flow.suspects import CLEAN, Mark
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.messages import Request
from headrace.telemetry.metrics import Metrics
from tests.support.conditions import eventually
from tests.support.logs import write_to
from tests.support.work import make_request

ONE, TWO = (TopicPartition("requests", number) for number in range(2))
NO_REQUEST = b"cancels another"


@pytest.fixture
async def log() -> MemoryLog:
    """With the topic, of two partitions, and ten records in the first."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("requests", 2, {})], replication_factor=1)
    await write_to(log, ONE, *[b"value"] * 10)
    return log


class Stage:
    """A stage that admits what it receives and settles when it is told to."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.receipts: list[LedgerReceipt] = []
        self.trials: list[Trial | None] = []

    async def run(self) -> None:
        while (delivery := await self.source.receive()) is not None:
            self.trials.append(delivery.trial)
            for record in delivery.records:
                if record.offset in delivery.assignment.progress:
                    delivery.assignment.skip(record.offset)
                elif record.value == NO_REQUEST:
                    delivery.assignment.pass_over(record.offset)
                else:
                    self.receipts.append(delivery.assignment.admit(record.offset, 10))

    @property
    def holds(self) -> list[str]:
        """What is in flight, as `partition:offset`."""
        return sorted(f"{one.assignment.partition.partition}:{one.offset}" for one in self.receipts)

    def settle(self, offsets: set[int]) -> None:
        settled = [receipt for receipt in self.receipts if receipt.offset in offsets]
        self.receipts = [receipt for receipt in self.receipts if receipt.offset not in offsets]
        for receipt in settled:
            receipt.settle()

    def settle_all(self) -> None:
        self.settle({receipt.offset for receipt in self.receipts})


def with_outputs(receipts: Sequence[LedgerReceipt]) -> list[Request]:
    """The requests of these, as they have come to the responder."""
    requests = [make_request() for _ in receipts]
    for request, receipt in zip(requests, receipts, strict=True):
        request.receipt = receipt
    return requests


@asynccontextmanager
async def reading(log: MemoryLog, *, dies: bool = False) -> AsyncIterator[Stage]:
    """A running source with a stage behind it; leaving stops it, or breaks it off at once."""
    settings = SourceSettings("requests", "group", "group", True, 1_000_000, 5.0, max_attempts=2)
    source = Source(log, settings, Metrics(CollectorRegistry()))
    stage = Stage(source)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await source.assigned.wait()
        yield stage
        if dies:
            running.cancel()
            work.cancel()
        else:
            source.stop_reading()
            await work
            await source.close_down(0.1)
            await running


async def marked(log: MemoryLog, partition: TopicPartition = ONE) -> Mark:
    """What is kept of a partition."""
    return (await Marks(log, "group").read([partition]))[partition][0]


async def mark(log: MemoryLog, of: Mark) -> None:
    """Leave a mark as a process that is no more would have."""
    await Marks(log, "group").write({ONE: of}, NOBODY)


async def test_a_partition_is_marked_as_open_before_anything_is_let_in(log: MemoryLog) -> None:
    """While the mark cannot be written, nothing comes."""
    log.faults.hold_commits()
    async with reading_soon(log) as stage:
        held = stage.holds
        log.faults.release_commits()
        await eventually(lambda: len(stage.receipts) == 10)

        assert held == []
        assert (await marked(log)).is_open
        stage.settle_all()


@asynccontextmanager
async def reading_soon(log: MemoryLog) -> AsyncIterator[Stage]:
    """A source that has not been assigned anything yet."""
    settings = SourceSettings("requests", "group", "group", True, 1_000_000, 5.0, max_attempts=2)
    source = Source(log, settings, Metrics(CollectorRegistry()))
    stage = Stage(source)
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        work = tasks.create_task(stage.run())
        await asyncio.sleep(0)
        yield stage
        source.stop_reading()
        await work
        await source.close_down(5)
        await running


async def test_a_good_end_leaves_a_clean_mark(log: MemoryLog) -> None:
    """The next owner suspects nothing."""
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
        stage.settle_all()

    assert await marked(log) == CLEAN


async def test_good_end_with_work_left_leaves_a_clean_mark(log: MemoryLog) -> None:
    """What was read and not answered in time is no suspect: nothing has ended a process."""
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)

    assert await marked(log) == CLEAN


async def test_what_was_unanswered_at_an_unclean_end_is_run_first_and_alone(
    log: MemoryLog,
) -> None:
    """Later records, and other partitions, wait until all of it is answered."""
    async with reading(log, dies=True) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
    async with reading(log) as stage:
        await write_to(log, TWO, b"later")
        await eventually(lambda: len(stage.receipts) == 10)
        first = stage.holds
        during = await marked(log)
        stage.settle_all()
        await eventually(lambda: stage.holds == ["1:0"])
        stage.settle_all()

    assert first == [f"0:{offset}" for offset in range(10)]
    assert during == Mark(True, 10, (0, 10))


@pytest.mark.parametrize("stuck", [{0}, {4, 9}, set(range(10))], ids=str)
async def test_who_has_run_and_cannot_be_answered_holds_nobody_up(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, stuck: set[int]
) -> None:
    """A reply partition without a leader keeps its suspects in flight; the others go on."""
    monkeypatch.setattr(aside, "QUIET_S", 0.02)
    await mark(log, Mark(True, 10))
    await write_to(log, TWO, b"later")
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
        waiting = with_outputs([each for each in stage.receipts if each.offset in stuck])
        stage.settle({each.offset for each in stage.receipts} - stuck)
        stage.source.probation.aside.unacknowledged = lambda: waiting
        await eventually(lambda: "1:0" in stage.holds)
        held = set(stage.holds)
        stage.settle_all()

    assert held == {"1:0"} | {f"0:{offset}" for offset in stuck}


async def test_who_still_runs_holds_the_others_up(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only some of those in flight are in the responder: another may yet end the process."""
    monkeypatch.setattr(aside, "QUIET_S", 0.02)
    await mark(log, Mark(True, 10))
    await write_to(log, TWO, b"later")
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
        waiting = with_outputs(stage.receipts[1:])
        stage.source.probation.aside.unacknowledged = lambda: waiting
        await eventually(lambda: len(stage.source.probation.aside.receipts) == 9)
        looks = stage.source.reading.begun
        await eventually(lambda: stage.source.reading.begun > looks + 5)
        held = stage.holds
        stage.settle_all()

    assert "1:0" not in held


async def test_a_part_that_was_running_is_cut(log: MemoryLog) -> None:
    """Ten offsets become ten parts, of which the first comes alone and is marked so."""
    await mark(log, Mark(True, 10, (0, 10)))
    async with reading(log) as stage:
        await eventually(lambda: stage.holds == ["0:0"])
        during = await marked(log)
        stage.settle_all()
        await eventually(lambda: stage.holds == ["0:1"])
        stage.settle_all()

    assert during == Mark(True, 10, (0, 1), 0)


async def test_a_part_that_ends_with_no_request_ends(log: MemoryLog) -> None:
    """Records that nobody answers, and offsets without any, hold nothing up."""
    await write_to(log, ONE, NO_REQUEST)
    log.faults.skip_offsets(ONE, 3)
    await mark(log, Mark(True, 14))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
        await write_to(log, TWO, b"later")
        stage.settle_all()
        await eventually(lambda: stage.holds == ["1:0"])
        stage.settle_all()


async def test_deaths_alone_condemn(log: MemoryLog) -> None:
    """At the second one the first stage is told, and the record comes with the others' turn."""
    await mark(log, Mark(True, 10, (3, 4), 0, {(3, 0): 1}))
    async with reading(log) as stage:
        await eventually(lambda: stage.holds == ["0:0", "0:1", "0:2"])
        stage.settle_all()
        await eventually(lambda: stage.holds == ["0:3"])
        trial = stage.trials[-1]
        stage.settle_all()
        await eventually(lambda: len(stage.receipts) == 6)
        stage.settle_all()

    assert trial is not None
    assert trial.condemned == {(3, 0)}


async def test_suspects_beyond_what_the_log_holds_are_forgotten(log: MemoryLog) -> None:
    """The topic is another one than that which was marked."""
    await mark(log, Mark(True, 500, (400, 500)))
    async with reading(log) as stage:
        await eventually(lambda: len(stage.receipts) == 10)
        stage.settle_all()
        await write_to(log, ONE, b"new")
        await eventually(lambda: stage.holds == ["0:10"])
        stage.settle_all()

    assert await marked(log) == CLEAN


async def test_the_search_goes_on_after_a_rebalance(log: MemoryLog) -> None:
    """The next owner goes on in the piece where this one was, and nothing counts as an attempt."""
    await mark(log, Mark(True, 10, (0, 10)))
    async with reading(log) as stage:
        await eventually(lambda: stage.holds == ["0:0"])
        log.faults.force_rebalance("group")
        stage.settle_all()
        await eventually(lambda: stage.holds == ["0:1"])
        during = await marked(log)
        stage.settle_all()

    assert during == Mark(True, 10, (1, 2), 0)


async def test_a_mark_that_cannot_be_written_is_tried_again(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile nothing is let in; no suspect ever runs unmarked."""
    monkeypatch.setattr(probation, "RETRY_S", 0.01)
    await mark(log, Mark(True, 10, (0, 10)))
    async with reading(log) as stage:
        await eventually(lambda: stage.holds == ["0:0"])
        log.faults.take_down()
        stage.settle_all()
        await eventually(lambda: stage.source.probation.held == {ONE, TWO})
        held = stage.holds
        log.faults.bring_back()
        await eventually(lambda: stage.holds == ["0:1"])
        stage.settle_all()

    assert held == []


async def test_metrics_tell_of_a_search(log: MemoryLog) -> None:
    """How many are suspect still, how often one was alone at a death, and who is condemned."""
    await mark(log, Mark(True, 10, (3, 4), 0, {(3, 0): 1}))
    async with reading(log) as stage:
        registry = stage.source._metrics.registry
        for left in (10, 7, 6):
            await eventually(lambda: stage.receipts)
            assert registry.get_sample_value("headrace_suspects") == left
            stage.settle_all()
        await eventually(lambda: registry.get_sample_value("headrace_suspects") == 0)
        attempts = registry.get_sample_value("headrace_suspect_attempts_total")
        condemned = registry.get_sample_value("headrace_condemned_total")

    assert (attempts, condemned) == (1, 1)


async def test_nothing_follows_what_was_dropped(log: MemoryLog) -> None:
    """Records that come between a drop and the way back would make the dropped ones count as
    absent, and nobody would ever answer them.
    """
    settings = SourceSettings("requests", "group", "group", True, 1_000_000, 5.0, max_attempts=2)
    source = Source(log, settings, Metrics(CollectorRegistry()))
    trial = source.probation
    await mark(log, Mark(True, 10))
    async with log.reader([ONE]) as reader:
        progresses = {ONE: Progress(0)}
        await trial.assigned(reader, progresses)
        source.ledger.assign(ONE, progresses[ONE])
        reader.seek(ONE, 0)
        first, second = [(await reader.poll(1, 5))[ONE] for _ in range(2)]

        dropped = trial.let_in(ONE, first)
        trial._open(trial._suspects.next())
        too_early = trial.let_in(ONE, second)
        await trial.look(reader, waiting=False)
        again = trial.let_in(ONE, (await reader.poll(1, 10))[ONE])

    assert [list(records) for records, _ in (dropped, too_early)] == [[], []]
    assert [record.offset for record in again[0]] == list(range(10))


async def test_what_is_lost_to_another_owner_has_not_survived(log: MemoryLog) -> None:
    """Its epoch is over, and whoever has it now writes the marks."""
    await mark(log, Mark(True, 10, (0, 10)))
    async with reading(log) as stage:
        await eventually(lambda: stage.holds == ["0:0"])
        stage.source.ledger.revoke(ONE)
        looks = stage.source.reading.begun
        await eventually(lambda: stage.source.reading.begun > looks + 5)
        during = await marked(log)

    assert during == Mark(True, 10, (0, 1), 0)
