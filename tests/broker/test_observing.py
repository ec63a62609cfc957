"""Metrics, logs and status of processes on a real Kafka, under load and with the broker gone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest
from aiokafka import AIOKafkaProducer

from headrace.telemetry.metric_specs import METRIC_SPECS
from headrace.tools.local_kafka import LocalKafka
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.metric_names import SHOWN_ONLY_WHEN
from tests.support.processes import Process, create_topics, environment
from tests.support.scrapes import OPENMETRICS, parse_openmetrics, parse_text, strangers
from tests.support.traffic import VALUE

BROKER_SILENCE_S = TUNING.runtime.broker_silence_s
MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"
ALL = "ingest,batcher,executor,responder"
REQUESTS = 20_000
PARTITIONS = 4
MARGIN_S = 5.0
"""Seconds that a busy machine may add to a stated time."""


async def _produce(bootstrap_servers: str, topic: str, requests: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap_servers, linger_ms=5) as producer:
        sent = [
            await producer.send(topic, VALUE, partition=number % PARTITIONS)
            for number in range(requests)
        ]
        await asyncio.gather(*sent)


async def _scrape(process: Process, headers: dict[str, str]) -> str:
    url = f"http://127.0.0.1:{process.http_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        assert response.status == 200
        return await response.text()


async def _status_of(process: Process, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{process.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def _answered(text: str) -> float:
    return sum(
        sample.value
        for sample in parse_text(text)["headrace_requests"].samples
        if sample.labels["outcome"] == "ok"
    )


@pytest.mark.timeout(120)
async def test_scrapes_under_load_match_catalogue(kafka: LocalKafka, unique_name: str) -> None:
    """Both formats match the catalogue while thousands of requests pass, each counted once."""
    settings = environment(kafka.bootstrap_servers, unique_name, MODELS)
    await create_topics(settings)
    async with Process(ALL, settings) as process, asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(
            _produce(kafka.bootstrap_servers, f"{unique_name}.requests", REQUESTS), name="produce"
        )
        while not producing.done():
            assert strangers(parse_text(await _scrape(process, {}))) == []
            assert strangers(parse_openmetrics(await _scrape(process, OPENMETRICS))) == []

        async def all_answered() -> bool:
            return _answered(await _scrape(process, {})) == REQUESTS

        await eventually(all_answered, deadline_s=60.0, recheck_s=0.2)
        families = parse_text(await _scrape(process, {}))
        assert METRIC_SPECS.keys() - families.keys() <= SHOWN_ONLY_WHEN | {
            "headrace_answer_slack_seconds"  # a request with a deadline was answered
        }
        assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= families.keys()

        async def caught_up() -> bool:
            lag = parse_text(await _scrape(process, {}))["headrace_consumer_lag_records"].samples
            return len(lag) == PARTITIONS and all(sample.value == 0 for sample in lag)

        await eventually(caught_up, deadline_s=20.0, recheck_s=0.2)


@pytest.mark.timeout(180)
async def test_stopped_broker_makes_process_unready_within_stated_time(
    kafka_installed: None, unique_name: str
) -> None:
    """The process is ready again when the broker is back, and is live all the time."""
    async with LocalKafka() as cluster:
        settings = environment(cluster.bootstrap_servers, unique_name, MODELS)
        await create_topics(settings)
        async with Process(ALL, settings) as process:

            async def is_unready() -> bool:
                live, _ = await _status_of(process, "/health/live")
                assert live == 200
                return (await _status_of(process, "/health/ready"))[0] == 503

            await cluster.stop_node()
            stopped_s = time.monotonic()
            await eventually(is_unready, deadline_s=BROKER_SILENCE_S + MARGIN_S, recheck_s=0.2)
            assert time.monotonic() - stopped_s > BROKER_SILENCE_S / 2, "it gave up too early"
            _, body = await _status_of(process, "/health/ready")
            assert "the broker was last heard of" in body

            async def is_ready() -> bool:
                return (await _status_of(process, "/health/ready"))[0] == 200

            await cluster.start_node()
            await eventually(is_ready, deadline_s=60.0, recheck_s=0.2)
