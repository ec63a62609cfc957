"""The responder: one answer for each request, where it was asked for, and dead letters."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from headrace.codec import Answer, decode_response
from headrace.config import make_settings
from headrace.envelope import parse_envelope
from headrace.errors import Code
from headrace.flow import sending
from headrace.flow.answered import Progress
from headrace.flow.books import Books
from headrace.flow.channel import Channel, ChannelWriter
from headrace.flow.inflight import Budget, Ledger
from headrace.flow.origins import Origins
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.producer import MemoryProducer
from headrace.log.port import NewRecord, Record, Run, TopicInfo, TopicPartition
from headrace.messages import Failure, Request
from headrace.services.responder import overlapping
from headrace.services.responder.routing import Routes
from headrace.services.responder.service import Delivery, ResponderService
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener, read
from tests.support.services import StillClock, counted, make_instruments
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


class Bench:
    """A running responder on an embedded log."""

    def __init__(
        self, log: MemoryLog, inlet: ChannelWriter[list[Request]], clock: StillClock
    ) -> None:
        self.log = log
        self.inlet = inlet
        self.clock = clock
        self.instruments = make_instruments(clock)

    async def answer(self, *requests: Request) -> None:
        """Give it requests and wait until they are settled."""
        await self.inlet.send(list(requests))
        await eventually(lambda: all(receipt_of(one).settled for one in requests), deadline_s=10)
        assert all(receipt_of(one).settled == 1 for one in requests)

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
    origins: Origins | None = None, log: MemoryLog | None = None
) -> AsyncIterator[Bench]:
    """Until the end of the context, when its inlet is closed."""
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
    inlet: Channel[list[Request]] = Channel()
    bench = Bench(log, inlet.writer(), StillClock())
    routes = Routes(make_settings({}), RESPONSES, DEAD_LETTERS)
    async with log.producer() as producer, asyncio.TaskGroup() as tasks:
        books = Books(Ledger(Budget(1), lambda: None), origins, "headrace.requests", "")
        delivery = Delivery(books, origins)
        responder = ResponderService(inlet, producer, routes, delivery, bench.instruments)
        tasks.create_task(responder.run())
        yield bench
        bench.inlet.close()


def status(record: Record) -> str:
    """`ok`, or the code."""
    return (dict(record.headers)["x-status"] or b"").decode()


def error_of(record: Record) -> str:
    """The message of an error answer."""
    return str(msgspec.msgpack.decode(record.value or b"")["error"])


async def test_an_answer_carries_the_outputs_and_says_whose_it_is() -> None:
    """On `responses`, in the request's partition modulo the topic's, with its key."""
    request = answerable(kafka_correlationId=b"c7", order_line=b"5")
    request.partition = 5
    async with running() as bench:
        await bench.answer(request)
        (record,) = await bench.responses()

    headers = dict(record.headers)
    answer = decode_response(record.headers, record.value)
    assert isinstance(answer, Answer)
    assert (record.partition, record.key, status(record)) == (1, b"key", "ok")
    assert headers["kafka_correlationId"] == b"c7"
    assert headers["order-line"] == b"5"
    assert headers["x-request"] == f"headrace.requests/5/{request.offset}".encode()
    assert answer.outputs["y"].tolist() == [[1.5]]


async def test_an_answer_goes_where_the_caller_wants_it() -> None:
    """To the reply topic, in the partition asked for, or in the request's own modulo."""
    asked = answerable(kafka_replyTopic=b"headrace.mine", kafka_replyPartition=struct.pack(">i", 2))
    left_open = answerable(kafka_replyTopic=b"headrace.mine")
    left_open.partition = 4
    async with running() as bench:
        await bench.answer(asked, left_open)
        records = await bench.records(MINE.topic)

    assert [record.partition for record in records] == [1, 2]
    assert {status(record) for record in records} == {"ok"}


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"kafka_replyTopic": b"elsewhere"}, "reply_allowed"),
        ({"kafka_replyTopic": b"headrace.requests"}, "which is ours"),
        ({"kafka_replyTopic": b"headrace.missing"}, "a topic that exists"),
        (
            {"kafka_replyTopic": b"headrace.mine", "kafka_replyPartition": struct.pack(">i", 3)},
            "expected 0 to 2",
        ),
        ({"kafka_replyTopic": b"headrace.compacted"}, "expected a key"),
    ],
)
async def test_an_answer_that_cannot_go_there_says_so_on_responses(
    headers: dict[str, bytes], told: str
) -> None:
    """The request has failed then, and is kept as a dead letter; others are as before."""
    request, good = answerable(**headers), answerable()
    request.key = None
    async with running() as bench:
        await bench.answer(request, good)
        records = await bench.responses()
        letters = await bench.records(DEAD_LETTERS.topic)

    assert sorted(map(status, records)) == ["INVALID_REQUEST", "ok"]
    assert told in next(error_of(one) for one in records if status(one) != "ok")
    assert len(letters) == 1


