"""Writing a change while the broker fails: what the author is told agrees with the topic."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.control.topic import ChangeOvertaken, ControlTopic
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog, TransactionFault
from headrace.models.wanted import Author, load
from headrace.runtime.topic_plan import plan_topics
from headrace.tuning import TUNING
from tests.support.conditions import eventually

SETTINGS = make_settings({})
TRANSACTIONAL_ID = "headrace.control"
QUICK = replace(TUNING.control, retry_first_s=0.001, retry_max_s=0.001)


async def new_topic() -> tuple[MemoryLog, ControlTopic]:
    """The control topic of an embedded log."""
    log = MemoryLog()
    await log.create_topics(list(plan_topics(SETTINGS).values()), replication_factor=1)
    return log, ControlTopic(log, SETTINGS, QUICK)


async def test_change_whose_answer_is_lost_is_found_in_topic() -> None:
    """The broker committed it and did not say so; it counts as made."""
    log, topic = await new_topic()
    log.faults.transactions.fail(TransactionFault.UNKNOWN_BUT_COMMITTED)
    record = await topic.write(load("digits", "1"), 0, Author("ada"), 0)
    assert await topic.read() == [record]


async def test_change_without_outcome_is_told_as_such_and_ended_by_next_writer() -> None:
    """The transaction stays open, nobody sees it, and it does not block the next change."""
    log, topic = await new_topic()
    log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
    with pytest.raises(LogUnavailable, match="may or may not have been made"):
        await topic.write(load("digits", "1"), 0, Author("ada"), 0)
    record = await topic.write(load("digits", "2"), 0, Author("bob"), 0)
    assert await topic.read() == [record]


async def test_writer_that_is_fenced_while_it_writes_is_told_winner() -> None:
    """Its open transaction is ended by the winner, which has seen nothing of it."""
    log, topic = await new_topic()
    log.faults.transactions.hold()
    async with asyncio.TaskGroup() as tasks:
        losing = tasks.create_task(_outcome(topic, "1", "ada"))
        await eventually(log.faults.transactions.open)
        winning = tasks.create_task(_outcome(topic, "2", "bob"))
        entered = log.faults.transactions.entered_producers
        await eventually(lambda: entered(TRANSACTIONAL_ID) == 2)
        log.faults.transactions.release()
    assert winning.result() == "made"
    assert "expected generation 0, got generation 1, load by bob" in losing.result()
    (record,) = await topic.read()
    assert record.who == "bob"


async def _outcome(topic: ControlTopic, version: str, who: str) -> str:
    try:
        await topic.write(load("digits", version), 0, Author(who), 0)
    except ChangeOvertaken as error:
        return str(error)
    return "made"


async def test_change_of_topic_that_was_made_anew_is_refused() -> None:
    """The author has seen another history."""
    _, topic = await new_topic()
    with pytest.raises(ChangeOvertaken, match="expected generation 3, got an empty topic"):
        await topic.write(load("digits", "1"), 3, Author("ada"), 0)
