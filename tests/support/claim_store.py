"""Stores of claims over HTTP, and in S3's protocol, for tests."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod

from aiohttp import web

from headrace.protocol.claims import describe_claim, write_claim
from tests.support.stand_in_server import StandInServer

CHUNK = 64 * 1024


class ObjectServer(StandInServer, ABC):
    """Serves objects by the paths of their URLs.

    Attributes:
        objects: contents by path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        router = self._application.router
        router.add_route("GET", "/{path:.*}", self.answer_get)
        router.add_route("PUT", "/{path:.*}", self.answer_put)

    def put(self, path: str, content: bytes) -> bytes:
        """Put an object; return the header of its claim."""
        self.objects[path] = content
        return write_claim(describe_claim(self.url + path, content))

    @abstractmethod
    async def answer_get(self, request: web.Request) -> web.StreamResponse:
        """Answer the read of an object."""

    @abstractmethod
    async def answer_put(self, request: web.Request) -> web.StreamResponse:
        """Answer the write of an object."""


class StandInStore(ObjectServer):
    """A store that fails as its attributes say.

    Attributes:
        requests: methods and paths, in order.
        failures_left: this many requests get `failure`.
        failure: a status, and the code of an error in S3's protocol.
        failure_headers: headers beside it.
        away_after: likewise those for an object, after this many.
        pause_s: pause after each part of an object.
        forgets: beginning of the paths whose objects are not kept when they are put.
        held: set to let reads go on that `holds` stops before their last bytes.
        holds_repeats: whether the same is done with all reads of an object but the first.
        sent_bytes: bytes of objects that were sent.
        most_reads, most_writes: most that were in progress together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attributes: dict[str, dict[str, str]] = {}
        self.requests: list[str] = []
        self.failures_left = 0
        self.failure = (503, "SlowDown")
        self.failure_headers: dict[str, str] = {}
        self.pause_s = 0.0
        self.holds = self.holds_repeats = False
        self.forgets = ""
        self.held = asyncio.Event()
        self.away_after: dict[str, int] = {}
        self.sent_bytes = 0
        self.reads = self.most_reads = 0
        self.writes = self.most_writes = 0
        self.redirects: dict[str, str] = {}
        self.lengths: dict[str, int | None] = {}
        self.cut: set[str] = set()

    async def answer_get(self, request: web.Request) -> web.StreamResponse:
        """Send an object in parts, unless the request is to fail."""
        path = request.path
        self.requests.append(f"GET {path}")
        is_beyond = self.requests.count(f"GET {path}") > self.away_after.get(path, 1 << 30)
        if self.failures_left or is_beyond:
            self.failures_left = max(0, self.failures_left - 1)
            return self._fail()
        if path in self.redirects:
            return web.Response(status=307, headers={"Location": self.redirects[path]})
        content = self.objects.get(path)
        if content is None:
            return web.Response(status=404)
        response = web.StreamResponse(
            headers={
                "ETag": f'"{hashlib.md5(content).hexdigest()}"',
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            }
        )
        response.content_length = self.lengths.get(path, len(content))
        self.reads += 1
        self.most_reads = max(self.most_reads, self.reads)
        try:
            await self._send(request, response, content, is_cut=path in self.cut)
        finally:
            self.reads -= 1
        return response

    def _fail(self) -> web.Response:
        status, code = self.failure
        text = f"<Error><Code>{code}</Code></Error>"
        return web.Response(status=status, text=text, headers=self.failure_headers)

    async def _send(
        self, request: web.Request, response: web.StreamResponse, content: bytes, *, is_cut: bool
    ) -> None:
        is_held = self.holds or (
            self.holds_repeats and self.requests.count(f"GET {request.path}") > 1
        )
        await response.prepare(request)
        for start in range(0, len(content), CHUNK):
            part = content[start : start + CHUNK]
            if is_held and start + CHUNK >= len(content):
                await self.held.wait()
            if is_cut and start:
                assert request.transport is not None
                request.transport.abort()
                return
            await response.write(part)
            self.sent_bytes += len(part)
            if self.pause_s:
                await asyncio.sleep(self.pause_s)

    async def answer_put(self, request: web.Request) -> web.Response:
        """Keep an object, unless the request is to fail."""
        self.requests.append(f"PUT {request.path}")
        content = await request.read()
        self.writes += 1
        self.most_writes = max(self.most_writes, self.writes)
        await asyncio.sleep(self.pause_s)
        self.writes -= 1
        if self.failures_left:
            self.failures_left -= 1
            return self._fail()
        if not (self.forgets and request.path.startswith(self.forgets)):
            self.objects[request.path] = content
        self.attributes[request.path] = dict(request.headers)
        digest = hashlib.md5(content).hexdigest()
        return web.Response(headers={"ETag": f'"{digest}"'})