async def test_a_reply_topic_that_is_deleted_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its partitions are remembered the log refuses it: the answer goes to `responses`."""
    async with running() as bench:
        await bench.answer(answerable(kafka_replyTopic=b"headrace.mine"))
        del bench.log._topics._topics[MINE.topic]
        await bench.answer(answerable(kafka_replyTopic=b"headrace.mine"))
        records = await bench.responses()

    assert [status(record) for record in records] == ["INVALID_REQUEST"]


async def test_looking_for_a_reply_topic_delays_nobody() -> None:
    """While one topic's partitions are asked for, all other answers go out."""
    waiting, good = answerable(kafka_replyTopic=b"headrace.mine"), answerable()
    async with running() as bench:
        asked = asyncio.Event()
        answered = asyncio.Event()

        async def slow(topic: str) -> int | None:
            asked.set()
            await answered.wait()
            return 3

        # The producer is the responder's own; what it asks is held up here.
        monkey = pytest.MonkeyPatch()
        monkey.setattr(
            "headrace.log.memory.producer.MemoryProducer.partitions_for",
            lambda _self, topic: slow(topic),
        )
        await bench.inlet.send([waiting, good])
        await asked.wait()
        await eventually(lambda: receipt_of(good).settled)
        assert not receipt_of(waiting).settled
        answered.set()
        await eventually(lambda: receipt_of(waiting).settled)
        monkey.undo()
        records = await bench.records(MINE.topic)

    assert [status(record) for record in records] == ["ok"]


