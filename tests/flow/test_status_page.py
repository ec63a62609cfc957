"""The page at `/` and `headrace top`, on pipelines that answer requests."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from headrace.client import Client, InferenceError
from headrace.config import Settings
from headrace.log.memory import MemoryLog
from headrace.models.wanted import load as load_version
from headrace.models.wanted import set_label
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.http import HttpServer, load_page
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES, Stage
from tests.flow.test_controlled_models import Operator, controlled
from tests.support.browser import browsing
from tests.support.command_line import Call
from tests.support.conditions import eventually
from tests.support.drawn_page import drawn_rows
from tests.support.gateways import Served, gateway_of
from tests.support.models import add_version, digits
from tests.support.pipelines import Caller, log_for, settings_of
from tests.support.python_models import add_python_model
from tests.support.spans import tracing_spans

HOST = "127.0.0.1"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
MESSAGE = "<b onmouseover=alert(1)>not bold</b>"
CHUNK = 20
WAIT = r"/wait for a batch\s+[\d.,]+ (µs|ms)/"

# What the script calls the parts of an answer.
NAMES = {
    "status": (),
    "totals": ("totals",),
    "request": ("totals", "requests", 0),
    "batch": ("totals", "batches", 0),
    "row": ("totals", "rows", 0),
    "time": ("totals", "times", "queue_wait", 0),
    "source": ("sources", 0),
    "requests": ("sources", 0),
    "partition": ("sources", 0, "partitions", 0),
    "commit": ("sources", 0, "commit"),
    "activity": ("activities", 0),
    "model": ("models", 0),
    "error": ("last_errors", 0),
    "gateway": ("gateway",),
    "end": ("gateway", "ended", 0),
    "door": ("gateway", "durations", 0),
}
GATEWAY = {"gateway", "end", "door"}
"""Those that only a process with a gateway has."""
OF_JAVASCRIPT = {"filter", "find", "flatMap", "includes", "map", "replace", "toReversed"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Models `digits`, and `model`, which fails whatever it is asked."""
    add_python_model(tmp_path, f"raise ValueError({MESSAGE!r})")
    return settings_of(tmp_path)


@pytest.fixture(autouse=True)
def _logging_as_in_a_process() -> Iterator[None]:
    """The last errors come from the log."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug", io.StringIO())  # with the messages of failures
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def shown(
    settings: Settings, log: MemoryLog, stages: Sequence[Stage] = STAGES
) -> AsyncIterator[str]:
    """A pipeline and its HTTP server; gives the server's address."""
    with tracing_spans(settings) as (tracing, _):
        instruments = Instruments(Metrics(CollectorRegistry()), tracing)
        async with served(Pipeline(settings, log, stages, instruments=instruments)) as url:
            yield url


@asynccontextmanager
async def served(pipeline: Pipeline) -> AsyncIterator[str]:
    """The address of a pipeline's HTTP server, once it is ready."""
    async with running(pipeline), page_of(pipeline) as url:
        yield url


@asynccontextmanager
async def page_of(pipeline: Pipeline) -> AsyncIterator[str]:
    """The address of the HTTP server of a pipeline that runs."""
    server = HttpServer(
        (HOST, 0),
        pipeline.health,
        pipeline.models.catalog,
        pipeline.metrics.registry,
        pipeline.state.status,
    )
    async with server:
        yield f"http://{HOST}:{server.port}"


@asynccontextmanager
async def load(settings: Settings, log: MemoryLog) -> AsyncIterator[None]:
    """Requests without end for `digits`, and a traced one that fails."""
    caller = Caller(settings, log)

    async def chunk() -> None:
        await caller.send(CHUNK)
        await caller.all_answered()

    async def send() -> None:
        while True:
            await chunk()

    async with Client(log=log, settings=settings) as client:
        with pytest.raises(InferenceError):
            await client.infer(
                "model",
                {"x": np.ones((1, 1), np.float32)},
                headers=[("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01".encode())],
            )
        await chunk()
        sending = asyncio.create_task(send(), name="load")
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.wait([sending])


