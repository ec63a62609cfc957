"""Following the control topic, with models that only note what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from headrace.config import make_settings
from headrace.control.following import ControlFollower
from headrace.control.topic import ControlTopic
from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicPartition
from headrace.models.wanted import (
    Author,
    BrokenHistory,
    FormerNames,
    Wanted,
    load,
    make_record,
    set_default,
    set_label,
    unload,
)
from headrace.models.wanted import Deployment as State
from headrace.protocol.codec.control import UnknownFormat, encode_control
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import Topic
from headrace.tuning import TUNING, ControlTuning
from tests.support.conditions import eventually
from tests.support.logs import write_to

SETTINGS = make_settings({})
CONTROL = TopicPartition(SETTINGS.topic(Topic.CONTROL), 0)
QUICK = replace(TUNING.control, retry_first_s=0.001, retry_max_s=0.001)
ADA = Author("ada")


class Scan(NamedTuple):
    """The result of a scan of the repository."""

    outages: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class NotingModels:
    """Notes the wanted states, and those that were wanted when the repository was scanned.

    Args:
        failures: outcomes of the first scans; later ones succeed.
        outages: of the scan that has opened the models.
    """

    def __init__(self, *failures: Scan | ConfigurationError, outages: tuple[str, ...] = ()) -> None:
        self.outages = outages
        self.wanted: list[list[str]] = []
        self.scanned: list[list[str]] = []
        self.retried: list[set[tuple[str, str]]] = []
        self.failed = 0
        self._failures = list(failures)

    def want(self, wanted: Wanted, former: FormerNames) -> None:
        self.wanted.append(sorted(wanted))

    async def reload(self, *, retry: Collection[tuple[str, str]]) -> Scan:
        self.retried.append({*retry})
        if self._failures:
            self.failed += 1
            failure = self._failures.pop(0)
            if isinstance(failure, ConfigurationError):
                raise failure
            return failure
        self.scanned.append(self.wanted[-1])
        return Scan()


async def new_log() -> MemoryLog:
    """An embedded log with all topics."""
    log = MemoryLog()
    await log.create_topics(list(plan_topics(SETTINGS).values()), replication_factor=1)
    return log


@asynccontextmanager
async def following(
    log: MemoryLog, models: NotingModels, tuning: ControlTuning = QUICK
) -> AsyncIterator[ControlFollower]:
    """A follower that runs while the context lasts."""
    topic = ControlTopic(log, SETTINGS, tuning)
    async with ControlFollower(topic, models, tuning) as follower, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(follower.run())
        yield follower
        running.cancel()


async def write(log: MemoryLog, *names: str) -> None:
    """Load version 1 of these models, one change each."""
    topic = ControlTopic(log, SETTINGS)
    for name in names:
        await topic.write(load(name, "1"), len(await topic.read()), ADA, 0)


async def test_state_is_wanted_before_anything_runs() -> None:
    """The first scan of a process finds what the topic says."""
    log, models = await new_log(), NotingModels()
    await write(log, "a", "b")
    async with ControlFollower(ControlTopic(log, SETTINGS), models) as follower:
        assert models.wanted == [["a", "b"]]
        assert follower.state.generation == 2


async def test_change_is_wanted_and_then_scanned() -> None:
    """Each change that comes later is followed."""
    log, models = await new_log(), NotingModels()
    async with following(log, models):
        await write(log, "a")
        await eventually(lambda: models.scanned == [["a"]])
        await write(log, "b")
        await eventually(lambda: models.scanned[-1] == ["a", "b"])


async def test_change_does_not_wait_until_store_that_is_unavailable_is_tried_again() -> None:
    """It may be about a model of another store."""
    log, models = await new_log(), NotingModels(Scan(("s3 is unavailable",)))
    patient = replace(QUICK, retry_first_s=3600, retry_max_s=3600)
    async with following(log, models, patient):
        await write(log, "a")
        await eventually(lambda: models.failed == 1)
        await write(log, "b")
        await eventually(lambda: models.scanned == [["a", "b"]])
    assert models.retried == [{("a", "1")}, {("a", "1"), ("b", "1")}]


@pytest.mark.parametrize(
    "failure", [ConfigurationError("no such directory"), Scan(("s3 is unavailable",))]
)
async def test_failed_scan_is_repeated(failure: Scan | ConfigurationError) -> None:
    """An outage of the repository must not keep the process from the wanted state."""
    log, models = await new_log(), NotingModels(failure, failure)
    async with following(log, models):
        await write(log, "a")
        await eventually(lambda: models.scanned == [["a"]])
    assert models.failed == 2
    assert models.retried == [{("a", "1")}] * 3


async def test_outage_when_process_starts_is_followed_by_another_scan() -> None:
    """A wanted version that could not be downloaded then is loaded without another change."""
    log, models = await new_log(), NotingModels(outages=("s3 is unavailable",))
    await write(log, "a")
    async with following(log, models):
        await eventually(lambda: models.scanned == [["a"]])


async def test_only_versions_that_a_change_loads_are_tried_again() -> None:
    """Neither a label nor another model makes a process load what has failed."""
    log, models = await new_log(), NotingModels()
    topic = ControlTopic(log, SETTINGS)
    changes = {
        load("a", "1"): {("a", "1")},
        load("a", "2"): {("a", "2")},
        load("b", "1"): {("b", "1")},
        set_label("a", "canary", "2"): set(),
        set_default("a", "2"): set(),
        load("a", "2", again=True): {("a", "1"), ("a", "2")},
        load("a", "1", {"instances": 2}): {("a", "1"), ("a", "2")},
        load("a", "3"): {("a", "3")},
        load("a", "3", allow_breaking=True): {("a", "3")},
        unload("a", "3"): set(),
        unload("b"): set(),
    }
    async with following(log, models):
        for generation, change in enumerate(changes):
            await topic.write(change, generation, ADA, 0)
            await eventually(lambda count=generation + 1: len(models.retried) == count)  # type: ignore[misc]
    assert models.retried == [*changes.values()]


async def test_fault_of_version_is_logged_once() -> None:
    """Later scans find it again as long as it is wanted."""
    fault = "a/1: no model"
    log, models = await new_log(), NotingModels(*[Scan((), (fault,))] * 2)
    with capture_logs() as lines:
        async with following(log, models):
            await write(log, "a")
            await eventually(lambda: models.failed == 1)
            await write(log, "b")
            await eventually(lambda: models.failed == 2)
    assert [line["reason"] for line in lines if line["event"] == "model.failed"] == [fault]


async def test_record_of_later_format_ends_following_and_keeps_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Records behind it are not followed either: they may depend on it."""
    log, models = await new_log(), NotingModels()
    await write(log, "a")
    async with following(log, models) as follower:
        later = make_record(load("b", "1"), follower.state, ADA, "id", 0, 64)
        assert later is not None
        value = encode_control(later).replace(b"format\x01", b"format\x03")
        await write_to(log, CONTROL, value)
        await eventually(lambda: "control.unreadable" in capsys.readouterr().out)
        assert follower.state.generation == 1
    assert models.wanted == [["a"]]
    with pytest.raises(UnknownFormat):
        async with following(log, NotingModels()):
            pass


