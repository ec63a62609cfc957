"""Retention deletes between two stages what nobody has read yet."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from headrace.log.port import TopicPartition
from headrace.topics import Stage, Topic
from tests.support.conditions import eventually
from tests.support.pipelines import PARTITIONS, Caller, log_for, serving, settings_of
from tests.support.tuning import QUICK

COUNT = 100
SINGLY = replace(QUICK, transport=replace(QUICK.transport, max_record_requests=1))
"""One request in each record, so that offsets of `items` count them."""


async def test_lost_intermediate_records_make_ingest_unready_and_are_sent_again(
    tmp_path: Path,
) -> None:
    """The ingest is not ready while a base stands still, and its successor begins there."""
    settings = settings_of(tmp_path)
    topics = settings.topics.model_copy(update={"internal_retention_ms": 500})
    settings = settings.model_copy(update={"topics": topics})
    log = await log_for(settings)
    caller = Caller(settings, log)
    ingest = [(Stage.INGEST,)]
    rest = [(Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
    first_items = TopicPartition(settings.topic(Topic.ITEMS), 0)
    async with serving(settings, log, ingest, SINGLY) as (reading,):
        await caller.send(COUNT)
        await eventually(
            lambda: log.faults.partitions.end_offset(first_items) == COUNT // PARTITIONS
        )
        log.faults.partitions.trim(first_items, 5)
        async with serving(settings, log, rest, SINGLY):

            def stuck_partitions() -> set[int]:
                found = [one for asked in reading.state.sources for one in asked().partitions]
                return {one.partition for one in found if one.is_stuck}

            await eventually(lambda: caller.answered() == COUNT - 5)
            await eventually(lambda: stuck_partitions() == {0})
            reason = reading.health.ready_fault()
    async with serving(settings, log, [*ingest, *rest]):
        await caller.all_answered()

    assert reason.startswith(f"{settings.topic(Topic.REQUESTS)}/0: its base has not moved for")
    numbers = await caller.check()
    assert set(numbers) == set(range(COUNT))
