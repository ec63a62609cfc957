"""Trace context: which trace a request belongs to, and which of its spans comes next.

Header and ids are those of W3C Trace Context (https://www.w3.org/TR/trace-context-2/). A request
that is not sampled has no `Trace`: to ask whether it has one is all that it costs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import log, log1p
from random import Random
from typing import NamedTuple

SAMPLED = 0x01
RANDOM = 0x02
"""Bits of the trace flags: it is recorded; its trace id was drawn at random."""

_VERSION_00_BYTES = 55
_HEX = frozenset(b"0123456789abcdef")
_random = Random()  # noqa: S311 - ids; an own one, since a user's model may seed the shared one

AttributeValue = str | int | bool


class SpanId(NamedTuple):
    """One span of one trace."""

    trace_id: int
    span_id: int


class Parent(NamedTuple):
    """What a `traceparent` says."""

    trace_id: int
    span_id: int
    flags: int


class Trace:
    """The trace of one request, and its place in it.

    The span of the stage that has the request has its id before it is made, so that others can
    point to it; when the stage is done the span is made and `advance` goes on to the next one.

    Attributes:
        parent_id: the span of the stage before, or of the caller; 0 where the trace begins.
        span_id: of the span of the present stage.
        answer_id: of the span that sends the answer.
        flags: of the trace.
        since_us: when the present stage got the request (epoch microseconds); 0 before the first.
        remote: the parent is another process's span.
        runs: the spans of the batches it has run in.
        run: what is known of the last of these runs, by attribute.
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
        """The present stage's span is made; the next stage begins."""
        self.parent_id = self.span_id
        self.span_id = new_span_id()
        self.since_us = now_us
        self.remote = False

    def traceparent(self, span_id: int) -> str:
        """The header by which others continue from one of its spans."""
        return f"00-{self.trace_id:032x}-{span_id:016x}-{self.flags:02x}"


def new_trace() -> Parent:
    """A trace that begins here."""
    return Parent(_random.getrandbits(128) or 1, 0, SAMPLED | RANDOM)


def new_span_id() -> int:
    """An id that no other span of the trace has."""
    return _random.getrandbits(64) or 1


def until_sampled(ratio: float) -> int:
    """How many are passed over before the next one that is sampled, of a share `ratio`.

    Drawn from the geometric distribution, which is what a draw for each of them would come to
    (Devroye, Non-Uniform Random Variate Generation, 1986, chapter X.2): one that is not sampled
    costs no draw.
    """
    if ratio >= 1.0:
        return 0
    if ratio <= 0.0:
        return sys.maxsize
    # The logarithm of a number above 0, since `random` may return 0 and never 1.
    return int(min(log(1.0 - _random.random()) / log1p(-ratio), sys.maxsize))


def parse_traceparent(value: bytes) -> Parent | None:
    """What the header says; None where it is none, and the trace has to begin anew.

    Of a later version only the fields of version 00 are read, as the specification says.
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
