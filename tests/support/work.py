"""Requests as the stages pass them on, with ack handles that say what became of them."""

from __future__ import annotations

import gc
from itertools import count
from typing import Any, NamedTuple

from numpy.typing import NDArray

from headrace.models.profiling.latency import Latency
from headrace.protocol.messages import Envelope, Request
from headrace.protocol.tensors import from_array

NOW_US = 1_700_000_000_000_000

_offsets = count()


class TestReceipt:
    """The obligation to acknowledge one record, without a log."""

    __test__ = False

    def __init__(self) -> None:
        self.revoked = False
        self.acked = 0

    @property
    def assignment(self) -> TestReceipt:
        return self

    def ack(self) -> None:
        self.acked += 1


class Limits(NamedTuple):
    """The limits that a model sets for its batches."""

    max_batch_size: int = 4
    max_batch_bytes: int = 1000
    max_queue_delay_ms: float = 0.0
    latency: Latency | None = None


def make_request(
    model: str = "digits",
    *,
    version: str = "1",
    rows: int = 1,
    size_bytes: int = 10,
    shape_class: tuple[int, ...] = (64,),
    deadline_ms: int = 0,
    ingested_us: int = NOW_US,
    inputs: dict[str, NDArray[Any]] | None = None,
    envelope: Envelope | None = None,
) -> Request:
    """A request that ingest has let through."""
    offset = next(_offsets)
    envelope = envelope or Envelope(deadline_ms=deadline_ms)
    origin = (0, offset, offset - 1, ingested_us // 1000)
    request = Request(TestReceipt(), *origin, b"key", b"value", [], envelope)
    request.model, request.version = model, version
    request.rows, request.size_bytes, request.shape_class = rows, size_bytes, shape_class
    request.ingested_us = ingested_us
    request.inputs = tuple(from_array(name, array) for name, array in (inputs or {}).items())
    return request


def receipt_of(request: Request) -> TestReceipt:
    """The ack handle of a request of `make_request`."""
    ack_handle = request.ack_handle
    assert isinstance(ack_handle, TestReceipt)
    return ack_handle


class Tray:
    """A stream that keeps what it is given."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.closed = False
        self.full = False

    def is_full(self) -> bool:
        return self.full

    def send_nowait(self, chunk: list[Request]) -> None:
        assert not self.closed
        self.requests += chunk

    async def send(self, chunk: list[Request]) -> None:
        self.send_nowait(chunk)

    def close(self) -> None:
        self.closed = True


def requests_alive() -> int:
    """How many requests the interpreter holds."""
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())
