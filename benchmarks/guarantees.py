"""Latency of both guarantees side by side, in one process and in three: digits on a local broker.

    python -m benchmarks.guarantees

One request at a time, and Poisson arrivals at 500 and at 5,000 a second; a time counts from when a
request was due. The throughput of each is in docs/performance.md.
"""

from __future__ import annotations

import secrets

import click
import msgspec
import uvloop

from benchmarks.__main__ import RESULTS
from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster
from benchmarks.contestants import Contestant, Place, headrace_as
from benchmarks.latency import LatencyRun
from benchmarks.machine import describe_machine
from benchmarks.subjects import SUBJECTS

RATES_PER_S = (500.0, 5000.0)
SECONDS = 5.0
APART = ("ingest", "batcher,executor", "responder")

FORMS: list[Contestant] = [
    headrace_as("one process, at least once"),
    headrace_as("one process, exactly once", delivery="exactly_once"),
    headrace_as("three processes, at least once", *APART),
    headrace_as("three processes, exactly once", *APART, delivery="exactly_once"),
]


async def measure() -> dict[str, object]:
    """Each form by itself, on one broker."""
    subject = SUBJECTS["digits"](SCRATCH)
    found: dict[str, object] = {}
    async with Cluster() as cluster:
        for form in FORMS:
            run = f"guarantees.{secrets.token_hex(4)}"
            place = Place(cluster.bootstrap_servers, f"{run}.requests", run, "")
            alone_ms, latencies = await LatencyRun(cluster, subject, place, form).at(
                RATES_PER_S, SECONDS
            )
            found[form.name] = {"one_at_a_time_p50_ms": alone_ms, "open_loop": latencies}
            rates = ", ".join(
                f"{each.offered_per_s:,.0f}/s p50 {each.p50_ms:.1f} p99 {each.p99_ms:.1f} ms"
                for each in latencies
            )
            click.echo(f"{form.name}: alone {alone_ms:.1f} ms; {rates}", err=True)
    return {"machine": describe_machine(), "forms": found}


if __name__ == "__main__":
    results = uvloop.run(measure())
    text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
    (RESULTS / "guarantees.json").write_text(text + "\n", encoding="utf-8")
