"""Operations on a group without being a member: commit for an empty one, remove a member."""

from __future__ import annotations

import pytest

from headrace.log.errors import Fenced, LogRefused
from headrace.log.port import Committed, Log
from tests.contract.conftest import MakeTopic
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, polling


async def test_empty_group_accepts_commit_from_outside(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Offsets and metadata are there for whoever asks, partition by partition."""
    first, second = await make_topic(2)
    await log.commit(unique_name, {first: Committed(3, "three"), second: Committed(0)})
    await log.commit(unique_name, {first: Committed(2, "two")})

    found = await log.committed(unique_name, [first, second])

    assert found == {first: Committed(2, "two"), second: Committed(0)}


async def test_group_with_members_refuses_commit_from_outside(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Only a member knows what its generation has done."""
    (partition,) = await make_topic()
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        with pytest.raises(Fenced):
            await log.commit(unique_name, {partition: Committed(1)})


async def test_oversized_metadata_from_outside_is_refused(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Kafka's limit holds whoever commits."""
    (partition,) = await make_topic()
    with pytest.raises(LogRefused):
        await log.commit(unique_name, {partition: Committed(1, "m" * 4097)})


async def test_removed_member_rejoins_under_another_id(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Its id counts for nothing from then on; being alive, it joins again under another."""
    (partition,) = await make_topic()
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        former = member.member_id

        removed = [await log.remove_member(unique_name, former) for _ in range(2)]

        assert removed == [True, False]
        await eventually(lambda: member.member_id not in {"", former})


async def test_members_of_group_are_listed_with_their_ids(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Nobody at first, then who has joined, with the id that it knows itself by."""
    (partition,) = await make_topic()
    assert not await log.members(unique_name)
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        (found,) = await log.members(unique_name)
        assert found.member_id == member.member_id


async def test_reader_without_group_has_no_member_id(log: Log, make_topic: MakeTopic) -> None:
    """It is in no group, and has no name in one."""
    (partition,) = await make_topic()
    async with log.reader([partition]) as reader:
        assert reader.member_id == ""
