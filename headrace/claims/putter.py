"""Put values that are too large for a record into a store, below one prefix."""

from __future__ import annotations

import asyncio
from functools import partial
from urllib.parse import quote

from headrace.claims.stores import ClaimStores, OnEnded, StoreCalls
from headrace.config import ClaimSettings
from headrace.protocol.claims import Claim, describe_claim
from headrace.tuning import TUNING, ClaimTuning
from headrace.urls import parse_address

EXPIRES = "headrace-expires-ms"
"""Attribute of an object: when it may be deleted, in epoch milliseconds."""


class ClaimPutter(StoreCalls):
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
        on_put: OnEnded = lambda _outcome, _size_bytes, _took_s: None,
    ) -> None:
        super().__init__(
            ClaimStores((parse_address(prefix),), tuning, setting),
            settings.timeout_ms / 1000,
            tuning.backoff,
            setting,
            on_put,
        )
        self._prefix = prefix.rstrip("/")
        self._slots = asyncio.Semaphore(settings.concurrency)

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
            ClaimUnavailable: the store was unavailable, or refused, for `claims.timeout_ms`.
        """
        attributes = {"Content-Type": content_type}
        if expires_ms:
            attributes[EXPIRES] = str(expires_ms)
        attempt = partial(self.stores.write, claim, content, attributes)
        await self.call(attempt, self._slots, len(content))
