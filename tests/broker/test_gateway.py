"""A gateway without stages, in front of a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import ClientSession

from headrace.config import make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from headrace.tuning import TUNING
from tests.support.gateways import HOST, pipeline_with_doors
from tests.support.models import add_version, digits


async def test_separate_gateways_answer_their_own_callers(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """Two gateways share the topics with the stages; each caller gets the answer to its request."""
    add_version(tmp_path, "digits", 1, digits())
    settings = make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "models": {"repository": str(tmp_path)},
            "gateway": {"http_port": 0, "grpc_port": "off"},
        }
    )

    async def ask(http: ClientSession, port: int, number: int) -> float:
        pixels = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [number] * 64}
        url = f"http://{HOST}:{port}/v2/models/digits/infer"
        async with http.post(url, json={"inputs": [pixels]}) as response:
            assert response.status == 200, await response.text()
            return float((await response.json())["outputs"][0]["data"][1])

    async with open_log(settings) as log, open_log(settings) as log_of_gateways:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with (
            running(Pipeline(settings, log)),
            pipeline_with_doors(settings, log_of_gateways, (), TUNING.gateway) as (alone, one),
            pipeline_with_doors(settings, log_of_gateways, (), TUNING.gateway) as (_, other),
            ClientSession() as http,
        ):
            calls = [ask(http, (one, other)[n % 2].ports["http"], n) for n in range(60)]
            answers = await asyncio.gather(*calls)
            status = alone.state.status()

    assert answers == [64.0 * number for number in range(60)]
    assert (status["stages"], status["ready"]["ready"]) == ([], True)
