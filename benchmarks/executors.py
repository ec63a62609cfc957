"""What more executor processes bring, with every stage apart: `python -m benchmarks.executors`.

Runs wait, as for a device of each executor's own: 20 ms and 2.5 ms for each row. So one executor
answers 200 requests a second in batches of eight at most, and on a machine with few cores, too, the
shape of the curve is that of the pipeline and not of the cores. Counts of executors take turns.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from statistics import median

import click
import msgspec
import numpy as np
import uvloop

from benchmarks.__main__ import RESULTS
from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster
from benchmarks.contestants import Place, headrace_as
from benchmarks.machine import describe_machine
from benchmarks.results import Saturated
from benchmarks.saturation import saturate
from benchmarks.subjects import Subject
from headrace.codec import encode_request

COUNTS = (1, 2, 4)
ROUNDS = 3
SECONDS = 10.0
BATCH = 8
ROW_S = 0.0025
RUN_S = 0.02
MOST_PER_S = BATCH / (RUN_S + BATCH * ROW_S)
"""Of one executor whose next batch is always there."""
MODEL = f"""
import time

class Model:
    inputs = [("x", "FP32", (-1, 64))]
    outputs = [("y", "FP32", (-1, 64))]

    def warm_up(self):
        pass

    def run(self, inputs):
        time.sleep({RUN_S} + {ROW_S} * len(inputs["x"]))
        return {{"y": inputs["x"]}}
"""


def waiting(scratch: Path) -> Subject:
    """A model whose runs take time, and no processor's."""
    repository = scratch / "waiting-repository"
    version = repository / "waiting" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    config = f'backend = "python"\nprobe = false\nmax_batch_size = {BATCH}\n'
    (version.parent / "model.toml").write_text(config, encoding="utf-8")
    row = {"x": np.zeros((1, 64), np.float32)}
    value = encode_request("application/msgpack", "waiting", row)
    most = round(MOST_PER_S * max(COUNTS))
    return Subject("waiting", "bound by waiting", repository, version, BATCH, [value], most, True)


async def measure() -> dict[int, list[Saturated]]:
    """By the number of executors, answers a second under a backlog, and what they cost."""
    subject = waiting(SCRATCH)
    found: dict[int, list[Saturated]] = {count: [] for count in COUNTS}
    async with Cluster() as cluster:
        requests = f"executors.{secrets.token_hex(4)}.requests"
        await cluster.create_plain(requests)
        await cluster.fill(requests, subject.values, round(subject.fastest_per_s * 3 * SECONDS))
        for _ in range(ROUNDS):
            for count in COUNTS:
                stages = ("ingest", "batcher", *["executor"] * count, "responder")
                form = headrace_as(f"{count} executors", *stages)
                run = f"executors.{secrets.token_hex(4)}"
                place = Place(cluster.bootstrap_servers, requests, run)
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
    text = msgspec.json.format(msgspec.json.encode({"machine": describe_machine(), "rows": rows}))
    (RESULTS / "executors.json").write_text(text.decode() + "\n", encoding="utf-8")
    click.echo(text.decode())
