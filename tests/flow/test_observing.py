"""Metrics, logs, status and health of the four services over HTTP, under load and in trouble."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import structlog
from aiohttp import ClientSession
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.telemetry.http import HttpServer
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metric_specs import METRIC_SPECS
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tracing import Tracing
from headrace.tuning import TUNING, Tuning
from tests.support.conditions import eventually
from tests.support.metric_names import SHOWN_ONLY_WHEN
from tests.support.models import add_version, digits
from tests.support.python_models import shut_gate
from tests.support.scrapes import OPENMETRICS, parse_openmetrics, parse_text, strangers
from tests.support.tree import ROOT

HOST = "127.0.0.1"
ROWS = np.ones((1, 64), np.float32)
HANGING = """
from tests.support.python_models import GATE

class Model:
    inputs = [("x", "FP32", (-1, 2))]
    outputs = [("y", "FP32", (-1,))]

    def run(self, inputs):
        if inputs["x"].max() == 13:
            GATE.wait()
        return {"y": inputs["x"].sum(axis=1)}
"""


class Served(NamedTuple):
    """A pipeline, its log, somebody who asks it, and somebody who looks at it."""

    pipeline: Pipeline
    log: MemoryLog
    client: Client
    session: ClientSession

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body."""
        async with self.session.get(path) as response:
            return response.status, await response.json()

    async def text(self, path: str, **headers: str) -> str:
        """The body as text."""
        async with self.session.get(path, headers=headers) as response:
            assert response.status == 200
            return await response.text()

    async def load(self, calls: int = 200) -> None:
        """Ask for so many rows, many at once."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(calls):
                tasks.create_task(self.client.infer("digits", {"pixels": ROWS}, timeout_s=30))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """One model, `digits`; every request is sampled."""
    add_version(tmp_path, "digits", 1, digits())
    return make_settings(
        {"models": {"repository": str(tmp_path)}, "telemetry": {"sample_ratio": 1.0}}
    )


@pytest.fixture
def _logging() -> Iterator[None]:
    """Set up as in a process, and put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("info", io.StringIO())
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def serving(settings: Settings, tuning: Tuning = TUNING) -> AsyncIterator[Served]:
    """The services with their HTTP server; no span leaves the process."""
    metrics = Metrics(CollectorRegistry())
    tracing = Tracing(lambda spans: None, settings, metrics)
    instruments = Instruments(metrics, tracing)
    async with MemoryLog() as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        pipeline = Pipeline(settings, log, instruments=instruments, tuning=tuning)
        server = HttpServer(
            (HOST, 0),
            pipeline.health,
            pipeline.models.catalog,
            pipeline.metrics.registry,
            pipeline.state.status,
        )
        async with (
            server,
            running(pipeline),
            Client(log=log, settings=settings) as client,
            ClientSession(f"http://{HOST}:{server.port}") as session,
        ):
            yield Served(pipeline, log, client, session)


@pytest.mark.parametrize("form", ["text", "openmetrics"])
async def test_scrape_under_load_matches_catalogue(settings: Settings, form: str) -> None:
    """The client library's own parser reads it; names, types and labels are those of the list."""
    headers, parse = ({}, parse_text) if form == "text" else (OPENMETRICS, parse_openmetrics)
    async with serving(settings) as served, asyncio.TaskGroup() as tasks:
        load = tasks.create_task(served.load(), name="load")
        scrapes = 0
        while not load.done():
            assert strangers(parse(await served.text("/metrics", **headers))) == []
            scrapes += 1
        assert scrapes > 1
        families = parse(await served.text("/metrics", **headers))
        assert METRIC_SPECS.keys() - families.keys() <= SHOWN_ONLY_WHEN | {
            "headrace_log_lines_suppressed"  # the log is set up for a process
        }


async def test_each_request_is_counted_once_in_every_metric(settings: Settings) -> None:
    """Requests, rows and every time of the path, for each request exactly once."""
    async with serving(settings) as served:
        await served.load(50)
        with pytest.raises(InferenceError):
            await served.client.infer("digits", {"pixels": np.ones((1, 63), np.float32)})
        value = served.pipeline.metrics.registry.get_sample_value
        digits_1 = {"model": "digits", "version": "1"}
        ok = {**digits_1, "outcome": "ok", "code": "ok"}
        refused = {"model": "", "version": "", "outcome": "refused", "code": "INVALID_TENSOR"}
        await eventually(lambda: value("headrace_requests_total", refused) == 1)
        assert value("headrace_requests_total", ok) == 50
        assert value("headrace_rows_total", {"model": "digits", "version": "1"}) == 50
        assert (value("headrace_model_load_seconds", digits_1) or 0) > 0
        for name in ("request_duration", "log_wait", "queue_wait", "answer_duration"):
            assert value(f"headrace_{name}_seconds_count", digits_1) == 50, name


