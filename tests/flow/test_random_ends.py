"""Processes that are cancelled at random moments, also while they close, with suspects among their
requests: whoever is left, or comes after, answers all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from headrace.config import Settings, make_settings
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import Stage
from tests.support.claim_store import StandInStore
from tests.support.conditions import eventually
from tests.support.dying import (
    FUSED,
    POISON,
    add_dying_model,
    outcomes,
    send_claims,
    send_numbers,
)
from tests.support.pipelines import PARTITIONS, Grouping, log_for

COUNT = 60
STRIKES = 12
SEEDS = 12
GROUPINGS: list[Grouping] = [
    [FUSED],
    [FUSED, FUSED],
    [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)],
]


class Hosts:
    """Pipelines that begin again whenever they have ended, until all are asked to stop.

    Attributes:
        serving: the present ones.
        ends: how those that were not cancelled have ended.
    """

    def __init__(self, settings: Settings, log: MemoryLog) -> None:
        self._settings = settings
        self._log = log
        self.stop = Stop()
        self.ends: list[BaseException | None] = []
        self.serving: dict[int, asyncio.Task[None]] = {}

    async def live(self, place: int, stages: tuple[Stage, ...]) -> None:
        """Run one pipeline after the other."""
        while not self.stop.requested.is_set():
            pipeline = Pipeline(self._settings, self._log, stages)
            self.serving[place] = asyncio.create_task(pipeline.run(self.stop), name="pipeline")
            await asyncio.wait([self.serving[place]])
            if not self.serving[place].cancelled():
                self.ends.append(self.serving[place].exception())


async def strike(random: Random, hosts: Hosts, log: MemoryLog, groups: list[str]) -> None:
    """End a pipeline: with one cancellation, or with more while it closes; or shake its group."""
    await asyncio.sleep(random.choice([0.0, 0.005, 0.02, 0.1]))
    what = random.choice(["cancel", "cancel", "cancel", "expire", "rebalance"])
    group = random.choice(groups)
    if what == "cancel":
        serving = random.choice(list(hosts.serving.values()))
        for _ in range(random.choice([1, 2, 2, 3])):
            serving.cancel()
            for _ in range(random.choice([0, 1, 2, 5, 20, 50])):
                await asyncio.sleep(0)
    elif log.faults.groups.members(group):
        if what == "rebalance":
            log.faults.groups.force_rebalance(group)
        else:
            log.faults.groups.expire_session(group, random.choice(log.faults.groups.members(group)))


async def run(seed: int, repository: Path, store: StandInStore) -> None:
    """One story: strikes, then peace until all is answered. In every second one the values of the
    requests are in a store, which fails at first.
    """
    random = Random(seed)
    delivery = {
        "guarantee": random.choice(["at_least_once", "exactly_once"]),
        "order": random.choice(["none", "none", "key", "partition"]),
    }
    grouping = random.choice(GROUPINGS)
    culprits = random.sample(range(COUNT), random.choice([0, 1, 2]))
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": repository},
            "delivery": delivery,
            "limits": {"inline_payload_bytes": 0} if seed % 2 else {},
            "claims": {"allowed": [store.url]},
        }
    )
    log = await log_for(settings)
    numbers = [POISON if place in culprits else float(place) for place in range(COUNT)]
    hosts = Hosts(settings, log)
    groups = ["headrace", "headrace.ingest", "headrace.batcher"]

    async def all_answered() -> bool:
        return len(await outcomes(settings, log)) == COUNT

    async with asyncio.TaskGroup() as tasks:
        for place, stages in enumerate(grouping):
            tasks.create_task(hosts.live(place, tuple(stages)), name=f"host-{place}")
        if seed % 2:
            store.failures_left = COUNT // 2
            await send_claims(settings, log, store, numbers)
        else:
            await send_numbers(settings, log, numbers)
        for _ in range(STRIKES):
            await strike(random, hosts, log, groups)
        await eventually(all_answered, recheck_s=0.05)
        hosts.stop.request()
    assert bool(store.requests) == bool(seed % 2)
    found = await outcomes(settings, log)
    assert [found[place] for place in culprits] == [{Code.MODEL_FAILED}] * len(culprits)
    # One that is innocent may have run alone at each of three strikes.
    assert all(
        found[place] <= {2 * number, Code.MODEL_FAILED} for place, number in enumerate(numbers)
    )


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_all_requests_are_answered_after_random_cancellations(
    tmp_path: Path, seed: int
) -> None:
    """Nothing is left behind that keeps partitions, whatever moment it was."""
    add_dying_model(tmp_path)
    async with StandInStore() as store:
        await run(seed, tmp_path, store)