async def status_of(url: str) -> dict[str, Any]:
    """An answer of `/status`."""
    async with ClientSession(url) as session, session.get("/status") as answer:
        return dict(await answer.json())


async def test_status_page_reads_only_fields_of_status(settings: Settings) -> None:
    """Every property that the script takes of `/status` is in the answer of a busy process."""
    log = await log_for(settings)
    async with shown(settings, log) as url, load(settings, log):
        status = await status_of(url)
    read = fields_read(NAMES.keys() - GATEWAY)

    assert len(read) > 60
    assert [name + path for name, path in read if not is_in(status, name, path)] == []


async def test_status_page_reads_only_fields_of_gateway(tmp_path: Path) -> None:
    """The same for the part that a process with a gateway shows."""
    async with gateway_with_calls(tmp_path) as served, page_of(served.pipeline) as url:
        status = await status_of(url)
    read = fields_read(GATEWAY)

    assert len(read) > 8
    assert [name + path for name, path in read if not is_in(status, name, path)] == []
    assert {
        (each["door"], each["status"], each["count"]) for each in status["gateway"]["ended"]
    } == {
        ("http", "200", 1),
        ("http", "404", 1),
    }


async def test_page_shows_labels_of_each_version(tmp_path: Path) -> None:
    """The table of models has the default and the labels beside the version that they name."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with running(Pipeline(settings, log)) as pipeline, page_of(pipeline) as url:
        operator = Operator(settings, log, [pipeline])
        for version in ("1", "2", "3"):
            await operator.change(load_version("digits", version))
        for label, version in (("stable", "1"), ("canary", "2"), ("trial", "2")):
            await operator.change(set_label("digits", label, version))
        status = await status_of(url)
    rows = await asyncio.to_thread(drawn_rows, status, "models")

    assert [row[:4] for row in rows] == [
        ["digits", "1", "default, stable", "ready"],
        ["digits", "2", "canary, trial", "ready"],
        ["digits", "3", "", "ready"],
    ]


async def test_each_series_of_gateway_is_exposed_once(tmp_path: Path) -> None:
    """A scrape of a process with a gateway names no sample twice."""
    async with (
        gateway_with_calls(tmp_path) as served,
        page_of(served.pipeline) as url,
        ClientSession(url) as session,
        session.get("/metrics") as answer,
    ):
        text = await answer.text()
    series = Counter(line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#")

    assert "headrace_gateway_in_flight_requests" in series
    assert [name for name, times in series.items() if times > 1] == []


@asynccontextmanager
async def gateway_with_calls(repository: Path) -> AsyncIterator[Served]:
    """A gateway that has answered a request, and refused one for a model that it does not know."""
    add_version(repository, "digits", 1, digits())
    body = {"inputs": [tensor_entry(np.ones((1, 64), np.float32))]}
    async with gateway_of(repository) as served:
        statuses = [(await served.infer(model, body)).status for model in ("digits", "none")]
        assert statuses == [200, 404]
        yield served


def tensor_entry(pixels: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "name": "pixels",
        "datatype": "FP32",
        "shape": list(pixels.shape),
        "data": pixels.ravel().tolist(),
    }


def fields_read(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each name of the page's script with the properties that the script takes of it."""
    (script,) = re.findall(r"<script>(.*)</script>", load_page().body.decode(), flags=re.DOTALL)
    found = re.findall(rf"(?<![\w.])({'|'.join(names)})((?:\??\.\w+)+)", script)
    return sorted(set(found))


def is_in(status: dict[str, Any], name: str, path: str) -> bool:
    """Whether a part of the answer, by its name in the script, has a property of that path."""
    value: Any = status
    for step in NAMES[name]:
        value = value[step]
    for step in re.findall(r"\w+", path):
        if step in OF_JAVASCRIPT:
            return isinstance(value, list | str)
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


