"""Dead letters are sent again, each once, and answered where the first answer was wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigurationError
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import decode_response
from headrace.protocol.codec.client import Answer
from headrace.runtime.process import Pipeline, running
from headrace.tools.dead_letters import DeadLetterSelection, Redrive, RedriveJob, read_dead_letters
from headrace.tools.dead_letters.copies import load_transform
from headrace.tools.dead_letters.redrive import RedriveUnderWay
from headrace.topics import Topic
from tests.support.conditions import eventually
from tests.support.dead_letters import (
    CORRELATION_ID,
    ROWS,
    STRICT_BYTES,
    create_topics,
    large_request,
    letter_headers,
    make_dead_letter,
    records_of,
    reply_topic,
    serving,
)
from tests.support.logs import RecordingListener, polling, read, write_to
from tests.support.transactions import leave_transaction_open
from tests.support.visible import visible


async def test_redriven_letter_is_answered_on_its_reply_topic(
    tmp_path: Path,
) -> None:
    """After the limit is raised the answer has the same reply topic, correlation id and headers."""
    strict = serving(tmp_path, "headrace", STRICT_BYTES)
    async with MemoryLog() as log:
        await create_topics(log, strict)
        await make_dead_letter(log, strict, large_request(strict))
        raised = serving(tmp_path, "headrace", 4096)
        replies = TopicPartition(reply_topic(raised), 0)
        async with log.reader([replies]) as reader, running(Pipeline(raised, log)):
            tally = await Redrive(log, raised, RedriveJob()).run()
            (answer,) = await read(reader, 1)

    assert tally.sent == {"TOO_LARGE": 1}
    assert dict(answer.headers)["kafka_correlationId"] == CORRELATION_ID
    assert dict(answer.headers)["order-line"] == b"of the caller's"
    decoded = decode_response(answer.headers, answer.value)
    assert isinstance(decoded, Answer)
    assert decoded.id == "7"
    np.testing.assert_allclose(decoded.outputs["scores"][:, 1], np.full(ROWS, 32.0))


async def _letters(log: MemoryLog, tmp_path: Path, *headers: dict[str, bytes]) -> None:
    settings = serving(tmp_path, "headrace", 4096)
    await create_topics(log, settings)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 1)
    records = [NewRecord(b"k", b"v%d" % n, list(each.items())) for n, each in enumerate(headers)]
    await write_to(log, letters, *records)


async def test_second_redrive_sends_no_letter_again(tmp_path: Path) -> None:
    """The log, not the process, remembers which dead letters were redriven."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 3)
        first = await Redrive(log, settings, RedriveJob()).run()
        second = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (first.sent.total(), second.sent.total(), second.done_before) == (3, 0, 3)
    assert [record.value for record in sent] == [b"v0", b"v1", b"v2"]


async def test_redrive_sends_selected_letters_and_leaves_rest(tmp_path: Path) -> None:
    """Letters between those that are done stay to be redriven."""
    settings = serving(tmp_path, "headrace", 4096)
    codes = (b"TOO_LARGE", b"UNKNOWN_MODEL", b"TOO_LARGE", b"UNKNOWN_MODEL")
    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("t", 1, 5, code=code) for code in codes])
        unknown = RedriveJob(DeadLetterSelection(codes=frozenset({"UNKNOWN_MODEL"})))
        await Redrive(log, settings, unknown).run()
        rest = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert rest.sent == {"TOO_LARGE": 2}
    assert [record.value for record in sent] == [b"v1", b"v3", b"v0", b"v2"]


async def test_limited_redrive_leaves_rest_for_next_one(tmp_path: Path) -> None:
    """The next redrive sends each of the rest once."""
    settings = serving(tmp_path, "headrace", 4096)
    parts: list[float] = []
    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 5)
        limited = Redrive(
            log, settings, RedriveJob(limit=2), advanced=lambda part, tally: parts.append(part)
        )
        first = await limited.run()
        rest = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (first.sent.total(), rest.sent.total(), rest.done_before) == (2, 3, 2)
    assert [record.value for record in sent] == [b"v%d" % number for number in range(5)]
    assert 0 < parts[-1] < 1


