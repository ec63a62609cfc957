"""What tracing costs: the four services in one process on the embedded log, with tracing off, on
at several ratios, one after the other in rounds, so that a busy machine is busy for all.

    python -m benchmarks.tracing_cost [--requests N] [--rounds N]

Requests are in the log before the services start. Time is counted until the last answer is in the
log, by the clock and by the processor time of the process, export included; what is left in the
queue of spans then is sent afterwards and not counted. Spans go by OTLP over HTTP to a process
that reads and forgets them. The interpreter is set as `headrace run` sets it, and a sampled request
costs what its mode takes over that of ratio 0, shared among those that were sampled.
"""

from __future__ import annotations

import argparse
import asyncio
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

MODES: dict[str, float | None] = {"off": None, "ratio 0": 0.0, "ratio 0.01": 0.01, "ratio 1": 1.0}
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


class Measured(NamedTuple):
    """One run: seconds by the clock and of the processor, and what became of the spans."""

    wall_s: float
    cpu_s: float
    exported: float
    dropped: float


def _settings(models: Path, endpoint: str, ratio: float | None) -> Settings:
    telemetry = {"otlp_endpoint": "" if ratio is None else endpoint, "sample_ratio": ratio or 0.0}
    return make_settings({"models": {"repository": str(models)}, "telemetry": telemetry})


async def _fill(log: Log, settings: Settings, requests: int) -> None:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": bytes(256)}
    value = msgpack.packb({"model_name": "digits", "inputs": [tensor]})
    topic, partitions = settings.topic(Topic.REQUESTS), settings.topics.partitions
    async with log.producer() as producer:
        for start in range(0, requests, CHUNK):
            target = TopicPartition(topic, start // CHUNK % partitions)
            for run in await producer.send(target, [NewRecord(None, value)] * CHUNK):
                await run.acknowledged


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


async def measure(settings: Settings, requests: int) -> Measured:
    """Serve so many requests."""
    metrics = Metrics(CollectorRegistry())
    async with MemoryLog() as log, open_tracing(settings, STAGES, metrics) as tracing:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        await _fill(log, settings, requests)
        pipeline = Pipeline(settings, log, instruments=Instruments(metrics, tracing))
        async with running(pipeline):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            await _answered(log, settings, requests)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    value = metrics.registry.get_sample_value
    exported = value("headrace_trace_spans_total") or 0.0
    return Measured(wall_s, cpu_s, exported, value("headrace_trace_spans_dropped_total") or 0.0)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    configure_logging("warning")
    tune_interpreter()
    requests = -(-given.requests // CHUNK) * CHUNK
    runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    collector = subprocess.Popen([sys.executable, "-c", FORGETFUL], stdout=subprocess.PIPE)
    try:
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        with as_file(files("headrace.tools.demo") / "models") as models:
            for number in range(given.rounds + 1):
                for mode, ratio in MODES.items():
                    measured = uvloop.run(measure(_settings(models, endpoint, ratio), requests))
                    if number:  # the first round warms up
                        runs[mode].append(measured)
    finally:
        collector.terminate()
        collector.wait()
    _report(runs, requests)


def _report(runs: dict[str, list[Measured]], requests: int) -> None:
    off, unsampled = runs["off"], runs["ratio 0"]
    print(
        "| tracing | answers/s | CPU µs/request | throughput | CPU | µs over off "
        "| µs per sampled request | spans sent | dropped |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for mode, measured in runs.items():
        # Each run is compared with the one of its round without tracing.
        pairs = list(zip(measured, off, strict=True))
        wall = median(base.wall_s / each.wall_s for each, base in pairs)
        cpu = median(each.cpu_s / base.cpu_s for each, base in pairs)
        over_us = 1e6 / requests * median(each.cpu_s - base.cpu_s for each, base in pairs)
        sampled = (MODES[mode] or 0.0) * requests
        sampled_us = "" if not sampled else f"{_sampled_us(measured, unsampled, sampled):.0f}"
        print(
            f"| {mode} | {requests / median(each.wall_s for each in measured):,.0f} "
            f"| {1e6 * median(each.cpu_s for each in measured) / requests:.1f} "
            f"| {wall:.3f} | {cpu:.3f} | {over_us:+.2f} | {sampled_us} "
            f"| {median(each.exported for each in measured):,.0f} "
            f"| {median(each.dropped for each in measured):,.0f} |"
        )


def _sampled_us(measured: list[Measured], unsampled: list[Measured], sampled: float) -> float:
    """What one sampled request costs, in microseconds of the processor."""
    pairs = zip(measured, unsampled, strict=True)
    return 1e6 / sampled * median(each.cpu_s - base.cpu_s for each, base in pairs)


if __name__ == "__main__":
    main()
