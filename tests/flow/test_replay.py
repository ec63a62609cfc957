"""Replays on the embedded log: topics, interrupted runs, a pipeline in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.replay import PipelineJob, replay_into_models
from headrace.config import make_settings
from headrace.errors import ConfigurationError
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import Record, TopicInfo, TopicPartition
from headrace.tools.replay.capture import CaptureWriter
from headrace.tools.replay.jobs import Advanced, RecordingSource, TopicJob, replay_into_topic
from headrace.tools.replay.recording import Filters, Recording, Selection, Window, identity
from headrace.tools.replay.replay import Unpaced
from headrace.tools.replay.sinks import Marking
from headrace.tools.replay.topic_recording import READ_AHEAD, ReadAhead, open_topic
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.models import identity as identity_model
from tests.support.recordings import START_MS, originals_of, recorded, write_recorded
from tests.support.transactions import leave_transaction_open

RECORDS = [recorded(number, 3)._replace(topic="source") for number in range(3000)]


@pytest.fixture
async def log() -> MemoryLog:
    """A source of three partitions with 3,000 records, and an empty target of two."""
    log = MemoryLog()
    topics = [TopicInfo("source", 3, {}), TopicInfo("target", 2, {})]
    await log.create_topics(topics, replication_factor=1)
    await write_recorded(log, "source", RECORDS)
    return log


def unwatched(recording: Recording) -> Advanced:
    """Tells nobody."""
    return lambda *_: None


async def read(
    log: MemoryLog,
    topic: str,
    selection: Selection | None = None,
    read_ahead: ReadAhead = READ_AHEAD,
) -> list[Record]:
    """Return the records of a topic that a selection keeps."""
    async with open_topic(log, topic, selection or Selection(), read_ahead) as recording:
        return [record async for record in recording]


async def test_recording_of_topic_is_ordered_by_timestamp(log: MemoryLog) -> None:
    """Records of all partitions come in the order of their timestamps."""
    assert await read(log, "source") == RECORDS


async def test_recording_ends_where_topic_ended(log: MemoryLog) -> None:
    """Records that arrive after it was opened are not part of it."""
    async with open_topic(log, "source", Selection()) as recording:
        await write_recorded(log, "source", RECORDS[:3])
        assert len([record async for record in recording]) == len(RECORDS)


async def test_recording_ends_at_end_behind_gap(log: MemoryLog) -> None:
    """Transaction markers at the end of a partition do not keep the others waiting."""
    log.faults.partitions.skip_offsets(TopicPartition("source", 1), 2)
    assert len(await read(log, "source")) == len(RECORDS)


async def test_recording_pauses_partitions_far_ahead(log: MemoryLog) -> None:
    """All records come in order although little room is left for waiting ones."""
    little = ReadAhead(poll_records=20, total_bytes=30_000, least_partition_bytes=1)
    assert await read(log, "source", read_ahead=little) == RECORDS


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(Window(START_MS + 2000, START_MS + 2100)), RECORDS[2000:2100]),
        (Selection(Window(from_offsets={None: 999, 1: 998})), [RECORDS[2995], *RECORDS[2997:]]),
        (Selection(Window(until_offsets={None: 0, 2: 2})), [RECORDS[2], RECORDS[5]]),
        (Selection(Window(partitions=frozenset({1})), limit=2), [RECORDS[1], RECORDS[4]]),
        (Selection(filters=Filters(key=b"key-77")), RECORDS[77:78]),
        (Selection(filters=Filters(model="other")), []),
        (Selection(Window(from_ms=START_MS + 9999)), []),
    ],
)
async def test_recording_of_selection_reads_only_selected_records(
    log: MemoryLog, selection: Selection, expected: list[Record]
) -> None:
    """Bounds by time and offset, filters, and the limit."""
    assert await read(log, "source", selection) == expected


async def test_copies_keep_partition_key_and_value(log: MemoryLog) -> None:
    """A record's partition is its own modulo the target's."""
    job = TopicJob("target", Unpaced(), Marking("run"))
    replayed = await replay_into_topic(log, RecordingSource("source", Selection()), job, unwatched)
    copies = await read(log, "target")

    assert replayed.outcome.records == len(RECORDS)
    by_original = dict(zip(originals_of(copies), copies, strict=True))
    for original in RECORDS:
        copy = by_original[identity(original)]
        assert copy.partition == original.partition % 2
        assert (copy.key, copy.value) == (original.key, original.value)


async def test_replay_for_missing_reply_topic_sends_nothing(log: MemoryLog) -> None:
    """All requests would be refused, with answers elsewhere."""
    job = TopicJob("target", Unpaced(), Marking("run", reply_to="mistyped"))

    with pytest.raises(ConfigurationError, match="mistyped: expected a topic"):
        await replay_into_topic(log, RecordingSource("source", Selection()), job, unwatched)

    assert await read(log, "target") == []


async def test_refused_copy_is_reported_with_its_original(log: MemoryLog) -> None:
    """Else nobody would know which record to leave out."""
    too_large, keyless = RECORDS[7]._replace(value=bytes(2000)), RECORDS[8]._replace(key=None)
    await log.create_topics(
        [
            TopicInfo("other", 3, {}),
            TopicInfo("narrow", 1, {"max.message.bytes": "1000"}),
            TopicInfo("compacted", 1, {"cleanup.policy": "compact"}),
        ],
        replication_factor=1,
    )
    await write_recorded(log, "other", [*RECORDS[:6], too_large, keyless])

    async def refusal(target: str) -> str:
        job = TopicJob(target, Unpaced(), Marking("run"))
        with pytest.raises(ExceptionGroup) as raised:
            await replay_into_topic(log, RecordingSource("other", Selection()), job, unwatched)
        [error] = raised.value.exceptions
        return str(error)

    assert (await refusal("narrow")).startswith("TOO_LARGE: other/1/2: ")
    assert "other/" in await refusal("compacted")


async def test_replay_by_key_writes_copies_of_key_to_one_partition(log: MemoryLog) -> None:
    """Their partition is the one that Kafka's clients choose."""
    await write_recorded(log, "source", [record._replace(key=b"same") for record in RECORDS[:3]])
    job = TopicJob("target", Unpaced(), Marking("run"), by_key=True)
    selection = Selection(filters=Filters(key=b"same"))
    await replay_into_topic(log, RecordingSource("source", selection), job, unwatched)
    assert len({copy.partition for copy in await read(log, "target")}) == 1


