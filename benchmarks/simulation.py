"""The simulation against real runs: what `headrace replay --simulate` says of the 99th percentile
of a run, and what that run had.

    python -m benchmarks.simulation [--model NAME,...] [--load SHARE,...] [--rounds N] [--seconds N]

The four services run in this process on the embedded log. Requests of one row arrive as a Poisson
process, whose moments a process of its own tells. Two points are compared in both: from when
ingest began to read a request until its answer was encoded, which is what the times in an answer
add up to. Digits runs on the event loop: its turns are measured before each run
(`headrace.replay.loop_measuring`), and the run itself tells the simulation nothing but its
arrivals. Magika and ResNet-50 are bound by computing: S(b) is learned from the run's own answers,
and a second time from those of the run before, at another load. So is that of *paced*, whose runs
wait for 200 ms and 25 ms for each row, as for a device: where a machine is busy with other work it
is the one model whose runs still take what they take. Loads are shares of what these times allow.
Every round has all loads in turn; what counts is the median of each load's rounds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.__main__ import RESULTS
from benchmarks.campaign import SCRATCH
from benchmarks.machine import describe_machine
from benchmarks.subjects import SUBJECTS, Subject
from benchmarks.ticking import TICK_BYTES
from headrace.codec import encode_request
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, NewRecord, TopicPartition
from headrace.pipeline import Pipeline, running
from headrace.replay.arrivals import read_arrivals
from headrace.replay.events import Limits
from headrace.replay.loop_measuring import measure_turns
from headrace.replay.measuring import measure
from headrace.replay.opening import open_recording
from headrace.replay.present import latest_models, resolved, served_now
from headrace.replay.selection import Selection
from headrace.replay.service_times import ServiceTime, learn
from headrace.replay.simulate import Outcome, Scenario, Served, simulate
from headrace.replay.simulated_loop import LoopTime
from headrace.replies import last_header
from headrace.services.batcher.forming import Forming
from headrace.telemetry.logs import configure_logging
from headrace.topic_plan import plan_topics
from headrace.topics import Topic

PARTITIONS = 4
WARM_UP_S = 1.0
WARM_UP_REQUESTS = 50
ANSWER_DEADLINE_S = 120.0
LOOK_EVERY_S = 0.05
SLOW_MEASURE_S = 2.0
KEPT_BYTES = 1 << 34
"""Of a partition: a run is read again as a whole."""
FREEZE_EVERY_S = 0.5
"""So often the records of the embedded log are taken out of the garbage collector's sight: with a
broker they would be none of this process's objects, and going through them takes long."""
WITHIN = 0.15


PACED = """
import time

class Model:
    inputs = [("x", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def warm_up(self):
        pass

    def run(self, inputs):
        time.sleep(0.2 + 0.025 * len(inputs["x"]))
        return {"y": inputs["x"]}
"""


class Times(NamedTuple):
    """What a simulation knows of how long things take."""

    service: Mapping[str, ServiceTime]
    loop: Mapping[str, LoopTime]


class Load(NamedTuple):
    """A rate for so long, and what share of the capacity it is."""

    share: float
    per_s: float
    seconds: float
    seed: int


class Compared(NamedTuple):
    """One run and its simulation, in milliseconds; `of_run_before` with the times of that."""

    model: str
    load: float
    per_s: float
    requests: int
    real_p50_ms: float
    real_p99_ms: float
    simulated_p50_ms: float
    simulated_p99_ms: float
    of_run_before_p99_ms: float | None
    simulated_load: float
    machine_load: float
    times: str


def paced(scratch: Path) -> Subject:
    """A model whose runs take the time that they are told to, and no processor's."""
    repository = scratch / "paced-repository"
    version = repository / "paced" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(PACED, encoding="utf-8")
    config = 'backend = "python"\nprobe = false\nmax_batch_size = 8\n'
    (version.parent / "model.toml").write_text(config, encoding="utf-8")
    row = {"x": np.zeros((1, 4), np.float32)}
    value = encode_request("application/msgpack", "paced", row)
    return Subject("paced", "bound by waiting", repository, version, 8, [value], 100, slow=True)


MODELS = {**SUBJECTS, "paced": paced}


def settings_of(subject: Subject) -> Settings:
    """The embedded log, and this model alone."""
    models = {"repository": str(subject.repository)}
    return make_settings({"models": models, "topics": {"partitions": PARTITIONS}})


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[Log]:
    """A log with nothing in it, and a pipeline that serves it."""
    async with MemoryLog(retention_bytes=KEPT_BYTES) as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)):
            yield log