async def test_bucket_exemplars_name_traces_of_requests(settings: Settings) -> None:
    """Sampled requests stand as examples where OpenMetrics is asked for."""
    async with serving(settings) as served:
        await served.load(5)
        families = parse_openmetrics(await served.text("/metrics", **OPENMETRICS))
        exemplars = [
            sample.exemplar
            for sample in families["headrace_request_duration_seconds"].samples
            if sample.exemplar
        ]
        assert exemplars
        assert all(len(each.labels["trace_id"]) == 32 for each in exemplars)


async def test_status_shows_whole_process(settings: Settings) -> None:
    """Stages, assignments with what is in flight, models, totals, errors."""
    async with serving(settings) as served:
        await served.load(20)
        _, status = await served.get("/status")
        assert status["stages"] == ["ingest", "batcher", "executor", "responder"]
        assert (status["phase"], status["ready"]["ready"], status["live"]["live"]) == (
            "ready",
            True,
            True,
        )
        (source,) = status["sources"]
        assert (source["topic"], source["group"]) == ("headrace.requests", "headrace")
        assert source["in_flight_records"] == 0
        assert [each["partition"] for each in source["partitions"]] == [0, 1, 2, 3]
        assert sum(each["base"] for each in source["partitions"]) == 20
        assert [(m["name"], m["state"]) for m in status["models"]] == [("digits", "ready")]
        assert (status["namespace"], status["broker"]) == (settings.namespace, "")
        assert status["host"] == socket.gethostname()
        assert [total["count"] for total in status["totals"]["requests"]] == [20]
        names = {activity["name"] for activity in status["activities"]}
        assert names == {"event loop", "reader of headrace.requests", "executor digits-1-0"}


async def test_status_has_fields_of_its_page(settings: Settings) -> None:
    """The example in docs/health.md has every field of a process, its partitions and its models."""
    page = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(\{\n  \"version\".*?)```", page, flags=re.DOTALL)
    async with serving(settings) as served:
        await served.load(20)
        _, status = await served.get("/status")

    assert fields(status) == fields(json.loads(example))


def fields(status: dict[str, Any]) -> list[set[str]]:
    """The names of the fields of `/status`, of a source, a partition and a model in it."""
    source, model = status["sources"][0], status["models"][0]
    return [set(each) for each in (status, source, source["partitions"][0], model)]


@pytest.mark.usefixtures("_logging")
async def test_failed_request_is_among_last_errors(settings: Settings) -> None:
    """The entry has the request's identity and its trace."""
    async with serving(settings) as served:
        with pytest.raises(InferenceError):
            await served.client.infer("digits", {"pixels": np.ones((1, 63), np.float32)})
        # The line is written when the answer is acknowledged, which the caller may see first.
        await eventually(served.pipeline.state.recent_errors.entries)
        (entry,) = served.pipeline.state.recent_errors.entries()
        assert (entry["event"], entry["code"]) == ("request.refused", "INVALID_TENSOR")
        assert len(entry["trace_id"]) == 32
        assert {"partition", "offset"} <= entry.keys()
        assert "63" not in entry["reason"]


async def test_process_without_broker_is_live_and_not_ready(
    settings: Settings,
) -> None:
    """The process is not ready from the stated silence on, until the broker is back."""
    tuning = replace(TUNING, runtime=replace(TUNING.runtime, broker_silence_s=1.0))
    async with serving(settings, tuning) as served:
        assert (await served.get("/health/ready"))[0] == 200
        served.log.faults.brokers.take_down()
        await eventually(lambda: not served.pipeline.health.ready)
        status, body = await served.get("/health/ready")
        assert (status, body["ready"]) == (503, False)
        assert body["reason"].startswith("the broker was last heard of")
        assert (await served.get("/health/live"))[0] == 200
        served.log.faults.brokers.bring_back()
        await eventually(lambda: served.pipeline.health.ready)


async def test_process_with_hung_model_is_not_live(settings: Settings) -> None:
    """The process is not live once the run exceeds its limit and the grace for cancelling; then it
    recovers.
    """
    executor = replace(TUNING.executor, watchdog_grace_s=0.3, cancel_grace_s=3600.0)
    tuning = replace(TUNING, executor=executor)
    repository = settings.models.directory
    (repository / "hanging" / "1").mkdir(parents=True)
    (repository / "hanging" / "1" / "model.py").write_text(HANGING, encoding="utf-8")
    config = 'backend = "python"\nmax_execution_s = 0.2\n'
    (repository / "hanging" / "model.toml").write_text(config, encoding="utf-8")
    async with serving(settings, tuning) as served, asyncio.TaskGroup() as tasks:
        assert (await served.get("/health/live"))[0] == 200
        with shut_gate():
            asked = tasks.create_task(_asked(served.client), name="ask")
            await eventually(lambda: not served.pipeline.health.live)
            status, body = await served.get("/health/live")
            assert status == 503
            assert body["reason"].startswith("executor hanging-1-0: no progress for")
            assert (await served.get("/health/ready"))[0] == 503
        assert await asked == "MODEL_FAILED"
        await eventually(lambda: served.pipeline.health.ready)


async def _asked(client: Client) -> str:
    try:
        await client.infer("hanging", {"x": np.full((1, 2), 13, np.float32)}, timeout_s=20)
    except InferenceError as error:
        return str(error.code)
    return "ok"
