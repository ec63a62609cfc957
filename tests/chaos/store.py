"""A store of claims that fails at random, and knows which objects it gave out with wrong bytes."""

from __future__ import annotations

import asyncio
import hashlib
import random

from aiohttp import web

from headrace.protocol.claims import Claim, parse_claim
from tests.support.claim_store import ObjectServer

PART = 8 * 1024
SLOWEST_S = 0.1
"""Longest pause of a slow transfer, after each of its parts."""
UNAVAILABLE = 503


class ChaosStore(ObjectServer):
    """A store that fails at random.

    Each transfer may be refused, before or after it was done, broken off, slow, or, of a read, have
    wrong bytes: some that were changed, too few, too many, or another object's.

    Attributes:
        spoiled: paths of which it gave out wrong bytes.
        is_unavailable: it refuses everything.
        pause_s: pause before each answer.
        faults: how often each fault was made.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.spoiled: set[str] = set()
        self.is_unavailable = False
        self.pause_s = 0.0
        self.faults: dict[str, int] = {}

    def resolve(self, header: bytes) -> bytes | None:
        """Return the object that the claim in an answer refers to; None if the store does not have
        it as the claim says.
        """
        claim = parse_claim(header)
        content = self.objects.get(claim.address.url.removeprefix(self.url))
        return content if content is not None and _is_that(content, claim) else None

    # --- HTTP -------------------------------------------------------------------------------------

    async def answer_get(self, request: web.Request) -> web.StreamResponse:
        """Send an object, with or without a fault."""
        chance = await self._begin()
        if self._strikes("refused a read", chance < 0.08):
            return web.Response(status=UNAVAILABLE)
        content = self.objects.get(request.path)
        if content is None:
            return web.Response(status=404)
        if self._strikes("read with wrong bytes", 0.08 <= chance < 0.12):
            self.spoiled.add(request.path)
            content = self._spoil(content)
        sent = content
        if self._strikes("read broken off", 0.12 <= chance < 0.18):
            sent = content[: self._rng.randrange(len(content))]
        is_slow = self._strikes("slow read", 0.18 <= chance < 0.28)
        response = web.StreamResponse()
        response.content_length = len(content)
        await response.prepare(request)
        for start in range(0, len(sent), PART):
            await response.write(sent[start : start + PART])
            if is_slow:
                await asyncio.sleep(self._rng.uniform(0.0, SLOWEST_S))
        return response if sent is content else self._break_off(request, response)

    async def answer_put(self, request: web.Request) -> web.StreamResponse:
        """Keep an object, with or without a fault."""
        chance = await self._begin()
        if self._strikes("refused a write", chance < 0.08):
            return web.Response(status=UNAVAILABLE)
        content = await request.read()
        if self._strikes("write broken off", 0.08 <= chance < 0.12):
            return self._break_off(request, web.Response())
        if self._strikes("slow write", 0.12 <= chance < 0.22):
            await asyncio.sleep(self._rng.uniform(0.0, 10 * SLOWEST_S))
        self.objects[request.path] = content
        if self._strikes("refused a write that it did", 0.22 <= chance < 0.26):
            return web.Response(status=UNAVAILABLE)
        if self._strikes("broken off after a write", 0.26 <= chance < 0.30):
            return self._break_off(request, web.Response())
        return web.Response()

    async def _begin(self) -> float:
        """Return a number from 0 to 1 that draws the fault of a request; 0 during an outage."""
        if self.pause_s:
            await asyncio.sleep(self._rng.uniform(0.0, self.pause_s))
        return 0.0 if self.is_unavailable else self._rng.random()

    def _strikes(self, fault: str, happens: bool) -> bool:
        if happens:
            self.faults[fault] = self.faults.get(fault, 0) + 1
        return happens

    def _break_off(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return response

    def _spoil(self, content: bytes) -> bytes:
        kind = self._rng.choice(("changed", "too few", "too many", "another's"))
        at = self._rng.randrange(len(content))
        if kind == "changed":
            return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        if kind == "too few":
            return content[:at]
        if kind == "too many":
            return content + content[: at + 1]
        others = [each for each in self.objects.values() if each != content]
        return self._rng.choice(others) if others else content[:at]


def _is_that(content: bytes, claim: Claim) -> bool:
    is_size = len(content) == claim.size_bytes
    return is_size and hashlib.sha256(content).hexdigest() == claim.sha256
