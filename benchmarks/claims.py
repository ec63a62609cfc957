"""Claims of 200 MB, 100 in flight, from a store that is slow and fails: answers, time and memory.

    python -m benchmarks.claims [--count N] [--mb N] [--budget-mb N] [--timeout-ms N] [--late-s N]
        [--out FILE]

The four services run in this process on the embedded log, the store in another one, over HTTP. It
sends each object at `--mb-per-s`, answers one request in four with status 503, breaks off one in
ten, and sends one in twenty with a wrong byte. The model takes an object as a row of bytes. All
requests are sent at once, with a deadline.

Exits with 1 unless every request is answered or refused within `--late-s` of its deadline, only
objects with a wrong byte are `INVALID_REQUEST`, the charged bytes stay within the budget, and the
memory of this process grows by at most the budget and two objects: one that is put into a batch,
and one that the store's connections hold.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry

from benchmarks.machine import describe_machine
from headrace.client.rpc import RpcClient
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics

MODEL = """
class Model:
    inputs = [("x", "UINT8", (-1, -1))]
    outputs = [("y", "UINT8", (-1, 1))]

    def run(self, inputs):
        return {"y": inputs["x"][:, :1]}
"""
CHUNK = 1024 * 1024
PATH_OF_FAULTS = "/faults"
ANSWERS = frozenset({"ok", "DEADLINE_EXCEEDED", "OVERLOADED", "INVALID_REQUEST"})
"""`OVERLOADED` refuses at once what would be late behind the others."""


def content_of(megabytes: int) -> bytes:
    """Return a request whose only input has so many bytes."""
    row = np.arange(megabytes * 1_000_000, dtype=np.uint32).astype(np.uint8).reshape(1, -1)
    return encode_request("application/msgpack", "model", {"x": row})


def serve(megabytes: int, mb_per_s: float, seed: int) -> None:
    """Be the store: print the port, and send the object for any path."""
    logging.disable()  # aiohttp logs each request whose caller has gone
    content, chance = content_of(megabytes), random.Random(seed)
    faults: Counter[str] = Counter()

    async def get(request: web.Request) -> web.StreamResponse:
        if request.path == PATH_OF_FAULTS:
            return web.json_response(faults)
        if chance.random() < 0.25:
            faults["status 503"] += 1
            return web.Response(status=503)
        breaks_at = wrong_at = len(content)
        if chance.random() < 0.1:
            faults["broken off"] += 1
            breaks_at = chance.randrange(len(content))
        elif chance.random() < 0.05:
            faults["wrong byte"] += 1
            wrong_at = chance.randrange(len(content))
        response = web.StreamResponse()
        response.content_length = len(content)
        await response.prepare(request)
        for start in range(0, len(content), CHUNK):
            if start > breaks_at and request.transport is not None:
                request.transport.abort()
                return response
            part = content[start : start + CHUNK]
            if start <= wrong_at < start + len(part):
                at = wrong_at - start
                part = part[:at] + bytes([part[at] ^ 1]) + part[at + 1 :]
            await response.write(part)
            await asyncio.sleep(CHUNK / 1e6 / mb_per_s)
        return response

    async def run() -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", get)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    uvloop.run(run())


class Observed:
    """The most memory of this process, and the most bytes charged to the budget."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._process = psutil.Process()
        self.before_mb = self._process.memory_info().rss / 1e6
        self.rss_mb = self.charged_mb = 0.0

    async def watch(self, until: asyncio.Event) -> None:
        """Look every 20 ms."""
        registry = self._pipeline.metrics.registry
        labels = {"topic": "headrace.requests"}
        while not until.is_set():
            await asyncio.sleep(0.02)
            self.rss_mb = max(self.rss_mb, self._process.memory_info().rss / 1e6)
            charged = registry.get_sample_value("headrace_in_flight_bytes", labels) or 0.0
            self.charged_mb = max(self.charged_mb, charged / 1e6)


