"""Shares of the byte budget, on a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.client import Client
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from tests.flow.test_shares import FLOOD, FUSED, SMALL, done, flood_of, settings_of
from tests.support.pipelines import serving


async def test_saturated_model_lets_others_through(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """A reader beside the group's member reads deferred requests again, and all are answered."""
    settings = settings_of(
        tmp_path,
        namespace=unique_name,
        kafka={"bootstrap_servers": kafka.bootstrap_servers},
    )
    async with open_log(settings) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with (
            serving(settings, log, FUSED),
            Client(settings=settings, max_in_flight=1000) as client,
            asyncio.TaskGroup() as tasks,
        ):
            flood = flood_of(client, tasks, "slow")
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(8):
                await client.infer("quick", SMALL)

            assert done(flood) < FLOOD / 2
            await asyncio.gather(*flood)
