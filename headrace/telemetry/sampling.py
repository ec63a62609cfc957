"""Sampling: which requests get a trace. Three rates limit what tracing can cost a process.

Ingest decides once for each request, and the decision travels with it. Three kinds of requests can
get a trace, and each has a token bucket of its own, so that none displaces another:

- without a trace context: a share of them by chance (`sample_ratio`), at most `traces_per_second`;
- with a trace context whose sampled flag is set: all, at most `caller_traces_per_second`. W3C Trace
  Context (section 3.2.2.5.1) lets a service record less than its callers ask for;
- failed without a trace: all, at most `failure_traces_per_second`.

`headrace_traces_rate_limited_total` counts the traces that a rate prevents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config import TelemetrySettings
from headrace.protocol.messages import Request
from headrace.protocol.trace_context import (
    SAMPLED,
    Parent,
    new_trace,
    parse_traceparent,
    until_sampled,
)
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.token_bucket import TokenBucket

_SAMPLED_DIGITS = frozenset({b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f"})
"""The last digit of a `traceparent` of version 00 whose sampled flag is set."""


class Sampler:
    """Decides which requests of one process get a trace."""

    def __init__(self, settings: TelemetrySettings, metrics: Metrics) -> None:
        self._ratio = settings.sample_ratio
        self._until_sampled = until_sampled(self._ratio)
        self._by_ratio = _bucket(settings.traces_per_second)
        self._by_caller = _bucket(settings.caller_traces_per_second)
        self._failed = _bucket(settings.failure_traces_per_second)
        limited = metrics.traces_rate_limited
        self._limited_by_ratio = limited.labels("ratio")
        self._limited_by_caller = limited.labels("caller")
        self._limited_failures = limited.labels("failure")

    def sample(self, requests: Sequence[Request], now_us: int) -> Iterator[tuple[Request, Parent]]:
        """Yield the requests that get a trace, each with the parent context of that trace.

        All requests without a trace pass this loop, so it calls nothing for most of them.
        """
        now_s = now_us / 1e6
        passing = self._until_sampled
        over_ratio = over_caller = 0
        for request in requests:
            header = request.envelope.traceparent
            # The limit does not rise within one chunk, so the other sampled ones need not be
            # parsed.
            if over_caller and header is not None and header[54:55] in _SAMPLED_DIGITS:
                over_caller += 1
                continue
            parent = None if header is None else parse_traceparent(header)
            if parent is None:
                if passing:
                    passing -= 1
                    continue
                passing = until_sampled(self._ratio)
                if not over_ratio and self._by_ratio.take(now_s):
                    yield request, new_trace()
                else:
                    over_ratio += 1
            elif parent.flags & SAMPLED:
                if self._by_caller.take(now_s):
                    yield request, parent
                else:
                    over_caller += 1
        self._until_sampled = passing
        if over_ratio:
            self._limited_by_ratio.inc(over_ratio)
        if over_caller:
            self._limited_by_caller.inc(over_caller)

    def keep_failure(self, now_us: int) -> bool:
        """Return whether a failed request without a trace gets one now."""
        if self._failed.take(now_us / 1e6):
            return True
        self._limited_failures.inc()
        return False


def _bucket(per_second: float) -> TokenBucket:
    """Return a bucket of one second's worth, and of at least one token unless the rate is 0."""
    return TokenBucket(max(1.0, per_second) if per_second else 0.0, per_second)
