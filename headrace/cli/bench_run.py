"""Runs of `headrace bench`: the load, the pipeline in this process if there is no broker, and the
metrics of an observed process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headrace.cli.progress import Progress
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.port import Log, TopicPartition
from headrace.models.version import ModelVersion
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.logs import configure_logging
from headrace.tools.bench.advice import Facts
from headrace.tools.bench.load import Load, LoadPlan, Payload
from headrace.tools.bench.measured import Measured
from headrace.tools.bench.payloads import from_arrays, from_capture, from_file, made_up
from headrace.tools.replay.present import latest_models
from headrace.topics import Topic

URL_TIMEOUT_S = 5.0
SHOW_EVERY_S = 0.2
CPU_SECONDS = "process_cpu_seconds_total "


class Asked(NamedTuple):
    """Parameters of a measurement; see `headrace.cli.bench`.

    Attributes:
        rate: requests per second; None to saturate.
        file: content and content type.
        url: of a process to observe; empty for none.
    """

    model: str
    version: str | None
    rate: float | None
    under_way: int
    seconds: float
    warm_up_s: float
    as_json: bool
    inputs: dict[str, NDArray[Any]]
    file: tuple[bytes, str] | None
    capture: Path | None
    url: str


async def measure(settings: Settings, asked: Asked, shown: Progress) -> tuple[Facts, Measured]:
    """Run the load and gather the results.

    Raises:
        ConfigurationError: topics or models are missing, or nothing answers at the URL.
        LogUnavailable: no broker answers.
    """
    known = latest_models(settings, None).get(asked.model)
    payloads = await _payloads(asked, known)
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(open_log(settings))
        if settings.kafka is None:
            configure_logging("warning")
            await stack.enter_async_context(running(Pipeline(settings, log)))
        course = await _course(settings, log, asked)
        cores = _Cores(asked.url)
        await cores.begin()
        load = Load(log, course, payloads)
        showing = asyncio.create_task(_show(shown, load.measured, course.seconds), name="progress")
        try:
            if asked.rate is None:
                measured = await load.closed_loop(asked.under_way)
            else:
                measured = await load.open_loop(asked.rate)
        finally:
            showing.cancel()
        kept_busy = await cores.end()
    offered_per_s = measured.counted / (course.seconds - course.skip_s)
    facts = _facts(asked, measured, known, payloads)
    if asked.rate is not None:  # the rate actually reached by so short a process
        facts = facts._replace(offered_per_s=offered_per_s)
    return facts._replace(cores=kept_busy), measured


async def _show(shown: Progress, measured: Measured, seconds: float) -> None:
    began_s = time.monotonic()
    while True:
        part = (time.monotonic() - began_s) / seconds
        shown.show(part, f"{measured.answered} of {measured.sent} requests answered")
        await asyncio.sleep(SHOW_EVERY_S)


async def _payloads(asked: Asked, known: ModelVersion | None) -> Sequence[Payload]:
    if asked.capture is not None:
        return await from_capture(asked.capture)
    if asked.file is not None:
        return [from_file(asked.model, asked.version, *asked.file)]
    if asked.inputs:
        given = from_arrays(asked.model, asked.version, asked.inputs, as_json=asked.as_json)
        return [given]
    if known is None:
        raise ConfigurationError(
            f"{asked.model}: expected it in models.repository, to make requests by its signature, "
            "or requests by --input, --file or --capture"
        )
    return [made_up(known, asked.version, as_json=asked.as_json)]


async def _course(settings: Settings, log: Log, asked: Asked) -> LoadPlan:
    names = [settings.topic(topic) for topic in (Topic.REQUESTS, Topic.RESPONSES)]
    found = await log.describe_topics(names)
    sized: list[TopicPartition] = []
    for name in names:
        topic = found[name]
        if topic is None:
            raise ConfigurationError(f"topic {name}: expected it; `headrace topics create`")
        sized.append(TopicPartition(name, topic.partitions))
    return LoadPlan(
        sized[0], sized[1], asked.seconds, skip_s=min(asked.warm_up_s, asked.seconds / 2)
    )


def _facts(
    asked: Asked, measured: Measured, known: ModelVersion | None, payloads: Sequence[Payload]
) -> Facts:
    rows = measured.rows_per_batch
    runs_per_s = measured.per_s / rows if rows else 0.0
    failed = measured.answered - measured.statuses["ok"]
    return Facts(
        offered_per_s=None,
        answered_per_s=measured.per_s,
        failed_share=failed / max(1, measured.answered),
        queue_s=measured.queue.mean_s,
        batch_s=measured.batch.mean_s,
        compute_s=measured.compute.mean_s,
        outside_s=measured.outside.mean_s,
        rows_per_batch=rows,
        computing=runs_per_s * measured.compute.mean_s / (known.config.instances if known else 1),
        max_batch_size=known.max_batch_size if known else 0,
        request_bytes=sum(len(each.value) for each in payloads) // len(payloads),
        as_json=any((b"json" in value) for each in payloads for _, value in each.headers[:1]),
    )


class _Cores:
    """Number of cores that a process keeps busy, from its own metrics."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._before: tuple[float, float] = (0.0, 0.0)

    async def begin(self) -> None:
        """Take the first sample. Raises `ConfigurationError`."""
        if self._url:
            self._before = (time.monotonic(), await self._cpu_s())

    async def end(self) -> float | None:
        """Take the second sample and return the number of busy cores; None without a URL."""
        if not self._url:
            return None
        began_s, cpu_s = self._before
        return (await self._cpu_s() - cpu_s) / (time.monotonic() - began_s)

    async def _cpu_s(self) -> float:
        from aiohttp import ClientError, ClientSession, ClientTimeout

        url = f"{self._url}/metrics"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(URL_TIMEOUT_S)) as session,
                session.get(url) as response,
            ):
                text = await response.text()
        except (ClientError, TimeoutError, ValueError) as error:
            raise ConfigurationError(f"{url}: expected metrics, got {error!r}") from error
        for line in text.splitlines():
            if line.startswith(CPU_SECONDS):
                return float(line.removeprefix(CPU_SECONDS))
        raise ConfigurationError(f"{url}: expected {CPU_SECONDS.strip()}, got none")
