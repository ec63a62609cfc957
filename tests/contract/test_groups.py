"""Consumer groups: sharing, rebalances, gates and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.log.errors import Fenced, LogRefused
from headrace.log.port import Committed, Consumer, Log, Record, TopicInfo, TopicPartition
from tests.contract.conftest import MakeTopic
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import RecordingListener, polling, read, values, write_to

TEN = [str(number).encode() for number in range(10)]


async def _read_by_another(log: Log, partition: TopicPartition) -> None:
    """Read all ten, so that whoever polls beside had time for it as well."""
    async with log.reader([partition]) as reader:
        reader.seek(partition, 0)
        await read(reader, 10)


async def test_lone_member_is_given_every_partition(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """The listener hears of them, and `assignment` says the same."""
    partitions = await make_topic(3)
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == set(partitions))
        assert member.assignment() == set(partitions)


async def test_new_group_starts_at_beginning(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Without a commit nothing that the log holds is left out."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.member(unique_name, [unique_name], RecordingListener()) as member:
        assert values(await read(member, 10)) == TEN


async def test_group_resumes_at_committed_offset(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """The next member starts at the committed offset."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.member(unique_name, [unique_name], RecordingListener()) as member:
        await read(member, 10)
        await member.commit({partition: Committed(8)})
    async with log.member(unique_name, [unique_name], RecordingListener()) as member:
        assert values(await read(member, 2)) == [b"8", b"9"]


