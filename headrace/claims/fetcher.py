"""Fetch the values that claims refer to: from allowed stores alone, checked, within a time."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections import defaultdict
from contextlib import aclosing
from functools import partial

from headrace.claims.stores import ClaimStores, OnEnded, StoreCalls, check_size
from headrace.config import ClaimSettings
from headrace.errors import Code
from headrace.protocol.claims import Claim, parse_claim, refuse_claim
from headrace.tuning import TUNING, ClaimTuning
from headrace.urls import parse_address


class ClaimFetcher(StoreCalls):
    """Fetches objects. Open while the context lasts; calls come from its event loop.

    Args:
        settings: what is allowed, and the limits.
        on_fetched: called with each outcome: `ok`, `refused`, `unavailable` or `cancelled`.

    Raises:
        ConfigurationError: a package is missing.
    """

    def __init__(
        self,
        settings: ClaimSettings,
        tuning: ClaimTuning = TUNING.claims,
        on_fetched: OnEnded = lambda _outcome, _size_bytes, _took_s: None,
    ) -> None:
        self._settings = settings
        self._allowed = tuple(map(parse_address, settings.allowed))
        super().__init__(
            ClaimStores(self._allowed, tuning),
            settings.timeout_ms / 1000,
            tuning.backoff,
            "header x-claim",
            on_fetched,
        )
        # By store: one that hangs must not take the slots of the others.
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, settings.concurrency)
        )

    @property
    def max_bytes(self) -> int:
        """Limit of one object."""
        return self._settings.max_bytes

    def read_claim(self, header: bytes) -> Claim:
        """Return the claim in a header, if its object may be fetched.

        Raises:
            Rejected: `INVALID_REQUEST`, or `TOO_LARGE`.
        """
        claim = parse_claim(header)
        if not any(map(claim.address.is_within, self._allowed)):
            raise refuse_claim("a URL that claims.allowed allows", f"one of {claim.address.origin}")
        if claim.size_bytes > self._settings.max_bytes:
            expected = f"at most {self._settings.max_bytes} bytes"
            raise refuse_claim(expected, str(claim.size_bytes), Code.TOO_LARGE)
        return claim

    async def fetch(self, claim: Claim) -> bytes:
        """Return an object that `read_claim` allows. The caller limits the time by the deadline.

        Raises:
            ClaimUnavailable: the store was unavailable for `claims.timeout_ms`.
            Rejected: `INVALID_REQUEST`: the object is not there, or is another one.
        """
        slots = self._slots[self.stores.store_of(claim.address)]
        return await self.call(partial(self._fetch_once, claim), slots, claim.size_bytes)

    async def _fetch_once(self, claim: Claim) -> bytes:
        # `getvalue` returns the buffer itself, and its growth moves pages instead of bytes.
        content, digest = io.BytesIO(), hashlib.sha256()
        left_bytes = claim.size_bytes
        async with aclosing(self.stores.read(claim)) as parts:
            async for part in parts:
                left_bytes -= len(part)
                if left_bytes < 0:
                    raise refuse_claim(f"an object of {claim.size_bytes} bytes", "more")
                digest.update(part)
                content.write(part)
        check_size(claim, claim.size_bytes - left_bytes)
        if digest.hexdigest() != claim.sha256:
            raise refuse_claim(
                f"an object with the SHA-256 {claim.sha256}", f"{digest.hexdigest()}"
            )
        return content.getvalue()
