"""The topic of requests is deleted and made anew while processes run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headrace.log.port import Committed, TopicPartition
from headrace.protocol.codec import decode_response
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import STAGES, Stage, Topic
from tests.support.conditions import eventually
from tests.support.dying import records_of
from tests.support.pipelines import PARTITIONS, Caller, Grouping, log_for, serving, settings_of

GROUPINGS: list[Grouping] = [[STAGES], [STAGES[:3], (Stage.RESPONDER,)]]


@pytest.mark.parametrize("grouping", GROUPINGS, ids=["fused", "responder-apart"])
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_new_requests_at_offsets_of_former_ones_are_answered(
    tmp_path: Path, grouping: Grouping, guarantee: str
) -> None:
    """None is taken for one that was answered already."""
    settings = settings_of(tmp_path)
    settings = settings.model_copy(
        update={"delivery": settings.delivery.model_copy(update={"guarantee": guarantee})}
    )
    log = await log_for(settings)
    requests = settings.topic(Topic.REQUESTS)
    partitions = [TopicPartition(requests, number) for number in range(PARTITIONS)]
    caller = Caller(settings, log)
    async with serving(settings, log, grouping):
        await caller.send(400)

        async def all_answered() -> bool:
            return len(await records_of(settings, log, Topic.RESPONSES)) == 400

        await eventually(all_answered, recheck_s=0.05)
        log.faults.topics.delete(requests)
        await log.create_topics([plan_topics(settings)[Topic.REQUESTS]], replication_factor=1)
        await caller.send(40)

        async def committed() -> bool:
            found = await log.committed(settings.namespace, partitions)
            return found == dict.fromkeys(partitions, Committed(40 // PARTITIONS))

        await eventually(committed)

    answers = await records_of(settings, log, Topic.RESPONSES)
    found = Counter(decode_response(each.headers, each.value).id for each in answers)
    assert found == Counter(map(str, range(440)))