async def test_member_reads_several_topics(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A subscription to two topics gives the partitions of both."""
    first = await make_topic(2)
    other = TopicPartition(f"{unique_name}-other", 0)
    described = (await log.describe_topics([unique_name]))[unique_name]
    assert described is not None
    created = described._replace(name=other.topic, partitions=1, config={})
    await log.create_topics([created], replication_factor=1)
    listener = RecordingListener()
    async with (
        log.member(unique_name, [unique_name, other.topic], listener) as member,
        polling(member, []),
    ):
        await eventually(lambda: listener.held == {*first, other})


async def test_two_members_share_partitions(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """When a second joins, each partition is one member's and both have some."""
    partitions = await make_topic(4)
    first, second = RecordingListener(), RecordingListener()
    async with log.member(unique_name, [unique_name], first) as one, polling(one, []):
        await eventually(lambda: first.held == set(partitions))
        async with log.member(unique_name, [unique_name], second) as two, polling(two, []):
            await eventually(lambda: len(first.held) == 2 and len(second.held) == 2)
            assert first.held | second.held == set(partitions)
            assert first.revocations == 1


async def test_partitions_of_leaving_member_move_to_others(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A member that closes leaves its group, at once."""
    partitions = await make_topic(4)
    first, second = RecordingListener(), RecordingListener()
    async with log.member(unique_name, [unique_name], first) as one, polling(one, []):
        async with log.member(unique_name, [unique_name], second) as two, polling(two, []):
            await eventually(lambda: len(first.held) == 2 and len(second.held) == 2)
        await eventually(lambda: first.held == set(partitions))


async def test_member_without_partition_waits(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """More members than partitions: the one left over is told so, and polls in vain."""
    (partition,) = await make_topic(1)
    first, second = RecordingListener(), RecordingListener()
    async with log.member(unique_name, [unique_name], first) as one, polling(one, []):
        await eventually(lambda: first.held == {partition})
        async with log.member(unique_name, [unique_name], second) as two, polling(two, []):
            await eventually(lambda: first.assignments == 2 and second.assignments == 1)
            assert first.held | second.held == {partition}
            assert not first.held & second.held


async def test_poll_is_empty_until_assignment_is_taken_up(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """While `on_assigned` runs, polls give nothing of its partitions; afterwards they do."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    entered, release = asyncio.Event(), asyncio.Event()

    async def assigned(_: Sequence[TopicPartition]) -> None:
        entered.set()
        await release.wait()

    async with log.member(unique_name, [unique_name], RecordingListener(assigned)) as member:
        seen: list[Record] = []
        async with polling(member, seen):
            async with asyncio.timeout(DEADLINE_S):
                await entered.wait()
            await _read_by_another(log, partition)
            assert seen == []
            release.set()
            await eventually(lambda: values(seen) == TEN)


async def test_seek_in_on_assigned_takes_effect(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Records before the offset that the listener seeks to are never read."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    member: Consumer

    async def assigned(partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            member.seek(each, 6)

    member = log.member(unique_name, [unique_name], RecordingListener(assigned))
    async with member:
        assert values(await read(member, 4)) == [b"6", b"7", b"8", b"9"]


async def test_pause_in_on_assigned_takes_effect(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A partition that the listener pauses is not read until it is resumed."""
    paused, other = await make_topic(2)
    await write_to(log, paused, b"paused")
    await write_to(log, other, *TEN)
    member: Consumer

    async def assigned(_: Sequence[TopicPartition]) -> None:
        member.pause([paused])

    member = log.member(unique_name, [unique_name], RecordingListener(assigned))
    async with member:
        assert values(await read(member, 10)) == TEN
        member.resume([paused])
        assert values(await read(member, 1)) == [b"paused"]


async def test_rebalance_clears_pauses(log: Log, make_topic: MakeTopic, unique_name: str) -> None:
    """A partition that was paused is read again after it was revoked and given back."""
    (partition,) = await make_topic()
    seen: list[Record] = []
    first, second = RecordingListener(), RecordingListener()
    async with log.member(unique_name, [unique_name], first) as one, polling(one, seen):
        await eventually(lambda: first.held == {partition})
        one.pause([partition])
        async with log.member(unique_name, [unique_name], second) as two, polling(two, []):
            await eventually(lambda: first.assignments == 2 and second.assignments == 1)
        await eventually(lambda: first.held == {partition})
        await write_to(log, partition, *TEN)
        await eventually(lambda: values(seen) == TEN)


async def test_poll_returns_no_record_of_revoked_partition(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """From the call of `on_revoked` to the return of the next `on_assigned` polls are empty."""
    partitions = await make_topic(2)
    early: list[Record] = []
    entered = asyncio.Event()

    async def revoked(_: Sequence[TopicPartition]) -> None:
        entered.set()
        for partition in partitions:
            await write_to(log, partition, *TEN)
            await _read_by_another(log, partition)

    listener = RecordingListener(revoked=revoked)
    async with log.member(unique_name, [unique_name], listener) as one:

        async def poll_until_shared() -> None:
            while len(listener.held) != 1:
                polled = await one.poll(0.05, 100)
                if listener.inside or not polled.keys() <= listener.held:
                    early.extend(record for records in polled.values() for record in records)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(poll_until_shared(), name="poll until shared")
            await eventually(lambda: listener.held == set(partitions))
            async with (
                log.member(unique_name, [unique_name], RecordingListener()) as two,
                polling(two, []),
            ):
                await eventually(lambda: entered.is_set() and len(listener.held) == 1)
    assert early == []


async def test_commit_on_revocation_is_accepted(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """The next owner starts at the offset that `on_revoked` commits."""
    partitions = await make_topic(2)
    for partition in partitions:
        await write_to(log, partition, *TEN)
    one: Consumer

    async def revoked(given_up: Sequence[TopicPartition]) -> None:
        if given_up:  # a first join may be told of nothing
            await one.commit({partition: Committed(9) for partition in given_up})

    one = log.member(unique_name, [unique_name], RecordingListener(revoked=revoked))
    async with one:
        await read(one, 20)
        async with (
            polling(one, []),
            log.member(unique_name, [unique_name], RecordingListener()) as two,
        ):
            assert values(await read(two, 1)) == [b"9"]


async def test_committed_metadata_is_returned(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Offset and text come back through the member and from outside; None where nothing was."""
    committed, other = await make_topic(2)
    await write_to(log, committed, *TEN)  # a member that did not seek may start at its commit
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {committed, other})
        await member.commit({committed: Committed(5, "answered: 7,9 é")})
        expected = {committed: Committed(5, "answered: 7,9 é"), other: None}
        assert await member.committed([committed, other]) == expected
    assert await log.committed(unique_name, [committed, other]) == expected


async def test_member_may_commit_for_topic_that_it_does_not_subscribe_to(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Its membership is what counts; so a group can remember a place elsewhere as well."""
    (partition,) = await make_topic()
    other = TopicPartition(f"{unique_name}-other", 0)
    await log.create_topics([TopicInfo(other.topic, 1, {})], replication_factor=1)
    listener = RecordingListener()
    async with log.member(unique_name, [partition.topic], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        await member.commit({partition: Committed(0), other: Committed(3, "open")})
    assert (await log.committed(unique_name, [other]))[other] == Committed(3, "open")


async def test_unknown_group_has_no_committed_offsets(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Asking about an unknown group is no error."""
    (partition,) = await make_topic()
    assert await log.committed(unique_name, [partition]) == {partition: None}


async def test_metadata_of_maximum_length_is_committed(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """4,096 characters are Kafka's limit, and allowed."""
    (partition,) = await make_topic()
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        await member.commit({partition: Committed(0, "x" * 4096)})
    assert await log.committed(unique_name, [partition]) == {partition: Committed(0, "x" * 4096)}


async def test_metadata_that_is_too_long_is_refused(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """One character more is an error that says what is wrong."""
    (partition,) = await make_topic()
    listener = RecordingListener()
    async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
        await eventually(lambda: listener.held == {partition})
        with pytest.raises(LogRefused, match=r"(?i)metadata"):
            await member.commit({partition: Committed(0, "x" * 4097)})


async def test_commit_for_partition_of_another_member_is_fenced(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """After a rebalance a member cannot commit what it has lost."""
    partitions = await make_topic(2)
    first, second = RecordingListener(), RecordingListener()
    async with log.member(unique_name, [unique_name], first) as one, polling(one, []):
        await eventually(lambda: first.held == set(partitions))
        async with log.member(unique_name, [unique_name], second) as two, polling(two, []):
            await eventually(lambda: len(first.held) == 1 and len(second.held) == 1)
            with pytest.raises(Fenced):
                await one.commit({partition: Committed(1) for partition in second.held})
    assert await log.committed(unique_name, partitions) == dict.fromkeys(partitions)


async def test_groups_have_separate_offsets(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """Two groups read the same records, each with commits of its own."""
    (partition,) = await make_topic()
    await write_to(log, partition, *TEN)
    async with log.member(f"{unique_name}-a", [unique_name], RecordingListener()) as member:
        await read(member, 10)
        await member.commit({partition: Committed(10)})
    async with log.member(f"{unique_name}-b", [unique_name], RecordingListener()) as member:
        assert values(await read(member, 10)) == TEN


async def test_error_of_listener_is_raised_by_poll(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """A listener that fails does not go on unnoticed."""
    await make_topic()

    async def assigned(_: Sequence[TopicPartition]) -> None:
        raise LookupError("no such model")

    async with log.member(unique_name, [unique_name], RecordingListener(assigned)) as member:
        with pytest.raises(LookupError, match="no such model"):
            await read(member, 1)


async def test_group_refuses_member_of_other_kind(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """One of another kind is refused, and those that are in it stay; once they left it may come."""
    partitions = await make_topic(2)
    first, second = RecordingListener(), RecordingListener()
    fused = log.member(unique_name, [unique_name], first, kind="requests")
    async with fused as one, polling(one, []):
        await eventually(lambda: first.held == set(partitions))
        async with log.member(unique_name, [unique_name], second, kind="results") as two:
            with pytest.raises(LogRefused, match="another kind"):
                await read(two, 1)
        assert one.assignment() == set(partitions)
    apart = log.member(unique_name, [unique_name], second, kind="results")
    async with apart as two, polling(two, []):
        await eventually(lambda: second.held == set(partitions))