async def test_redrive_dry_run_sends_and_commits_nothing(tmp_path: Path) -> None:
    """It counts what would be sent, and so does the next one."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog() as log:
        await _letters(log, tmp_path, letter_headers("t", 1, 5))
        tallies = [await Redrive(log, settings, RedriveJob(dry_run=True)).run() for _ in range(2)]
        sent = await records_of(log, "headrace.requests", 2)

    assert [tally.sent.total() for tally in tallies] == [1, 1]
    assert sent == []


async def test_discarded_letter_is_never_sent(tmp_path: Path) -> None:
    """A discarded letter counts as redriven."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog() as log:
        await _letters(log, tmp_path, letter_headers("t", 1, 5))
        discarded = await Redrive(log, settings, RedriveJob(discard=True)).run()
        after = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (discarded.sent.total(), after.done_before) == (1, 1)
    assert sent == []


async def test_redrive_transform_changes_letters_or_leaves_them(tmp_path: Path) -> None:
    """None leaves it to be redriven another time; identities are put on after the transform."""
    settings = serving(tmp_path, "headrace", 4096)

    def transform(record: NewRecord) -> NewRecord | None:
        return None if record.value == b"v0" else record._replace(value=b"fixed", headers=[])

    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 0, 5)] * 2)
        tally = await Redrive(log, settings, RedriveJob(transform=transform)).run()
        rest = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (tally.sent.total(), tally.left, rest.sent.total()) == (1, 1, 1)
    assert [record.value for record in sent] == [b"fixed", b"v0"]
    assert dict(sent[0].headers)["x-replay-of"] == b"headrace.requests/0/5"
    assert dict(sent[0].headers)["x-replay-letter"] == b"headrace.dead-letters/1/1"


async def test_dead_letter_on_which_redrive_transform_fails_is_named(tmp_path: Path) -> None:
    """One of thousands may have a value that the function cannot read."""
    settings = serving(tmp_path, "headrace", 4096)
    script = tmp_path / "fix.py"
    script.write_text(
        "def transform(record):\n    return record if record.value == b'v0' else 1 / 0\n"
    )

    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 0, 5)] * 2)
        job = RedriveJob(transform=load_transform(script))
        with pytest.raises(ConfigurationError, match=r"^headrace.dead-letters/1/1: .*ZeroDivision"):
            await Redrive(log, settings, job).run()


async def test_limited_redrive_passes_over_letters_that_transform_leaves(tmp_path: Path) -> None:
    """Else a few that it leaves would keep the same command from ever reaching the others."""
    settings = serving(tmp_path, "headrace", 4096)

    def transform(record: NewRecord) -> NewRecord | None:
        return record if record.value in (b"v2", b"v4") else None

    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 0, 5)] * 5)
        job = RedriveJob(limit=1, transform=transform)
        first = await Redrive(log, settings, job).run()
        second = await Redrive(log, settings, job).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (first.sent.total(), first.left) == (1, 2)
    assert (second.sent.total(), second.left, second.done_before) == (1, 3, 1)
    assert [record.value for record in sent] == [b"v2", b"v4"]


async def test_redriven_letter_that_fails_again_counts_attempts(tmp_path: Path) -> None:
    """The new dead letter counts its attempts and still names the first request."""
    strict = serving(tmp_path, "headrace", STRICT_BYTES)
    async with MemoryLog() as log:
        await create_topics(log, strict)
        await make_dead_letter(log, strict, large_request(strict))
        letters = TopicPartition(strict.topic(Topic.DEAD_LETTERS), 1)
        async with log.reader([letters]) as reader, running(Pipeline(strict, log)):
            await Redrive(log, strict, RedriveJob()).run()
            await read(reader, 1)
        again = [
            each async for each in read_dead_letters(log, letters.topic, DeadLetterSelection())
        ]

    assert [letter.attempt for letter in again] == [1, 2]
    assert dict(again[1].record.headers)["x-replay-of"] == b"headrace.requests/1/0"


