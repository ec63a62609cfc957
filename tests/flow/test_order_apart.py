"""Order where the answers come from another process than the one that reads requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.log.port import TopicPartition
from headrace.topics import Stage
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.mixed import Mixed
from tests.support.models import add_version, embedding
from tests.support.pipelines import PARTITIONS, Grouping, log_for, serving

SINGLY = replace(TUNING, transport=replace(TUNING.transport, max_record_requests=1))
"""One request in each record, so that the end of `results` counts them."""

THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("order", ["partition", "key"])
async def test_held_answers_do_not_keep_their_predecessor_from_budget(
    tmp_path: Path, order: str, guarantee: str
) -> None:
    """One request waits for company, and the answers behind it are more than the budget."""
    add_version(tmp_path, "embedding", 1, embedding())
    config = "max_queue_delay_ms = 3000\nmax_batch_size = 2\n"
    add_version(tmp_path, "late", 1, embedding(), config)
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": {"guarantee": guarantee, "order": order},
            "limits": {"max_in_flight_bytes": 1024 * 1024},
        }
    )
    log = await log_for(settings)
    caller = Mixed(settings, log)
    results = TopicPartition("headrace.results", 0)
    async with serving(settings, log, THREE, SINGLY):
        await caller.send_one("late", b"one")
        await caller.send_more(5000, b"one")
        await eventually(lambda: log.faults.partitions.end_offset(results) >= 5000)
        await caller.send_one("late", b"one")
        await caller.all_answered()

    await caller.check()
