"""The doors for HTTP and gRPC beside MLServer, LitServe and BentoML.

    python -m benchmarks.doors [--quick] [--rounds N] [--seconds N] [--server NAME] [--out FILE]

All serve the digits model on ONNX Runtime with one thread, and share the cores of the machine with
the load and the broker. In each round each server is started, warmed up, and loaded in turns
through each of its doors, by so many callers at once that each wait for their answer. Every answer
is compared with the model's. The first run makes the environments of the others in `.venv-doors`.

Writes the results as JSON and prints tables; ratios are medians over the rounds of what was
measured in the same round. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import onnxruntime
import uvloop
from msgspec import Struct, field

from benchmarks.cluster import Cluster, a_port
from benchmarks.contestants import HEADRACE
from benchmarks.door_load import LoadOrder, LoadReport, Way, exchanges
from benchmarks.door_servers import (
    APART,
    BENTOML,
    DOOR_SERVERS,
    EMBEDDED,
    ENVIRONMENTS,
    LITSERVE,
    MLSERVER,
    WITH_KAFKA,
    Door,
    Place,
    Server,
    headrace_environment,
    make_environment,
)
from benchmarks.machine import describe_machine, versions_of
from benchmarks.processes import ProgramFailed, Running
from benchmarks.results import RESULTS, record
from benchmarks.subjects import DISTINCT_REQUESTS, BenchmarkModel, digits

UNLOADED = 1
CONCURRENCIES = (UNLOADED, 32, 128)
START_WAIT_S = 60.0
READY_ANSWER_S = 2.0
READY_EVERY_S = 0.2
WARM_UP_S = 1.0
BROKER_WARM_UP_S = 15.0
"""Load on a broker that has just started: until its code is compiled it takes six times as long."""
SKIP_S = 0.5
BUSY_LOAD = 0.9
"""Share of a core from which on the load may be what is measured."""

LEAST_OVER_MLSERVER = 2.0
MOST_OVER_CLIENT_MS = 2.0


class DoorRun(Struct):
    """One measurement.

    Attributes:
        cpu_us: processor time of all the server's processes for each request.
        cpu_each_us: the same for each of its programs.
        broker_us: the same of the broker.
        load_cores: how many cores the load kept busy.
        load_average: of the machine, when it began.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    cpu_each_us: list[float]
    broker_us: float
    load_cores: float
    wrong: int
    example: str
    load_average: float


class DoorResult(Struct):
    """The runs of one door with one number of callers, by round."""

    server: str
    way: Way
    concurrency: int
    runs: dict[int, DoorRun] = field(default_factory=dict)

    def median(self, what: str) -> float:
        """Return the median of a field over the rounds."""
        return float(median(getattr(run, what) for run in self.runs.values()))


class DoorResults(Struct):
    """All results."""

    date: str
    machine: dict[str, Any]
    versions: dict[str, dict[str, str]]
    rounds: int
    window_s: float
    results: list[DoorResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, server: str, way: Way, concurrency: int, number: int, run: DoorRun) -> None:
        """Add the run of a round."""
        found = self.find(server, way, concurrency)
        if found is None:
            found = DoorResult(server, way, concurrency)
            self.results.append(found)
        found.runs[number] = run

    def find(self, server: str, way: Way, concurrency: int) -> DoorResult | None:
        """Return the results of a door, None without any."""
        for result in self.results:
            if (result.server, result.way, result.concurrency) == (server, way, concurrency):
                return result
        return None

    def ratio(self, server: str, way: Way, concurrency: int, to: str, to_way: Way) -> float | None:
        """Return how many times the rate of another door this one has; None if one is missing."""
        ours, others = self.find(server, way, concurrency), self.find(to, to_way, concurrency)
        if ours is None or others is None:
            return None
        both = ours.runs.keys() & others.runs.keys()
        if not both or not all(others.runs[number].per_s for number in both):
            return None
        return median(ours.runs[number].per_s / others.runs[number].per_s for number in both)


class Target(NamedTuple):
    """A sentence about the results, and whether it is true."""

    text: str
    met: bool


