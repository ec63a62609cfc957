"""Changes of models: several at once, and what a load is answered with that has failed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.control.changing import Followed, LoadFailed, ModelChanges, NoProcess
from headrace.control.topic import ControlTopic
from headrace.errors import Code, NotLoadableHere, Rejected
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.models.wanted import Author, Change, ChangeRefused, load, unload
from headrace.protocol.codec.events import encode_event
from headrace.protocol.control import ControlRecord
from headrace.protocol.events import ExecutorEvent
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import Topic
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.models import add_version, digits, settings_for

HEARD_AT_ONCE = replace(TUNING, control=replace(TUNING.control, listen_s=0.0, poll_s=0.01))
NOT_BEGUN = Followed(-1, ())
KEY = "digits/1"


def failing(name: str, *rejected: str) -> ExecutorEvent:
    """An executor that has failed to load the version; a release before this one rejects none."""
    return ExecutorEvent(
        executor=name,
        silent_after_ms=1000,
        generation=1,
        unready=[f"{KEY}: no"],
        stages=["executor"],
        failed=[KEY],
        rejected=[*rejected],
    )


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([failing("a", KEY), failing("b", KEY)], Code.INVALID_REQUEST),
        ([failing("a", KEY), failing("b")], Code.MODEL_FAILED),
        ([failing("a")], Code.MODEL_FAILED),
    ],
    ids=["rejected", "rejected by one", "failed in a former release"],
)
async def test_load_is_its_callers_fault_if_all_that_failed_rejected_the_version(
    tmp_path: Path, reports: list[ExecutorEvent], code: Code
) -> None:
    """The text is the same; a report of another reason, or without one, is the server's fault."""
    add_version(tmp_path, "digits", 1, digits())
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    topic, events = ControlTopic(log, settings), TopicPartition(settings.topic(Topic.EVENTS), 0)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE, lambda: NOT_BEGUN)
    loading = changes.load_selected("digits", {}, Author("ada"), 10.0)
    async with log.producer() as producer:
        task = asyncio.create_task(loading, name="load")
        await eventually(topic.read, what="the change")
        records = [NewRecord(None, encode_event(each)) for each in reports]

        async def has_ended() -> bool:
            await producer.send(events, records)  # again and again, as processes do
            return task.done()

        await eventually(has_ended, what="the answer")
        with pytest.raises(LoadFailed, match=f"^{code}: {KEY}: no$") as failed:
            await task

    assert failed.value.code == code
    assert [each.action for each in await topic.read()] == ["load", "rollback"]


async def test_load_is_not_failed_by_process_that_follows_no_more(tmp_path: Path) -> None:
    """What it could not load is of the former topic, although its generation is higher."""
    add_version(tmp_path, "digits", 1, digits())
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    events = TopicPartition(settings.topic(Topic.EVENTS), 0)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE)
    event = replace(failing("a", KEY), generation=9, is_following=False)
    loading = changes.load_selected("digits", {}, Author("ada"), 0.5)
    task = asyncio.create_task(loading, name="load")
    async with log.producer() as producer:

        async def has_ended() -> bool:
            await producer.send(events, [NewRecord(None, encode_event(event))])
            return task.done()

        await eventually(has_ended, what="the answer")
    with pytest.raises(Rejected, match="does not follow until it is started again") as caught:
        await task
    assert caught.value.code == Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("unready", "followed"),
    [("faces/1", True), ("digits/1", True), ("digits/2", False), ("digits/3", False)],
    ids=["of another model", "that nothing names", "default", "loaded now"],
)
async def test_change_waits_for_versions_that_it_is_about(
    tmp_path: Path, unready: str, followed: bool
) -> None:
    """One that has failed before, perhaps of another team, keeps nobody waiting."""
    for number in (1, 2, 3):
        add_version(tmp_path, "digits", number, digits())
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    topic, events = ControlTopic(log, settings), TopicPartition(settings.topic(Topic.EVENTS), 0)
    for seen, change in enumerate([load("faces", "1"), load("digits", "2"), load("digits", "1")]):
        await topic.write(change, seen, Author("ada"), 0)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE)
    loading = changes.make(lambda _: load("digits", "3"), Author("bob"), wait_s=0.5)
    task = asyncio.create_task(loading, name="load")
    event = replace(failing("a"), generation=4, unready=[f"{unready}: no"], failed=[unready])
    async with log.producer() as producer:

        async def has_ended() -> bool:
            await producer.send(events, [NewRecord(None, encode_event(event))])
            return task.done()

        await eventually(has_ended, what="the end of the wait")
    assert (await task).followed is followed


