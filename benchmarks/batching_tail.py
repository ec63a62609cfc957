"""Latency tail under load: the measured 99th percentile from a request's arrival at the batcher
until its result, compared with the simulated one.

    python -m benchmarks.batching_tail [--model NAME] [--rounds N] [--seconds N]

ResNet-50, or another model, runs at 80 % of its capacity in this process on the embedded log, as in
`benchmarks.simulation`. The latency is the sum of `queue_us`, `batch_us` and `compute_us` of an
answer, from the beginning of reading the request until the answer was encoded, which is a little
more than from batcher to result. The simulation applies the same rules to the same arrivals, with
the durations that the run's own answers report. So the difference of the two percentiles is the
time that the pipeline adds around its batches. The goal is at most a quarter.
"""

from __future__ import annotations

import json
from statistics import median

import click
import uvloop

from benchmarks.campaign import SCRATCH
from benchmarks.simulation import MODELS, compare, write
from headrace.telemetry.logs import configure_logging

LOAD = 0.8
AT_MOST = 1.25


@click.command(help=__doc__)
@click.option("--model", "name", type=click.Choice(sorted(MODELS)), default="resnet50")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=60.0, show_default=True, help="Duration of a round.")
def main(name: str, rounds: int, seconds: float) -> None:
    configure_logging("warning")
    rows = uvloop.run(compare(MODELS[name](SCRATCH), [LOAD], rounds, seconds))
    ratios = [row.real_p99_ms / row.simulated_p99_ms for row in rows]
    found = {
        "model": name,
        "load": LOAD,
        "real_over_simulated_p99": median(ratios),
        "lowest_and_highest": [min(ratios), max(ratios)],
        "at_most": AT_MOST,
        "holds": bool(median(ratios) <= AT_MOST),
        "runs": [row._asdict() for row in rows],
    }
    write(f"batching_tail_{name}.json", found)
    click.echo(json.dumps({key: each for key, each in found.items() if key != "runs"}, indent=2))


if __name__ == "__main__":
    main()
