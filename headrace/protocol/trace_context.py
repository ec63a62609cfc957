"""Trace context: the trace of a request and its current span.

Header and ids follow W3C Trace Context (https://www.w3.org/TR/trace-context-2/). A request that is
not sampled has no `Trace`, and costs only the check for one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from math import log, log1p
from random import Random
from typing import NamedTuple

SAMPLED = 0x01
RANDOM = 0x02
"""Bits of the trace flags: the trace is recorded; its id is random."""

_VERSION_00_BYTES = 55
_HEX = frozenset(b"0123456789abcdef")
_random = Random()  # noqa: S311 - ids; own instance: a user's model may seed the shared one
if hasattr(os, "register_at_fork"):
    # Or processes that are forked from one would give the same ids, as `random` says of its own.
    os.register_at_fork(after_in_child=_random.seed)

AttributeValue = str | int | bool


class SpanId(NamedTuple):
    """Identity of a span: trace id and span id."""

    trace_id: int
    span_id: int


class Parent(NamedTuple):
    """Fields of a `traceparent`."""

    trace_id: int
    span_id: int
    flags: int


class Trace:
    """Trace of one request and its current span.

    The span of the current stage has its id before it is created, so that other spans can refer
    to it; when the stage ends, the span is created and `advance` moves on to the next one.

    Attributes:
        parent_id: id of the previous stage's or the caller's span; 0 where the trace begins.
        span_id: id of the current stage's span.
        answer_id: id of the span that sends the answer.
        flags: flags of the trace.
        since_us: time at which the current stage received the request, in epoch microseconds; 0
            before the first.
        remote: True if the parent is a span of another process.
        runs: spans of the batches in which the request has run.
        run: attributes of the last of these runs.
    """

    __slots__ = (
        "answer_id",
        "flags",
        "parent_id",
        "remote",
        "run",
        "runs",
        "since_us",
        "span_id",
        "trace_id",
    )

    def __init__(self, parent: Parent, since_us: int = 0) -> None:
        self.trace_id, self.parent_id, self.flags = parent
        self.span_id = new_span_id()
        self.answer_id = new_span_id()
        self.since_us = since_us
        self.remote = parent.span_id != 0
        self.runs: tuple[SpanId, ...] = ()
        self.run: Mapping[str, AttributeValue] = {}

    def advance(self, now_us: int) -> None:
        """Begin the next stage, after the current stage's span was created."""
        self.parent_id = self.span_id
        self.span_id = new_span_id()
        self.since_us = now_us
        self.remote = False

    def traceparent(self, span_id: int) -> str:
        """Return the `traceparent` header for children of one of its spans."""
        return traceparent(self.trace_id, span_id, self.flags)


def traceparent(trace_id: int, span_id: int, flags: int) -> str:
    """Return the `traceparent` header for children of a span."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def new_trace() -> Parent:
    """Return the root of a new, sampled trace."""
    trace_id, _, flags = new_root()
    return Parent(trace_id, 0, flags | SAMPLED)


def new_root() -> Parent:
    """Return the root of a new trace that is not sampled so far."""
    return Parent(_random.getrandbits(128) or 1, 0, RANDOM)


def new_span_id() -> int:
    """Return a random span id, never 0."""
    return _random.getrandbits(64) or 1


def until_sampled(ratio: float) -> int:
    """Return how many requests to skip before the next sampled one, at sampling rate `ratio`.

    Drawn from the geometric distribution, which is equivalent to one draw for each request
    (Devroye, Non-Uniform Random Variate Generation, 1986, chapter X.2), so that skipped requests
    cost no draw.
    """
    if ratio >= 1.0:
        return 0
    if ratio <= 0.0:
        return sys.maxsize
    # `random` may return 0 but never 1, so the logarithm is of a number above 0.
    return int(min(log(1.0 - _random.random()) / log1p(-ratio), sys.maxsize))


def parse_traceparent(value: bytes) -> Parent | None:
    """Parse a `traceparent`; None if it is invalid, and a new trace must begin.

    Of a later version only the fields of version 00 are read, as the specification requires.
    """
    head, dashes = value[:_VERSION_00_BYTES], value[2:3] + value[35:36] + value[52:53]
    if len(head) < _VERSION_00_BYTES or dashes != b"---" or not _HEX.issuperset(_digits(head)):
        return None
    version = head[:2]
    if version == b"ff" or (len(value) > _VERSION_00_BYTES and not _is_longer(version, value)):
        return None
    trace_id, span_id = int(head[3:35], 16), int(head[36:52], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, int(head[53:55], 16))


def _digits(head: bytes) -> bytes:
    return head[:2] + head[3:35] + head[36:52] + head[53:]


def _is_longer(version: bytes, value: bytes) -> bool:
    return version != b"00" and value[_VERSION_00_BYTES : _VERSION_00_BYTES + 1] == b"-"
