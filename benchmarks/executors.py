"""Throughput by the number of executor processes, with every stage in a process of its own: `python
-m benchmarks.executors`.

Runs wait, as for a device of each executor's own: 20 ms and 2.5 ms for each row. So one executor
answers 200 requests a second in batches of eight at most, and on a machine with few cores, too, the
shape of the curve is that of the pipeline and not of the cores. Counts of executors take turns.
"""

from __future__ import annotations

import secrets
from statistics import median

import click
import uvloop

from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster
from benchmarks.contestants import Endpoints, headrace_as
from benchmarks.machine import describe_machine
from benchmarks.results import RESULTS, Saturated, record
from benchmarks.saturation import saturate
from benchmarks.subjects import WAITING_ROWS, waiting

COUNTS = (1, 2, 4)
ROUNDS = 3
SECONDS = 10.0
RUN_S, ROW_S = 0.02, 0.0025
MOST_PER_S = WAITING_ROWS / (RUN_S + WAITING_ROWS * ROW_S)
"""Highest rate of one executor whose next batch is always available."""


async def measure() -> dict[int, list[Saturated]]:
    """Return throughput under a backlog, and CPU cost, by the number of executors."""
    subject = waiting("waiting", SCRATCH, run_s=RUN_S, row_s=ROW_S)
    enough = round(MOST_PER_S * max(COUNTS) * 3 * SECONDS)
    found: dict[int, list[Saturated]] = {count: [] for count in COUNTS}
    async with Cluster() as cluster:
        requests = f"executors.{secrets.token_hex(4)}.requests"
        await cluster.create_plain(requests)
        await cluster.fill(requests, subject.values, enough)
        for _ in range(ROUNDS):
            for count in COUNTS:
                stages = ("ingest", "batcher", *["executor"] * count, "responder")
                form = headrace_as(f"{count} executors", *stages)
                run = f"executors.{secrets.token_hex(4)}"
                place = Endpoints(cluster.bootstrap_servers, requests, run)
                found[count].append(await saturate(cluster, form, subject, place, SECONDS))
                click.echo(f"{count} executors: {found[count][-1].per_s:,.0f}/s", err=True)
    return found


if __name__ == "__main__":
    runs = uvloop.run(measure())
    rows = [
        {
            "executors": count,
            "per_s": median(run.per_s for run in of_count),
            "of_what_they_can": median(run.per_s for run in of_count) / (count * MOST_PER_S),
            "cpu_us": median(run.cpu_us for run in of_count),
            "runs_per_s": [run.per_s for run in of_count],
        }
        for count, of_count in runs.items()
    ]
    record(RESULTS / "executors.json", {"machine": describe_machine(), "rows": rows})
