"""One record that cannot be read as others can: it stops no process, and nothing behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.errors import Code
from headrace.log.port import Gap, NewRecord, Record, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.tools.dead_letters import DeadLetterSelection, read_dead_letters
from headrace.tools.replay.capture import CaptureWriter, open_capture
from headrace.tools.replay.recording import Selection
from headrace.tools.replay.topic_recording import open_topic
from headrace.topics import STAGES, Topic
from tests.support.conditions import eventually
from tests.support.logs import read, write_to
from tests.support.pipelines import log_for, serving, settings_of

TOGETHER = [STAGES]
APART = [[stage] for stage in STAGES]
NAME = "caf\udce9"
"""`caf\\xe9`, a name in Latin-1, as the log decodes it."""

REQUESTS = TopicPartition("headrace.requests", 3)
RESPONSES = TopicPartition("headrace.responses", 3)
DEAD_LETTERS = TopicPartition("headrace.dead-letters", 3)


def request(number: int) -> NewRecord:
    """A request of `digits`."""
    pixels = np.full((1, 64), number, np.float32)
    return NewRecord(b"key", encode_request("application/msgpack", "digits", {"pixels": pixels}))


def status(record: Record) -> str:
    """Return the status of an answer."""
    return (dict(record.headers)["x-status"] or b"").decode()


@pytest.mark.parametrize(
    "strange_headers", [[(NAME, b"x"), ("none", None)], [(NAME, None), ("x-tenant", None)]]
)
@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
async def test_request_with_header_name_that_is_not_utf8_is_refused(
    tmp_path: Path, grouping: Any, strange_headers: list[tuple[str, bytes | None]]
) -> None:
    """It is answered, kept as a dead letter with that very name, and the next one is served."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    headers = [("order", b"7"), *strange_headers]
    strange = request(1)._replace(headers=headers)
    await write_to(log, REQUESTS, strange, request(2))

    async with (
        log.reader([RESPONSES]) as answers,
        log.reader([DEAD_LETTERS]) as letters,
        serving(settings, log, grouping),
    ):
        answered = {dict(each.headers)["x-request"]: each for each in await read(answers, 2)}
        (letter,) = await read(letters, 1)

    refused = answered[b"headrace.requests/3/0"]
    assert status(refused) == Code.INVALID_REQUEST
    assert b"header caf\\xe9: expected a name in UTF-8" in (refused.value or b"")
    assert NAME not in dict(refused.headers)
    assert dict(refused.headers)["order"] == b"7"
    assert status(answered[b"headrace.requests/3/1"]) == "ok"
    assert list(letter.headers[:3]) == headers
    assert (letter.key, letter.value) == (strange.key, strange.value)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
async def test_unreadable_batch_is_counted_and_passed_over(
    tmp_path: Path, grouping: Any, guarantee: str
) -> None:
    """The base goes past it, also where nothing comes behind it."""
    settings = settings_of(tmp_path)
    delivery = settings.delivery.model_copy(update={"guarantee": guarantee})
    settings = settings.model_copy(update={"delivery": delivery})
    log = await log_for(settings)
    await write_to(log, REQUESTS, request(1))
    log.faults.partitions.write_unreadable(REQUESTS, 3, code=Code.TOO_LARGE)
    await write_to(log, REQUESTS, request(2))
    log.faults.partitions.write_unreadable(REQUESTS, 2)

    async with log.reader([RESPONSES]) as reader, serving(settings, log, grouping) as pipelines:
        assert [status(each) for each in await read(reader, 2)] == ["ok", "ok"]

        async def is_committed() -> bool:
            committed = (await log.committed("headrace", [REQUESTS]))[REQUESTS]
            return committed is not None and AckedOffsets.from_committed(committed) == AckedOffsets(
                7
            )

        await eventually(is_committed)
        counted = pipelines[0].metrics.registry.get_sample_value
        assert counted("headrace_unreadable_records_total", {"code": "TOO_LARGE"}) == 3
        assert counted("headrace_unreadable_records_total", {"code": "INVALID_REQUEST"}) == 2


async def test_topic_with_unreadable_records_is_replayed_without_them(tmp_path: Path) -> None:
    """The recording has the other records, that strange name among them, and says what it lacks."""
    log = await log_for(settings_of(tmp_path))
    await write_to(log, REQUESTS, NewRecord(b"k", b"1", [(NAME, b"x")]))
    log.faults.partitions.write_unreadable(REQUESTS, 2, reason="damaged")
    await write_to(log, REQUESTS, NewRecord(b"k", b"2"))
    log.faults.partitions.write_unreadable(REQUESTS, 1)
    gaps: list[Gap] = []

    async with open_topic(log, REQUESTS.topic, Selection()) as recording:
        recording.on_unreadable = gaps.append
        records = [record async for record in recording]

    assert [each.offset for each in records] == [0, 3]
    assert [(gap.first, gap.end) for gap in gaps] == [(1, 3), (4, 5)]
    assert "offsets from 1 to 2, INVALID_REQUEST: damaged" in str(gaps[0])

    path = tmp_path / "capture"
    with CaptureWriter(path, REQUESTS.topic) as writer:
        writer.add(records)
    async with open_capture(path, Selection()) as captured:
        assert [record async for record in captured] == records


async def test_dead_letters_beside_unreadable_one_are_listed(tmp_path: Path) -> None:
    """The list reports the unreadable record."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    await write_to(log, DEAD_LETTERS, NewRecord(b"k", b"1", [(NAME, b"x")]))
    log.faults.partitions.write_unreadable(DEAD_LETTERS, 1)
    await write_to(log, DEAD_LETTERS, NewRecord(b"k", b"2"))
    gaps: list[Gap] = []

    letters = read_dead_letters(
        log, settings.topic(Topic.DEAD_LETTERS), DeadLetterSelection(), gaps.append
    )
    found = [letter.record.offset async for letter in letters]

    assert found == [0, 2]
    assert [(gap.first, gap.end) for gap in gaps] == [(1, 2)]
