"""A caller that reads a large answer slowly gets all of it; what nobody reads is bounded."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.tools.local_kafka.security import make_certificates
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.gateways import HOST, Served, gateway_of
from tests.support.models import add_version, identity

COUNT = 375_000
"""Elements of an answer in JSON: its 7 MB are more than the kernel buffers for a connection."""
ANSWER_BYTES = 7_000_000
LIMIT_BYTES = 2 * ANSWER_BYTES
"""One answer fits in it, and two do not."""


def request() -> bytes:
    """A request in the binary form, which is a third of its answer."""
    content = np.full(COUNT, 1 / 3).tobytes()
    tensor = {
        "name": "x",
        "datatype": "FP64",
        "shape": [COUNT // 2, 2],
        "parameters": {"binary_data_size": len(content)},
    }
    json = msgspec.json.encode({"inputs": [tensor]})
    head = (
        "POST /v2/models/FP64/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(json)}\r\n"
        f"Content-Length: {len(json) + len(content)}\r\n\r\n"
    )
    return head.encode() + json + content


class Caller:
    """A caller on a connection of its own, whose kernel buffers little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.write(request())

    async def read_head(self) -> int:
        """Read the head of the answer; return the size of its body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])

    async def is_answered(self) -> bool:
        """Read the rest; return whether the answer came whole."""
        size = await self.read_head()
        try:
            (output,) = msgspec.json.decode(await self._reader.readexactly(size))["outputs"]
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return len(output["data"]) == COUNT

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def calling(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
    """Send a request on a connection of its own."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    narrow.connect((HOST, port))
    narrow.setblocking(False)
    name = None if context is None else HOST
    opened = await asyncio.open_connection(sock=narrow, ssl=context, server_hostname=name)
    caller = Caller(*opened)
    try:
        yield caller
    finally:
        await caller.close()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Any]:
    """Settings of a gateway, and the context of its callers."""
    if not request.param:
        return {}, None
    files = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(files.authority))
    return {"tls_cert_file": str(files.broker)}, context


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model that returns what it gets."""
    folder = tmp_path / "models"
    folder.mkdir()
    add_version(folder, "FP64", 1, identity("FP64"), "probe = false")
    return folder


async def test_answer_that_is_read_slowly_comes_whole(models: Path, secured: Any) -> None:
    """Its size gives it the time; another connection has been idle for too long by then."""
    options, context = secured
    tuning = replace(TUNING.gateway, end_timeout_s=0.1)
    async with (
        gateway_of(models, tuning=tuning, idle_timeout_s=0.3, **options) as served,
        asyncio.timeout(DEADLINE_S),
    ):
        port = served.doors.ports["http"]
        async with calling(port, context) as slow:
            await eventually(lambda: served.counted(200) == 1)
            quick, other = await asyncio.open_connection(HOST, port, ssl=context)
            other.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await quick.read()).startswith(b"HTTP/1.1 200")  # until the door closes it
            is_whole = await slow.is_answered()
        other.close()

    assert is_whole


async def test_answers_nobody_reads_give_way_to_newest(models: Path, secured: Any) -> None:
    """The door holds no more bytes than its limit, and drops those that have waited longest."""
    options, context = secured
    options |= {"max_in_flight_bytes": LIMIT_BYTES}
    async with gateway_of(models, **options) as served, asyncio.timeout(DEADLINE_S):
        port = served.doors.ports["http"]
        async with (
            calling(port, context) as first,
            calling_after(served, 1, port, context) as second,
            calling_after(served, 2, port, context) as third,
        ):
            await eventually(lambda: served.doors.snapshot().connections_closed == 2)
            held_bytes = served.doors.snapshot().untaken_bytes["http"]
            whole = [await each.is_answered() for each in (first, second, third)]
            await eventually(lambda: served.doors.snapshot().untaken_bytes["http"] == 0)

    assert whole == [False, False, True]
    assert ANSWER_BYTES <= held_bytes <= LIMIT_BYTES


@asynccontextmanager
async def calling_after(
    served: Served, count: int, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[Caller]:
    """Send a request once so many have been answered."""
    await eventually(lambda: served.counted(200) == count)
    async with calling(port, context) as caller:
        yield caller


async def test_answer_nobody_reads_is_dropped_after_its_time(models: Path, secured: Any) -> None:
    """Its connection is closed, although it has not been idle for long."""
    options, context = secured
    tuning = replace(TUNING.gateway, end_timeout_s=0.1, end_bytes_per_s=2.0**30)
    async with (
        gateway_of(models, tuning=tuning, **options) as served,
        asyncio.timeout(DEADLINE_S),
        calling(served.doors.ports["http"], context) as caller,
    ):
        await eventually(lambda: served.doors.snapshot().connections_closed == 1)
        held_bytes = served.doors.snapshot().untaken_bytes["http"]
        is_whole = await caller.is_answered()

    assert (held_bytes, is_whole) == (0, False)
