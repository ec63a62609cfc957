"""Bad input at both doors of a gateway, beside a good caller: its latency, and the memory.

    python -m benchmarks.bad_input [--minutes N] [--rate PER_S] [--out FILE]

Sends all kinds of bad input that the tests know, in turn, to a `headrace gateway` in front of a
local Kafka. A good caller in a process of its own sends requests over HTTP at the times of a
Poisson process, and its latencies count from when they were due, so that a pause counts for each
request that it holds up. Windows alternate: nothing else is sent, as many good requests as bad ones
in the next window (any request takes some of the machine), and bad ones. The memory is the
gateway's alone.

Exits with 1 if an answer blames the server (500 or `INTERNAL`) or does not come, if the good caller
is refused, if its 99th percentile beside bad requests is more than 1.25 times that beside good
ones, or if resident memory rises after the first minute by more than 4 MiB, which is half a
kilobyte for each request of four minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import grpc
import msgspec
import numpy as np
import uvloop

from benchmarks.cluster import Cluster, a_port
from benchmarks.contestants import HEADRACE
from benchmarks.machine import describe_machine
from benchmarks.named_load import LoadPlan, NamedLoad, NoteColumns
from benchmarks.processes import Program, Running
from benchmarks.results import RESULTS, record
from headrace.gateway.open_inference_pb2 import ModelInferResponse
from tests.flow.test_gateway_bad_input import (
    GOOD,
    HEADER_REQUESTS,
    JSON_REQUESTS,
    LIMIT,
    LYING_TEXTS,
    PATHS,
    WIRE,
    head,
    text_body,
)
from tests.flow.test_gateway_grpc_bad_input import CASES
from tests.support.gateways import add_identities
from tests.support.grpc_callers import pixels
from tests.support.models import add_version, digits, identity

HOST = "127.0.0.1"
MIB = 1024 * 1024
WINDOW_S = 10.0
SKIP_S = 0.5
"""What is due in the beginning of a window is not counted: the one before has not ended yet."""
CALLER_PER_S = 100.0
START_WAIT_S = 60.0
UNDER_WAY = 256
"""Flooding requests at once; further ones wait, so that slow kinds do not add up."""
ANSWER_WAIT_S = 5.0
TIMEOUTS_S = {"HEADER_TIMEOUT_S": "4", "BODY_TIMEOUT_S": "0.5"}
"""Limits of the server, which some kinds run into."""
WARM_UP_S = 60.0
MAX_RISE_MIB = 4.0
MAX_P99_RATIO = 1.25
BLAMES = ("500", "INTERNAL", "UNKNOWN")
HANGS = ("TimeoutError", "DEADLINE_EXCEEDED")
SHOWN = 80

Send = Callable[[], Awaitable[str]]


class Beside(StrEnum):
    """Requests that are sent beside the good caller in a window."""

    NOTHING = "nothing"
    GOOD = "good requests"
    BAD = "bad requests"


class Window(msgspec.Struct):
    """Answers to the good caller in one window, by when its requests were due.

    Attributes:
        from_s, until_s: on the monotonic clock.
        memory_mib: resident, of the gateway, at its end.
    """

    beside: Beside
    from_s: float
    until_s: float = 0.0
    memory_mib: float = 0.0
    requests: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0

    def count(self, notes: NoteColumns) -> None:
        """Count the requests that were due in this window."""
        is_due = (notes.due_ns >= self.from_s * 1e9) & (notes.due_ns < self.until_s * 1e9)
        latencies_ms = (notes.done_ns - notes.due_ns)[is_due] / 1e6
        self.requests = len(latencies_ms)
        if self.requests:
            self.p50_ms, self.p99_ms, self.max_ms = np.percentile(
                latencies_ms, (50, 99, 100)
            ).tolist()


class Found(msgspec.Struct):
    """The results of a measurement.

    Attributes:
        kinds: of bad input.
        rate_per_s: of the flooding requests.
        ended: their numbers by status, of the good and the bad ones; 0: without an answer.
        refusals: what the good caller got instead of answers, by their beginnings.
    """

    kinds: int
    rate_per_s: float
    ended: dict[Beside, Counter[str]] = msgspec.field(
        default_factory=lambda: {Beside.GOOD: Counter(), Beside.BAD: Counter()}
    )
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    windows: list[Window] = msgspec.field(default_factory=list)

    def beside(self, what: Beside) -> list[Window]:
        """Return the windows with something beside the good caller."""
        return [window for window in self.windows if window.beside == what]

    def p99_ratio(self, to: Beside) -> float:
        """Return the median of the ratios of 99th percentiles in the same round, beside bad
        requests to beside something else.
        """
        pairs = zip(self.beside(Beside.BAD), self.beside(to), strict=True)
        return median(bad.p99_ms / other.p99_ms for bad, other in pairs)

    def rise_mib(self) -> float:
        """Return the growth after the warm-up, from the first third of its windows to the last."""
        warm_s = self.windows[0].from_s + WARM_UP_S
        late_mib = [each.memory_mib for each in self.windows if each.until_s >= warm_s]
        third = -(-len(late_mib) // 3)
        return median(late_mib[-third:]) - median(late_mib[:third])

    def faults(self) -> list[str]:
        """Return what is not as it should be."""
        bad = self.ended[Beside.BAD]
        blamed, hung = (sum(bad[each] for each in group) for group in (BLAMES, HANGS))
        refused = self.refusals.total()
        ratio, rise_mib = self.p99_ratio(Beside.GOOD), self.rise_mib()
        found = {
            f"{blamed} answers blame the server": blamed,
            f"{hung} bad requests were not answered in {ANSWER_WAIT_S:g} s": hung,
            f"the good caller got {refused} refusals, such as {list(self.refusals)[:3]}": refused,
            f"p99 beside bad requests is {ratio:.2f} times that beside good ones": (
                ratio > MAX_P99_RATIO
            ),
            f"memory rises by {rise_mib:.1f} MiB": rise_mib > MAX_RISE_MIB,
        }
        return [text for text, is_fault in found.items() if is_fault]


def good_on_wire() -> bytes:
    """Return a good request over HTTP, on a connection of its own like the bad ones."""
    content = msgspec.json.encode(GOOD)
    return head(f"Content-Length: {len(content)}", "Connection: close") + content


def on_wire() -> Iterator[bytes]:
    """Return all kinds over HTTP, as the bytes that are sent on a connection of their own."""
    for sent, _ in (*PATHS.values(), *WIRE.values()):
        yield sent
    for body, _ in JSON_REQUESTS.values():
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        yield head(f"Content-Length: {len(content)}", "Connection: close") + content
    for headers, content, _, _ in HEADER_REQUESTS.values():
        lines = [f"{name}: {value}" for name, value in headers.items() if value.isascii()]
        lines += [f"Content-Length: {len(content)}", "Connection: close"]
        yield head(*lines) + content
    for content, _ in LYING_TEXTS.values():
        body = text_body(content)
        lines = [
            f"Inference-Header-Content-Length: {len(body)}",
            f"Content-Length: {len(body + content)}",
            "Connection: close",
        ]
        yield head(*lines, target="POST /v2/models/texts/infer") + body + content


def bad_requests(port: int, channel: grpc.aio.Channel) -> list[Send]:
    """Return what sends each kind of bad input, those at both doors mixed."""
    sends: list[Send] = [partial(send_http, port, content) for content in on_wire()]
    for _, request, _, _ in CASES:
        content = request if isinstance(request, bytes) else request.SerializeToString()
        sends.append(partial(send_grpc, channel, content))
    random.Random(1).shuffle(sends)
    return sends


def good_requests(port: int, channel: grpc.aio.Channel) -> list[Send]:
    """Return what sends good requests, in the same share at each door."""
    over_http, over_grpc = sum(1 for _ in on_wire()), len(CASES)
    content = pixels().SerializeToString()
    sends: list[Send] = [partial(send_http, port, good_on_wire())] * over_http
    sends += [partial(send_grpc, channel, content)] * over_grpc
    random.Random(1).shuffle(sends)
    return sends


async def send_http(port: int, content: bytes) -> str:
    """Send bytes, and return the status that comes back."""
    writer = None
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(content)
            line = await reader.readline()
        return line.split()[1].decode() if line else "0"
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    finally:
        if writer is not None:
            writer.close()


async def send_grpc(channel: grpc.aio.Channel, content: bytes) -> str:
    """Send bytes as a message, and return the status of the call."""
    begin: Any = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        response_deserializer=ModelInferResponse.FromString,
    )
    try:
        await begin(content, timeout=ANSWER_WAIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def flood(sends: Iterator[Send], rate_per_s: float) -> Counter[str]:
    """Send requests at a rate for a window; return their number by how they ended."""
    permits = asyncio.Semaphore(UNDER_WAY)
    ended: Counter[str] = Counter()

    async def send_one(send: Send) -> None:
        try:
            ended[await send()] += 1
        finally:
            permits.release()

    began_s = due_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        while due_s < began_s + WINDOW_S:
            await permits.acquire()
            tasks.create_task(send_one(next(sends)), name="flooding-request")
            due_s += 1 / rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return ended


async def wait_until_ready(port: int, running: Running) -> None:
    """Wait until the gateway answers a good request."""
    give_up_s = time.monotonic() + START_WAIT_S
    while time.monotonic() < give_up_s:
        running.check()
        if await send_http(port, good_on_wire()) == "200":
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"no answer in {START_WAIT_S:g} s: {running.last_words()}")


def create_topics(environment: dict[str, str]) -> None:
    """Create the topics that the gateway and the stages share."""
    ours = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    create = (HEADRACE, "topics", "create")
    subprocess.run(create, env=ours | environment, check=True, stdout=subprocess.DEVNULL)


async def measure(minutes: float, rate_per_s: float, scratch: Path) -> Found:
    """Measure with a broker of its own."""
    async with Cluster() as cluster:
        return await _measure(minutes, rate_per_s, scratch, cluster.bootstrap_servers)


async def _measure(
    minutes: float, rate_per_s: float, scratch: Path, bootstrap_servers: str
) -> Found:
    """Alternate the kinds of windows."""
    add_version(scratch, "digits", 1, digits())
    add_version(scratch, "texts", 1, identity("BYTES"), "probe = false")
    add_identities(scratch)
    http_port, grpc_port = a_port(), a_port()
    environment = {
        "HEADRACE_MODELS__REPOSITORY": str(scratch),
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
        "HEADRACE_TELEMETRY__LOG_LEVEL": "error",
        "HEADRACE_GATEWAY__MAX_BODY_BYTES": str(LIMIT),
        **{f"HEADRACE_GATEWAY__{name}": value for name, value in TIMEOUTS_S.items()},
    }
    create_topics(environment)
    ports = ["--gateway-port", str(http_port), "--grpc-port", str(grpc_port), "--http-port", "0"]
    gateway = Program([HEADRACE, "gateway", *ports], environment)
    stages = Program([HEADRACE, "run", "--http-port", "0"], environment)
    async with grpc.aio.insecure_channel(f"{HOST}:{grpc_port}") as channel:
        bad = bad_requests(http_port, channel)
        found = Found(len(bad), rate_per_s)
        sends = {
            Beside.GOOD: itertools.cycle(good_requests(http_port, channel)),
            Beside.BAD: itertools.cycle(bad),
        }
        with Running([stages]), Running([gateway]) as running:
            await wait_until_ready(http_port, running)
            async with NamedLoad(LoadPlan(http_port, ["digits"], CALLER_PER_S)) as caller:
                await flood(sends[Beside.BAD], rate_per_s)  # warms up
                until_s = time.monotonic() + minutes * 60
                for number in itertools.count():
                    for beside in list(Beside)[:: -1 if number % 2 else 1]:
                        window = Window(beside, from_s=time.monotonic() + SKIP_S)
                        if beside is Beside.NOTHING:
                            await asyncio.sleep(WINDOW_S)
                        else:
                            ended = await flood(sends[beside], rate_per_s)
                            found.ended[beside] += ended
                        running.check()
                        window.until_s = time.monotonic()
                        window.memory_mib = running.resident_bytes() / MIB
                        found.windows.append(window)
                        click.echo(f"beside {beside}: {window.memory_mib:.1f} MiB", err=True)
                    if time.monotonic() > until_s:
                        break
                notes = NoteColumns(*(await caller.stop()).T)
    found.refusals.update(text[:SHOWN] for text in caller.refusals)
    for window in found.windows:
        window.count(notes)
    return found


@click.command()
@click.option("--minutes", type=click.FloatRange(min=2), default=4.0, show_default=True)
@click.option("--rate", type=click.FloatRange(min=1), default=100.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "bad_input.json")
def main(minutes: float, rate: float, out: Path) -> None:
    """Flood a gateway with bad input, and watch a good caller and the memory."""
    with tempfile.TemporaryDirectory() as scratch:
        found = uvloop.run(measure(minutes, rate, Path(scratch)))
    record(out, {"machine": describe_machine(), "found": found})
    for beside in Beside:
        p50_ms, p99_ms, max_ms = (
            median(getattr(each, what) for each in found.beside(beside))
            for what in ("p50_ms", "p99_ms", "max_ms")
        )
        click.echo(
            f"good caller beside {beside}: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, "
            f"longest {max_ms:.1f} ms (medians of {len(found.beside(beside))} windows)"
        )
    click.echo(
        f"p99 beside bad requests: {found.p99_ratio(Beside.GOOD):.2f} times that beside good ones, "
        f"{found.p99_ratio(Beside.NOTHING):.2f} times that beside nothing"
    )
    ended = found.ended[Beside.BAD]
    click.echo(f"{found.kinds} kinds, {ended.total()} sent, ended as {dict(ended)}")
    first, last = found.windows[0], found.windows[-1]
    click.echo(f"memory {first.memory_mib:.1f} to {last.memory_mib:.1f} MiB")
    for fault in found.faults():
        click.echo(f"MISSED {fault}")
    sys.exit(1 if found.faults() else 0)


if __name__ == "__main__":
    main()
