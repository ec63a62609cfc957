"""A bucket in S3's protocol, as far as model repositories need it, that can become unavailable."""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from enum import Enum, auto
from xml.sax.saxutils import escape

from aiohttp import web

from tests.support.stand_in_server import StandInServer

BUCKET = "models"
MODIFIED = "2026-01-01T00:00:00.000Z"
MODIFIED_HTTP = "Thu, 01 Jan 2026 00:00:00 GMT"


class Absence(Enum):
    """How a bucket is unavailable."""

    REFUSES = auto()
    """Nobody listens at its address."""
    ABORTS = auto()
    """Connections are reset when a request comes."""
    FAILS = auto()
    """Each request gets 503."""
    SILENT = auto()
    """Requests are taken, and not answered."""


def environment_of(url: str) -> dict[str, str]:
    """Return the variables with which the library finds a server of buckets."""
    return {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": url,
    }


class S3Bucket(StandInServer):
    """Objects by key (ListObjectsV2, GetObject, PutObject).

    Attributes:
        objects: contents by key.
        requests: number of requests that came, answered or not.
        reads: keys and values of the header `Range` of the reads, in order.
        holds_from: by key, the number of bytes after which reads get no more.
        is_holding: whether a read waits for bytes that it does not get.
        environment: variables with which the library finds it, as `s3://models`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.reads: list[tuple[str, str]] = []
        self.holds_from: dict[str, int] = {}
        self.is_holding = False
        self._absence: Absence | None = None
        self._back = asyncio.Event()
        self._application.router.add_route("*", "/{path:.*}", self._answer)

    @property
    def environment(self) -> dict[str, str]:
        """See the class."""
        return environment_of(self.url)

    async def go_away(self, absence: Absence) -> None:
        """Be unavailable from now on."""
        self._absence = absence
        self._back.clear()
        if absence is Absence.REFUSES:
            await self.refuse()

    async def come_back(self) -> None:
        """Answer again."""
        self._absence = None
        self._back.set()
        await self.listen()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        if self._absence is Absence.SILENT:
            await self._back.wait()
        if self._absence is Absence.ABORTS and request.transport is not None:
            request.transport.abort()
        if self._absence is not None:
            return web.Response(status=503)
        bucket, _, key = request.path.lstrip("/").partition("/")
        if request.method == "PUT":
            return await self._write(request, key)
        if bucket == BUCKET and not key:
            return self.list_objects(request.query.get("prefix", ""))
        if bucket != BUCKET or key not in self.objects:
            return web.Response(status=404)
        self.reads.append((key, request.headers.get("Range", "")))
        response = _read(self.objects[key], self.reads[-1][1])
        if key in self.holds_from:
            return await self._hold(request, response, self.holds_from[key])
        return response

    async def _hold(
        self, request: web.Request, whole: web.Response, end: int
    ) -> web.StreamResponse:
        """Send the bytes of an answer that lie before a place in the object, and never the rest."""
        start = int(whole.headers.get("Content-Range", "bytes 0-").split()[1].split("-")[0])
        assert isinstance(whole.body, bytes)
        response = web.StreamResponse(status=whole.status, headers=whole.headers)
        response.content_length = len(whole.body)
        await response.prepare(request)
        await response.write(whole.body[: max(0, end - start)])
        if end - start < len(whole.body):
            self.is_holding = True
            await asyncio.Event().wait()  # cancelled when the server ends
        return response

    async def _write(self, request: web.Request, key: str) -> web.Response:
        if not self.meets_condition(request, self.objects.get(key)):
            return web.Response(status=412)
        self.objects[key] = await request.read()
        return web.Response(headers=_tags(self.objects[key]))

    def meets_condition(self, request: web.Request, content: bytes | None) -> bool:
        """Return False for a write of an object that is not as the request says."""
        if request.headers.get("If-None-Match") == "*":
            return content is None
        expected = request.headers.get("If-Match")
        return expected is None or (content is not None and expected == _tag(content))

    def list_objects(self, prefix: str) -> web.Response:
        """Answer with the keys that begin so, in the form of the protocol."""
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{MODIFIED}</LastModified>"
            f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
            for key, content in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        listed = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        return web.Response(text=listed, content_type="application/xml")


def _read(content: bytes, asked: str) -> web.Response:
    headers = {**_tags(content), "Last-Modified": MODIFIED_HTTP}
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
    if found is None:
        return web.Response(body=content, headers=headers)
    start, end = int(found[1]), min(int(found[2]), len(content) - 1)
    headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
    return web.Response(status=206, body=content[start : end + 1], headers=headers)


def _tags(content: bytes) -> dict[str, str]:
    return {"ETag": _tag(content), "x-goog-generation": generation_of(content)}


def generation_of(content: bytes) -> str:
    """Return Google's number of an object's content; never 0, which is that of no object."""
    return str(1 + zlib.crc32(content))


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
