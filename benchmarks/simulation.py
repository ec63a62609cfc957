"""The simulation against real runs: what `headrace replay --simulate` says of the 99th percentile
of a run, and what that run had.

    python benchmarks/simulation.py [--seconds N] [--load SHARE,...] [--json FILE]

The four services run in this process on the embedded log, with requests of one row that arrive as
a Poisson process; the sender shares the event loop with them. Two models: digits, whose run is far
shorter than what is done around it, and magika, which is bound by its computing. Afterwards the
requests and answers that the log holds are simulated with S(b) learned from the answers: once with
`compute_us` alone, and once with what a batch cost besides, the median of `batch_us` where the
batch was of one row. The real latency is what the answers say: `queue_us` + `compute_us` +
`batch_us`, from ingest until the answer was encoded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from contextlib import aclosing
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from headrace.codec import encode_request
from headrace.config import Settings, make_settings
from headrace.demo.magika_model import find_magika
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, NewRecord, TopicPartition
from headrace.pipeline import Pipeline, running
from headrace.replay.arrivals import read_arrivals
from headrace.replay.opening import open_recording
from headrace.replay.present import latest_models, resolved, served_now
from headrace.replay.selection import Selection
from headrace.replay.service_times import learn
from headrace.replay.simulate import Outcome, Scenario, simulate
from headrace.services.batcher.forming import Forming
from headrace.telemetry.logs import configure_logging
from headrace.topic_plan import plan_topics
from headrace.topics import Topic

PARTITIONS = 4
WARM_UP_REQUESTS = 200
ANSWER_DEADLINE_S = 120.0
LOOK_EVERY_S = 0.05


class Subject(NamedTuple):
    """A model, a request to it, and at what rate it is asked."""

    name: str
    value: bytes
    per_s: float


class Answered(NamedTuple):
    """What the answers of a run say, in microseconds."""

    latency_us: NDArray[np.int64]
    around_us: float


class Compared(NamedTuple):
    """One run and its simulations; latencies in milliseconds, errors as shares of the real one."""

    model: str
    load: float
    per_s: float
    requests: int
    real_p50_ms: float
    real_p99_ms: float
    simulated_p50_ms: float
    simulated_p99_ms: float
    p99_error: float
    overhead_us: float
    with_overhead_p50_ms: float
    with_overhead_p99_ms: float
    with_overhead_p99_error: float


async def ask(log: Log, settings: Settings, subject: Subject, count: int, seed: int) -> None:
    """Send requests as a Poisson process, and wait until all are answered."""
    gaps_s = np.random.default_rng(seed).exponential(1 / subject.per_s, count)
    due_s = np.cumsum(gaps_s).tolist()
    requests = settings.topic(Topic.REQUESTS)
    async with log.producer() as producer:
        began_s = time.monotonic()
        sent = 0
        while sent < count:
            now_s = time.monotonic() - began_s
            while sent < count and due_s[sent] <= now_s:
                partition = TopicPartition(requests, sent % PARTITIONS)
                await producer.send(partition, [NewRecord(None, subject.value)])
                sent += 1
            if sent < count:
                await asyncio.sleep(max(0.0, due_s[sent] - (time.monotonic() - began_s)))
        give_up_s = time.monotonic() + ANSWER_DEADLINE_S
        while await held(log, settings, Topic.RESPONSES) < count:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{count} requests, and not all are answered")
            await asyncio.sleep(LOOK_EVERY_S)


async def held(log: Log, settings: Settings, topic: Topic) -> int:
    """How many records were written to a topic."""
    name = settings.topic(topic)
    partitions = [TopicPartition(name, number) for number in range(PARTITIONS)]
    async with log.reader(partitions) as reader:
        return sum((await reader.end_offsets(partitions)).values())


async def measured(log: Log, settings: Settings, skipped: int) -> Answered:
    """The latencies that the answers tell of, without the first ones."""
    latency_us: list[int] = []
    around_us: list[int] = []
    async with (
        open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers,
        aclosing(answers.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                said = msgspec.msgpack.decode(record.value or b"")["parameters"]
                latency_us.append(said["queue_us"] + said["compute_us"] + said["batch_us"])
                if said["batch_size"] == 1:
                    around_us.append(said["batch_us"])
    return Answered(
        np.array(latency_us[skipped:], dtype=np.int64), float(np.median(around_us or [0]))
    )


async def outcomes(
    log: Log, settings: Settings, skipped: int, overhead_us: float
) -> tuple[Outcome, Outcome]:
    """The simulation of what the log holds, without and with the overhead."""
    async with open_recording(log, settings.topic(Topic.REQUESTS), Selection()) as requests:
        recorded = await read_arrivals(requests, 0)
    async with open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers:
        times = await learn(answers)
    models = latest_models(settings, None)
    arrivals = resolved(recorded.arrivals, models)
    arrivals = arrivals.chosen(slice(skipped, None))
    found = []
    for each in (0.0, overhead_us):
        later = {model: one.later(each) for model, one in times.items()}
        served = served_now(settings, arrivals, later, models)
        found.append(
            simulate(arrivals, served, Scenario(), lambda limits: Forming(limits, "simulated"))
        )
    return found[0], found[1]


async def compared(settings: Settings, subject: Subject, load: float, seconds: float) -> Compared:
    """One run at a share of the rate, and its simulations."""
    asked = subject._replace(per_s=subject.per_s * load)
    count = WARM_UP_REQUESTS + round(asked.per_s * seconds)
    async with MemoryLog() as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)):
            await ask(log, settings, asked, count, seed=1)
        real = await measured(log, settings, WARM_UP_REQUESTS)
        plain, loaded = await outcomes(log, settings, WARM_UP_REQUESTS, real.around_us)
    p50_ms, p99_ms = (np.quantile(real.latency_us, (0.5, 0.99)) / 1000).tolist()
    return Compared(
        subject.name,
        load,
        asked.per_s,
        count - WARM_UP_REQUESTS,
        p50_ms,
        p99_ms,
        plain.latency_ms(0.5),
        plain.latency_ms(0.99),
        plain.latency_ms(0.99) / p99_ms - 1,
        real.around_us,
        loaded.latency_ms(0.5),
        loaded.latency_ms(0.99),
        loaded.latency_ms(0.99) / p99_ms - 1,
    )


def subjects(settings: Settings) -> list[Subject]:
    """The two models, with the rates that count as a load of 1."""
    found = []
    rates = {"digits": 8000.0, "magika": 200.0}
    for name, version in sorted(latest_models(settings, None).items()):
        (spec,) = version.signature.inputs
        shape = [1 if size == -1 else size for size in spec.shape]
        dtype = np.int32 if spec.datatype == "INT32" else np.float32
        value = encode_request("application/msgpack", name, {spec.name: np.zeros(shape, dtype)})
        found.append(Subject(name, value, rates[name]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--load", default="0.25,0.5,0.75")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    configure_logging("warning")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made, as_file(files("headrace.demo") / "models") as own:
        repository = Path(made)
        (repository / "digits").symlink_to(own / "digits")
        magika = find_magika()
        if magika is None:
            parser.error("expected the package magika (extra demo) to be installed")
        magika.add_to(repository)
        settings = make_settings(
            {"models": {"repository": repository}, "topics": {"partitions": PARTITIONS}}
        )
        for subject in subjects(settings):
            for load in map(float, given.load.split(",")):
                busy = os.getloadavg()[0]
                found = uvloop.run(compared(settings, subject, load, given.seconds))
                rows.append(found._asdict() | {"machine_load_before": busy})
                print(json.dumps(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
