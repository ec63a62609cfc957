"""Limits of each caller: requests a second, and what it has under way at once.

A caller over its limits is refused at once and may try again, so that it cannot take the place of
others. Each process of a gateway counts for itself.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from headrace.errors import Code, Rejected
from headrace.primitives.token_bucket import TokenBucket


class Reason(StrEnum):
    """The limit that a refused request is over."""

    RATE = "rate"
    CONCURRENCY = "concurrency"
    BYTES = "bytes"


class Limits(NamedTuple):
    """The limits of one caller; 0 is none.

    Attributes:
        requests_per_second: in the long run.
        burst: requests at once after a pause; 0 is as many as in a second, and at least one.
        max_in_flight: requests under way.
        max_in_flight_bytes: of their bodies, decompressed.
    """

    requests_per_second: float = 0.0
    burst: int = 0
    max_in_flight: int = 0
    max_in_flight_bytes: int = 0

    @property
    def are_set(self) -> bool:
        """Return True if there is a limit."""
        return bool(self.requests_per_second or self.max_in_flight or self.max_in_flight_bytes)


NO_LIMITS = Limits()


class CallerUsage:
    """Requests of one caller in progress, and the tokens that it has left.

    Attributes:
        requests: under way.
        size_bytes: of their bodies.
    """

    __slots__ = ("_bucket", "_caller", "_refused", "limits", "requests", "size_bytes")

    def __init__(self, caller: str, limits: Limits, refused: Counter[Reason]) -> None:
        self._caller = caller
        self._refused = refused
        self.requests = 0
        self.size_bytes = 0
        self.renew(limits)

    def renew(self, limits: Limits) -> None:
        """Apply other limits from now on, with all their tokens."""
        per_second = limits.requests_per_second
        burst = limits.burst or max(1.0, per_second)
        self.limits = limits
        self._bucket = TokenBucket(burst, per_second) if per_second else None

    def begin(self, now_s: float, known_bytes: int = 0) -> None:
        """Count a request. Raises `Rejected`; see `CallerLimits.begin`."""
        limits = self.limits
        # The token is taken last: a request that another limit refuses costs none.
        if limits.max_in_flight and self.requests >= limits.max_in_flight:
            expected = f"at most {limits.max_in_flight} requests under way"
            raise self._over(Reason.CONCURRENCY, expected, "one more")
        self.check_bytes(0, known_bytes)
        if self._bucket is not None and not self._bucket.take(now_s):
            wait_s = self._bucket.wait_s(now_s)
            expected = f"at most {limits.requests_per_second:g} requests per second"
            got = f"more; the next one may come in {wait_s:.3f} s"
            raise self._over(Reason.RATE, expected, got, retry_after_ms=int(wait_s * 1000) + 1)
        self.requests += 1

    def check_bytes(self, size_bytes: int, more_bytes: int) -> None:
        """Check that a request may have more bytes.

        Args:
            size_bytes: that were counted for the request before.
            more_bytes: of the same request.

        Raises:
            Rejected: `OVERLOADED`: all requests of the caller together have too many; or
                `TOO_LARGE`: this one alone does, so that it can never succeed.
        """
        limit = self.limits.max_in_flight_bytes
        if not limit or self.size_bytes + more_bytes <= limit:
            return
        expected = f"at most {limit} bytes in the bodies of its requests under way"
        if size_bytes + more_bytes > limit:
            raise self._over(Reason.BYTES, expected, "one request with more", code=Code.TOO_LARGE)
        raise self._over(Reason.BYTES, expected, "more")

    def _over(
        self,
        reason: Reason,
        expected: str,
        got: str,
        *,
        code: Code = Code.OVERLOADED,
        retry_after_ms: int | None = None,
    ) -> Rejected:
        self._refused[reason] += 1
        message = f"{self._caller}: expected {expected}, got {got}"
        return Rejected(code, message, retry_after_ms=retry_after_ms)


class CallerLimits:
    """Counts the requests of each caller against its limits.

    A caller with requests under way is remembered, and so are `max_idle` others. Beyond them, the
    one that ended its last request longest ago is forgotten: its tokens are the likeliest to have
    come back.

    Attributes:
        refused: number of refused requests by reason.
    """

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._busy: dict[str, CallerUsage] = {}
        self._idle: dict[str, CallerUsage] = {}
        """Idle callers, in the order in which they became idle."""
        self.refused: Counter[Reason] = Counter()

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def begin(self, caller: str, limits: Limits, now_s: float, known_bytes: int = 0) -> CallerUsage:
        """Count a request until `end`, and return what its caller uses.

        Args:
            caller: its name, in errors as well.
            limits: those of the caller; they may change between requests.
            now_s: monotonic time.
            known_bytes: size of its body as far as it is known yet; they are checked, not counted.

        Raises:
            Rejected: `OVERLOADED` or `TOO_LARGE`: the caller is over a limit.
        """
        usage = self._busy.get(caller) or self._idle.pop(caller, None)
        if usage is None:
            usage = CallerUsage(caller, limits, self.refused)
        elif usage.limits != limits:
            usage.renew(limits)
        try:
            usage.begin(now_s, known_bytes)
        finally:
            self._keep(caller, usage)
        return usage

    def end(self, caller: str, usage: CallerUsage, size_bytes: int) -> None:
        """Count the end of a request with so many bytes."""
        usage.requests -= 1
        usage.size_bytes -= size_bytes
        self._keep(caller, usage)

    def _keep(self, caller: str, usage: CallerUsage) -> None:
        if usage.requests:
            self._busy[caller] = usage
            return
        self._busy.pop(caller, None)
        self._idle[caller] = usage
        if len(self._idle) > self._max_idle:
            del self._idle[next(iter(self._idle))]
