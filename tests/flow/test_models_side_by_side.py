"""Several models in one process: each has instances of its own, and none waits for another."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np

from headrace.codec import Answer, decode_response, encode_request
from headrace.log.port import NewRecord, TopicPartition
from headrace.topics import STAGES
from tests.support.logs import POLL_S, write_to
from tests.support.models import add_version, slow
from tests.support.pipelines import PARTITIONS, log_for, serving, settings_of

FLOOD, QUICK = 24, 100
ROUNDS = 20_000
"""Of the slow model's loop: a tenth of a second."""


async def test_a_flood_of_one_model_does_not_hold_up_another(tmp_path: Path) -> None:
    """Requests to a quick model are answered while most of those to a slow one still wait."""
    add_version(tmp_path, "slow", 1, slow(), "intra_op_threads = 1")
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    x = np.ones((1, 64), np.float32)
    flood = encode_request("application/msgpack", "slow", {"times": np.array(ROUNDS), "x": x})
    quick = encode_request("application/msgpack", "digits", {"pixels": x})
    topics = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]
    answers: Counter[str] = Counter()
    async with log.reader(topics) as reader, serving(settings, log, [STAGES]):
        for number, value in enumerate([flood] * FLOOD + [quick] * QUICK):
            target = TopicPartition("headrace.requests", number % PARTITIONS)
            await write_to(log, target, NewRecord(None, value))
        async with asyncio.timeout(30):
            while answers["digits"] < QUICK:
                for records in (await reader.poll(POLL_S, 500)).values():
                    for record in records:
                        answer = decode_response(record.headers, record.value)
                        assert isinstance(answer, Answer), answer
                        answers[answer.model_name] += 1
    assert answers["slow"] < FLOOD / 2
