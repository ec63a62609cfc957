"""Latency of both delivery guarantees, in one process and in three, for digits on a local broker.

    python -m benchmarks.guarantees
    python -m benchmarks.guarantees --coordinator-linger-ms 0     one process only; not recorded

One request at a time, and Poisson arrivals at 500 and at 5,000 a second; a time counts from when a
request was due. The broker has answered transactions for a minute before, since a Java process that
has just been started takes several times the processor for each. The throughput of both guarantees
is in docs/performance.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from statistics import median

import click
import msgspec
import uvloop

from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster, a_port
from benchmarks.contestants import Contestant, Endpoints, headrace_as
from benchmarks.latency import LatencyRun
from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, OpenLoopLatency, record
from benchmarks.subjects import SUBJECTS

RATES_PER_S = (500.0, 5000.0)
SECONDS = 5.0
WARM_RATE_PER_S, WARM_S = 2000.0, 60.0
ROUNDS = 3
LINGER = "group.coordinator.append.linger.ms"
APART = ("ingest", "batcher,executor", "responder")

ONCE = headrace_as("one process, exactly once", delivery="exactly_once")
FORMS: list[Contestant] = [
    headrace_as("one process, at least once"),
    ONCE,
    headrace_as("three processes, at least once", *APART),
    headrace_as("three processes, exactly once", *APART, delivery="exactly_once"),
]


class Found(msgspec.Struct):
    """Rounds of one division of the stages.

    Attributes:
        alone_ms: medians of one request at a time, a round each.
        rates: of each rate, a round each.
    """

    alone_ms: list[float] = msgspec.field(default_factory=list)
    rates: list[list[OpenLoopLatency]] = msgspec.field(
        default_factory=lambda: [[] for _ in RATES_PER_S]
    )

    def told(self) -> str:
        """Return the medians over the rounds, and the number of busy cores."""
        rates = "; ".join(
            f"{runs[0].offered_per_s:,.0f}/s p50 {median(run.p50_ms for run in runs):.1f} "
            f"p99 {median(run.p99_ms for run in runs):.1f} ms, broker "
            f"{median(run.cores.broker for run in runs if run.cores):.2f} cores"
            for runs in self.rates
        )
        return f"alone {median(self.alone_ms):.1f} ms; {rates}"


async def measure(
    forms: Sequence[Contestant], properties: Mapping[str, str] | None
) -> dict[str, Found]:
    """Measure all divisions alternately, on one broker with these properties."""
    subject = SUBJECTS["digits"](SCRATCH)
    found = {form.name: Found() for form in forms}
    async with Cluster(properties) as cluster:

        async def run(form: Contestant, rates_per_s: tuple[float, ...], seconds: float) -> Found:
            name = f"guarantees.{secrets.token_hex(4)}"
            port = 0 if form.name.startswith("three") else a_port()
            place = Endpoints(cluster.bootstrap_servers, f"{name}.requests", name, http_port=port)
            latency = LatencyRun(cluster, subject, place, form)
            alone_ms, latencies = await latency.at(rates_per_s, seconds)
            return Found([alone_ms], [[each] for each in latencies])

        await run(ONCE, (WARM_RATE_PER_S,), WARM_S)
        for _ in range(ROUNDS):
            for form in forms:
                one, all_ = await run(form, RATES_PER_S, SECONDS), found[form.name]
                all_.alone_ms += one.alone_ms
                for runs, more in zip(all_.rates, one.rates, strict=True):
                    runs.extend(more)
                click.echo(f"{form.name}: {one.told()}", err=True)
    return found


@click.command()
@click.option("--coordinator-linger-ms", type=int, help=f"{LINGER} of the broker.")
def main(coordinator_linger_ms: int | None) -> None:
    """Measure, and record it unless the broker is another than by default."""
    if coordinator_linger_ms is None:
        found = uvloop.run(measure(FORMS, None))
        record(RESULTS / "guarantees.json", {"machine": describe_machine(), "forms": found})
    else:
        found = uvloop.run(measure(FORMS[:2], {LINGER: str(coordinator_linger_ms)}))
    for name, each in found.items():
        click.echo(f"{name}: {each.told()}", err=True)


if __name__ == "__main__":
    main()
