"""Large values stay on `requests`: stages in other processes refer to them and read them there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, NewRecord, Record, TopicPartition
from headrace.protocol.codec import decode_response, encode_request
from headrace.protocol.messages import ErrorResponse
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Stage, Topic
from tests.support.conditions import eventually
from tests.support.logs import write
from tests.support.pipelines import (
    PARTITIONS,
    Caller,
    Grouping,
    digits_request,
    groupings,
    log_for,
    name_of,
    serving,
    settings_of,
)
from tests.support.python_models import add_python_model

FRONT = (Stage.INGEST, Stage.BATCHER)
EXECUTOR = (Stage.EXECUTOR,)
BACK = (Stage.RESPONDER,)
APART = [grouping for grouping in groupings() if len(grouping) > 1]
SEPARATED = [
    each for each in APART if not any({Stage.INGEST, Stage.EXECUTOR} <= {*group} for group in each)
]
PIXELS_BYTES = 256


def sharing(directory: Path) -> Settings:
    """Settings with which all values pass in shared memory, in a directory of their own."""
    shared = directory / "shared"
    shared.mkdir()
    repository = directory / "models"
    return settings_of(repository, inline_payload_bytes=PIXELS_BYTES, shared_values_dir=shared)


def values_of(pipeline: Pipeline, outcome: str) -> float:
    """How many values that are not in records a process has read, by outcome."""
    labels = {"outcome": outcome}
    found = pipeline.metrics.registry.get_sample_value("headrace_source_values_total", labels)
    return found or 0.0


async def records_of(settings: Settings, log: MemoryLog, topic: Topic) -> list[Record]:
    """All records of a topic between stages, as far as the log holds them."""
    name = settings.topic(topic)
    info = (await log.describe_topics([name]))[name]
    assert info is not None
    found: list[Record] = []
    for number in range(info.partitions):
        partition = TopicPartition(name, number)
        end = log.faults.partitions.end_offset(partition)
        found += await log.fetch(partition, 0, end, 1 << 20)
    return found


@pytest.mark.parametrize("grouping", APART, ids=name_of)
async def test_stages_apart_answer_all_requests_by_reference(
    tmp_path: Path, grouping: Grouping
) -> None:
    """However the stages are divided, each request gets its own answer, once."""
    settings = settings_of(tmp_path, inline_payload_bytes=PIXELS_BYTES, shared_values_bytes=0)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, grouping):
        await caller.send(200)
        await caller.all_answered()
    assert await caller.check() == Counter(range(200))


@pytest.mark.parametrize("grouping", SEPARATED, ids=name_of)
async def test_values_pass_in_shared_memory_and_not_by_the_log(
    tmp_path: Path, grouping: Grouping
) -> None:
    """Where ingest and the executor are different processes of a machine."""
    settings = sharing(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, grouping) as pipelines:
        await caller.send(200)
        await caller.all_answered()
        shared, read = (
            sum(values_of(pipeline, outcome) for pipeline in pipelines)
            for outcome in ("shared", "read")
        )
    assert await caller.check() == Counter(range(200))
    assert (shared, read) == (200, 0)


async def test_values_are_read_from_the_log_after_shared_memory_is_gone(tmp_path: Path) -> None:
    """As after a restart of ingest, or where an executor of another machine takes over."""
    settings = sharing(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    items = TopicPartition(settings.topic(Topic.ITEMS), 0)
    async with serving(settings, log, [BACK]):
        async with serving(settings, log, [(Stage.INGEST,)]):
            await caller.send(40)
            await eventually(lambda: log.faults.partitions.end_offset(items) > 0)
        async with serving(settings, log, [(Stage.BATCHER, Stage.EXECUTOR)]) as [pipeline]:
            await caller.all_answered()
            shared = values_of(pipeline, "shared")
    assert await caller.check() == Counter(range(40))
    assert shared == 0


@pytest.mark.parametrize(("inline_bytes", "carried"), [(PIXELS_BYTES, False), (1024, True)])
async def test_only_values_below_limit_pass_topics_between_stages(
    tmp_path: Path, inline_bytes: int, carried: bool
) -> None:
    """Topics between the stages hold no byte of a value that stays on `requests`."""
    settings = settings_of(tmp_path, inline_payload_bytes=inline_bytes, shared_values_bytes=0)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, [[stage] for stage in STAGES]) as pipelines:
        await caller.send(20)
        await caller.all_answered()
        read = [values_of(pipeline, "read") + values_of(pipeline, "kept") for pipeline in pipelines]
    between = [
        *await records_of(settings, log, Topic.ITEMS),
        *await records_of(settings, log, Topic.BATCHES),
    ]
    size_bytes = sum(len(record.value or b"") for record in between)
    assert (size_bytes > 2 * 20 * PIXELS_BYTES) is carried
    assert read == [0, 0, 0 if carried else 20, 0]


async def test_request_whose_record_is_gone_fails_and_others_are_answered(tmp_path: Path) -> None:
    """Retention has removed it before the model could run; the caller may send it again."""
    settings = settings_of(tmp_path, inline_payload_bytes=PIXELS_BYTES, shared_values_bytes=0)
    log = await log_for(settings)
    caller = Caller(settings, log)
    items = TopicPartition(settings.topic(Topic.ITEMS), 0)
    async with serving(settings, log, [(Stage.INGEST,), BACK]):
        await caller.send(2 * PARTITIONS)
        await eventually(lambda: log.faults.partitions.end_offset(items) > 0)
        log.faults.partitions.trim(TopicPartition(settings.topic(Topic.REQUESTS), 0), 1)
        async with serving(settings, log, [(Stage.BATCHER, Stage.EXECUTOR)]) as [pipeline]:
            await caller.all_answered()
            assert values_of(pipeline, "lost") == 1
    answers = [decode_response(each.headers, each.value) for each in await caller.answers()]
    (lost,) = [each for each in answers if isinstance(each, ErrorResponse)]
    assert (lost.error_details.code, lost.error_details.retriable) == ("INTERNAL", True)
    assert "offset 0: expected the request's record, but it is no longer in the log" in lost.error
    assert len(answers) == 2 * PARTITIONS


async def test_requests_deleted_in_flight_are_answered_by_first_responder(tmp_path: Path) -> None:
    """A responder that starts after the deletion does not count them as answered."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    runner = [(Stage.BATCHER, Stage.EXECUTOR)]
    requests, items = (
        [TopicPartition(settings.topic(each), number) for number in range(PARTITIONS)]
        for each in (Topic.REQUESTS, Topic.ITEMS)
    )
    end_offset = log.faults.partitions.end_offset
    async with serving(settings, log, [(Stage.INGEST,)]):
        await caller.send(PARTITIONS)
        await eventually(lambda: all(map(end_offset, items)))
        for each in requests:
            log.faults.partitions.trim(each, 1)
        async with serving(settings, log, [*runner, BACK]):
            await caller.all_answered()
    assert await caller.check() == Counter(range(PARTITIONS))


