"""Gateways restarted one after another, behind a balancer that asks for their readiness."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp
import grpc
import pytest

from headrace.config import Settings, make_settings
from headrace.log.port import Log
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline, running
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.gateways import HOST, pipeline_with_doors
from tests.support.grpc_callers import Caller, pixels
from tests.support.models import add_version, digits

GATEWAYS = 2
CALLERS = 4
CHECK_INTERVAL_S = 0.05
BODY = {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}]}


class Balancer:
    """Chooses among the gateways that were ready at the last check, in turns.

    It neither sends a request twice nor looks at answers, as a proxy for other requests than GET.
    """

    def __init__(self) -> None:
        self._ready: dict[int, dict[str, int]] = {}
        self._turn = count()

    def choose(self) -> dict[str, int]:
        """Return the ports of a gateway by protocol."""
        chosen = list(self._ready.values())
        return chosen[next(self._turn) % len(chosen)]

    @property
    def ready(self) -> int:
        return len(self._ready)

    async def check(self, number: int, ports: dict[str, int]) -> None:
        """Ask a gateway for its readiness, again and again, until it no longer listens."""
        url = f"http://{HOST}:{ports['http']}/v2/health/ready"
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(url) as answer:
                        is_ready = answer.status == 200
                except aiohttp.ClientError:
                    self._ready.pop(number, None)
                    return
                if is_ready:
                    self._ready[number] = ports
                else:
                    self._ready.pop(number, None)
                await asyncio.sleep(CHECK_INTERVAL_S)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    add_version(tmp_path, "digits", 1, digits())
    notice_s = 10 * CHECK_INTERVAL_S
    gateway = {"http_port": 0, "grpc_port": 0, "drain_notice_s": notice_s}
    return make_settings({"models": {"repository": str(tmp_path)}, "gateway": gateway})


async def test_rolling_restart_of_gateways_loses_no_request(settings: Settings) -> None:
    """Each is restarted under load, the others serve; every call over both doors is answered."""
    answers: Counter[str] = Counter()
    balancer, numbers, done = Balancer(), count(), asyncio.Event()

    async def call(ask: Callable[[], Awaitable[str]]) -> None:
        while not done.is_set():
            answers[await ask()] += 1

    async def answered(more: int) -> None:
        wanted = answers.total() + more
        await eventually(lambda: answers.total() >= wanted)

    async with (
        open_log(settings) as log,
        running(Pipeline(settings, log)),
        AsyncExitStack() as stack,
    ):
        gateways = [AsyncExitStack() for _ in range(GATEWAYS)]

        async def start(gateway: AsyncExitStack) -> None:
            ports = await gateway.enter_async_context(gateway_beside(settings, log))
            tasks.create_task(balancer.check(next(numbers), ports))

        async with asyncio.TaskGroup() as tasks:
            for gateway in gateways:
                await start(gateway)
            await eventually(lambda: balancer.ready == GATEWAYS)
            for _ in range(CALLERS):
                http = await stack.enter_async_context(HttpCaller(balancer))
                tasks.create_task(call(http.ask))
                over_grpc = await stack.enter_async_context(GrpcCaller(balancer))
                tasks.create_task(call(over_grpc.ask))
            for gateway in gateways:
                await answered(100)
                await gateway.aclose()
                await start(gateway)
                await eventually(lambda: balancer.ready == GATEWAYS)
            done.set()
            for gateway in gateways:
                await gateway.aclose()

    assert set(answers) == {"http 200", "grpc OK"}


@asynccontextmanager
async def gateway_beside(settings: Settings, log: Log) -> AsyncIterator[dict[str, int]]:
    """Run a gateway without stages; gives its ports by protocol."""
    async with pipeline_with_doors(settings, log, (), TUNING.gateway) as (_, doors):
        yield dict(doors.ports)


class HttpCaller:
    """Sends requests over HTTP, on connections that it keeps."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    async def __aenter__(self) -> HttpCaller:
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self) -> str:
        """Send one request, and return the status of its answer."""
        url = f"http://{HOST}:{self._balancer.choose()['http']}/v2/models/digits/infer"
        async with self._http.post(url, json=BODY) as answer:
            await answer.read()
            return f"http {answer.status}"


class GrpcCaller:
    """Sends requests over gRPC, on a channel for each gateway."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def __aenter__(self) -> GrpcCaller:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def ask(self) -> str:
        """Send one request, and return the status of its answer."""
        port = self._balancer.choose()["grpc"]
        if port not in self._channels:
            self._channels[port] = grpc.aio.insecure_channel(f"{HOST}:{port}")
        try:
            await Caller(self._channels[port]).infer(pixels())
        except grpc.aio.AioRpcError as error:
            return f"grpc {error.code().name}: {error.details()}"
        return "grpc OK"
