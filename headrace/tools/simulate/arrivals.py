"""Arrivals from recorded requests: their times, sizes, and batching classes.

The bytes of a request's tensors are skipped. Requests that a pipeline would refuse are left out and
counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import aclosing
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.log.port import Record
from headrace.protocol.headers import DECODED_TYPES, parse_envelope
from headrace.protocol.messages import Envelope
from headrace.protocol.tensors import DATATYPES
from headrace.tools.bodies import BodyReader
from headrace.tools.replay.recording import Recording
from headrace.tools.simulate.events import NO_TIMEOUT, Arrivals, Kind

_ELEMENT_BYTES = 16
"""Assumed size of a `BYTES` element, since element lengths are in the skipped part."""


_MOST = 1 << 40
"""Most rows or bytes of a request: a shape is what its caller claims, and any number."""

_LATEST_MS = 1 << 52
"""Latest arrival, which is also counted in microseconds, in 64 bits."""


class _RecordedInput(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Body(msgspec.Struct):
    inputs: list[_RecordedInput]
    model_name: str = ""
    model_version: str | None = None


_bodies = BodyReader(_Body)


class RecordedArrivals(NamedTuple):
    """Arrivals of a recording.

    Attributes:
        left_out: number of records that are not valid requests.
    """

    arrivals: Arrivals
    left_out: int


class _Work(NamedTuple):
    kind: Kind
    rows: int
    size_bytes: int


async def read_arrivals(
    recording: Recording, default_timeout_ms: int, unbatched: Collection[str] = ()
) -> RecordedArrivals:
    """Return the requests of a recording; those of the models `unbatched` have one row each.

    Their timestamps are whole milliseconds, and a timestamp that steps back counts as the one
    before it. Requests of the same millisecond are spread evenly over it; otherwise they would form
    a burst that never happened.

    Raises: see `Recording.chunks`.
    """
    kinds: dict[Kind, int] = {}
    found: list[tuple[int, int, int, int, int]] = []
    latest_ms = left_out = 0
    async with aclosing(recording.chunks()) as chunks:
        async for chunk in chunks:
            for record in chunk:
                envelope = parse_envelope(record.headers, record.timestamp, default_timeout_ms)
                work = _work(record, envelope, unbatched)
                if work is None:
                    left_out += 1
                    continue
                latest_ms = max(latest_ms, record.timestamp)
                timeout_us = _timeout_us(envelope.deadline_ms, record.timestamp)
                number = kinds.setdefault(work.kind, len(kinds))
                found.append((latest_ms, work.rows, work.size_bytes, timeout_us, number))
    columns = np.array(found, dtype=np.int64).reshape(-1, 5).T
    at_us = np.fromiter(_spread(columns[0].tolist()), np.int64, len(found))
    _, rows, size_bytes, timeouts_us, kind = columns
    return RecordedArrivals(
        Arrivals(at_us, rows, size_bytes, timeouts_us, kind, tuple(kinds)), left_out
    )


def _spread(timestamps_ms: list[int]) -> Iterator[int]:
    """Yield epoch microseconds, ascending."""
    for timestamp_ms, share in sorted(Counter(timestamps_ms).items()):
        for place in range(share):
            yield timestamp_ms * 1000 + 1000 * place // share


def _timeout_us(deadline_ms: int, timestamp_ms: int) -> int:
    if not deadline_ms:
        return NO_TIMEOUT
    return max(deadline_ms - timestamp_ms, 0) * 1000


def _work(record: Record, envelope: Envelope, unbatched: Collection[str]) -> _Work | None:
    """Parse a record; None if it is not a valid request."""
    if record.value is None or envelope.fault is not None:
        return None
    if not 0 <= record.timestamp <= _LATEST_MS:
        return None
    if envelope.content_type not in DECODED_TYPES:
        # One item, whose size after the transform is unknown.
        kind = Kind(envelope.model, envelope.version, (), envelope.tenant, envelope.priority)
        return _Work(kind, 1, len(record.value))
    body = _bodies.read(record)
    return None if body is None else _work_of(body, envelope, unbatched)


def _work_of(body: _Body, envelope: Envelope, unbatched: Collection[str]) -> _Work | None:
    name = body.model_name or envelope.model
    sizes = [_size_bytes(each) for each in body.inputs]
    batched = name not in unbatched
    rows = {each.shape[0] if each.shape else 0 for each in body.inputs} if batched else {1}
    if not name or not sizes or min(sizes) < 0 or len(rows) != 1 or min(rows) < 1:
        return None
    if max(sum(sizes), *rows) > _MOST:
        return None
    inputs = sorted(body.inputs, key=lambda one: one.name)
    shape_class = tuple(size for each in inputs for size in each.shape[batched:])
    version = body.model_version or envelope.version
    kind = Kind(name, version, shape_class, envelope.tenant, envelope.priority)
    return _Work(kind, rows.pop(), sum(sizes))


def _size_bytes(tensor: _RecordedInput) -> int:
    """Return the tensor's size; -1 if it is invalid."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or min(tensor.shape, default=0) < 0:
        return -1
    return math.prod(tensor.shape) * (datatype.itemsize or _ELEMENT_BYTES)