class Interrupted(Exception):
    """Ends a run where a test wants it to end."""


def ending_at_once(recording: Recording) -> Advanced:
    """Ends a run when its first records are acknowledged, before its checkpoint knows them."""

    def advanced(records: int, size: int, positions: Mapping[TopicPartition, int]) -> None:
        raise Interrupted

    return advanced


@pytest.mark.parametrize("turns", [1, 2])
async def test_resumed_replay_neither_loses_nor_repeats_records(
    log: MemoryLog, tmp_path: Path, turns: int
) -> None:
    """Ended again and again with records sent that its checkpoint does not know."""

    def ending(recording: Recording) -> Advanced:
        left = turns

        def advanced(records: int, size: int, positions: Mapping[TopicPartition, int]) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Interrupted

        return advanced

    source = RecordingSource("source", Selection(limit=2750))
    job = TopicJob(
        "target",
        Unpaced(),
        Marking("first"),
        checkpoint=tmp_path / "checkpoint",
        checkpoint_every_s=0.0,
    )
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            await replay_into_topic(log, source, job, ending)
        assert caught.group_contains(Interrupted)
    replayed = await replay_into_topic(log, source, job, unwatched)
    again = await replay_into_topic(log, source, job, unwatched)

    assert Counter(originals_of(await read(log, "target"))) == Counter(
        map(identity, RECORDS[:2750])
    )
    assert (replayed.resumed, replayed.run_id) == (True, "first")
    assert again.outcome.records == 0


async def test_resumed_replay_finds_copies_behind_open_transaction(
    log: MemoryLog, tmp_path: Path
) -> None:
    """Another producer's transaction hides them: nothing is sent before it has ended."""
    await leave_transaction_open(log, TopicPartition("target", 0), "streams")
    source = RecordingSource("source", Selection())
    job = TopicJob(
        "target",
        Unpaced(),
        Marking("first"),
        checkpoint=tmp_path / "checkpoint",
        decided_within_s=0.0,
    )
    with pytest.raises(ExceptionGroup):
        await replay_into_topic(log, source, job, ending_at_once)
    with pytest.raises(LogUnavailable, match=r"target/0: .*open transaction"):
        await replay_into_topic(log, source, job, unwatched)
    log.faults.transactions.time_out("streams")
    await replay_into_topic(log, source, job, unwatched)

    copies = originals_of(await read(log, "target"))
    assert Counter(copies) == Counter(map(identity, RECORDS))


def ending_before_first(recording: Recording) -> Advanced:
    """Ends a run before its first record is sent."""
    raise Interrupted


