"""`headrace dlq` on a real Kafka: from a limit that was too strict to the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiokafka
import pytest
from aiokafka.admin import RecordsToDelete
from click.testing import Result
from msgspec.structs import replace

from headrace.config import Settings
from headrace.log.port import Record, TopicPartition
from headrace.protocol.codec import decode_response
from headrace.protocol.codec.client import Answer
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.tools.dead_letters import Redrive, RedriveJob, RedriveResult
from headrace.tools.dead_letters.redrive import patient
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import Topic
from headrace.tuning import TUNING
from tests.support.command_line import Call
from tests.support.dead_letters import (
    CORRELATION_ID,
    STRICT_BYTES,
    create_topics,
    large_request,
    make_dead_letter,
    records_of,
    reply_topic,
    serving,
)
from tests.support.deployments import administration
from tests.support.logs import PATIENT, read

Settle = Callable[[int], Settings]


@pytest.fixture
def ack(
    kafka: LocalKafka, tmp_path: Path, unique_name: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> Settle:
    """Settings with a limit, for the process and, through the environment, for commands."""
    broker = {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}}
    monkeypatch.setenv("HEADRACE_NAMESPACE", unique_name)
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    return lambda limit: serving(tmp_path, unique_name, limit, **broker)


async def _fail(settings: Settings, count: int) -> None:
    async with open_log(settings) as log:
        await create_topics(log, settings)
        deadline = ("x-deadline-ms", b"4000000000000")
        records = [large_request(settings, deadline) for _ in range(count)]
        await make_dead_letter(log, settings, *records)


async def _serve(settings: Settings, count: int) -> list[Record]:
    """Answer what is there, and return what came to the caller's topic, refusals included."""
    async with open_log(settings) as log:
        replies = TopicPartition(reply_topic(settings), 0)
        async with log.reader([replies]) as reader, running(Pipeline(settings, log)):
            reader.seek(replies, 0)
            return await read(reader, count)


async def _requests(settings: Settings) -> list[Record]:
    async with open_log(settings) as log:
        return await records_of(log, settings.topic(Topic.REQUESTS), 2)


