"""Saturated throughput: answers are counted while a contestant serves records that were written
before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.cluster import Cluster, Counter
from benchmarks.contestants import PYTHON, Contestant, Endpoints
from benchmarks.processes import ProgramFailed, Running
from benchmarks.results import Saturated
from benchmarks.stages import rows_per_run, scrape
from benchmarks.subjects import BenchmarkModel
from headrace.log.port import TopicPartition
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import Topic

START_DEADLINE_S = 40.0
STALLED_S = 20.0
LOOK_EVERY_S = 0.02
GAP_S = 0.06
"""Pause after which the answers of one run, which come to several partitions, are complete."""
MOST_GAPS = 5
"""Maximum number of pauses to wait for, if runs follow each other faster than that."""


async def prepare(
    cluster: Cluster, contestant: Contestant, subject: BenchmarkModel, place: Endpoints
) -> list[str]:
    """Create a contestant's topics; returns their names. Raises `ContestantMissing`."""
    if contestant.settings is None:
        await cluster.create_plain(place.responses)
        return [place.responses]
    planned = plan_topics(contestant.settings(subject, place))
    topics = [topic for kind, topic in planned.items() if kind is not Topic.REQUESTS]
    await cluster.create(topics)
    return [topic.name for topic in topics]


async def saturate(
    cluster: Cluster,
    contestant: Contestant,
    subject: BenchmarkModel,
    place: Endpoints,
    window_s: float,
) -> Saturated:
    """Measure one run.

    Raises:
        ContestantMissing: it cannot run here.
        ProgramFailed: it did not get on.
    """
    programs = contestant.programs(subject, place)
    topics = await prepare(cluster, contestant, subject, place)
    try:
        async with cluster.counting(place.requests) as requests:
            there = await requests.now()
        async with cluster.counting(place.responses) as answers:
            with Running(programs) as running:
                await _first_answer(running, answers)
                await asyncio.sleep(contestant.settle_s)
                before = scrape(place.http_port) if place.http_port else {}
                seen = await _count(cluster, running, answers, there, window_s)
                rows = rows_per_run(before, scrape(place.http_port)) if place.http_port else 0.0
            answered = seen.offsets
            if contestant.in_transactions:
                answered = await answers.records(seen.begin, seen.end)
            return Saturated(
                per_s=answered / seen.seconds,
                cpu_us=seen.cpu_s / answered * 1e6,
                broker_us=seen.broker_s / answered * 1e6,
                memory_mib=seen.memory_mib,
                rows_per_run=rows,
            )
    finally:
        await cluster.delete(topics)


async def _first_answer(running: Running, answers: Counter) -> None:
    give_up_s = time.monotonic() + START_DEADLINE_S
    while not await answers.now():
        running.check()
        if time.monotonic() > give_up_s:
            raise ProgramFailed(f"no answer within {START_DEADLINE_S:g} s: {running.last_words()}")
        await asyncio.sleep(LOOK_EVERY_S)


class _Window(NamedTuple):
    """Answers and costs of one period of time."""

    begin: Mapping[TopicPartition, int]
    end: Mapping[TopicPartition, int]
    seconds: float
    cpu_s: float
    broker_s: float
    memory_mib: float

    @property
    def offsets(self) -> int:
        """Number of offsets between the two ends."""
        return sum(self.end.values()) - sum(self.begin.values())


async def _count(
    cluster: Cluster, running: Running, answers: Counter, there: int, window_s: float
) -> _Window:
    """Count from the end of one run's answers to the end of another's, at least `window_s` later,
    or until all requests are answered.

    Answers of a slow model come batch by batch: counted from any moment to any other, a batch more
    or less, or a part of one, would be percents.
    """
    begin = end = await _change(running, answers, await answers.ends())
    began_s, cpu_s, broker_s = time.monotonic(), running.cpu_s(), cluster.cpu_s()
    while time.monotonic() < began_s + window_s and sum(end.values()) < there:
        await asyncio.sleep(LOOK_EVERY_S)
        end = await answers.ends()
    if sum(end.values()) < there:
        end = await _change(running, answers, end)
    seen = _Window(
        begin,
        end,
        time.monotonic() - began_s,
        running.cpu_s() - cpu_s,
        cluster.cpu_s() - broker_s,
        running.resident_bytes() / 2**20,
    )
    running.check()
    if not seen.offsets:
        raise ProgramFailed(f"all {there} requests were answered before the count began")
    return seen


async def _change(
    running: Running, answers: Counter, before: Mapping[TopicPartition, int]
) -> Mapping[TopicPartition, int]:
    """Wait for a run's answers; returns the end offsets after them. Raises `ProgramFailed`."""
    give_up_s = time.monotonic() + STALLED_S
    while (ends := await answers.ends()) == before:
        running.check()
        if time.monotonic() > give_up_s:
            raise ProgramFailed(f"no answers for {STALLED_S:g} s: {running.last_words()}")
        await asyncio.sleep(LOOK_EVERY_S)
    for _ in range(MOST_GAPS):
        await asyncio.sleep(GAP_S)
        before, ends = ends, await answers.ends()
        if ends == before:
            break
    return ends


def run_bare(subject: BenchmarkModel, seconds: float) -> Saturated:
    """Run the model alone, at the subject's batch size."""
    with tempfile.TemporaryDirectory() as scratch:
        batch = Path(scratch) / "batch.npy"
        np.save(batch, subject.array())
        found = subprocess.run(
            [
                *(PYTHON, "-m", "benchmarks.loops.bare"),
                *(subject.onnx, batch, str(seconds), str(subject.threads)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + START_DEADLINE_S,
        )
    if found.returncode:
        raise ProgramFailed(found.stderr[-1500:])
    said = json.loads(found.stdout)
    return Saturated(said["rows"] / said["seconds"], said["cpu_s"] / said["rows"] * 1e6)
