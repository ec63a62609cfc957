"""Topics that access rules forbid: a caller's costs it an answer, one of ours ends the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.cli.outcome import Exit, explain
from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.shutdown import Stop
from headrace.topics import Topic
from tests.support.dead_letters import create_topics, reply_topic, serving
from tests.support.logs import read, write_to


def request(*headers: tuple[str, bytes]) -> NewRecord:
    """A sound request."""
    inputs = {"pixels": np.full((1, 64), 0.5, np.float32)}
    return NewRecord(b"key", encode_request("application/msgpack", "digits", inputs), headers)


def partition(settings: Settings, topic: Topic) -> TopicPartition:
    """The one that all of these tests use."""
    return TopicPartition(settings.topic(topic), 0)


@pytest.mark.parametrize("hidden", [False, True], ids=["visible", "hidden"])
async def test_forbidden_reply_topic_fails_only_its_request(tmp_path: Path, hidden: bool) -> None:
    """It is answered on `responses` and kept as a dead letter; those around it are answered."""
    settings = serving(tmp_path, "headrace", 4096)
    forbidden = reply_topic(settings)
    async with MemoryLog() as log:
        await create_topics(log, settings)
        log.faults.topics.forbid(forbidden, hidden=hidden)
        responses = partition(settings, Topic.RESPONSES)
        letters = partition(settings, Topic.DEAD_LETTERS)
        async with (
            log.reader([responses]) as answered,
            log.reader([letters]) as kept,
            running(Pipeline(settings, log)),
        ):
            await write_to(
                log,
                partition(settings, Topic.REQUESTS),
                request(("kafka_correlationId", b"before")),
                request(
                    ("kafka_correlationId", b"forbidden"), ("kafka_replyTopic", forbidden.encode())
                ),
                request(("kafka_correlationId", b"after")),
            )
            answers = await read(answered, 3)
            (letter,) = await read(kept, 1)

    by_id = {dict(one.headers)["kafka_correlationId"]: one for one in answers}
    statuses = {name: dict(one.headers)["x-status"] for name, one in by_id.items()}
    assert statuses == {b"before": b"ok", b"forbidden": b"INVALID_REQUEST", b"after": b"ok"}
    words = b"kafka_replyTopic: not allowed to write to topic " + forbidden.encode()
    assert words in (by_id[b"forbidden"].value or b"")
    assert dict(letter.headers)["kafka_dlt-exception-message"] == words
    assert letter.value == request().value


@pytest.mark.parametrize("topic", [Topic.RESPONSES, Topic.DEAD_LETTERS])
async def test_forbidden_own_topic_ends_process(tmp_path: Path, topic: Topic) -> None:
    """One line names the topic; the request stays unanswered and runs elsewhere."""
    settings = serving(tmp_path, "headrace", 4096)
    async with MemoryLog() as log:
        await create_topics(log, settings)
        log.faults.topics.forbid(settings.topic(topic))
        bad = NewRecord(b"key", b"not a request")
        requests = partition(settings, Topic.REQUESTS)
        await write_to(log, requests, bad)
        with pytest.raises(ExceptionGroup) as caught:
            await Pipeline(settings, log).run(Stop())
        committed = await log.committed(settings.namespace, [requests])

    name = settings.topic(topic)
    lines = [f"not allowed to write to topic {name}"]
    assert explain(caught.value) == (Exit.FAILED, lines)
    found = committed[requests]
    assert found is None or found.offset == 0