async def measure(settings: Settings, given: argparse.Namespace, url: str) -> dict[str, Any]:
    """Send all requests at once, and wait for their answers."""
    content = content_of(given.mb)
    claim = f"{len(content)} {hashlib.sha256(content).hexdigest()}"
    del content
    async with MemoryLog() as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        pipeline = Pipeline(settings, log, instruments=Instruments(Metrics(CollectorRegistry())))
        async with running(pipeline), RpcClient(log, settings) as client:
            observed, ending = Observed(pipeline), asyncio.Event()

            async def call(number: int) -> tuple[str, float]:
                headers = [
                    ("x-model", b"model"),
                    ("x-claim", f"{url}/in/{number} {claim}".encode()),
                    ("x-timeout-ms", b"%d" % given.timeout_ms),
                ]
                answer: Record = await client.call(NewRecord(None, None, headers))
                status = (dict(answer.headers)["x-status"] or b"").decode()
                return status, time.monotonic()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(observed.watch(ending), name="watch")
                began_s = time.monotonic()
                answers = await asyncio.gather(*[call(number) for number in range(given.count)])
                ending.set()
        took = [at_s - began_s for _, at_s in answers]
        counted = {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in pipeline.metrics.registry.collect()
            for sample in family.samples
            if sample.name.startswith("headrace_claim") and not sample.name.endswith("_created")
        }
    return {
        "machine": describe_machine(),
        "requests": given.count,
        "object_mb": given.mb,
        "budget_mb": given.budget_mb,
        "timeout_ms": given.timeout_ms,
        "answers": dict(Counter(status for status, _ in answers)),
        "late": sum(each > given.timeout_ms / 1e3 + given.late_s for each in took),
        "last_answer_s": max(took),
        "rss_mb": {"before": observed.before_mb, "max": observed.rss_mb},
        "charged_mb_max": observed.charged_mb,
        "counted": counted,
    }


async def run(given: argparse.Namespace, repository: str) -> dict[str, Any]:
    """Start the store, and measure."""
    store = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.claims", "--serve"),
        *("--mb", str(given.mb), "--mb-per-s", str(given.mb_per_s)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert store.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(await store.stdout.readline())}"
        settings = make_settings(
            {
                "models": {"repository": repository},
                "limits": {"max_in_flight_bytes": given.budget_mb * 1_000_000},
                "claims": {
                    "allowed": [f"{url}/in"],
                    "max_bytes": (given.mb + 1) * 1_000_000,
                    "timeout_ms": given.timeout_ms,
                },
            }
        )
        report = await measure(settings, given, url)
        async with ClientSession() as session, session.get(f"{url}{PATH_OF_FAULTS}") as answer:
            return report | {"faults": await answer.json()}
    finally:
        store.terminate()
        await store.wait()


def main() -> int:
    """Measure and report; exit with 1 if something is not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--budget-mb", type=int, default=2000)
    parser.add_argument("--timeout-ms", type=int, default=60_000)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--late-s", type=float, default=1.0)
    parser.add_argument("--serve", action="store_true", help="be the store")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.serve:
        serve(given.mb, given.mb_per_s, seed=1)
    configure_logging("error")
    with tempfile.TemporaryDirectory() as repository:
        version = Path(repository, "model", "1")
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        settings = 'backend = "python"\nmax_batch_size = 1\n'
        (version.parent / "model.toml").write_text(settings)
        report = uvloop.run(run(given, repository))
    text = json.dumps(report, indent=2)
    if given.out is not None:
        given.out.write_text(text)
    print(text)
    broken = list(find_broken(report))
    for each in broken:
        print(each, file=sys.stderr)
    return int(bool(broken))


def find_broken(report: dict[str, Any]) -> Iterator[str]:
    """Yield what a report does not have as it should."""
    answers = report["answers"]
    if sum(answers.values()) < report["requests"] or not ANSWERS.issuperset(answers):
        yield f"expected {report['requests']} answers of {sorted(ANSWERS)}, got {answers}"
    if report["late"]:
        yield f"{report['late']} answers are late, the last at {report['last_answer_s']:.1f} s"
    if answers.get("INVALID_REQUEST", 0) > report["faults"].get("wrong byte", 0):
        yield "more requests are invalid than objects had a wrong byte"
    if report["charged_mb_max"] > report["budget_mb"]:
        yield f"{report['charged_mb_max']:.0f} MB were charged of {report['budget_mb']}"
    grown_mb = report["rss_mb"]["max"] - report["rss_mb"]["before"]
    allowed_mb = report["budget_mb"] + 2 * report["object_mb"]
    if grown_mb > allowed_mb:
        yield f"memory has grown by {grown_mb:.0f} MB, of which {allowed_mb} are allowed"


if __name__ == "__main__":
    sys.exit(main())