async def test_a_late_answer_is_an_expiry() -> None:
    """Outputs that come after the deadline are not sent as if they were in time."""
    request = answerable(x_deadline_ms=str(NOW_US // 1000 + 5).encode())
    async with running() as bench:
        bench.clock.now_us += 5000
        await bench.answer(request)
        (record,) = await bench.responses()

    assert status(record) == "DEADLINE_EXCEEDED"
    assert "responder" in error_of(record)


async def test_a_failure_that_is_final_is_kept_as_it_came() -> None:
    """Key, value and headers untouched, with where and why in Spring's headers."""
    request = failed(order_line=b"5", kafka_correlationId=b"\x00\xff")
    request.value = memoryview(b"\x00the value\xff")
    async with running() as bench:
        await bench.answer(request)
        (letter,) = await bench.records(DEAD_LETTERS.topic)

    headers = dict(letter.headers)
    assert (letter.key, letter.value) == (b"key", b"\x00the value\xff")
    assert headers["order-line"] == b"5"
    assert headers["kafka_correlationId"] == b"\x00\xff"
    assert headers["kafka_dlt-original-topic"] == b"headrace.requests"
    assert headers["kafka_dlt-original-offset"] == struct.pack(">q", request.offset)
    assert headers["kafka_dlt-exception-fqcn"] == b"MODEL_FAILED"


@pytest.mark.parametrize("code", sorted(Code))
async def test_only_what_can_never_succeed_is_kept(code: Code) -> None:
    """A request that may be sent again is answered, and no more."""
    async with running() as bench:
        await bench.answer(failed(code))
        records = await bench.responses()
        letters = await bench.records(DEAD_LETTERS.topic)

    assert [status(record) for record in records] == [code]
    assert len(letters) == code.is_dead_letter


async def test_an_answer_that_does_not_fit_becomes_the_error_that_says_so() -> None:
    """The others of its chunk are sent."""
    large, good = answerable(), answerable()
    large.outputs = make_request(inputs={"y": np.zeros((1, 2000), np.float32)}).inputs
    async with running() as bench:
        await bench.answer(large, good)
        records = await bench.responses()

    assert sorted(map(status, records)) == ["TOO_LARGE", "ok"]
    assert counted(bench.instruments, "unanswered_total") == 0


async def test_an_error_that_does_not_fit_goes_without_the_callers_headers() -> None:
    """A key or headers that fill a record must not keep an answer from being given."""
    request = answerable(long=b"x" * LIMIT_BYTES)
    async with running() as bench:
        await bench.answer(request)
        (record,) = await bench.responses()

    assert status(record) == "TOO_LARGE"
    assert record.key is None
    assert [name for name, _ in record.headers] == ["content-type", "x-status", "x-request"]


async def test_a_dead_letter_that_does_not_fit_is_counted() -> None:
    """The answer is given all the same."""
    request = failed()
    request.value = b"x" * LIMIT_BYTES
    async with running() as bench:
        await bench.answer(request)
        assert [status(record) for record in await bench.responses()] == ["MODEL_FAILED"]
        assert counted(bench.instruments, "unkept_dead_letters_total") == 1


async def test_a_void_request_gets_no_answer_here() -> None:
    """Its partition's new owner gives it."""
    void, good = answerable(), answerable()
    receipt_of(void).void = True
    async with running() as bench:
        await bench.answer(void, good)
        assert len(await bench.responses()) == 1
        assert counted(bench.instruments, "void_total") == 1


async def origins_of(log: MemoryLog) -> Origins:
    """Origins of an assigned partition of which nothing is answered."""
    await log.create_topics(
        [TopicInfo("headrace.requests", 1, {}), TopicInfo("headrace.results", 1, {})],
        replication_factor=1,
    )
    origins = Origins("headrace.requests")
    listener = RecordingListener()
    async with log.member("headrace", ["headrace.results"], listener) as member:
        await eventually(lambda: listener.held)
        await origins.assigned(member, [0])
    return origins


async def test_a_result_that_comes_twice_is_answered_once() -> None:
    """At once, and after the answer; both records of `results` are settled."""
    log = MemoryLog()
    origins = await origins_of(log)
    requests = [answerable() for _ in range(3)]
    for request in requests:
        request.offset, request.previous = 0, -1
    async with running(origins, log) as bench:
        await bench.answer(*requests[:2])
        await bench.answer(requests[2])
        assert len(await bench.responses()) == 1
        assert counted(bench.instruments, "duplicates_total") == 2


async def test_nothing_is_settled_before_it_is_acknowledged() -> None:
    """Only what the log has taken may be committed."""
    request = answerable()
    async with running() as bench:
        bench.log.faults.hold_acknowledgements()
        await bench.inlet.send([request])
        await eventually(
            lambda: bench.log._topics.partition(TopicPartition(RESPONSES.topic, 0)).end
        )
        assert not receipt_of(request).settled
        bench.log.faults.release_acknowledgements()
        await eventually(lambda: receipt_of(request).settled)


async def test_an_outage_delays_answers_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent when the broker is back, each once."""
    monkeypatch.setattr(sending, "wait_random_exponential", lambda **_: lambda _: 0.001)
    requests = [answerable() for _ in range(20)]
    async with running() as bench:
        bench.log.faults.take_down()
        await bench.inlet.send(requests[:10])
        await bench.inlet.send(requests[10:])
        bench.log.faults.bring_back()
        await eventually(lambda: all(receipt_of(one).settled for one in requests))
        assert len(await bench.responses()) == 20


async def test_a_target_that_does_not_acknowledge_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many chunks wait for it: its answers stand aside, and go when it is back."""
    monkeypatch.setattr(overlapping, "STALLED_S", 0.02)
    monkeypatch.setattr(sending, "wait_random_exponential", lambda **_: lambda _: 0.01)
    send, leaderless = MemoryProducer.send, True

    async def fail(
        producer: MemoryProducer, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> Sequence[Run]:
        if leaderless and partition.topic == MINE.topic:
            raise LogUnavailable("the partition has no leader")
        return await send(producer, partition, records)

    monkeypatch.setattr(MemoryProducer, "send", fail)
    async with running() as bench:
        stuck = [answerable(kafka_replyTopic=b"headrace.mine") for _ in range(40)]
        for request in stuck:
            await bench.inlet.send([request])
        await bench.answer(*[answerable() for _ in range(10)])
        assert not any(receipt_of(one).settled for one in stuck)

        leaderless = False
        await eventually(lambda: all(receipt_of(one).settled == 1 for one in stuck))
        assert len(await bench.records(MINE.topic)) == 40


async def test_outputs_that_wait_are_charged_to_the_budget() -> None:
    """A broker that is slow to take answers makes reading pause, before memory runs out."""
    ledger = Ledger(Budget(1_000_000), lambda: None)
    assignment = ledger.assign(TopicPartition("headrace.requests", 0), Progress(0))
    request = answerable()
    request.receipt = assignment.admit(0, 10)
    request.outputs = make_request(inputs={"y": np.zeros((1, 500), np.float32)}).inputs
    async with running() as bench:
        bench.log.faults.hold_acknowledgements()
        await bench.inlet.send([request])
        await eventually(lambda: ledger.budget.used_bytes == 2010)
        bench.log.faults.release_acknowledgements()
        await eventually(lambda: not ledger.budget.used_bytes)


async def test_chunks_with_large_outputs_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes are unacknowledged at most, and then the stages before are held up."""
    monkeypatch.setattr(overlapping, "UNACKNOWLEDGED_BYTES", 3000)
    requests = [answerable() for _ in range(6)]
    for request in requests:
        request.outputs = make_request(inputs={"y": np.zeros((1, 250), np.float32)}).inputs
    async with running() as bench:
        bench.log.faults.hold_acknowledgements()
        async with asyncio.TaskGroup() as tasks:
            sending_all = tasks.create_task(send_singly(bench, requests))
            written = bench.log._topics.partition(TopicPartition(RESPONSES.topic, 0))
            await eventually(lambda: written.end == 3)
            for _ in range(20):
                await asyncio.sleep(0)
            assert written.end == 3
            assert not sending_all.done()
            bench.log.faults.release_acknowledgements()
        await eventually(lambda: all(receipt_of(one).settled for one in requests))


async def send_singly(bench: Bench, requests: list[Request]) -> None:
    """Each in a chunk of its own."""
    for request in requests:
        await bench.inlet.send([request])