# --- the real run ------------------------------------------------------------------------------


async def ask(
    log: Log, settings: Settings, values: Sequence[bytes], load: Load, due: list[int]
) -> None:
    """Send a request at each tick, and add the moments when they were due, in epoch microseconds,
    to those of earlier requests.
    """
    command = ("-m", "benchmarks.ticking", str(load.per_s), str(load.seconds), str(load.seed))
    ticking = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    assert ticking.stdout is not None
    topic, turns = settings.topic(Topic.REQUESTS), cycle(values)
    rest, freeze_s = b"", time.monotonic()
    async with log.producer() as producer:
        while ticks := await ticking.stdout.read(1 << 16):
            if time.monotonic() >= freeze_s:
                gc.freeze()
                freeze_s = time.monotonic() + FREEZE_EVERY_S
            ticks = rest + ticks
            whole = len(ticks) // TICK_BYTES * TICK_BYTES
            ticks, rest = ticks[:whole], ticks[whole:]
            for due_us in np.frombuffer(ticks, "<i8").tolist():
                target = TopicPartition(topic, len(due) % PARTITIONS)
                due.append(due_us)
                await producer.send(target, [NewRecord(None, next(turns), (), due_us // 1000)])
    await ticking.wait()


@asynccontextmanager
async def ticking_unheard(load: Load) -> AsyncIterator[None]:
    """Somebody tells when requests are due, and nobody listens."""
    ticking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.ticking", str(load.per_s), "3600", str(load.seed)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        ticking.kill()
        await ticking.wait()


async def all_answered(log: Log, settings: Settings, count: int) -> None:
    """Wait until the log holds so many answers. Raises `TimeoutError`."""
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


async def latencies_us(
    log: Log, settings: Settings, due: Sequence[int], skipped: int
) -> NDArray[np.int64]:
    """From when a request was due until its answer was written, without the first requests; the
    log tells the millisecond of the latter.
    """
    found: list[int] = []
    async with (
        open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers,
        aclosing(answers.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                origin = last_header(record.headers, "x-request") or b""
                _, partition, offset = origin.decode().rsplit("/", 2)
                number = int(offset) * PARTITIONS + int(partition)
                if number >= skipped:
                    found.append(record.timestamp * 1000 + 500 - due[number])
    return np.array(found, dtype=np.int64)


# --- the simulated one -------------------------------------------------------------------------


async def learned(log: Log, settings: Settings) -> Mapping[str, ServiceTime]:
    """S(b) out of the answers that the log holds."""
    async with open_recording(log, settings.topic(Topic.RESPONSES), Selection()) as answers:
        return await learn(answers)


async def outcome(log: Log, settings: Settings, skipped: int, times: Times) -> Outcome:
    """The simulation of the requests that the log holds."""
    async with open_recording(log, settings.topic(Topic.REQUESTS), Selection()) as requests:
        recorded = await read_arrivals(requests, 0)
    models = latest_models(settings, None)
    arrivals = resolved(recorded.arrivals, models).chosen(slice(skipped, None))
    now = served_now(settings, arrivals, times.service, models, times.loop)
    return simulate(arrivals, now, Scenario(), lambda limits: Forming(limits, "simulated"))


class Comparison:
    """Runs of one model and their simulations; each knows the times of the one before it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._settings = settings_of(subject)
        self._before: Times | None = None

    async def capacity_per_s(self) -> float:
        """What the model's times, measured now, allow."""
        versions = latest_models(self._settings, None)
        version = versions[self._subject.name]
        if not self._subject.slow:
            return (await self._turns()).capacity_per_s(256)
        service_time = await asyncio.to_thread(measure, version, SLOW_MEASURE_S)
        limits = served_limits(self._settings, self._subject.name, service_time)
        return limits.known().capacity_per_s()

    async def compared(self, load: Load) -> Compared:
        """One run, and what the simulation makes of its arrivals."""
        subject, settings, busy = self._subject, self._settings, os.getloadavg()[0]
        loop = {} if subject.slow else {subject.name: await self._turns(load)}
        async with served(settings) as log:
            warm_up = load._replace(
                seconds=max(WARM_UP_S, WARM_UP_REQUESTS / load.per_s), seed=load.seed + 1000
            )
            due: list[int] = []
            await ask(log, settings, subject.values, warm_up, due)
            await all_answered(log, settings, skipped := len(due))
            await ask(log, settings, subject.values, load, due)
            await all_answered(log, settings, len(due))
            real_us = await latencies_us(log, settings, due, skipped)
            times = Times(await learned(log, settings), loop)
            found = await outcome(log, settings, skipped, times)
            before = None
            if subject.slow and self._before is not None:
                before = await outcome(log, settings, skipped, self._before)
        gc.unfreeze()
        sent = len(due) - skipped
        if len(real_us) != sent:
            raise RuntimeError(f"expected {sent} answers in the log, got {len(real_us)}")
        self._before = times
        p50_ms, p99_ms = (np.quantile(real_us, (0.5, 0.99)) / 1000).tolist()
        return Compared(
            subject.name,
            load.share,
            load.per_s,
            sent,
            p50_ms,
            p99_ms,
            found.latency_ms(0.5),
            found.latency_ms(0.99),
            None if before is None else before.latency_ms(0.99),
            float(found.load),
            busy,
            str(loop.get(subject.name) or times.service[subject.name]),
        )

    async def _turns(self, load: Load | None = None) -> LoopTime:
        """With the process beside it that tells the arrivals of a load, as in the run."""
        async with served(self._settings) as log, AsyncExitStack() as stack:
            if load is not None:
                await stack.enter_async_context(ticking_unheard(load))
            return await measure_turns(log, self._settings, self._subject.values)


def served_limits(settings: Settings, model: str, service_time: ServiceTime) -> Served:
    """A model as it is served at present."""
    version = latest_models(settings, None)[model]
    limits = (version.max_batch_size, version.max_batch_bytes, version.max_queue_delay_ms)
    return Served(Limits(*limits), version.config.instances, service_time)


def summary(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """By model and load: the medians of the ratios, simulated over real."""
    found = []
    for model, load in dict.fromkeys((row.model, row.load) for row in rows):
        runs = [row for row in rows if (row.model, row.load) == (model, load)]
        p99 = [row.simulated_p99_ms / row.real_p99_ms for row in runs]
        before = [
            row.of_run_before_p99_ms / row.real_p99_ms
            for row in runs
            if row.of_run_before_p99_ms is not None
        ]
        found.append(
            {
                "model": model,
                "load": load,
                "rounds": len(runs),
                "real_p99_ms": median(row.real_p99_ms for row in runs),
                "simulated_over_real_p50": median(
                    row.simulated_p50_ms / row.real_p50_ms for row in runs
                ),
                "simulated_over_real_p99": median(p99),
                "lowest_and_highest": [min(p99), max(p99)],
                "times_of_run_before_p99": median(before) if before else None,
                "within_15_percent": bool(abs(median(p99) - 1) <= WITHIN),
            }
        )
    return found


async def compare(
    subject: Subject, loads: Sequence[float], rounds: int, seconds: float
) -> list[Compared]:
    """All loads in turn, again and again."""
    comparison, rows = Comparison(subject), []
    for number in range(rounds):
        capacity_per_s = await comparison.capacity_per_s()
        for share in loads:
            load = Load(share, capacity_per_s * share, seconds, number)
            rows.append(await comparison.compared(load))
            click.echo(json.dumps(rows[-1]._asdict()), err=True)
    return rows


def write(name: str, results: Mapping[str, Any]) -> None:
    """As JSON among the results, with what it was measured on."""
    text = json.dumps({"machine": describe_machine(), **results}, indent=2)
    (RESULTS / name).write_text(text + "\n", encoding="utf-8")


def numbers(text: str) -> list[float]:
    """Shares with commas between them."""
    return [float(each) for each in text.split(",")]


@click.command(help=__doc__)
@click.option("--model", "names", default="digits,magika,paced", show_default=True)
@click.option("--load", "loads", default="0.3,0.5,0.8", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=20.0, show_default=True)
def main(names: str, loads: str, rounds: int, seconds: float) -> None:
    configure_logging("warning")
    rows: list[Compared] = []
    for name in names.split(","):
        subject = MODELS[name](SCRATCH)
        rows += uvloop.run(compare(subject, numbers(loads), rounds, seconds))
    found = summary(rows)
    write("simulation.json", {"summary": found, "runs": [row._asdict() for row in rows]})
    click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