class Plan(NamedTuple):
    """How much is measured."""

    rounds: int
    window_s: float
    concurrencies: Sequence[int]
    servers: Sequence[Server]


# --- measuring ------------------------------------------------------------------------------------


class Campaign:
    """Measures doors, with a broker where one is needed.

    Args:
        say: takes a line about the progress.
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster | None,
        scratch: Path,
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._scratch = scratch
        self._say = say
        self._model = digits(scratch)
        self._rows, self._labels, self._probabilities = answers_of(self._model)
        self._started = 0
        self._is_broker_warm = False

    async def run(self, results: DoorResults) -> None:
        """Run all rounds, every second one in reverse order."""
        for number in range(self._plan.rounds):
            for server in self._plan.servers[:: -1 if number % 2 else 1]:
                try:
                    async with aclosing(self._measure(server)) as measured:
                        async for door, concurrency, run in measured:
                            results.add(server.name, door.way, concurrency, number, run)
                            self._say(
                                f"{number} {server.name}, {door.way}, {concurrency}: {_shown(run)}"
                            )
                except ProgramFailed as error:
                    results.failures.append(f"{server.name}: {error}")
                    self._say(results.failures[-1])

    async def _measure(self, server: Server) -> AsyncGenerator[tuple[Door, int, DoorRun], None]:
        """Start a server, and yield what each of its doors does with each number of callers."""
        place = self._place(server)
        if server.needs_broker:
            create_topics(place)
        with Running(server.programs(place)) as running:
            await self._wait_until_ready(server.doors[0], place, running)
            for door in server.doors:
                most = max(self._plan.concurrencies)
                order = self._order(door, place, most, self._warm_up_s(server))
                await self._load(server, order, running)
                for concurrency in self._plan.concurrencies:
                    order = self._order(door, place, concurrency, self._plan.window_s)
                    yield door, concurrency, await self._load(server, order, running)

    def _warm_up_s(self, server: Server) -> float:
        if not server.needs_broker or self._is_broker_warm:
            return WARM_UP_S
        self._is_broker_warm = True
        return BROKER_WARM_UP_S

    def _place(self, server: Server) -> Place:
        self._started += 1
        scratch = self._scratch / f"server-{self._started}"
        scratch.mkdir()
        broker = ""
        if server.needs_broker:
            assert self._cluster is not None
            broker = self._cluster.bootstrap_servers
        return Place(
            http_port=a_port(),
            grpc_port=a_port(),
            spare_port=a_port(),
            namespace=f"doors-{self._started}",
            bootstrap_servers=broker,
            repository=self._model.repository,
            onnx=self._model.onnx,
            scratch=scratch,
        )

    def _order(self, door: Door, place: Place, concurrency: int, window_s: float) -> LoadOrder:
        port = place.grpc_port if door.way is Way.GRPC else place.http_port
        return LoadOrder(
            way=door.way,
            dialect=door.dialect,
            address=place.bootstrap_servers if door.way is Way.KAFKA else str(port),
            path=door.path,
            namespace=place.namespace,
            rows=self._rows,
            labels=self._labels,
            probabilities=self._probabilities,
            concurrency=concurrency,
            skip_s=SKIP_S,
            window_s=window_s,
        )

    async def _wait_until_ready(self, door: Door, place: Place, running: Running) -> None:
        """Wait until the server answers a request over HTTP."""
        request = exchanges(self._order(door, place, 1, 0.0))[0].request
        give_up_s = time.monotonic() + START_WAIT_S
        while time.monotonic() < give_up_s:
            running.check()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(READY_ANSWER_S):
                    if await _answers(place.http_port, request):
                        return
            await asyncio.sleep(READY_EVERY_S)
        raise ProgramFailed(f"no answer in {START_WAIT_S:g} s: {running.last_words()}")

    async def _load(self, server: Server, order: LoadOrder, running: Running) -> DoorRun:
        """Load a door. Raises `ProgramFailed`: the load or the server has ended."""
        path = self._scratch / "order.json"
        path.write_bytes(msgspec.json.encode(order))
        load_average = os.getloadavg()[0]
        command = ("-m", "benchmarks.door_load", str(path))
        load = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
        assert load.stdout is not None
        await load.stdout.readline()
        before_s, broker_s = running.cpu_each_s(), self._broker_s(server)
        line = await load.stdout.readline()
        after_s, broker_s = running.cpu_each_s(), self._broker_s(server) - broker_s
        await load.wait()
        running.check()
        if not line:
            raise ProgramFailed(f"the load of {order.way} ended with {load.returncode}")
        report = msgspec.json.decode(line, type=LoadReport)
        each_s = [after - before for after, before in zip(after_s, before_s, strict=True)]
        return door_run(report, each_s, broker_s, load_average)

    def _broker_s(self, server: Server) -> float:
        """Return the broker's processor time; 0 beside a server that does not use it."""
        return self._cluster.cpu_s() if self._cluster and server.needs_broker else 0.0


