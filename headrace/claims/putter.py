"""Put values that are too large for a record into a store, below one prefix."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import TracebackType
from typing import Self
from urllib.parse import quote

from headrace.claims.fetcher import OnFetched
from headrace.claims.stores import ClaimStores, ClaimUnavailable, retry_in_time
from headrace.config import ClaimSettings
from headrace.protocol.claims import Claim, describe_claim
from headrace.tuning import TUNING, ClaimTuning
from headrace.urls import parse_address

EXPIRES = "headrace-expires-ms"
"""Attribute of an object: when it may be deleted, in epoch milliseconds."""


class ClaimPutter:
    """Puts objects. Open while the context lasts; calls come from its event loop.

    Args:
        prefix: address below which they are put.
        settings: time for one object, and how many at a time.
        setting: that has the prefix, for messages.
        on_put: called with each outcome: `ok`, `unavailable` or `cancelled`.

    Raises:
        ConfigurationError: a package is missing.
    """

    def __init__(
        self,
        prefix: str,
        settings: ClaimSettings,
        setting: str,
        tuning: ClaimTuning = TUNING.claims,
        on_put: OnFetched = lambda _outcome, _size_bytes, _took_s: None,
    ) -> None:
        self._prefix = prefix.rstrip("/")
        self._settings = settings
        self._setting = setting
        self._tuning = tuning
        self._on_put = on_put
        self._stores = ClaimStores((parse_address(prefix),), tuning, setting)
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def __aenter__(self) -> Self:
        await self._stores.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stores.__aexit__(kind, error, trace)

    def describe(self, name: str, content: bytes) -> Claim:
        """Return the claim of content that is put at `<prefix>/<name>/<SHA-256>`.

        Any thread may do this; it takes as long as the digest. The same content has the same place,
        so that repeating a put changes nothing.
        """
        place = f"{self._prefix}/{quote(name)}"
        claim = describe_claim(place, content)
        return claim._replace(address=parse_address(f"{place}/{claim.sha256}"))

    async def put(
        self, claim: Claim, content: bytes, content_type: str, expires_ms: int = 0
    ) -> None:
        """Put an object that `describe` has described.

        Args:
            claim: its description.
            content: all of it.
            content_type: for those who look into the store.
            expires_ms: when it may be deleted; 0 for no time.

        Raises:
            ClaimUnavailable: the store was away, or refused, for `claims.timeout_ms`.
        """
        attributes = {"Content-Type": content_type}
        if expires_ms:
            attributes[EXPIRES] = str(expires_ms)
        async with self._slots:
            began_s = time.monotonic()
            outcome = "cancelled"
            try:
                await retry_in_time(
                    partial(self._stores.write, claim, content, attributes),
                    self._settings.timeout_ms / 1000,
                    self._tuning.backoff,
                    self._setting,
                )
                outcome = "ok"
            except ClaimUnavailable:
                outcome = "unavailable"
                raise
            finally:
                size_bytes = len(content) if outcome == "ok" else 0
                self._on_put(outcome, size_bytes, time.monotonic() - began_s)
