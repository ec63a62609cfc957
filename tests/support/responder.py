"""The services' side of the contract, played by a script: for tests of what asks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from headrace.config import Settings
from headrace.log.port import Headers, Log, NewRecord, Record, TopicPartition
from headrace.protocol.headers import HeaderName, answer_content_type, travels
from headrace.topics import Topic
from tests.support.logs import POLL_S, write_to

Script = Callable[[Record], Sequence[bytes]]
"""From a request to the values of its answers: usually one, sometimes none or two."""


def header(headers: Headers, name: str) -> bytes | None:
    """The last value of a header."""
    return dict(headers).get(name)


def answer(**fields: object) -> bytes:
    """The value of a response in MessagePack."""
    return msgspec.msgpack.encode({"model_name": "m", "model_version": "1", "outputs": []} | fields)


def refusal(code: str, message: str, **details: object) -> bytes:
    """The value of an error response in MessagePack."""
    return msgspec.msgpack.encode(
        {
            "error": message,
            "error_details": {"code": code, "stage": "ingest", "retriable": False} | details,
        }
    )


def echo(record: Record) -> Sequence[bytes]:
    """Answer with the inputs as outputs, and with the request's id and version."""
    assert record.value is not None
    request = msgspec.msgpack.decode(record.value)
    return [
        answer(
            model_name=request["model_name"],
            model_version=request.get("model_version") or "1",
            id=request.get("id"),
            outputs=request["inputs"],
            parameters={"batch_size": 1},
        )
    ]


class Responder:
    """Reads requests and answers them as its script says.

    Attributes:
        seen: the requests, in the order in which they came.
        cancelled: the correlation ids of those that were cancelled.
        script: what to answer.
    """

    def __init__(self, log: Log, settings: Settings, script: Script = echo) -> None:
        self.seen: list[Record] = []
        self.cancelled: list[bytes | None] = []
        self.script = script
        self._log = log
        self._settings = settings

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer while the context lasts."""
        requests = self._settings.topic(Topic.REQUESTS)
        count = self._settings.topics.partitions
        partitions = [TopicPartition(requests, number) for number in range(count)]
        stopping = asyncio.Event()
        async with self._log.reader(partitions) as reader, asyncio.TaskGroup() as tasks:
            for partition in partitions:
                reader.seek(partition, 0)

            async def answer_all() -> None:
                while not stopping.is_set():
                    for records in (await reader.poll(POLL_S, 100)).values():
                        for record in records:
                            if header(record.headers, "x-cancel") is not None:
                                self.cancelled.append(
                                    header(record.headers, HeaderName.CORRELATION_ID)
                                )
                                continue
                            self.seen.append(record)
                            await self.reply(record, *self.script(record))

            tasks.create_task(answer_all(), name="responder")
            try:
                yield
            finally:
                stopping.set()

    async def reply(self, request: Record, *values: bytes) -> None:
        """Write answers to where a request wants them."""
        topic = header(request.headers, "kafka_replyTopic")
        number = header(request.headers, "kafka_replyPartition")
        assert topic is not None
        assert number is not None
        where = TopicPartition(topic.decode(), int.from_bytes(number, "big"))
        asked = (header(request.headers, "content-type") or b"").decode()
        headers = [
            *((name, value) for name, value in request.headers if travels(name)),
            ("content-type", answer_content_type(asked).encode()),
            (HeaderName.CORRELATION_ID, header(request.headers, HeaderName.CORRELATION_ID)),
        ]
        if values:
            records = (NewRecord(None, value, headers) for value in values)
            await write_to(self._log, where, *records)
