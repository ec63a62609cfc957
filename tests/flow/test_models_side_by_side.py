"""Several models in one process: each has instances of its own, and none waits for another."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.log.port import Consumer, NewRecord, TopicPartition
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.conditions import DEADLINE_S
from tests.support.logs import POLL_S, write_to
from tests.support.models import add_version, slow
from tests.support.pipelines import PARTITIONS, log_for, serving, settings_of

FLOOD, QUICK = 24, 100
ROUNDS = 20_000
"""Rounds of the slow model's loop: a tenth of a second."""


async def test_flood_of_one_model_does_not_hold_up_another(tmp_path: Path) -> None:
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
        async with asyncio.timeout(DEADLINE_S):
            while answers["digits"] < QUICK:
                for records in (await reader.poll(POLL_S, 500)).values():
                    for record in records:
                        answer = decode_response(record.headers, record.value)
                        assert isinstance(answer, Answer), answer
                        answers[answer.model_name] += 1
    assert answers["slow"] < FLOOD / 2


WORK = {"long": 12_000, "short": 1_200}
"""Rounds of one run; nothing else differs between the two."""
RUNS = {"long": 40, "short": 400}
SEEN = 12


@pytest.fixture
def one_core() -> Iterator[None]:
    """Restrict everything started in the context to one core."""
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    yield
    os.sched_setaffinity(0, affinity)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are Linux's to give")
@pytest.mark.usefixtures("one_core")
async def test_flooded_models_get_equal_shares_of_core(tmp_path: Path) -> None:
    """Shares count computing time and not runs: long runs get no more than short ones."""
    for name in WORK:
        add_version(tmp_path, name, 1, slow(), "intra_op_threads = 1")
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    topics = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]
    async with log.reader(topics) as reader, serving(settings, log, [STAGES]):
        for name, times in WORK.items():
            inputs = {"times": np.array(times), "x": np.ones((1, 64), np.float32)}
            value = encode_request("application/msgpack", name, inputs)
            for number in range(RUNS[name]):
                target = TopicPartition("headrace.requests", number % PARTITIONS)
                await write_to(log, target, NewRecord(None, value))
        async with asyncio.timeout(60):
            began = await _answered(reader, Counter(), dict.fromkeys(WORK, 1))
            ended = await _answered(reader, began.copy(), {"long": began["long"] + SEEN})
    done = {name: WORK[name] * (ended[name] - began[name]) for name in WORK}
    assert 0.35 < done["short"] / sum(done.values()) < 0.65, done


async def _answered(reader: Consumer, seen: Counter[str], wanted: dict[str, int]) -> Counter[str]:
    """Read until so many answers of each model were seen."""
    while any(seen[name] < count for name, count in wanted.items()):
        for records in (await reader.poll(POLL_S, 500)).values():
            for record in records:
                answer = decode_response(record.headers, record.value)
                assert isinstance(answer, Answer), answer
                seen[answer.model_name] += 1
    return seen