async def test_change_before_record_that_cannot_be_followed_is_followed() -> None:
    """The process announces its generation, also where both are read at once."""
    log, models = await new_log(), NotingModels()
    good, broken = (
        make_record(load(name, "1"), state, ADA, "id", 0, 64)
        for name, state in (("a", State()), ("b", State(4)))
    )
    assert good is not None
    assert broken is not None
    async with following(log, models) as follower:
        await write_to(log, CONTROL, encode_control(good), encode_control(broken))
        await eventually(lambda: not follower.is_following)
        assert follower.state.generation == 1
        await eventually(lambda: models.scanned == [["a"]])


async def test_topic_whose_records_do_not_follow_each_other_is_refused() -> None:
    """A process that starts must not act on half of a history."""
    log = await new_log()
    record = make_record(load("a", "1"), State(4), ADA, "id", 0, 64)
    assert record is not None
    await write_to(log, CONTROL, encode_control(record))
    with pytest.raises(BrokenHistory, match="expected generation 1, got 5"):
        async with following(log, NotingModels()):
            pass


async def test_missing_topic_is_refused_with_command_that_makes_it() -> None:
    """An operator who sets the mode has to create the topic."""
    with pytest.raises(ConfigurationError, match=r"headrace\.control: expected it to exist"):
        async with following(MemoryLog(), NotingModels()):
            pass


async def test_process_starts_from_oldest_snapshot_where_retention_removed_records() -> None:
    """The snapshot has the records that retention removed; later changes follow as usual."""
    log, models = await new_log(), NotingModels()
    topic = ControlTopic(log, SETTINGS, replace(QUICK, snapshot_every=3))
    for generation, name in enumerate("abcd"):
        await topic.write(load(name, "1"), generation, ADA, 0)
    log.faults.partitions.trim(CONTROL, 1)
    async with following(log, models) as follower:
        assert models.wanted == [list("abcd")]
        await topic.write(load("e", "1"), 4, ADA, 0)
        await eventually(lambda: models.scanned == [list("abcde")])
        assert follower.state.generation == 5


async def test_topic_made_anew_ends_following_and_keeps_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An empty topic unloads nothing; the log says at which generation the process stays."""
    log, models = await new_log(), NotingModels()
    await write(log, "a", "b")
    async with following(log, models) as follower:
        log.faults.topics.replace(CONTROL.topic)
        await eventually(lambda: "control.unreadable" in capsys.readouterr().out)
        assert follower.state.generation == 2
        assert not follower.is_following
    assert models.wanted == [["a", "b"]]


async def test_deleted_topic_keeps_models_and_refuses_processes_that_start() -> None:
    """The error of a process that starts says how the topic is made."""
    log, models = await new_log(), NotingModels()
    await write(log, "a")
    async with following(log, models) as follower:
        log.faults.topics.delete(CONTROL.topic)
        with pytest.raises(ConfigurationError, match="headrace topics create"):
            async with following(log, NotingModels()):
                pass
        assert follower.state.generation == 1
    assert models.wanted == [["a"]]
