"""Changes of the wanted models on both logs: one writer at a time, and readers that see each."""

from __future__ import annotations

import asyncio

import pytest

from headrace.config import Settings, make_settings
from headrace.control.topic import ChangeOvertaken, ControlTopic
from headrace.log.port import Log, TopicPartition
from headrace.models.wanted import Author, fold, load, set_default
from headrace.topics import Topic
from tests.contract.conftest import MakeTopic
from tests.support.logs import write_to


@pytest.fixture
async def settings(make_topic: MakeTopic, unique_name: str) -> Settings:
    """Settings whose control topic exists."""
    (partition,) = await make_topic(1)
    names = {"control": partition.topic}
    return make_settings({"namespace": unique_name, "topics": {"names": names}})


def topic_of(log: Log, settings: Settings) -> ControlTopic:
    return ControlTopic(log, settings)


async def test_changes_are_read_in_order(log: Log, settings: Settings) -> None:
    """Transaction markers between them are passed, and none is missing."""
    topic = topic_of(log, settings)
    first = await topic.write(load("digits", "1"), 0, Author("ada"), 1)
    second = await topic.write(load("digits", "2"), 1, Author("bob", "faster"), 2)
    records = await topic.read()
    assert records == [first, second]
    assert fold(records).models["digits"].versions == ["1", "2"]


async def test_change_that_changes_nothing_writes_nothing(log: Log, settings: Settings) -> None:
    """The generation stays."""
    topic = topic_of(log, settings)
    await topic.write(load("digits", "1"), 0, Author("ada"), 1)
    assert await topic.write(load("digits", "1"), 1, Author("ada"), 2) is None
    assert len(await topic.read()) == 1


async def test_change_of_older_generation_is_told_newer_one(log: Log, settings: Settings) -> None:
    """Its author has not seen what he would change."""
    topic = topic_of(log, settings)
    await topic.write(load("digits", "1"), 0, Author("ada"), 1)
    with pytest.raises(ChangeOvertaken, match="expected generation 0, got generation 1, load by a"):
        await topic.write(load("digits", "2"), 0, Author("bob"), 2)
    assert len(await topic.read()) == 1


async def test_one_of_two_writers_at_once_wins(log: Log, settings: Settings) -> None:
    """The topic has one change, and the loser is told by whom; nothing is half done."""
    await topic_of(log, settings).write(load("digits", "1"), 0, Author("ada"), 1)
    outcomes = await asyncio.gather(
        topic_of(log, settings).write(load("digits", "2"), 1, Author("bob"), 2),
        topic_of(log, settings).write(load("digits", "3"), 1, Author("eve"), 2),
        return_exceptions=True,
    )
    won = [each for each in outcomes if not isinstance(each, BaseException)]
    lost = [each for each in outcomes if isinstance(each, BaseException)]
    records = await topic_of(log, settings).read()
    assert records[1:] == won
    assert [type(each) for each in lost] == [ChangeOvertaken] * (2 - len(won))
    assert len(won) == 1


async def test_record_of_other_program_is_skipped(log: Log, settings: Settings) -> None:
    """Records behind the unreadable one are read."""
    topic = topic_of(log, settings)
    await topic.write(load("digits", "1"), 0, Author("ada"), 1)
    partition = TopicPartition(settings.topic(Topic.CONTROL), 0)
    await write_to(log, partition, b"what is this?")
    await topic.write(load("digits", "2"), 1, Author("ada"), 1)
    await topic.write(set_default("digits", "2"), 2, Author("ada"), 1)
    assert fold(await topic.read()).models["digits"].default == "2"
