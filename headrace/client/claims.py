"""Large requests and answers of a client, which are in stores instead of their records."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Self

from headrace.claims.fetcher import ClaimFetcher
from headrace.claims.putter import ClaimPutter
from headrace.claims.stores import ClaimUnavailable
from headrace.config import Settings
from headrace.errors import Code, Rejected
from headrace.log.port import NewRecord, Record
from headrace.protocol.claims import write_claim
from headrace.protocol.headers import HeaderName


class ClientClaims:
    """Puts the values of requests, and fetches those of answers. Open while the context lasts.

    Args:
        settings: the stores: `claims.store` for requests, and `claims.allowed` and
            `answers.claim_store` for answers.

    Raises:
        ConfigurationError: a package is missing.
    """

    def __init__(self, settings: Settings) -> None:
        claims, answers = settings.claims, settings.answers
        allowed = [*claims.allowed, *([answers.claim_store] if answers.claim_store else [])]
        self._above_bytes = claims.above_bytes
        self._fetcher: ClaimFetcher | None = None
        self._putter: ClaimPutter | None = None
        if allowed:
            self._fetcher = ClaimFetcher(claims.model_copy(update={"allowed": tuple(allowed)}))
        if claims.store is not None:
            self._putter = ClaimPutter(claims.store, claims, "claims.store")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for each in (self._fetcher, self._putter):
                if each is not None:
                    await stack.enter_async_context(each)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def is_large(self, value: bytes | None) -> bool:
        """Return True if a value is for the store."""
        return self._putter is not None and value is not None and len(value) > self._above_bytes

    async def put(self, request: NewRecord, content_type: str) -> NewRecord:
        """Return a request with a claim instead of a value that is large.

        Raises:
            ClaimUnavailable: the store is unavailable.
        """
        value, putter = request.value, self._putter
        if putter is None or value is None or not self.is_large(value):
            return request
        claim = await asyncio.to_thread(putter.describe, secrets.token_hex(16), value)
        await putter.put(claim, value, content_type)
        headers = [*request.headers, (HeaderName.CLAIM, write_claim(claim))]
        return request._replace(value=None, headers=headers)

    async def fetch(self, answer: Record) -> Record:
        """Return an answer with its value.

        Raises:
            Rejected: `INTERNAL`: the value cannot be fetched.
        """
        header = dict(answer.headers).get(HeaderName.CLAIM)
        if header is None or answer.value is not None:
            return answer
        try:
            if self._fetcher is None:
                raise Rejected(
                    Code.INTERNAL,
                    "expected its store in claims.allowed or answers.claim_store, got neither in "
                    "the settings of this client",
                )
            value = await self._fetcher.fetch(self._fetcher.read_claim(header))
        except (Rejected, ClaimUnavailable) as error:
            message = error.message if isinstance(error, Rejected) else str(error)
            raise Rejected(Code.INTERNAL, f"answer: {message}") from error
        return answer._replace(value=value)
