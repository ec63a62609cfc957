"""Latency: open-loop at shares of the capacity, and unloaded compared with two bare hops through
Kafka, and with stages apart.

The load comes from the same machine, in the open form from two processes
(`benchmarks.open_loop`); so the capacity that the shares are of is measured with a load as well,
by as many requests under way as it takes. It is lower than the throughput of records that were
there before. A load that cannot be sent when it is due measures its own queue: it is made smaller.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

from benchmarks.cluster import PARTITIONS, Cluster
from benchmarks.contestants import (
    ECHO,
    FUSED_CONTESTANT,
    THREE_CONTESTANT,
    Contestant,
    Endpoints,
)
from benchmarks.open_loop import LoadSample, OpenLoop, open_loop
from benchmarks.processes import ProgramFailed, Running
from benchmarks.results import BusyCores, OpenLoopLatency, Unloaded
from benchmarks.saturation import prepare, run_bare
from benchmarks.stages import scrape, stages_between
from benchmarks.subjects import BenchmarkModel
from headrace.log.port import TopicPartition
from headrace.tools.bench.load import Load, LoadPlan, LoadRequest
from headrace.tools.bench.measured import LoadResult

LOADS = (0.2, 0.5, 0.8)
STEP, LEAST = 0.1, 0.5
"""The largest share is lowered by `STEP` until its requests are sent on time, or `LEAST` is
reached.
"""
WARM_UP_S = 1.0
START_WAIT_S = 40.0
LAST_ANSWERS_S = 10.0
SKIP_S = 0.5
UNLOADED_ROUNDS = 3
UNLOADED_S = 1.0


class LatencyRun:
    """Headrace under several loads, one after the other.

    Args:
        place: of this run; its topic of requests is used by nobody else.
        contestant: in which form, and with which guarantee.
    """

    def __init__(
        self,
        cluster: Cluster,
        subject: BenchmarkModel,
        place: Endpoints,
        contestant: Contestant = FUSED_CONTESTANT,
    ) -> None:
        self._contestant = contestant
        self._cluster = cluster
        self._subject = subject
        self._place = place

    async def loaded(self, seconds: float) -> tuple[float, list[OpenLoopLatency]]:
        """Return the capacity per second, and the latencies at shares of it. Raises
        `ProgramFailed`.
        """
        async with self.serving() as running:
            under_way = 8 * self._subject.batch if self._subject.slow else 2048 * PARTITIONS
            capacity_per_s = (await self._load(seconds, SKIP_S).closed_loop(under_way)).per_s
            if not capacity_per_s:
                raise ProgramFailed(f"no answer within {seconds:g} s of load")
            latencies = []
            for share in LOADS:
                found = await self._open(running, capacity_per_s, share, seconds)
                while not found.on_time and found.load - STEP > LEAST:
                    lower = round(found.load - STEP, 2)
                    found = await self._open(running, capacity_per_s, lower, seconds)
                latencies.append(found)
        return capacity_per_s, latencies

    async def _open(
        self, running: Running, capacity_per_s: float, share: float, seconds: float
    ) -> OpenLoopLatency:
        """Run one open loop at a share of the capacity, and record where the time went."""
        rate_per_s = capacity_per_s * share
        load = await self.load(running, rate_per_s, seconds, SKIP_S)
        return _latency_result(share, rate_per_s, load)

    async def load(
        self,
        running: Running,
        rate_per_s: float,
        seconds: float,
        skip_s: float = 0.0,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> OpenLoop:
        """Run one open loop; the parameters are those of `open_loop`. Raises `ProgramFailed`."""
        place = self._place
        topics = (
            TopicPartition(place.requests, PARTITIONS),
            TopicPartition(place.responses, PARTITIONS),
        )

        def look() -> LoadSample:
            metrics = scrape(place.http_port) if place.http_port else {}
            return LoadSample(time.monotonic(), running.cpu_s(), self._cluster.cpu_s(), metrics)

        load = await open_loop(
            place.bootstrap_servers,
            topics,
            self._subject.values,
            (rate_per_s, seconds),
            skip_s,
            look,
            before,
        )
        running.check()
        return load

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Running]:
        """Start the contestant; it has answered when the context is entered."""
        await self._topics(self._contestant)
        with Running(self._contestant.programs(self._subject, self._place)) as running:
            await self._warm_up(running)
            yield running

    async def at(
        self, rates_per_s: Sequence[float], seconds: float
    ) -> tuple[float, list[OpenLoopLatency]]:
        """Return the unloaded median in ms, and the latencies at the given rates."""
        async with self.serving() as running:
            alone = await self._load(seconds).closed_loop(1)
            latencies = [await self._open(running, rate, 1.0, seconds) for rate in rates_per_s]
        return 1e3 * alone.latency.percentile_s(50), latencies

    async def unloaded(
        self, echo_place: Endpoints, apart_place: Endpoints | None = None
    ) -> Unloaded:
        """Send one request at a time, in turns through Headrace, through an echo and, if it has a
        place, through Headrace in three processes.
        """
        runs = [self, LatencyRun(self._cluster, self._subject, echo_place, ECHO)]
        if apart_place is not None:
            runs.append(LatencyRun(self._cluster, self._subject, apart_place, THREE_CONTESTANT))
        alone = run_bare(self._subject._replace(batch=1), UNLOADED_S)
        async with AsyncExitStack() as stack:
            ways = [
                _OneAtATime(run, await stack.enter_async_context(run.serving())) for run in runs
            ]
            for _ in range(UNLOADED_ROUNDS):
                for way in ways:
                    await way.ask()
        headrace, hops, *apart = ways
        found = Unloaded(
            *_halves(hops.rounds),
            1000 / alone.per_s,
            *_halves(headrace.rounds),
            computing_ms=1e3 * median(each.compute.percentile_s(50) for each in headrace.rounds),
            headrace_cpu_us=headrace.cpu_us,
            two_hops_cpu_us=hops.cpu_us,
        )
        for way in apart:
            found.three_processes_p50_ms, found.three_processes_p99_ms = _halves(way.rounds)
            found.three_processes_cpu_us = way.cpu_us
        return found

    async def _topics(self, contestant: Contestant) -> None:
        await self._cluster.create_plain(self._place.requests)
        await prepare(self._cluster, contestant, self._subject, self._place)

    async def _warm_up(self, running: Running) -> None:
        found = await self._load(WARM_UP_S, wait_s=START_WAIT_S).closed_loop(PARTITIONS)
        running.check()
        if not found.answered:
            raise ProgramFailed(f"no answer in {START_WAIT_S:g} s: {running.last_words()}")

    def _load(self, seconds: float, skip_s: float = 0.0, wait_s: float = LAST_ANSWERS_S) -> Load:
        plan = LoadPlan(
            TopicPartition(self._place.requests, PARTITIONS),
            TopicPartition(self._place.responses, PARTITIONS),
            seconds,
            wait_s,
            skip_s,
        )
        return Load(self._cluster.log, plan, [LoadRequest(one) for one in self._subject.values])


def median_of(found: Sequence[Unloaded]) -> Unloaded:
    """Return the medians of several runs, each with processes of its own: some are a tenth slower
    than others, for as long as they last.
    """
    return Unloaded(
        *(median(getattr(each, name) for each in found) for name in Unloaded.__struct_fields__)
    )


class _OneAtATime:
    """Rounds of one request at a time through one of the paths, and their CPU cost."""

    def __init__(self, way: LatencyRun, running: Running) -> None:
        self._way = way
        self._running = running
        self._cpu_s = 0.0
        self.rounds: list[LoadResult] = []

    async def ask(self) -> None:
        """Run one round."""
        began_s = self._running.cpu_s()
        self.rounds.append(await self._way._load(UNLOADED_S).closed_loop(1))
        self._cpu_s += self._running.cpu_s() - began_s

    @property
    def cpu_us(self) -> float:
        """Return the CPU time per request."""
        return 1e6 * self._cpu_s / max(1, sum(each.answered for each in self.rounds))


def _latency_result(
    share: float,
    offered_per_s: float,
    load: OpenLoop,
) -> OpenLoopLatency:
    latency, late, answered = load.answered.latency, load.sent.late, load.answered
    before, after = load.looks
    wall_s = after.at_s - before.at_s
    cores = BusyCores(
        headrace=(after.headrace_s - before.headrace_s) / wall_s,
        broker=(after.broker_s - before.broker_s) / wall_s,
        sender=load.sent.cpu_s / wall_s,
        reader=load.answered.cpu_s / wall_s,
    )
    return OpenLoopLatency(
        load=share,
        offered_per_s=offered_per_s,
        answered_per_s=answered.counted / answered.seconds if answered.seconds else 0.0,
        p50_ms=1e3 * latency.percentile_s(50),
        p99_ms=1e3 * latency.percentile_s(99),
        p999_ms=1e3 * latency.percentile_s(99.9),
        late_ms=1e3 * late.percentile_s(99),
        unanswered=load.sent.count - answered.count,
        mean_ms=1e3 * latency.mean_s,
        late_mean_ms=1e3 * late.mean_s,
        stages=stages_between(before.metrics, after.metrics) if after.metrics else None,
        cores=cores,
    )


def _halves(rounds: list[LoadResult]) -> tuple[float, float]:
    return (
        1e3 * median(each.latency.percentile_s(50) for each in rounds),
        1e3 * median(each.latency.percentile_s(99) for each in rounds),
    )