def door_run(
    report: LoadReport, each_s: Sequence[float], broker_s: float, load_average: float
) -> DoorRun:
    """Return a measurement from the report of its load and the processor times meanwhile."""
    answered = max(1, report.answered)
    return DoorRun(
        per_s=report.answered / report.window_s,
        p50_ms=report.p50_ms,
        p99_ms=report.p99_ms,
        cpu_us=1e6 * sum(each_s) / answered,
        cpu_each_us=[1e6 * one_s / answered for one_s in each_s],
        broker_us=1e6 * broker_s / answered,
        load_cores=report.cpu_s / report.window_s,
        wrong=report.wrong,
        example=report.example,
        load_average=load_average,
    )


def create_topics(place: Place) -> None:
    """Create the topics of a server's namespace."""
    ours = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    environment = {**ours, **headrace_environment(place)}
    create = (HEADRACE, "topics", "create")
    subprocess.run(create, env=environment, check=True, stdout=subprocess.DEVNULL)


def answers_of(model: BenchmarkModel) -> tuple[list[list[float]], list[int], list[list[float]]]:
    """Return some rows for the model, and the label and the probabilities for each."""
    pixels = np.random.default_rng(1).integers(0, 17, (DISTINCT_REQUESTS, 64)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.onnx)
    labels, probabilities = session.run(["label", "probabilities"], {"pixels": pixels})
    return pixels.tolist(), labels.tolist(), probabilities.tolist()


