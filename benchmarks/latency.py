"""Latency: open-loop at shares of the capacity, and one request at a time against two bare hops.

The load comes from this process, on the same machine; so the capacity that the shares are of is
measured with it, by as many requests under way as it takes. It is lower than the throughput of
records that were there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.cluster import PARTITIONS, Cluster
from benchmarks.contestants import ECHO, FUSED_CONTESTANT, Contestant, Place
from benchmarks.processes import ProgramFailed, Running
from benchmarks.results import Latency, Unloaded
from benchmarks.saturation import prepare, run_bare
from benchmarks.subjects import Subject
from headrace.bench.load import Course, Load, Payload
from headrace.bench.measured import Measured
from headrace.log.port import TopicPartition

LOADS = (0.2, 0.5, 0.8)
WARM_UP_S = 1.0
START_WAIT_S = 40.0
LAST_ANSWERS_S = 10.0
SKIP_S = 0.5
UNLOADED_ROUNDS = 3
UNLOADED_S = 1.0


class LatencyRun:
    """Headrace under loads, one after another.

    Args:
        place: of this run; its topic of requests is used by nobody else.
        contestant: in which form, and with which guarantee.
    """

    def __init__(
        self,
        cluster: Cluster,
        subject: Subject,
        place: Place,
        contestant: Contestant = FUSED_CONTESTANT,
    ) -> None:
        self._contestant = contestant
        self._cluster = cluster
        self._subject = subject
        self._place = place

    async def loaded(self, seconds: float) -> tuple[float, list[Latency]]:
        """The capacity per second, and the latencies at shares of it. Raises `ProgramFailed`."""
        await self._topics(self._contestant)
        with Running(self._contestant.programs(self._subject, self._place)) as running:
            await self._warm_up(running)
            under_way = 8 * self._subject.batch if self._subject.slow else 2048 * PARTITIONS
            found = await self._load(seconds, SKIP_S).closed_loop(under_way)
            capacity_per_s = found.per_s
            if not capacity_per_s:
                raise ProgramFailed(f"no answer within {seconds:g} s of load")
            latencies = []
            for share in LOADS:
                load = self._load(seconds, SKIP_S)
                measured = await load.open_loop(capacity_per_s * share, seed=1)
                running.check()
                latencies.append(_told(share, capacity_per_s * share, measured))
        return capacity_per_s, latencies

    async def at(self, rates_per_s: Sequence[float], seconds: float) -> tuple[float, list[Latency]]:
        """One at a time, in ms at the median, and the latencies at given rates."""
        await self._topics(self._contestant)
        with Running(self._contestant.programs(self._subject, self._place)) as running:
            await self._warm_up(running)
            alone = await self._load(seconds).closed_loop(1)
            latencies = []
            for rate in rates_per_s:
                measured = await self._load(seconds, SKIP_S).open_loop(rate, seed=1)
                running.check()
                latencies.append(_told(0.0, rate, measured))
        return 1e3 * alone.latency.percentile_s(50), latencies

    async def unloaded(self, echo_place: Place) -> Unloaded:
        """One request at a time, by turns through Headrace and through an echo."""
        await self._topics(self._contestant)
        await self._cluster.create_plain(echo_place.requests)
        await self._cluster.create_plain(echo_place.responses)
        echo = LatencyRun(self._cluster, self._subject, echo_place)
        alone = run_bare(self._subject._replace(batch=1), UNLOADED_S)
        headrace: list[Measured] = []
        hops: list[Measured] = []
        with (
            Running(self._contestant.programs(self._subject, self._place)) as running,
            Running(ECHO.programs(self._subject, echo_place)) as echoing,
        ):
            await self._warm_up(running)
            await echo._warm_up(echoing)
            for _ in range(UNLOADED_ROUNDS):
                headrace.append(await self._load(UNLOADED_S).closed_loop(1))
                hops.append(await echo._load(UNLOADED_S).closed_loop(1))
        return Unloaded(*_halves(hops), 1000 / alone.per_s, *_halves(headrace))

    async def _topics(self, contestant: Contestant) -> None:
        await self._cluster.create_plain(self._place.requests)
        await prepare(self._cluster, contestant, self._subject, self._place)

    async def _warm_up(self, running: Running) -> None:
        found = await self._load(WARM_UP_S, wait_s=START_WAIT_S).closed_loop(PARTITIONS)
        running.check()
        if not found.answered:
            raise ProgramFailed(f"no answer in {START_WAIT_S:g} s: {running.last_words()}")

    def _load(self, seconds: float, skip_s: float = 0.0, wait_s: float = LAST_ANSWERS_S) -> Load:
        course = Course(
            TopicPartition(self._place.requests, PARTITIONS),
            TopicPartition(self._place.responses, PARTITIONS),
            seconds,
            wait_s,
            skip_s,
        )
        return Load(self._cluster.log, course, [Payload(one) for one in self._subject.values])


def _told(share: float, offered_per_s: float, measured: Measured) -> Latency:
    return Latency(
        load=share,
        offered_per_s=offered_per_s,
        answered_per_s=measured.per_s,
        p50_ms=1e3 * measured.latency.percentile_s(50),
        p99_ms=1e3 * measured.latency.percentile_s(99),
        p999_ms=1e3 * measured.latency.percentile_s(99.9),
        late_ms=1e3 * measured.lateness.percentile_s(99),
        unanswered=measured.unanswered,
    )


def _halves(rounds: list[Measured]) -> tuple[float, float]:
    return (
        1e3 * median(each.latency.percentile_s(50) for each in rounds),
        1e3 * median(each.latency.percentile_s(99) for each in rounds),
    )
