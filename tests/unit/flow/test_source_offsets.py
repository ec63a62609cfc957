"""The source partitions' progress at a responder that reads `results`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.source_offsets import SourceOffsets
from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, TopicInfo, TopicPartition
from headrace.protocol.messages import Request
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, write_to
from tests.support.work import make_request

SOURCE = TopicPartition("requests", 0)
RESULTS = TopicPartition("results", 0)


@pytest.fixture
async def log() -> MemoryLog:
    """The two topics, with requests in one of them."""
    log = MemoryLog()
    await log.create_topics(
        [TopicInfo("requests", 1, {}), TopicInfo("results", 1, {})], replication_factor=1
    )
    await write_to(log, SOURCE, *[b"x"] * 9)
    return log


async def assigned(log: MemoryLog, committed: Committed | None = None) -> SourceOffsets:
    """Origins whose partition has been assigned, after something was committed for it."""
    tuning = replace(TUNING.delivery, source_check_interval_s=0.0)
    source_offsets = SourceOffsets(log, "requests", tuning)
    listener = RecordingListener()
    async with log.member("group", ["results"], listener) as member:
        await eventually(lambda: listener.held)
        if committed is not None:
            await member.commit({SOURCE: committed})
        await source_offsets.on_assigned(member, [0])
    return source_offsets


def at(offset: int, previous: int | None = None) -> Request:
    """A request of the source partition, delivered after its neighbour if not said otherwise."""
    request = make_request()
    request.offset, request.previous = offset, offset - 1 if previous is None else previous
    return request


async def test_source_offset_is_taken_once(log: MemoryLog) -> None:
    """Only the first of two results for one request is answered."""
    source_offsets = await assigned(log)

    assert [
        source_offsets.take(0, 5),
        source_offsets.take(0, 5),
        source_offsets.take(0, 6),
    ] == [True, False, True]


async def test_answered_offset_is_not_taken_again(log: MemoryLog) -> None:
    """After the answer too, and after the base has passed it."""
    source_offsets = await assigned(log)
    for offset in (0, 2):
        source_offsets.take(0, offset)
        source_offsets.mark_acked([at(offset)])

    assert [source_offsets.take(0, offset) for offset in range(4)] == [
        False,
        True,
        False,
        True,
    ]


async def test_range_of_answers_covers_each_offset(log: MemoryLog) -> None:
    """Ranges come in any order, with gaps where no record was."""
    source_offsets = await assigned(log)

    source_offsets.mark_acked([at(0), at(1), at(7, previous=4), at(8), at(4, previous=1)])

    assert source_offsets.progress(0) == AckedOffsets(9)


async def test_committed_offset_is_not_taken(log: MemoryLog) -> None:
    """A new owner knows what its predecessor has answered, above the base as well."""
    source_offsets = await assigned(log, AckedOffsets(3, [(5, 6)]).committable())

    assert [source_offsets.take(0, offset) for offset in range(2, 7)] == [
        False,
        True,
        True,
        False,
        True,
    ]


async def test_answer_stays_pending_until_committed(log: MemoryLog) -> None:
    """Offsets that the log acknowledged are committed again only after `forget_committed`."""
    source_offsets = await assigned(log)
    first = source_offsets.committable()
    source_offsets.note_committed(first)
    assert (first, source_offsets.committable()) == ({SOURCE: Committed(0)}, {})

    source_offsets.take(0, 0)
    source_offsets.mark_acked([at(0)])
    assert source_offsets.committable() == {SOURCE: Committed(1)}
    source_offsets.note_committed(source_offsets.committable() | {RESULTS: Committed(7)})
    assert source_offsets.committable() == {}

    source_offsets.forget_committed()
    assert source_offsets.committable() == {SOURCE: Committed(1)}


async def test_offset_of_revoked_partition_is_not_taken(log: MemoryLog) -> None:
    """Another process answers for it now; a straggler's answer is no news here."""
    source_offsets = await assigned(log)
    source_offsets.take(0, 0)

    source_offsets.on_revoked([0])
    source_offsets.mark_acked([at(0)])

    assert not source_offsets.take(0, 1)
    assert source_offsets.committable() == {}


async def test_results_partition_without_source_partition_is_configuration_error(
    log: MemoryLog,
) -> None:
    """Partitions were added to the topic of results alone; no request is to blame."""
    source_offsets = SourceOffsets(log, "requests")
    listener = RecordingListener()
    async with log.member("group", ["results"], listener) as member:
        await eventually(lambda: listener.held)
        with pytest.raises(ConfigurationError) as raised:
            await source_offsets.on_assigned(member, [0, 1])

    assert str(raised.value) == (
        "requests: expected partition 1, since the topic of results has it, got 1 partitions; "
        "give both topics the same number of partitions"
    )


async def test_deleted_request_is_answered_unless_ingest_skipped_it(log: MemoryLog) -> None:
    """Results of requests that were deleted after they were read are on their way; the base passes
    the others when the marker of the skipped range comes.
    """
    log.faults.partitions.trim(SOURCE, 6)

    source_offsets = await assigned(log, Committed(2))

    assert source_offsets.committable() == {SOURCE: Committed(2)}
    assert source_offsets.take(0, 3)
    source_offsets.mark_acked([at(5, previous=1)])
    assert not source_offsets.take(0, 4)
    assert source_offsets.committable() == {SOURCE: Committed(6)}


async def test_recreated_topic_resets_answered_offsets(log: MemoryLog) -> None:
    """Other requests stand at its offsets, and none of them is answered."""
    source_offsets = await assigned(log, AckedOffsets(3, [(5, 6)]).committable())
    before = await source_offsets.has_other_records()
    log.faults.topics.delete("requests")
    await log.create_topics([TopicInfo("requests", 1, {})], replication_factor=1)

    assert not before
    assert await source_offsets.has_other_records()
    assert [source_offsets.take(0, offset) for offset in (0, 5)] == [True, True]
    assert source_offsets.committable() == {SOURCE: Committed(0)}


async def test_lost_end_of_requests_truncates_answered_offsets(log: MemoryLog) -> None:
    """Other requests get the offsets above it, and what is answered below stays so."""
    source_offsets = await assigned(log, AckedOffsets(3, [(5, 8)]).committable())
    log.faults.partitions.truncate(SOURCE, 6)

    assert not source_offsets.take(0, 7)
    assert await source_offsets.has_other_records()
    assert [source_offsets.take(0, offset) for offset in (2, 5, 6, 7)] == [
        False,
        False,
        True,
        True,
    ]


async def test_deleted_topic_keeps_answered_offsets(log: MemoryLog) -> None:
    """Requests that are still under way come from the deleted topic."""
    source_offsets = await assigned(log, Committed(3))
    log.faults.topics.delete("requests")

    assert not await source_offsets.has_other_records()
    assert not source_offsets.take(0, 2)
