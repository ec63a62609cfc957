"""Latency in the first second after a flood, compared with the same load at rest.

    python -m benchmarks.after_flood

One process drains a backlog at full speed. As soon as its last answer is written, requests arrive
at a quarter of that rate or less, for a second. The same second is measured again after a pause. If
anything that was learned under saturation, such as batch sizes, delays of writes or the throughput,
outlived it, the first would be slower than the second.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from statistics import median
from typing import Any

import click
import msgspec
import uvloop

from benchmarks.apart import answered
from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster, Counter
from benchmarks.contestants import Endpoints, headrace_as
from benchmarks.latency import LatencyRun
from benchmarks.machine import describe_machine
from benchmarks.open_loop import OpenLoop
from benchmarks.processes import Running
from benchmarks.results import RESULTS, record
from benchmarks.subjects import SUBJECTS

BACKLOG = 100_000
RATE_PER_S, SECONDS = 4000.0, 1.0
PAUSE_S = 5.0
WARM_FLOODS = 6
"""Floods before the first round: a broker that has just been started is slow for so long."""
ROUNDS = 7

FUSED = headrace_as("one process")


class Second(msgspec.Struct):
    """Latencies of the requests of one second, in milliseconds, and the lateness of the sender."""

    p50_ms: float
    p99_ms: float
    late_p99_ms: float
    unanswered: int


class Found(msgspec.Struct):
    """One entry for each round: directly after the flood, and at rest."""

    after: list[Second] = msgspec.field(default_factory=list)
    at_rest: list[Second] = msgspec.field(default_factory=list)

    def told(self) -> str:
        """Return the medians over the rounds, and the worst round."""
        return "; ".join(
            f"{name} p50 {median(each.p50_ms for each in seconds):.1f} ms "
            f"(worst {max(each.p50_ms for each in seconds):.1f}), "
            f"p99 {median(each.p99_ms for each in seconds):.1f} ms "
            f"(worst {max(each.p99_ms for each in seconds):.1f})"
            for name, seconds in (("after a flood", self.after), ("at rest", self.at_rest))
        )


def _second(load: OpenLoop) -> Second:
    latency, late = load.answered.latency, load.sent.late
    return Second(
        p50_ms=1e3 * latency.percentile_s(50),
        p99_ms=1e3 * latency.percentile_s(99),
        late_p99_ms=1e3 * late.percentile_s(99),
        unanswered=load.sent.count - load.answered.count,
    )


async def measure() -> Found:
    """Measure all rounds with one process and one broker."""
    digits, found = SUBJECTS["digits"](SCRATCH), Found()
    async with Cluster() as cluster:
        name = f"flood.{secrets.token_hex(4)}"
        place = Endpoints(cluster.bootstrap_servers, f"{name}.requests", name)
        run = LatencyRun(cluster, digits, place, FUSED)
        async with run.serving() as running, cluster.counting(place.responses) as answers:

            async def flood() -> None:
                await _drain_backlog(cluster, place, running, answers, digits.values)

            for _ in range(WARM_FLOODS):
                await flood()
            for _ in range(ROUNDS):
                load = await run.load(running, RATE_PER_S, SECONDS, before=flood)
                found.after.append(_second(load))
                await asyncio.sleep(PAUSE_S)
                load = await run.load(running, RATE_PER_S, SECONDS)
                found.at_rest.append(_second(load))
                click.echo(f"after {found.after[-1]}, at rest {found.at_rest[-1]}", err=True)
    return found


async def _drain_backlog(
    cluster: Cluster, place: Endpoints, running: Running, answers: Counter, values: list[bytes]
) -> None:
    """Write a backlog while the process stands still, and let it be answered at full speed."""
    expected = await answers.now() + BACKLOG
    running.signal(signal.SIGSTOP)
    try:
        await cluster.fill(place.requests, values, BACKLOG)
    finally:
        running.signal(signal.SIGCONT)
    await answered(running, answers, expected)


if __name__ == "__main__":
    flooded = uvloop.run(measure())
    results: dict[str, Any] = {"machine": describe_machine(), "found": flooded}
    record(RESULTS / "after_flood.json", results)
    click.echo(flooded.told(), err=True)
