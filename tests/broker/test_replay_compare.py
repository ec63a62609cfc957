"""`headrace replay compare` on what a real Kafka holds: requests, and the answers they got."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.config import Settings, make_settings
from headrace.log.port import NewRecord, TopicPartition
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import Topic
from tests.support.command_line import Call
from tests.support.comparing import digit_requests, plant, swapped
from tests.support.dead_letters import create_topics
from tests.support.logs import read, write_to

COUNT = 60


async def _serve(settings: Settings) -> None:
    """Send the requests, and serve until all have their answers on `responses`."""
    requests = TopicPartition(settings.topic(Topic.REQUESTS), 0)
    answers = TopicPartition(settings.topic(Topic.RESPONSES), 0)
    async with open_log(settings) as log:
        await create_topics(log, settings)
        async with log.reader([answers]) as reader, running(Pipeline(settings, log)):
            records = [NewRecord(None, record.value) for record in digit_requests(COUNT)]
            await write_to(log, requests, *records)
            await read(reader, COUNT)


def test_comparing_uses_recorded_answers_on_topic(
    kafka: LocalKafka,
    unique_name: str,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests and answers are matched by `x-request`; the same models pass, others do not."""
    current = plant(tmp_path / "current")
    other = plant(tmp_path / "other", output_weight=swapped, output_bias=swapped)
    settings = make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "models": {"repository": current},
            "topics": {"partitions": 1},
        }
    )
    asyncio.run(_serve(settings))
    monkeypatch.setenv("HEADRACE_NAMESPACE", unique_name)
    monkeypatch.setenv("HEADRACE_KAFKA__BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    answers = settings.topic(Topic.RESPONSES)
    patient = ("--max-latency-ratio", "1000")  # one stall of the machine makes a side slower
    words = ("replay", "compare", "--answers", answers, "--models", str(current), "--json")

    same = call(*words, "--candidate", str(current), *patient)
    different = call(*words, "--candidate", str(other), *patient)

    assert (same.exit_code, different.exit_code) == (0, 1), same.stdout + same.stderr
    assert json.loads(same.stdout)["candidate"]["codes"] == [["ok", "ok", COUNT]]
    assert json.loads(different.stdout)["worst"][0]["command"].startswith(
        f"headrace replay compare --topic {settings.topic(Topic.REQUESTS)} --partition 0"
    )
