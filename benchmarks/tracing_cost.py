"""Cost of tracing: the four services in one process on the embedded log at full load, with and
without tracing, alternately, so that other load on the machine affects both equally.

    python -m benchmarks.tracing_cost [--requests N] [--rounds N] [--mode NAME]

Requests are in the log before the services start. Time is counted until the last answer is in the
log, by the clock and by the processor time of the process, export included: spans are sent every
0.2 s by OTLP over HTTP, to a process that reads and forgets them. The interpreter is set as
`headrace run` sets it. A mode with tracing is compared with the one of its round without tracing
whose requests have the same headers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgpack
import uvloop
from prometheus_client import CollectorRegistry

from headrace.cli.run import tune_interpreter
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, NewRecord, TopicPartition
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.telemetry.collector import open_tracing
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES, Topic

TRACEPARENT = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
EXPORT_DELAY_MS = "200"
CHUNK = 500
LOOK_EVERY_S = 0.005

FORGETFUL = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Forget(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Forget)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Mode(NamedTuple):
    """One way of tracing requests.

    Attributes:
        base: the mode that this one is compared with.
        telemetry: settings; None for no tracing.
        sampled: requests come with a `traceparent` that is sampled.
    """

    base: str
    telemetry: dict[str, float] | None
    sampled: bool = False


MODES = {
    "off": Mode("off", None),
    "default": Mode("off", {}),
    "ratio 1, 10 a second": Mode("off", {"sample_ratio": 1.0}),
    "ratio 0.01, no limit": Mode("off", {"traces_per_second": 1e6}),
    "off, sampled by callers": Mode("off, sampled by callers", None, sampled=True),
    "sampled by callers, 20 a second": Mode("off, sampled by callers", {}, sampled=True),
}


class TracedRun(NamedTuple):
    """One run: wall-clock and CPU seconds, and the number of exported and dropped spans."""

    wall_s: float
    cpu_s: float
    exported: float
    dropped: float


def _settings(models: Path, endpoint: str, mode: Mode) -> Settings:
    telemetry = {} if mode.telemetry is None else {"otlp_endpoint": endpoint, **mode.telemetry}
    return make_settings({"models": {"repository": str(models)}, "telemetry": telemetry})


async def _fill(log: Log, settings: Settings, requests: int, *, sampled: bool) -> None:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": bytes(256)}
    value = msgpack.packb({"model_name": "digits", "inputs": [tensor]})
    record = NewRecord(None, value, [TRACEPARENT] if sampled else [])
    topic, partitions = settings.topic(Topic.REQUESTS), settings.topics.partitions
    async with log.producer() as producer:
        for start in range(0, requests, CHUNK):
            target = TopicPartition(topic, start // CHUNK % partitions)
            for sent in await producer.send(target, [record] * CHUNK):
                await sent.acknowledged


async def _answered(log: Log, settings: Settings, requests: int) -> None:
    topic = settings.topic(Topic.RESPONSES)
    partitions = [TopicPartition(topic, each) for each in range(settings.topics.partitions)]
    async with log.reader(partitions) as reader:
        # Reading the answers would cost as well; only their number is looked at.
        while True:
            ends = await reader.end_offsets(partitions)
            if sum(ends.values()) >= requests:
                return
            await asyncio.sleep(LOOK_EVERY_S)


async def measure(settings: Settings, requests: int, *, sampled: bool) -> TracedRun:
    """Serve this many requests, and return the measurements."""
    metrics = Metrics(CollectorRegistry())
    async with MemoryLog() as log, open_tracing(settings, STAGES, metrics) as tracing:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        await _fill(log, settings, requests, sampled=sampled)
        pipeline = Pipeline(settings, log, instruments=Instruments(metrics, tracing))
        async with running(pipeline):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await _answered(log, settings, requests)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    value = metrics.registry.get_sample_value
    exported = value("headrace_trace_spans_total") or 0.0
    return TracedRun(wall_s, cpu_s, exported, value("headrace_trace_spans_dropped_total") or 0.0)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mode", choices=MODES, help="measure only this one, and without tracing")
    given = parser.parse_args()
    chosen = MODES if given.mode is None else dict.fromkeys((MODES[given.mode].base, given.mode))
    configure_logging("warning")
    tune_interpreter()
    os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", EXPORT_DELAY_MS)
    requests = -(-given.requests // CHUNK) * CHUNK
    runs: dict[str, list[TracedRun]] = {name: [] for name in chosen}
    collector = subprocess.Popen([sys.executable, "-c", FORGETFUL], stdout=subprocess.PIPE)
    try:
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        with as_file(files("headrace.tools.demo") / "models") as models:
            for number in range(given.rounds + 1):
                # Neither of two is always the one that runs later.
                for name in list(chosen)[:: 1 if number % 2 else -1]:
                    mode = MODES[name]
                    settings = _settings(models, endpoint, mode)
                    measured = uvloop.run(measure(settings, requests, sampled=mode.sampled))
                    if number:  # the first round warms up
                        runs[name].append(measured)
    finally:
        collector.terminate()
        collector.wait()
    _report(runs, requests)


def _report(runs: dict[str, list[TracedRun]], requests: int) -> None:
    print(
        "| tracing | answers/s | CPU µs/request, median | best | throughput | CPU, best "
        "| µs over off | spans sent | dropped |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, measured in runs.items():
        pairs = list(zip(measured, runs[MODES[name].base], strict=True))
        wall = median(base.wall_s / each.wall_s for each, base in pairs)
        # A busy machine only adds to the processor time, so the best of the rounds is compared.
        best_us, off_us = (
            1e6 / requests * min(each.cpu_s for each in runs[mode])
            for mode in (name, MODES[name].base)
        )
        print(
            f"| {name} | {requests / median(each.wall_s for each in measured):,.0f} "
            f"| {1e6 / requests * median(each.cpu_s for each in measured):.2f} "
            f"| {best_us:.2f} | {wall:.3f} | {best_us / off_us:.3f} | {best_us - off_us:+.2f} "
            f"| {median(each.exported for each in measured):,.0f} "
            f"| {median(each.dropped for each in measured):,.0f} |"
        )


if __name__ == "__main__":
    main()