@pytest.mark.slow
async def test_browser_shows_rates_waits_and_errors(settings: Settings, tmp_path: Path) -> None:
    """All four boxes get rates, the models their states, and a message stays text."""
    log = await log_for(settings)
    async with (
        browsing(tmp_path / "profile") as page,
        shown(settings, log) as url,
        load(settings, log),
    ):
        await page.open(f"{url}/")
        for stage in STAGES:
            await page.wait_for(f"/[1-9]/.test({box(stage)}?.querySelector('.rate')?.innerText)")
        await page.wait_for(f"{WAIT}.test({box('batcher')}.innerText)")
        models = await page.evaluate("document.getElementById('models').innerText")
        errors = await page.evaluate("document.getElementById('errors').innerText")

    assert re.search(r"digits\s+1\s+default\s+ready", models)
    assert MESSAGE in errors
    assert TRACE_ID in errors
    assert page.complaints == []


@pytest.mark.slow
async def test_browser_shows_rates_of_doors(tmp_path: Path) -> None:
    """A process with a gateway shows for each door its answers, and those that are not ok."""
    body = {"inputs": [tensor_entry(np.ones((1, 64), np.float32))]}
    add_version(tmp_path / "models", "digits", 1, digits())
    async with (
        browsing(tmp_path / "profile") as page,
        gateway_of(tmp_path / "models") as served,
        page_of(served.pipeline) as url,
    ):
        await page.open(f"{url}/")
        await page.wait_for("!document.getElementById('gateway').hidden")

        async def shows_rates() -> bool:
            for model in ("digits", "none"):
                await served.infer(model, body)
            shown = await page.evaluate("document.getElementById('doors').innerText")
            return bool(re.search(r"http\s+[\d.]+/s\s+404 [\d.]+/s\s+[\d.]+ (ms|µs)", shown))

        await eventually(shows_rates)
        models = await page.evaluate("document.getElementById('models').innerText")

    assert re.search(r"digits\s+1\s+default\s+ready.*\s[\d.,]+ (B|[KM]iB)", models)
    assert page.complaints == []


@pytest.mark.slow
async def test_browser_shows_stages_of_other_processes(settings: Settings, tmp_path: Path) -> None:
    """A process with two stages shows the other two as not its own, and nothing breaks."""
    log = await log_for(settings)
    stages = (Stage.BATCHER, Stage.EXECUTOR)
    async with browsing(tmp_path / "profile") as page, shown(settings, log, stages) as url:
        await page.open(f"{url}/")
        await page.wait_for(f"!!{box('executor')}?.querySelector('.rate')")
        elsewhere = await page.evaluate(
            "[...document.querySelectorAll('.elsewhere')].map((each) => each.dataset.stage)"
        )

    assert elsewhere == ["ingest", "responder"]
    assert page.complaints == []


@pytest.mark.slow
async def test_browser_shows_that_process_is_gone(settings: Settings, tmp_path: Path) -> None:
    """Figures that are old are marked as such."""
    log = await log_for(settings)
    async with browsing(tmp_path / "profile") as page:
        async with shown(settings, log) as url:
            await page.open(f"{url}/")
            await page.wait_for("document.getElementById('phase').innerText === 'ready'")
        await page.wait_for("document.body.classList.contains('lost')")
        said = await page.evaluate("document.getElementById('lost').innerText")

    assert said.startswith("No answer from the process")


def box(stage: str) -> str:
    """JavaScript for the box of a stage."""
    return f"document.querySelector('[data-stage={stage}]')"


async def test_top_shows_rates_of_processes(settings: Settings, call: Call) -> None:
    """Rates of a busy process; exit code 1, since another one does not answer."""
    log = await log_for(settings)
    async with shown(settings, log) as url, load(settings, log):
        arguments = ("top", "--once", "--interval", "1", "--url", url)
        ended = await asyncio.to_thread(call, *arguments, "--url", f"http://{HOST}:1")
    heads, process, gone, *_ = ended.stdout.splitlines()

    assert ended.exit_code == 1
    assert heads.split()[:4] == ["process", "state", "stages", "answers/s"]
    assert process.split()[:3] == [url, "ready", ",".join(STAGES)]
    assert float(process.split()[3].replace(",", "")) > 0
    assert re.match(rf"http://{HOST}:1 +no answer: ", gone)
    assert re.search(r"digits/1 +default +ready +[\d,]+", ended.stdout)