async def test_change_of_nothing_waits_for_its_model(tmp_path: Path) -> None:
    """As a command that is repeated after it has timed out."""
    add_version(tmp_path, "digits", 1, digits())
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    topic, events = ControlTopic(log, settings), TopicPartition(settings.topic(Topic.EVENTS), 0)
    for seen, change in enumerate([load("faces", "1"), load("digits", "1")]):
        await topic.write(change, seen, Author("ada"), 0)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE)
    loading = changes.make(lambda _: load("digits", "1"), Author("bob"), wait_s=0.5)
    task = asyncio.create_task(loading, name="load")
    event = replace(failing("a"), generation=2, unready=["faces/1: no"], failed=["faces/1"])
    async with log.producer() as producer:

        async def has_ended() -> bool:
            await producer.send(events, [NewRecord(None, encode_event(event))])
            return task.done()

        await eventually(has_ended, what="the end of the wait")
    outcome = await task
    assert (outcome.record, outcome.followed) == (None, True)


async def test_load_after_failed_one_is_another_reading_of_files(tmp_path: Path) -> None:
    """What a slow process found in the first attempt must not be taken for the second one's."""
    add_version(tmp_path, "digits", 1, digits())
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    topic, changes = ControlTopic(log, settings), ModelChanges(log, settings, HEARD_AT_ONCE)
    for _ in range(2):
        with pytest.raises(NoProcess):
            await changes.load_selected("digits", {}, Author("ada"), 0.0)
        generation = len(await topic.read())
        await topic.write(unload("digits"), generation, Author("ada"), 0)
    first, _, second, _ = [each.after["digits"] for each in await topic.read()]
    assert first is not None
    assert second is not None
    assert second.reads > first.reads


async def test_load_whose_configuration_cannot_be_read_is_not_refused_as_wrong(
    tmp_path: Path,
) -> None:
    """The file system is at fault, which its caller cannot correct."""
    version = add_version(tmp_path, "digits", 1, digits())
    (version.parent / "model.toml").symlink_to("model.toml")  # to itself: it cannot be followed
    settings = settings_for(tmp_path)
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE)
    with pytest.raises(NotLoadableHere, match=r"^digits/model\.toml: "):
        await changes.load_selected("digits", {}, Author("ada"), 10.0)
    with pytest.raises(ChangeRefused, match="expected one of the repository"):
        await changes.load_selected("letters", {}, Author("ada"), 10.0)


async def test_store_that_does_not_answer_delays_no_change_that_needs_none(tmp_path: Path) -> None:
    """A model can be unloaded while another call waits until it may load one."""
    add_version(tmp_path, "digits", 1, digits())
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        store = f"https://127.0.0.1:{server.getsockname()[1]}/models"
        settings = make_settings({"models": {"repository": [str(tmp_path), store]}})
        log = MemoryLog()
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        changes = ModelChanges(log, settings, HEARD_AT_ONCE)
        await ControlTopic(log, settings).write(load("faces", "1"), 0, Author("ada"), 0)
        loading = asyncio.create_task(
            changes.load_selected("digits", {}, Author("ada"), 10.0), name="load"
        )
        connection, _ = await asyncio.get_running_loop().sock_accept(server)
        with connection:  # whoever asked gets no answer
            with pytest.raises(NoProcess, match="generation 2"):
                await changes.unload_all("faces", Author("bob"), 0.0, lambda: True)
            assert not loading.done()
            loading.cancel()


async def test_changes_of_one_process_at_once_are_all_made(tmp_path: Path) -> None:
    """Each is made of what the topic says after the one before."""
    names = [f"digits-{number}" for number in range(20)]
    for name in names:
        add_version(tmp_path, name, 1, digits())
    settings, log = settings_for(tmp_path), MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    changes = ModelChanges(log, settings, HEARD_AT_ONCE)

    def loading(name: str) -> Callable[[Sequence[ControlRecord]], Change]:
        return lambda _: load(name, "1")

    made = await asyncio.gather(*(changes.make(loading(name), Author("ada")) for name in names))

    assert sorted(each.generation for each in made) == [*range(1, len(names) + 1)]
