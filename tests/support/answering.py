"""A responder on an embedded log, and requests for it to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from headrace.config import make_settings
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.source_offsets import SourceOffsets
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.log.port import Record, TopicInfo, TopicPartition
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Failure, Request
from headrace.services.responder.ordered import OrderBy
from headrace.services.responder.routing import Routes
from headrace.services.responder.service import Delivery, ResponderService
from headrace.transport.channels import Writer
from headrace.tuning import TUNING, ResponderTuning
from tests.support.conditions import eventually
from tests.support.logs import read
from tests.support.services import StillClock, make_instruments
from tests.support.work import NOW_US, make_request, receipt_of

RESPONSES = TopicPartition("headrace.responses", 2)
DEAD_LETTERS = TopicPartition("headrace.dead-letters", 1)
MINE = TopicPartition("headrace.mine", 3)
LIMIT_BYTES = 3000


def answerable(**headers: bytes) -> Request:
    """A request with outputs; headers by their names, `_` for `-` where it is not Spring's."""
    names = {
        name if name.startswith("kafka") else name.replace("_", "-"): value
        for name, value in headers.items()
    }
    envelope = parse_envelope(list(names.items()), NOW_US // 1000, 0)
    request = make_request(inputs={"y": np.array([[1.5]], np.float32)}, envelope=envelope)
    request.headers = list(names.items())
    request.outputs, request.inputs = request.inputs, ()
    return request


def failed(code: Code = Code.MODEL_FAILED, **headers: bytes) -> Request:
    """A request that has failed."""
    request = answerable(**headers)
    request.outputs = None
    request.fail(Failure(code, "no", "executor"))
    return request


class ResponderHarness:
    """A running responder on an embedded log."""

    incoming: Writer[list[Request]]

    def __init__(self, log: MemoryLog, clock: StillClock) -> None:
        self.log = log
        self.clock = clock
        self.instruments = make_instruments(clock)

    async def answer(self, *requests: Request) -> None:
        """Give it requests and wait until they are acknowledged."""
        await self.incoming.send(list(requests))
        await eventually(lambda: all(receipt_of(one).acked for one in requests))
        assert all(receipt_of(one).acked == 1 for one in requests)

    async def records(self, topic: str) -> list[Record]:
        """All that a topic holds, by partition."""
        info = (await self.log.describe_topics([topic]))[topic]
        assert info is not None
        names = [TopicPartition(topic, number) for number in range(info.partitions)]
        async with self.log.reader(names) as reader:
            ends = await reader.end_offsets(names)
            for name in names:
                reader.seek(name, 0)
            found = await read(reader, sum(ends.values()))
        return sorted(found, key=lambda record: (record.partition, record.offset))

    async def responses(self) -> list[Record]:
        return await self.records(RESPONSES.topic)


@asynccontextmanager
async def running(
    source_offsets: SourceOffsets | None = None,
    log: MemoryLog | None = None,
    order_by: OrderBy = "none",
    tracker: InFlightTracker | None = None,
    tuning: ResponderTuning = TUNING.responder,
) -> AsyncIterator[ResponderHarness]:
    """Answer requests until the end of the context, when its stream is closed."""
    log = log or MemoryLog()
    limit = {"max.message.bytes": str(LIMIT_BYTES)}
    await log.create_topics(
        [
            TopicInfo(RESPONSES.topic, 2, limit),
            TopicInfo(DEAD_LETTERS.topic, 1, limit),
            TopicInfo(MINE.topic, 3, {"max.message.bytes": "500"}),
            TopicInfo("headrace.compacted", 1, {"cleanup.policy": "compact"}),
            TopicInfo("elsewhere", 1, {}),
        ],
        replication_factor=1,
    )
    bench = ResponderHarness(log, StillClock())
    routes = Routes(make_settings({}), RESPONSES, DEAD_LETTERS)
    async with log.producer() as producer, asyncio.TaskGroup() as tasks:
        tracker = tracker or InFlightTracker(Budget(1), lambda: None)
        offset_store = OffsetStore(
            tracker, source_offsets, "headrace.requests", "headrace.requests"
        )
        delivery = Delivery(offset_store, source_offsets, order_by=order_by)
        responder = ResponderService(producer, routes, delivery, bench.instruments, tuning)
        bench.incoming = responder.writer()
        tasks.create_task(responder.run())
        await asyncio.sleep(0)
        yield bench
        bench.incoming.close()


def status(record: Record) -> str:
    """`ok`, or the code."""
    return (dict(record.headers)["x-status"] or b"").decode()


def error_of(record: Record) -> str:
    """The message of an error answer."""
    return str(msgspec.msgpack.decode(record.value or b"")["error"])