async def test_base_of_new_group_passes_records_that_were_deleted_before(tmp_path: Path) -> None:
    """They were no requests of this group, so that none of them counts as lost."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    requests = [
        TopicPartition(settings.topic(Topic.REQUESTS), number) for number in range(PARTITIONS)
    ]
    await caller.send(PARTITIONS)
    for each in requests:
        log.faults.partitions.trim(each, 1)
    front, runner = (Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR)
    async with serving(settings, log, [BACK]), serving(settings, log, [front, runner]) as found:
        await caller.send(PARTITIONS)
        await eventually(lambda: caller.answered() == PARTITIONS)
        skipped = found[0].metrics.registry.get_sample_value("headrace_skipped_records_total")
    committed = await log.committed(settings.namespace, requests)
    assert (committed, skipped) == (dict.fromkeys(requests, Committed(2)), 0)


@pytest.mark.parametrize(
    "grouping",
    [[FRONT, EXECUTOR, BACK], [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), BACK]],
    ids=name_of,
)
@pytest.mark.parametrize(
    ("content_type", "reader"), [("application/msgpack", 1), ("application/json", 2)]
)
async def test_dead_letter_of_reference_holds_original_bytes(
    tmp_path: Path, grouping: Grouping, content_type: str, reader: int
) -> None:
    """The executor has read them where the tensors are in them; otherwise the responder does."""
    add_python_model(tmp_path, "raise ValueError('no')", name="broken")
    settings = settings_of(tmp_path, inline_payload_bytes=PIXELS_BYTES, shared_values_bytes=0)
    log = await log_for(settings)
    value = encode_request(content_type, "broken", {"x": np.zeros((100, 1), np.float32)})
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 0)
    record = NewRecord(None, value, [("content-type", content_type.encode())])
    async with serving(settings, log, grouping) as pipelines, log.producer() as producer:
        await write(producer, TopicPartition(settings.topic(Topic.REQUESTS), 0), record)
        await eventually(lambda: log.faults.partitions.end_offset(letters) > 0)
        read = [values_of(pipeline, "read") for pipeline in pipelines]
    (letter,) = await log.fetch(letters, 0, 0, 1 << 20)
    assert letter.value == value
    assert read == [float(place == reader) for place in range(3)]


@pytest.mark.parametrize(
    ("guarantee", "order"),
    [("at_least_once", "none"), ("at_least_once", "key"), ("exactly_once", "none")],
)
async def test_dead_letter_of_request_that_failed_behind_its_run_holds_its_value(
    tmp_path: Path, guarantee: str, order: str
) -> None:
    """Results with outputs have no values: a responder apart reads them, some at a time. One that
    was null stays so.
    """
    settings = settings_of(tmp_path)
    delivery = settings.delivery.model_copy(update={"guarantee": guarantee, "order": order})
    settings = settings.model_copy(update={"delivery": delivery})
    log = await log_for(settings)
    requests = TopicPartition(settings.topic(Topic.REQUESTS), 0)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 0)
    wrong = [("kafka_replyPartition", b"\0\0\0\x63")]
    records = [NewRecord(b"k", digits_request(str(n)), wrong if n % 3 else []) for n in range(60)]
    records.append(NewRecord(b"k", None, wrong))
    async with log.producer() as producer:
        await write(producer, requests, *records)
    async with serving(settings, log, [FRONT, EXECUTOR, BACK]) as pipelines:
        await eventually(lambda: log.faults.partitions.end_offset(letters) >= 41)
        read = sum(values_of(pipelines[-1], outcome) for outcome in ("read", "kept"))
    found = await log.fetch(letters, 0, 100, 1 << 20)
    values = [each.value for each in records if each.headers]
    assert Counter(each.value for each in found) == Counter(values)
    assert read == 41


async def test_dead_letter_of_late_request_with_wrong_reply_partition_holds_its_value(
    tmp_path: Path,
) -> None:
    """Ingest has released the value, since being late makes no dead letter; the responder reads it,
    also in one process with ingest.
    """
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 0)
    headers = [("kafka_replyPartition", b"\0\0\0\x63"), ("x-deadline-ms", b"1")]
    record = NewRecord(b"k", digits_request("late"), headers)
    async with serving(settings, log, [STAGES]), log.producer() as producer:
        await write(producer, TopicPartition(settings.topic(Topic.REQUESTS), 0), record)
        await eventually(lambda: log.faults.partitions.end_offset(letters) > 0)
    (letter,) = await log.fetch(letters, 0, 0, 1 << 20)
    assert letter.value == record.value
