"""A process ends in good order while answers far ahead of an unanswered request are committed."""

from __future__ import annotations

from collections import Counter
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from headrace.config import Settings, make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.pipelines import Grouping, log_for, serving
from tests.support.python_models import GATE, add_gated_model, shut_gate
from tests.support.visible import source_of, visible

REQUESTS = TopicPartition("headrace.requests", 0)
APART: Grouping = [STAGES[:3], (Stage.RESPONDER,)]
COUNT = 2 * TUNING.delivery.safe_span_offsets
EVERY = 4
"""Each so many-th request waits at the gate: the answered ones between them are as many ranges."""


def settings_of(repository: Path) -> Settings:
    """One partition, a model that answers and one that waits, and hardly any time for a drain."""
    add_version(repository, "digits", 1, digits())
    add_gated_model(repository)
    return make_settings(
        {
            "topics": {"partitions": 1},
            "models": {"repository": repository},
            "limits": {"drain_timeout_s": 0.1},
        }
    )


async def send(log: MemoryLog, count: int) -> None:
    """Send so many requests, every fourth for the model behind the gate."""
    pixels, x = np.zeros((1, 64), np.float32), np.zeros((1, 1), np.float32)
    quick = NewRecord(None, encode_request("application/msgpack", "digits", {"pixels": pixels}))
    gated = NewRecord(None, encode_request("application/msgpack", "gated", {"x": x}))
    records = [quick if number % EVERY else gated for number in range(count)]
    async with log.producer() as producer:
        for sent in await producer.send(REQUESTS, records):
            await sent.acknowledged


async def answers_overtake(log: MemoryLog, reading: Pipeline) -> None:
    """Wait until no answer is on its way any more while the gate is shut.

    Reading has stopped, since the answered offsets reach too far above the first request, which
    waits; and each request that was read is answered and committed, except those at the gate.
    """

    async def only_gated_ones_are_left() -> bool:
        (source,) = [
            asked
            for asked in (each() for each in reading.state.sources)
            if asked.partitions and asked.topic == REQUESTS.topic
        ]
        (partition,) = source.partitions
        quick = partition.span_records - ceil(partition.span_records / EVERY)
        committed = (await log.committed("headrace", [REQUESTS]))[REQUESTS]
        return (
            partition.paused != ""
            and partition.span_records >= TUNING.delivery.safe_span_offsets
            and committed is not None
            and AckedOffsets.from_committed(committed).answered_above[0] == quick
            and len(await visible(log, "headrace.responses")) == quick
        )

    await eventually(only_gated_ones_are_left, recheck_s=0.1)


def assignments(pipeline: Pipeline) -> float | None:
    """How many times the pipeline was given partitions."""
    return pipeline.metrics.registry.get_sample_value("headrace_rebalances_total")


async def repeats_when_all_are_answered(log: MemoryLog, count: int) -> dict[tuple[int, int], int]:
    """Wait until each request has an answer, and return those that have more than one."""
    counts: Counter[tuple[int, int]] = Counter()

    async def all_answered() -> bool:
        counts.clear()
        counts.update(map(source_of, await visible(log, "headrace.responses")))
        return len(counts) == count

    await eventually(all_answered, recheck_s=0.3, deadline_s=60)
    return {place: often for place, often in counts.items() if often > 1}


@pytest.mark.parametrize("grouping", [[STAGES], APART], ids=["fused", "responder-apart"])
@pytest.mark.parametrize("then", ["at_least_once", "exactly_once"])
async def test_restart_with_long_backlog_repeats_no_answer(
    tmp_path: Path, grouping: Grouping, then: str
) -> None:
    """More answers could overtake the waiting requests than a commit's metadata can hold."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    await send(log, COUNT)
    with shut_gate():
        async with serving(settings, log, grouping) as [reading, *_]:
            await answers_overtake(log, reading)
    delivery = settings.delivery.model_copy(update={"guarantee": then})
    async with serving(settings.model_copy(update={"delivery": delivery}), log, grouping):
        repeats = await repeats_when_all_are_answered(log, COUNT)

    assert not repeats, f"{len(repeats)} of {COUNT} requests have more than one answer"


async def test_rebalance_with_long_backlog_repeats_no_answer(tmp_path: Path) -> None:
    """A second process joins while the requests in flight do not end in time."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    await send(log, COUNT)
    with shut_gate():
        async with serving(settings, log, [STAGES]) as [pipeline]:
            await answers_overtake(log, pipeline)
            log.faults.groups.force_rebalance(settings.namespace)
            # Answers that are on their way when the drain's time is over may be repeated. The gate
            # stays shut until then, so that there are none.
            await eventually(lambda: assignments(pipeline) == 2)
            GATE.set()
            repeats = await repeats_when_all_are_answered(log, COUNT)

    assert not repeats, f"{len(repeats)} of {COUNT} requests have more than one answer"