async def _answers(port: int, request: bytes) -> bool:
    """Return whether a server answers a request over HTTP with 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return b" 200 " in await reader.readline()
    finally:
        writer.close()


def _shown(run: DoorRun) -> str:
    return (
        f"{run.per_s:,.0f}/s, p50 {run.p50_ms:.2f} ms, p99 {run.p99_ms:.2f} ms, "
        f"CPU {run.cpu_us:.0f} µs, load {run.load_cores:.2f} cores"
        + (f", {run.wrong} wrong: {run.example}" if run.wrong else "")
    )


# --- the report -----------------------------------------------------------------------------------


def render(results: DoorResults) -> str:
    """Return a table for each number of callers."""
    return "\n\n".join(
        _table(results, concurrency)
        for concurrency in sorted({result.concurrency for result in results.results})
    )


def _table(results: DoorResults, concurrency: int) -> str:
    lines = [
        f"{concurrency} at once:",
        "",
        "| server | way | answers/s | times MLServer | p50 ms | p99 ms | CPU µs/request "
        "| broker µs | load, cores |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results.results:
        if result.concurrency != concurrency:
            continue
        way, middle = result.way, result.median
        other = Way.GRPC if way is Way.GRPC else Way.JSON
        ratio = results.ratio(result.server, way, concurrency, MLSERVER, other)
        lines.append(
            f"| {result.server} | {way} | {middle('per_s'):,.0f} "
            f"| {'' if ratio is None else f'{ratio:.2f}'} "
            f"| {middle('p50_ms'):.2f} | {middle('p99_ms'):.2f} | {_cpu(result)} "
            f"| {middle('broker_us'):.0f} | {middle('load_cores'):.2f} |"
        )
    return "\n".join(lines)


def _cpu(result: DoorResult) -> str:
    """Return the processor time for each request, and that of each program."""
    total = f"{result.median('cpu_us'):.0f}"
    each = list(zip(*(run.cpu_each_us for run in result.runs.values()), strict=True))
    if len(each) == 1:
        return total
    parts = next(server.parts for server in DOOR_SERVERS if server.name == result.server)
    named = (f"{part} {median(of):.0f}" for part, of in zip(parts, each, strict=True))
    return f"{total} ({', '.join(named)})"


def targets(results: DoorResults) -> list[Target]:
    """Return what the doors are to show, as far as it was measured."""
    found = []
    loaded = sorted({result.concurrency for result in results.results} - {UNLOADED})
    ways = (Way.BINARY, Way.GRPC)
    rivals = {MLSERVER: LEAST_OVER_MLSERVER, LITSERVE: 1.0, BENTOML: 1.0}
    for server, way, concurrency in product((EMBEDDED, WITH_KAFKA), ways, loaded):
        for rival, least in rivals.items():
            ratio = results.ratio(server, way, concurrency, rival, Way.JSON)
            if ratio is not None:
                text = (
                    f"{server}, {way}, {concurrency} at once: {ratio:.2f} times {rival} over HTTP"
                )
                found.append(Target(f"{text}; target {least:g}", ratio >= least))
    client = results.find(WITH_KAFKA, Way.KAFKA, UNLOADED)
    for server, way in product((WITH_KAFKA, APART), ways):
        door = results.find(server, way, UNLOADED)
        if client is not None and door is not None:
            more_ms = door.median("p50_ms") - client.median("p50_ms")
            text = f"{server}, unloaded: {way} {more_ms:+.2f} ms against the Kafka client"
            met = more_ms <= MOST_OVER_CLIENT_MS
            found.append(Target(f"{text}; target {MOST_OVER_CLIENT_MS:+g} ms", met))
    wrong = sum(run.wrong for result in results.results for run in result.runs.values())
    found.append(Target(f"{wrong} wrong answers; target 0", not wrong))
    runs = (run for result in results.results for run in result.runs.values())
    busiest = max((run.load_cores for run in runs), default=0.0)
    text = f"the load kept at most {busiest:.2f} cores busy; target below {BUSY_LOAD:g}"
    found.append(Target(text, busiest < BUSY_LOAD))
    return found


async def measure(plan: Plan, say: Callable[[str], None]) -> DoorResults:
    """Measure as planned."""
    results = DoorResults(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=describe_machine(),
        versions={
            server.others: versions_of(
                ENVIRONMENTS / server.others / "bin" / "python", (server.others, "onnxruntime")
            )
            for server in plan.servers
            if server.others
        },
        rounds=plan.rounds,
        window_s=plan.window_s,
    )
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = None
        if any(server.needs_broker for server in plan.servers):
            cluster = await stack.enter_async_context(Cluster())
        await Campaign(plan, cluster, scratch, say).run(results)
    return results


@click.command()
@click.option("--quick", is_flag=True, help="One round of one second each: does it work?")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True)
@click.option("--server", "named", multiple=True, help="Those with this in their names.")
@click.option("--concurrency", "given", type=click.IntRange(min=1), multiple=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "doors.json")
def main(
    quick: bool,
    rounds: int,
    seconds: float,
    named: tuple[str, ...],
    given: tuple[int, ...],
    out: Path,
) -> None:
    """Measure the doors of Headrace and of other servers."""
    chosen = [
        server
        for server in DOOR_SERVERS
        if not named or any(name.lower() in server.name.lower() for name in named)
    ]
    concurrencies = given or CONCURRENCIES
    plan = Plan(1 if quick else rounds, 1.0 if quick else seconds, concurrencies, chosen)
    for server in chosen:
        if server.others:
            make_environment(server.others)
    results = uvloop.run(measure(plan, lambda line: click.echo(line, err=True)))
    record(out, results)
    click.echo(render(results) + "\n")
    found = targets(results)
    for target in found:
        click.echo(f"{'met   ' if target.met else 'MISSED'} {target.text}")
    for failure in results.failures:
        click.echo(f"failed {failure}")
    sys.exit(0 if all(target.met for target in found) and not results.failures else 1)


if __name__ == "__main__":
    os.environ.pop("HEADRACE_CONFIG", None)
    main()
