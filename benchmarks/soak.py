"""Soak test: hold a load for a long time, and watch the memory of a Headrace process (`make soak`).

    python -m benchmarks.soak [--minutes N] [--rate PER_S] [--json FILE]

Requests to the digits model come as a Poisson process; resident memory is noted every ten
seconds. After a fifth of the time, when caches and pools are full, a line is fitted through the
rest: it must not rise by more than 1 MiB in ten minutes. Exit code 1 where it does, or where an
answer is missing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path

import click
import numpy as np
import uvloop

from benchmarks.campaign import SCRATCH
from benchmarks.cluster import PARTITIONS, Cluster
from benchmarks.contestants import FUSED_CONTESTANT, Endpoints
from benchmarks.processes import Running
from benchmarks.saturation import prepare
from benchmarks.subjects import SUBJECTS
from headrace.log.port import TopicPartition
from headrace.tools.bench.load import Load, LoadPlan, LoadRequest
from headrace.tools.bench.measured import LoadResult

NOTE_EVERY_S = 10.0
WARM_SHARE = 0.2
MAX_RISE_MIB = 1.0
PER_S = 600.0
WARM_UP_S = 5.0
START_WAIT_S = 40.0


async def soak(minutes: float, per_s: float) -> tuple[list[tuple[float, float]], LoadResult]:
    """Return (seconds, MiB) samples, and the results of the load."""
    subject = SUBJECTS["digits"](SCRATCH)
    notes: list[tuple[float, float]] = []
    async with Cluster() as cluster:
        run = f"soak.{secrets.token_hex(4)}"
        place = Endpoints(cluster.bootstrap_servers, f"{run}.requests", run)
        await cluster.create_plain(place.requests)
        await prepare(cluster, FUSED_CONTESTANT, subject, place)

        def load(seconds: float) -> Load:
            plan = LoadPlan(
                TopicPartition(place.requests, PARTITIONS),
                TopicPartition(place.responses, PARTITIONS),
                seconds,
                START_WAIT_S,
            )
            return Load(cluster.log, plan, [LoadRequest(value) for value in subject.values])

        with Running(FUSED_CONTESTANT.programs(subject, place)) as running:
            await load(WARM_UP_S).closed_loop(PARTITIONS)
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                loading = tasks.create_task(load(minutes * 60).open_loop(per_s), name="load")
                while not loading.done():
                    running.check()
                    notes.append((time.monotonic() - began_s, running.resident_bytes() / 2**20))
                    await asyncio.wait([loading], timeout=NOTE_EVERY_S)
            return notes, loading.result()


def rise_mib(notes: list[tuple[float, float]]) -> float:
    """Return the growth of memory in ten minutes, by a line fitted to the samples after warm-up."""
    last_s = notes[-1][0]
    late = np.array([note for note in notes if note[0] >= WARM_SHARE * last_s])
    if len(late) < 2:
        return 0.0
    slope, _ = np.polyfit(late[:, 0], late[:, 1], 1)
    return float(slope) * 600


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.5), default=60.0, show_default=True)
@click.option("--rate", type=click.FloatRange(min=1), default=PER_S, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(minutes: float, rate: float, json_file: Path | None) -> None:
    """Watch the memory of a process under load."""
    notes, measured = uvloop.run(soak(minutes, rate))
    found = {
        "minutes": minutes,
        "per_s": rate,
        "answered": measured.answered,
        "unanswered": measured.unanswered,
        "first_mib": notes[0][1],
        "last_mib": notes[-1][1],
        "rise_mib_in_10_min": rise_mib(notes),
        "p99_ms": 1e3 * measured.latency.percentile_s(99),
        "notes": notes,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    del found["notes"]
    click.echo(json.dumps(found, indent=2))
    if measured.unanswered or rise_mib(notes) > MAX_RISE_MIB:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
