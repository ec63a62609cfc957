"""A caller that reads a large answer slowly gets all of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.tools.local_kafka.security import make_certificates
from tests.support.conditions import DEADLINE_S
from tests.support.gateways import HOST, gateway_of
from tests.support.models import add_version, identity

COUNT = 375_000
"""Elements of an answer in JSON: its 7 MB are more than the kernel buffers for a connection."""


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


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
async def test_answer_that_is_read_slowly_comes_whole(tmp_path: Path, secured: bool) -> None:
    """Another connection that was answered later has been idle for too long by then."""
    models = tmp_path / "models"
    models.mkdir()
    add_version(models, "FP64", 1, identity("FP64"), "probe = false")
    options: dict[str, Any] = {"idle_timeout_s": 0.3}
    context = None
    if secured:
        files = make_certificates(tmp_path)
        options |= {"tls_cert_file": str(files.broker)}
        context = ssl.create_default_context(cafile=str(files.authority))
    async with gateway_of(models, **options) as served, asyncio.timeout(DEADLINE_S):
        port = served.doors.ports["http"]
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        narrow.connect((HOST, port))
        narrow.setblocking(False)
        name = HOST if secured else None
        slow, sending = await asyncio.open_connection(
            sock=narrow, ssl=context, server_hostname=name
        )
        sending.write(request())
        head = await slow.readuntil(b"\r\n\r\n")
        quick, other = await asyncio.open_connection(HOST, port, ssl=context)
        other.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await quick.read()).startswith(b"HTTP/1.1 200")  # until the door closes it
        size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        rest = await slow.readexactly(size)
        for each in (sending, other):
            each.close()

    assert head.startswith(b"HTTP/1.1 200")
    (output,) = msgspec.json.decode(rest)["outputs"]
    assert len(output["data"]) == COUNT