@pytest.mark.parametrize("topic", ["source", "target"])
async def test_replay_is_not_resumed_with_topic_made_anew(
    log: MemoryLog, tmp_path: Path, topic: str
) -> None:
    """Offsets of the former topic say nothing about the new one."""
    source = RecordingSource("source", Selection())
    job = TopicJob("target", Unpaced(), Marking("first"), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(Interrupted):
        await replay_into_topic(log, source, job, ending_before_first)
    log.faults.topics.replace(topic)
    with pytest.raises(ConfigurationError, match=f"another run: id of topic {topic}"):
        await replay_into_topic(log, source, job, unwatched)


async def test_resumed_replay_names_records_that_retention_has_deleted(
    log: MemoryLog, tmp_path: Path
) -> None:
    """It sends the rest, and says what it cannot send."""
    source = RecordingSource("source", Selection())
    job = TopicJob("target", Unpaced(), Marking("first"), checkpoint=tmp_path / "checkpoint")
    notices: list[str] = []

    def noting(recording: Recording) -> Advanced:
        notices.append(recording.notice)
        return unwatched(recording)

    with pytest.raises(Interrupted):
        await replay_into_topic(log, source, job, ending_before_first)
    log.faults.partitions.trim(TopicPartition("source", 1), 250)
    replayed = await replay_into_topic(log, source, job, noting)

    assert notices == [
        "source/1: retention has deleted the records from offset 0 to 249 before they were known "
        "to be sent"
    ]
    assert replayed.outcome.records == len(RECORDS) - 250


async def test_second_run_with_checkpoint_of_running_replay_is_refused(
    log: MemoryLog, tmp_path: Path
) -> None:
    """Both would send what is left; once the first has ended, the same command goes on."""
    source = RecordingSource("source", Selection())
    job = TopicJob("target", Unpaced(), Marking("first"), checkpoint=tmp_path / "checkpoint")
    async with asyncio.TaskGroup() as tasks:
        ended = asyncio.Event()
        log.faults.acknowledgements.hold()
        first = replay_into_topic(log, source, job, unwatched)
        tasks.create_task(first).add_done_callback(lambda _: ended.set())
        await eventually((tmp_path / "checkpoint").exists)
        with pytest.raises(ConfigurationError, match="checkpoint: expected no other run"):
            await replay_into_topic(log, source, job, unwatched)
        assert not ended.is_set()
        log.faults.acknowledgements.release()
    again = await replay_into_topic(log, source, job, unwatched)

    copies = originals_of(await read(log, "target"))
    assert Counter(copies) == Counter(map(identity, RECORDS))
    assert (again.resumed, again.outcome.records) == (True, 0)
    assert not (tmp_path / "checkpoint.lock").exists()


async def test_replay_to_missing_topic_is_refused(log: MemoryLog) -> None:
    """Nothing is created by a misspelt name."""
    job = TopicJob("targets", Unpaced(), Marking("run"))
    with pytest.raises(ConfigurationError, match="targets: expected a topic"):
        await replay_into_topic(log, RecordingSource("source", Selection()), job, unwatched)


async def test_embedded_pipeline_answers_capture(tmp_path: Path) -> None:
    """Each original is answered once; answers are counted by status."""
    add_version(tmp_path, "digits", 1, digits())
    records = [recorded(number, 5) for number in range(500)]
    records[7] = records[7]._replace(value=b"not a request")
    file = tmp_path / "capture"
    with CaptureWriter(file, "recorded") as writer:
        writer.add(records)
    job = PipelineJob(tmp_path, Unpaced(), Marking("run"))
    outcome, statuses = await replay_into_models(
        make_settings({}), RecordingSource(file, Selection()), job, unwatched
    )

    assert outcome.records == 500
    assert statuses == {"ok": 499, "INVALID_REQUEST": 1}


async def test_embedded_pipeline_converts_payloads_of_capture(tmp_path: Path) -> None:
    """The transform of the model makes tensors of them, as it did of the originals."""
    transform = "[transform.record.inputs]\nx = [{ path = 'price' }]\n"
    add_version(tmp_path, "orders", 1, identity_model("FP32", ("batch", 1)), transform)
    headers = [("content-type", b"application/json"), ("x-model", b"orders")]
    records = [
        recorded(number, 5)._replace(headers=headers, value=b'{"price": %d}' % number)
        for number in range(100)
    ]
    records[7] = records[7]._replace(value=b'{"price": "much"}')
    file = tmp_path / "capture"
    with CaptureWriter(file, "recorded") as writer:
        writer.add(records)
    job = PipelineJob(tmp_path, Unpaced(), Marking("run"))
    _, statuses = await replay_into_models(
        make_settings({}), RecordingSource(file, Selection()), job, unwatched
    )

    assert statuses == {"ok": 99, "INVALID_TENSOR": 1}