def _json(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_redriven_letter_is_answered_after_limit_is_raised(ack: Settle, call: Call) -> None:
    """The answer comes on the named reply topic with its correlation id; a second redrive sends
    nothing.
    """
    asyncio.run(_fail(ack(STRICT_BYTES), 1))

    first = _json(call("dlq", "redrive", "--code", "TOO_LARGE", "--json"))
    second = _json(call("dlq", "redrive", "--json"))
    refusal, answer = asyncio.run(_serve(ack(4096), 2))

    assert (first["sent"], second["sent"], second["done_before"]) == (1, 0, 1)
    assert dict(refusal.headers)["x-status"] == b"TOO_LARGE"
    assert dict(answer.headers)["x-status"] == b"ok"
    assert dict(answer.headers)["kafka_correlationId"] == CORRELATION_ID
    assert isinstance(decode_response(answer.headers, answer.value), Answer)


def test_letters_are_listed_shown_and_exported(ack: Settle, call: Call) -> None:
    """Redriven letters are marked; the request is decoded whatever limit it exceeded."""
    settings = ack(STRICT_BYTES)
    asyncio.run(_fail(settings, 3))
    call("dlq", "redrive", "1/1")

    listed = _json(call("dlq", "list", "--json", "--model", "digits"))
    pending = _json(call("dlq", "list", "--json", "--pending", "--since", "1h"))
    shown = call("dlq", "show", f"{settings.topic(Topic.DEAD_LETTERS)}/1/1").stdout
    exported = call("dlq", "export", "--stage", "ingest")
    captured = call("dlq", "export", "--pending", "--capture", "letters.capture")
    counted = _json(call("replay", "count", "--file", "letters.capture", "--json"))

    assert [letter["redriven"] for letter in listed["letters"]] == [False, True, False]
    assert listed["counts"] == {"TOO_LARGE": 3}
    assert pending["total"] == 2
    assert "input pixels FP32 [8, 64]" in shown
    assert "redriven since" in shown
    assert exported.exit_code == 0, exported.stderr
    lines = [json.loads(line) for line in exported.stdout.splitlines()]
    assert [line["letter"].rpartition("/")[2] for line in lines] == ["0", "1", "2"]
    assert captured.stderr.splitlines()[-1] == "2 dead letters written"
    assert [(each["partition"], each["records"]) for each in counted] == [(1, 2)]


def test_export_of_nothing_empties_existing_file(ack: Settle, call: Call, tmp_path: Path) -> None:
    """What an earlier export has written must not pass for this one's."""
    asyncio.run(_fail(ack(STRICT_BYTES), 0))
    earlier = tmp_path / "letters.jsonl"
    earlier.write_text("{}\n")

    result = call("dlq", "export", "--output", str(earlier))

    assert result.exit_code == 0, result.stderr
    assert earlier.read_text() == ""


def test_redrive_runs_dry_and_with_transform(ack: Settle, call: Call, tmp_path: Path) -> None:
    """The dry run sends nothing; the script's records are what is sent."""
    settings = ack(STRICT_BYTES)
    asyncio.run(_fail(settings, 2))
    script = tmp_path / "fix.py"
    script.write_text("def transform(record):\n    return record._replace(value=b'fixed')\n")

    dry = _json(call("dlq", "redrive", "--dry-run", "--json"))
    unchanged = len(asyncio.run(_requests(settings)))
    wet = _json(call("dlq", "redrive", "--transform", str(script), "--rate", "100", "--json"))

    assert (dry["sent"], wet["sent"], unchanged) == (2, 2, 2)
    assert [record.value for record in asyncio.run(_requests(settings))[2:]] == [b"fixed"] * 2


async def _delete_before(settings: Settings, letters: TopicPartition, offset: int) -> None:
    assert settings.kafka is not None
    async with administration(settings.kafka.bootstrap_servers) as admin:
        before = RecordsToDelete(before_offset=offset)
        await admin.delete_records({aiokafka.TopicPartition(*letters): before})


def test_letters_that_retention_has_left_are_redriven(ack: Settle, call: Call) -> None:
    """The redrive state names an offset that the topic no longer holds."""
    settings = ack(STRICT_BYTES)
    asyncio.run(_fail(settings, 4))
    first = _json(call("dlq", "redrive", "--limit", "1", "--json"))
    letters = TopicPartition(settings.topic(Topic.DEAD_LETTERS), 1)
    asyncio.run(_delete_before(settings, letters, 2))

    rest = _json(call("dlq", "redrive", "--json"))
    again = _json(call("dlq", "redrive", "--json"))

    assert (first["sent"], rest["sent"], again["sent"]) == (1, 2, 0)


def test_redrive_slower_than_poll_interval_stays_in_group(ack: Settle) -> None:
    """One poll returns many letters, which may take long at a low rate or with a slow transform."""
    settings = ack(STRICT_BYTES)
    hasty = replace(TUNING, kafka=replace(PATIENT, max_poll_interval_s=1.0))

    async def redrive() -> RedriveResult:
        async with open_log(settings, patient(hasty)) as log:
            return await Redrive(log, settings, RedriveJob(rate=5.0)).run()

    asyncio.run(_fail(settings, 20))
    assert asyncio.run(redrive()).sent.total() == 20


def test_missing_dead_letter_is_reported(ack: Settle, call: Call) -> None:
    """The error names the place, and the exit code is that of wrong usage."""
    settings = ack(STRICT_BYTES)
    asyncio.run(_fail(settings, 1))

    result = call("dlq", "show", "1/7")

    assert result.exit_code == 2
    assert "dead-letters/1/7: expected a dead letter, but there is none" in result.stderr
