"""Metrics and status of processes with one stage each, on one embedded log."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from headrace.client import Client
from headrace.config import make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.scrapes import scrape, scrape_openmetrics, strangers

CALLS = 60


async def test_status_of_separate_stage_shows_its_topics_and_progress(
    tmp_path: Path,
) -> None:
    """Topics, groups and bases of four processes; each scrape is as the catalogue says."""
    add_version(tmp_path, "digits", 1, digits())
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    async with open_log(settings) as log, AsyncExitStack() as stack:
        pipelines: list[Pipeline] = []
        for stage in STAGES:
            metrics = Metrics(CollectorRegistry())
            pipeline = Pipeline(settings, log, (stage,), instruments=Instruments(metrics))
            pipelines.append(await stack.enter_async_context(running(pipeline)))
        client = await stack.enter_async_context(Client(log=log, settings=settings))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLS):
                tasks.create_task(client.infer("digits", {"pixels": np.ones((1, 64), np.float32)}))

        for pipeline in pipelines:
            registry = pipeline.metrics.registry
            assert strangers(scrape(registry)) == []
            assert strangers(scrape_openmetrics(registry)) == []
        sources = [pipeline.state.status()["sources"][0] for pipeline in pipelines]
        assert [(each["topic"], each["group"]) for each in sources] == [
            ("headrace.requests", "headrace.ingest"),
            ("headrace.items", "headrace.batcher"),
            ("headrace.batches", "headrace.executor"),
            ("headrace.results", "headrace"),
        ]
        responder = pipelines[-1]

        def kept() -> list[dict[str, Any]]:
            (source,) = responder.state.status()["sources"]
            return [each for each in source["partitions"] if each["topic"] == "headrace.requests"]

        await eventually(lambda: sum(each["base"] for each in kept()) == CALLS)
        assert [each["partition"] for each in kept()] == [0, 1, 2, 3]
        value = responder.metrics.registry.get_sample_value
        labels = {"model": "digits", "version": "1", "outcome": "ok", "code": "ok"}
        assert value("headrace_requests_total", labels) == CALLS
