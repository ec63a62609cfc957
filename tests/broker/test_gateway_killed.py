"""A process with an executor, and one with a gateway, killed under load on a real Kafka."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import msgspec
import numpy as np
import pytest

from headrace.gateway import open_inference_pb2 as messages
from headrace.tools.local_kafka import LocalKafka
from headrace.tools.local_kafka.broker import free_port
from tests.support.conditions import eventually
from tests.support.grpc_callers import RECONNECT, Caller, pixels
from tests.support.models import add_version, digits
from tests.support.processes import Process, create_topics, environment

HOST = "127.0.0.1"
TIMEOUT_S = 10.0
HUNG_AFTER_S = TIMEOUT_S + 20.0
"""A call that has not ended by then was not ended by its deadline, even on a busy machine."""
CALLERS = 8
ANSWER = "answer"
RETRIABLE = {"503", "429", "disconnected", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}


class Load:
    """Callers of both doors that send one request after another, each with numbers of its own.

    Attributes:
        ended: number of calls by door and how they ended.
        listening: cleared while nothing listens, so that no caller tries without a pause.
    """

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._url = f"http://{HOST}:{http_port}/v2/models/digits/infer"
        self._target = f"{HOST}:{grpc_port}"
        self._is_over = False
        self.ended: Counter[tuple[str, str]] = Counter()
        self.listening = asyncio.Event()
        self.listening.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send while the context lasts; left when the last call has ended."""
        async with (
            aiohttp.ClientSession() as http,
            grpc.aio.insecure_channel(self._target, options=RECONNECT) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(1, CALLERS + 1):
                tasks.create_task(self._call_http(http, number))
                tasks.create_task(self._call_grpc(Caller(channel), number))
            try:
                yield
            finally:
                self._is_over = True
                self.listening.set()

    async def answers_come(self) -> None:
        """Wait until each door has answered some requests from now on."""
        before = self.ended.copy()

        def both_answered() -> bool:
            new = self.ended - before
            return min(new["http", ANSWER], new["grpc", ANSWER]) > 5 * CALLERS

        await eventually(both_answered, what="answers at both doors")

    async def _call_http(self, http: aiohttp.ClientSession, number: int) -> None:
        raw = np.full(64, number, "<f4").tobytes()
        tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64]}
        size = {"binary_data_size": len(raw)}
        head = msgspec.json.encode({"inputs": [{**tensor, "parameters": size}]})
        headers = {
            "Inference-Header-Content-Length": str(len(head)),
            "X-Timeout-Ms": f"{TIMEOUT_S * 1000:.0f}",
        }
        while not self._is_over:
            await self.listening.wait()
            try:
                async with (
                    asyncio.timeout(HUNG_AFTER_S),
                    http.post(self._url, data=head + raw, headers=headers) as response,
                ):
                    body = await response.json(content_type=None)
                    outcome = str(response.status)
                    if response.status == 200:
                        outcome = judge(body["outputs"][0]["data"][1], number)
            except aiohttp.ClientError:
                outcome = "disconnected"
            except TimeoutError:
                outcome = "hung"
            self.ended["http", outcome] += 1

    async def _call_grpc(self, caller: Caller, number: int) -> None:
        request = pixels(raw_input_contents=[np.full(64, number, "<f4").tobytes()])
        while not self._is_over:
            await self.listening.wait()
            try:
                async with asyncio.timeout(HUNG_AFTER_S):
                    answer: messages.ModelInferResponse = await caller.infer(
                        request, timeout=TIMEOUT_S
                    )
                    scores = np.frombuffer(answer.raw_output_contents[0], "<f4")
                    outcome = judge(float(scores[1]), number)
            except grpc.aio.AioRpcError as error:
                outcome = error.code().name
            except TimeoutError:
                outcome = "hung"
            self.ended["grpc", outcome] += 1


def judge(score: float, number: int) -> str:
    """Whether an answer is the one to the pixels that were sent."""
    return ANSWER if score == 64.0 * number else f"{score} for {number}"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_calls_end_while_executor_and_gateway_are_killed(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """Each gets its answer or a retriable error within its deadline, and answers come again."""
    add_version(tmp_path, "digits", 1, digits())
    ports = [free_port([], HOST)]
    ports.append(free_port(ports, HOST))
    settings = environment(
        kafka.bootstrap_servers,
        unique_name,
        tmp_path,
        KAFKA__SESSION_TIMEOUT_MS="1500",
        GATEWAY__HTTP_PORT=str(ports[0]),
        GATEWAY__GRPC_PORT=str(ports[1]),
    )
    await create_topics(settings)
    executor, gateway = Process("executor,responder", settings), Process("", settings)
    front = Process("ingest,batcher", settings)
    async with AsyncExitStack() as stack:
        started = (front, executor, gateway)
        await asyncio.gather(*[stack.enter_async_context(process) for process in started])
        load = Load(*ports)
        async with load.running():
            await load.answers_come()
            await executor.kill()
            await stack.enter_async_context(Process("executor,responder", settings))
            await load.answers_come()
            load.listening.clear()
            await gateway.kill()
            await stack.enter_async_context(Process("", settings))
            load.listening.set()
            await load.answers_come()

    assert {outcome for _, outcome in load.ended} <= {ANSWER, *RETRIABLE}, load.ended
    assert load.ended["http", "disconnected"]
    assert load.ended["grpc", "UNAVAILABLE"]