async def test_redrive_after_killed_run_sends_no_letter_twice(tmp_path: Path) -> None:
    """It could not commit any more; the next run finds the copies among the requests."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog(request_timeout_s=0.05) as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 3)

        def from_now_on_no_commit_is_answered(record: NewRecord) -> NewRecord:
            log.faults.groups.hold_commits()
            return record

        with pytest.raises(LogUnavailable):
            await Redrive(
                log, settings, RedriveJob(transform=from_now_on_no_commit_is_answered)
            ).run()
        log.faults.groups.release_commits()
        next_run = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (next_run.sent.total(), next_run.done_before) == (0, 3)
    assert len(sent) == 3


async def test_redrive_after_killed_run_finds_copies_behind_open_transaction(
    tmp_path: Path,
) -> None:
    """Another producer's transaction hides them: nothing is sent before it has ended."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog(request_timeout_s=0.05) as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 3)
        await leave_transaction_open(log, TopicPartition("headrace.requests", 1), "streams")

        def from_now_on_no_commit_is_answered(record: NewRecord) -> NewRecord:
            log.faults.groups.hold_commits()
            return record

        with pytest.raises(LogUnavailable):
            await Redrive(
                log, settings, RedriveJob(transform=from_now_on_no_commit_is_answered)
            ).run()
        log.faults.groups.release_commits()
        with pytest.raises(LogUnavailable, match=r"headrace\.requests/1: .*open transaction"):
            await Redrive(log, settings, RedriveJob(), decided_within_s=0.0).run()
        log.faults.transactions.time_out("streams")
        next_run = await Redrive(log, settings, RedriveJob()).run()
        sent = await visible(log, "headrace.requests")

    assert (next_run.sent.total(), next_run.done_before) == (0, 3)
    assert [record.value for record in sent] == [b"v0", b"v1", b"v2"]


async def test_redrive_after_retention_sends_letters_that_are_left(tmp_path: Path) -> None:
    """The group's committed offset is below what the topic still holds."""
    settings = serving(tmp_path, "headrace", 4096)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 1)
    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 5)
        await Redrive(log, settings, RedriveJob(limit=1)).run()
        log.faults.partitions.trim(letters, 3)
        after = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (after.sent.total(), after.done_before) == (2, 0)
    assert [record.value for record in sent] == [b"v0", b"v3", b"v4"]


async def test_redrive_after_lost_end_sends_no_letter_twice(tmp_path: Path) -> None:
    """An unclean leader election took the last one; a new one gets its offset."""
    settings = serving(tmp_path, "headrace", 4096)
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 1)
    async with MemoryLog() as log:
        await _letters(log, tmp_path, *[letter_headers("headrace.requests", 1, 5)] * 3)
        await Redrive(log, settings, RedriveJob()).run()
        log.faults.partitions.truncate(letters, 2)
        lost = await Redrive(log, settings, RedriveJob()).run()
        await write_to(log, letters, b"new")
        after = await Redrive(log, settings, RedriveJob()).run()
        sent = await records_of(log, "headrace.requests", 2)

    assert (lost.sent.total(), lost.done_before, after.sent.total()) == (0, 2, 1)
    assert sorted(record.value or b"" for record in sent) == [b"new", b"v0", b"v1", b"v2"]


async def test_two_redrives_at_once_are_refused(tmp_path: Path) -> None:
    """A redrive that does not get every partition sends nothing."""
    settings = serving(tmp_path, "headrace", 4096)
    listener = RecordingListener()
    async with MemoryLog() as log:
        await _letters(log, tmp_path, letter_headers("t", 1, 5))
        other = log.member("headrace.redrive", ["headrace.dead-letters"], listener)
        async with other, polling(other, []):
            await eventually(lambda: listener.held)
            with pytest.raises(RedriveUnderWay):
                await Redrive(log, settings, RedriveJob()).run()
        assert await records_of(log, "headrace.requests", 2) == []


async def test_redrive_to_missing_topic_names_topic(tmp_path: Path) -> None:
    """The error comes before anything is joined or sent."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog() as log:
        with pytest.raises(ConfigurationError, match=r"headrace\.dead-letters: does not exist"):
            await Redrive(log, settings, RedriveJob()).run()
