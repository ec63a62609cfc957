"""Bad input at both doors of a gateway, beside a good caller: its latency, and the memory.

    python -m benchmarks.bad_input [--minutes N] [--rate PER_S] [--out FILE]

Sends all kinds of bad input that the tests know, in turn, to a `headrace gateway` in front of a
local Kafka: so many a second, in windows that alternate with quiet ones. A good caller in a process
of its own sends one request after another over HTTP in both. The memory is the gateway's alone.

Exits with 1 if an answer blames the server (500 or `INTERNAL`), if a good answer is wrong, or if
resident memory rises after the first quarter of the time by more than 2 MiB in ten minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
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
from benchmarks.door_load import Dialect, LoadOrder, LoadReport, Way
from benchmarks.doors import answers_of
from benchmarks.machine import describe_machine
from benchmarks.processes import Program, Running
from benchmarks.results import RESULTS, record
from benchmarks.subjects import digits
from headrace.gateway.open_inference_pb2 import ModelInferResponse
from tests.flow.test_gateway_bad_input import (
    HEADER_REQUESTS,
    INFER,
    JSON_REQUESTS,
    LYING_TEXTS,
    PATHS,
    WIRE,
    head,
    text_body,
)
from tests.flow.test_gateway_grpc_bad_input import CASES

HOST = "127.0.0.1"
MIB = 1024 * 1024
WINDOW_S = 10.0
START_WAIT_S = 60.0
UNDER_WAY = 256
"""Bad requests at once; further ones wait, so that slow kinds do not add up."""
ANSWER_WAIT_S = 5.0
TIMEOUTS = ("HEADER_TIMEOUT_S", "BODY_TIMEOUT_S", "IDLE_TIMEOUT_S")
SHORT_S = "0.5"
"""Limits of the server, which some kinds run into."""
WARM_SHARE = 0.25
MAX_RISE_MIB = 2.0

Send = Callable[[], Awaitable[str]]


class Found(msgspec.Struct):
    """The results of a measurement.

    Attributes:
        kinds: of bad input.
        sent: bad requests.
        ended: their number by status; 0 for a connection that ended without one.
        quiet, flooded: reports of the good caller, one for each window.
        memory: seconds, and MiB of the server, at the end of each window.
    """

    kinds: int
    rate_per_s: float
    sent: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)
    quiet: list[LoadReport] = msgspec.field(default_factory=list)
    flooded: list[LoadReport] = msgspec.field(default_factory=list)
    memory: list[tuple[float, float]] = msgspec.field(default_factory=list)

    def rise_mib(self) -> float:
        """Return the growth in ten minutes, by a line through the samples after the warm-up."""
        notes = np.array(self.memory)
        late = notes[notes[:, 0] >= WARM_SHARE * notes[-1, 0]]
        return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) * 600

    def faults(self) -> list[str]:
        """Return what is not as it should be."""
        blamed = sum(self.ended[status] for status in ("500", "INTERNAL", "UNKNOWN"))
        wrong = sum(report.wrong for report in (*self.quiet, *self.flooded))
        found = {
            f"{blamed} answers blame the server": blamed,
            f"{wrong} answers to the good caller were wrong": wrong,
            f"memory rises by {self.rise_mib():.1f} MiB in ten minutes": (
                self.rise_mib() > MAX_RISE_MIB
            ),
        }
        return [text for text, is_fault in found.items() if is_fault]


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


async def send_http(port: int, content: bytes) -> str:
    """Send bytes, and return the status that comes back."""
    writer = None
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(content)
            line = await reader.readline()
            await reader.read()
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


async def flood(sends: Iterator[Send], rate_per_s: float, found: Found) -> None:
    """Send bad requests at a rate, until it is cancelled."""
    permits = asyncio.Semaphore(UNDER_WAY)

    async def send_one(send: Send) -> None:
        try:
            found.ended[await send()] += 1
        finally:
            permits.release()

    due_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for send in sends:
            await permits.acquire()
            tasks.create_task(send_one(send))
            found.sent += 1
            due_s += 1 / rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def good_caller(order: Path) -> LoadReport:
    """Run the good caller for a window."""
    command = ("-m", "benchmarks.door_load", str(order))
    load = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
    output, _ = await load.communicate()
    return msgspec.json.decode(output.splitlines()[-1], type=LoadReport)


async def wait_until_ready(port: int, running: Running) -> None:
    """Wait until the gateway is ready."""
    give_up_s = time.monotonic() + START_WAIT_S
    while time.monotonic() < give_up_s:
        running.check()
        ready = head("Connection: close", target="GET /v2/health/ready")
        if await send_http(port, ready) == "200":
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"not ready in {START_WAIT_S:g} s: {running.last_words()}")


def create_topics(environment: dict[str, str]) -> None:
    """Create the topics that the gateway and the stages share."""
    ours = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    create = (HEADRACE, "topics", "create")
    subprocess.run(create, env=ours | environment, check=True, stdout=subprocess.DEVNULL)


async def measure(minutes: float, rate_per_s: float, scratch: Path) -> Found:
    """Measure with a broker of its own."""
    async with Cluster() as cluster:
        return await _measure(minutes, rate_per_s, scratch, cluster)


async def _measure(minutes: float, rate_per_s: float, scratch: Path, cluster: Cluster) -> Found:
    """Alternate quiet windows and flooded ones."""
    model, http_port, grpc_port = digits(scratch), a_port(), a_port()
    rows, labels, probabilities = answers_of(model)
    order = scratch / "order.json"
    settings = LoadOrder(
        way=Way.BINARY,
        dialect=Dialect.OPEN_INFERENCE,
        address=str(http_port),
        path=INFER,
        namespace="",
        rows=rows,
        labels=labels,
        probabilities=probabilities,
        concurrency=1,
        skip_s=0.5,
        window_s=WINDOW_S,
    )
    order.write_bytes(msgspec.json.encode(settings))
    environment = {
        "HEADRACE_MODELS__REPOSITORY": str(model.repository),
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
        "HEADRACE_TELEMETRY__LOG_LEVEL": "error",
        "HEADRACE_GATEWAY__MAX_BODY_BYTES": "65536",
        **{f"HEADRACE_GATEWAY__{name}": SHORT_S for name in TIMEOUTS},
    }
    create_topics(environment)
    ports = ["--gateway-port", str(http_port), "--grpc-port", str(grpc_port), "--http-port", "0"]
    gateway = Program([HEADRACE, "gateway", *ports], environment)
    stages = Program([HEADRACE, "run", "--http-port", "0"], environment)
    async with grpc.aio.insecure_channel(f"{HOST}:{grpc_port}") as channel:
        kinds: list[Send] = [partial(send_http, http_port, content) for content in on_wire()]
        for _, request, _, _ in CASES:
            content = request if isinstance(request, bytes) else request.SerializeToString()
            kinds.append(partial(send_grpc, channel, content))
        found = Found(len(kinds), rate_per_s)
        with Running([stages]), Running([gateway]) as running:
            await wait_until_ready(http_port, running)
            sends, began_s = itertools.cycle(kinds), time.monotonic()
            while time.monotonic() - began_s < minutes * 60:
                found.quiet.append(await good_caller(order))
                flooding = asyncio.create_task(flood(sends, rate_per_s, found), name="flood")
                found.flooded.append(await good_caller(order))
                flooding.cancel()
                with suppress(asyncio.CancelledError):
                    await flooding
                running.check()
                note = time.monotonic() - began_s, running.resident_bytes() / MIB
                found.memory.append(note)
                click.echo(
                    f"{note[0]:.0f} s: {note[1]:.1f} MiB, p99 {found.quiet[-1].p99_ms:.2f} ms "
                    f"quiet, {found.flooded[-1].p99_ms:.2f} ms flooded",
                    err=True,
                )
    return found


@click.command()
@click.option("--minutes", type=click.FloatRange(min=1), default=10.0, show_default=True)
@click.option("--rate", type=click.FloatRange(min=1), default=100.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "bad_input.json")
def main(minutes: float, rate: float, out: Path) -> None:
    """Flood a gateway with bad input, and watch a good caller and the memory."""
    with tempfile.TemporaryDirectory() as scratch:
        found = uvloop.run(measure(minutes, rate, Path(scratch)))
    record(out, {"machine": describe_machine(), "found": found})
    for name, reports in (("quiet", found.quiet), ("flooded", found.flooded)):
        click.echo(
            f"{name}: p50 {median(each.p50_ms for each in reports):.2f} ms, "
            f"p99 {median(each.p99_ms for each in reports):.2f} ms"
        )
    click.echo(f"{found.kinds} kinds, {found.sent} sent, ended as {dict(found.ended)}")
    click.echo(f"memory {found.memory[0][1]:.1f} to {found.memory[-1][1]:.1f} MiB")
    for fault in found.faults():
        click.echo(f"MISSED {fault}")
    sys.exit(1 if found.faults() else 0)


if __name__ == "__main__":
    main()
