"""The answering step for exactly once: what the log refuses, and what has no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import InFlightTracker
from headrace.delivery.offset_store import OffsetStore
from headrace.delivery.transactions import PartitionTransactions
from headrace.errors import Code
from headrace.log.errors import LogRefused
from headrace.log.memory import MemoryLog
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import Committed, TopicInfo, TopicPartition
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Failure, Request
from headrace.services.responder.ordered import OrderBy
from headrace.services.responder.routing import Routes
from headrace.services.responder.service import Delivery, ResponderService
from headrace.transport.channels import Writer
from headrace.tuning import DeliveryTuning, ResponderTuning
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener
from tests.support.services import StillClock, counted, make_instruments
from tests.support.tuning import QUICK
from tests.support.visible import source_of, status_of, visible
from tests.support.work import NOW_US, make_request

SOURCE = TopicPartition("headrace.requests", 0)
RESPONSES = TopicPartition("headrace.responses", 1)
DEAD_LETTERS = TopicPartition("headrace.dead-letters", 1)
LIMIT_BYTES = 3000
TIGHT = replace(QUICK.delivery, metadata_characters=8)
"""Two ranges fit into the metadata of a commit."""


class TransactionalHarness:
    """A responder that seals, on an embedded log, and the in-flight tracker of its source
    partition.
    """

    incoming: Writer[list[Request]]
    fence: Callable[[], Awaitable[None]]

    def __init__(self, log: MemoryLog, tracker: InFlightTracker) -> None:
        self.log = log
        self.tracker = tracker
        self.instruments = make_instruments(StillClock())
        self._assignment = tracker.assign(SOURCE, AckedOffsets(0))

    def request(self, value: float = 1.5, size: int = 1, **headers: bytes) -> Request:
        """The next record of the source, with outputs."""
        envelope = parse_envelope(list(headers.items()), NOW_US // 1000, 0)
        request = make_request(inputs={"y": np.full((1, size), value, np.float32)})
        request.envelope, request.headers = envelope, list(headers.items())
        ack_handle = self._assignment.admit(self._assignment.last_delivered + 1, 10)
        request.ack_handle, request.offset, request.previous = (
            ack_handle,
            ack_handle.offset,
            ack_handle.previous,
        )
        request.outputs, request.inputs = request.inputs, ()
        return request

    @property
    def in_flight(self) -> int:
        """How many requests are not acknowledged."""
        return self._assignment.in_flight

    @property
    def answering(self) -> int:
        """How many of them have ended, and wait for their transaction or are in it."""
        return self._assignment.answering

    async def acked(self) -> None:
        """Wait until nothing is in flight."""
        await eventually(lambda: not self._assignment.in_flight, deadline_s=10)

    async def statuses(self, topic: str = RESPONSES.topic) -> dict[int, str]:
        """The visible answers of a topic: the status, by source offset."""
        return {source_of(each)[1]: status_of(each) for each in await visible(self.log, topic)}

    async def committed(self) -> AckedOffsets:
        """Return the offsets that the group has committed."""
        found = (await self.log.committed("headrace", [SOURCE]))[SOURCE]
        return AckedOffsets(0) if found is None else AckedOffsets.from_committed(found)


@asynccontextmanager
async def running(
    order_by: OrderBy = "none",
    log: MemoryLog | None = None,
    *,
    exactly_once: bool = True,
    tuning: ResponderTuning = QUICK.responder,
    offsets_tuning: DeliveryTuning = QUICK.delivery,
) -> AsyncIterator[TransactionalHarness]:
    """Run a responder; at the end of the context everything must be acknowledged."""
    log = log or MemoryLog()
    limit = {"max.message.bytes": str(LIMIT_BYTES)}
    await log.create_topics(
        [
            TopicInfo(SOURCE.topic, 1, {}),
            TopicInfo(RESPONSES.topic, 1, limit),
            TopicInfo(DEAD_LETTERS.topic, 1, limit),
            TopicInfo("headrace.compacted", 1, {"cleanup.policy": "compact"}),
        ],
        replication_factor=1,
    )
    tracker = InFlightTracker(Budget(1_000_000), lambda: None)
    bench = TransactionalHarness(log, tracker)
    offset_store = OffsetStore(tracker, None, SOURCE.topic, SOURCE.topic, offsets_tuning)
    metrics = bench.instruments.metrics
    seals = PartitionTransactions(
        log, offset_store, "headrace", metrics, lambda: tracker.revoke(SOURCE), offsets_tuning
    )
    routes = Routes(make_settings({}), RESPONSES, DEAD_LETTERS)
    listener = RecordingListener()
    async with log.member("headrace", [SOURCE.topic], listener) as member, log.producer() as plain:
        await eventually(lambda: listener.held)
        bench.fence = partial(seals.fence, member, [0])
        await bench.fence()
        delivery = Delivery(offset_store, None, seals if exactly_once else None, order_by)
        responder = ResponderService(plain, routes, delivery, bench.instruments, tuning)
        bench.incoming = responder.writer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(responder.run())
            await asyncio.sleep(0)
            yield bench
            bench.incoming.close()
        await seals.release()


@pytest.mark.parametrize("place", [0, 7, 15])
async def test_oversized_answer_fails_alone_in_transaction(place: int) -> None:
    """The transaction is taken apart; all others of it go as they are, each once."""
    async with running() as bench:
        requests = [bench.request(size=2000 if each == place else 1) for each in range(16)]
        await bench.incoming.send(requests)
        await bench.acked()
        expected = {each: "TOO_LARGE" if each == place else "ok" for each in range(16)}
        assert await bench.statuses() == expected
        assert len(await visible(bench.log, RESPONSES.topic)) == 16
        assert await bench.committed() == AckedOffsets(16)


async def test_request_of_partition_that_is_fenced_again_is_answered() -> None:
    """As when a rebalance comes while a partition that lost records is assigned again."""
    async with running() as bench:
        transactions = bench.log.faults.transactions
        transactions.hold()
        await bench.incoming.send([bench.request()])
        await eventually(transactions.open)
        await bench.fence()
        transactions.release()
        await bench.acked()
        assert await bench.statuses() == {0: "ok"}
        assert await bench.committed() == AckedOffsets(1)


async def test_requests_that_wait_for_transaction_are_counted_until_it_ends() -> None:
    """As ended ones: reading ahead of them takes no time from others."""
    async with running() as bench:
        transactions = bench.log.faults.transactions
        transactions.hold()
        await bench.incoming.send([bench.request()])
        await eventually(transactions.open)
        await bench.incoming.send([bench.request(), bench.request()])
        assert bench.answering == 3
        transactions.release()
        await bench.acked()
        await eventually(lambda: not bench.answering)


@pytest.mark.parametrize("topic", ["headrace.compacted", "headrace.gone"])
async def test_answer_refused_by_reply_topic_goes_to_responses(topic: str) -> None:
    """A compacted topic wants a key; one that was deleted meanwhile takes nothing."""
    async with running() as bench:
        if topic == "headrace.gone":
            await bench.log.create_topics([TopicInfo(topic, 1, {})], replication_factor=1)
            await bench.incoming.send([bench.request(kafka_replyTopic=topic.encode())])
            await bench.acked()
            bench.log.faults.topics.delete(topic)
        requests = [
            bench.request(),
            bench.request(kafka_replyTopic=topic.encode()),
            bench.request(),
        ]
        requests[1].key = None
        await bench.incoming.send(requests)
        await bench.acked()
        offsets = [request.offset for request in requests]
        assert await bench.statuses() == dict(
            zip(offsets, ["ok", "INVALID_REQUEST", "ok"], strict=True)
        )


async def test_forbidden_reply_topic_costs_one_producer() -> None:
    """A caller that names a forbidden topic again and again does not slow down the others."""
    transactional_id = "headrace.headrace.requests.0"
    async with running() as bench:
        await bench.log.create_topics([TopicInfo("headrace.mine", 1, {})], replication_factor=1)
        bench.log.faults.topics.forbid("headrace.mine")
        entered = bench.log.faults.transactions.entered_producers(transactional_id)
        for _ in range(10):
            requests = [bench.request(kafka_replyTopic=b"headrace.mine"), bench.request()]
            await bench.incoming.send(requests)
            await bench.acked()
        assert list((await bench.statuses()).values()) == ["INVALID_REQUEST", "ok"] * 10
        assert bench.log.faults.transactions.entered_producers(transactional_id) == entered + 1


async def test_oversized_error_is_sent_without_headers() -> None:
    """A key or headers that fill a record must not keep an answer from being given."""
    async with running() as bench:
        request = bench.request(long=b"x" * LIMIT_BYTES)
        await bench.incoming.send([request])
        await bench.acked()
        (record,) = await visible(bench.log, RESPONSES.topic)

    assert status_of(record) == "TOO_LARGE"
    assert record.key is None
    assert counted(bench.instruments, "dead_letters_dropped_total") == 1


async def test_dead_letter_is_in_transaction_of_its_answer() -> None:
    """In the same transaction; one that does not fit is left out and counted."""
    async with running() as bench:
        small, large = bench.request(), bench.request()
        for request in (small, large):
            request.outputs = None
            request.fail(Failure(Code.MODEL_FAILED, "no", "executor"))
        small.value, large.value = b"kept", b"x" * LIMIT_BYTES
        await bench.incoming.send([small, large])
        await bench.acked()
        assert await bench.statuses() == {0: "MODEL_FAILED", 1: "MODEL_FAILED"}
        assert [each.value for each in await visible(bench.log, DEAD_LETTERS.topic)] == [b"kept"]
        assert counted(bench.instruments, "dead_letters_dropped_total") == 1


async def test_failed_transaction_keeps_answer_whose_dead_letter_does_not_fit() -> None:
    """It was tried without the letter, and is so again: its caller knows it by its headers."""
    async with running() as bench:
        await bench.log.create_topics([TopicInfo("headrace.mine", 1, {})], replication_factor=1)
        request = bench.request(kafka_replyTopic=b"headrace.mine", kafka_correlationId=b"c-1")
        request.outputs, request.value = None, b"x" * LIMIT_BYTES
        request.fail(Failure(Code.MODEL_FAILED, "no", "executor"))
        bench.log.faults.transactions.fail(TransactionFault.UNKNOWN_AND_OPEN)
        await bench.incoming.send([request])
        await bench.acked()
        (record,) = await visible(bench.log, "headrace.mine")

    assert ("kafka_correlationId", b"c-1") in list(record.headers)
    assert counted(bench.instruments, "dead_letters_dropped_total") == 1


async def test_answer_too_large_in_every_form_is_dropped_and_committed() -> None:
    """The partition goes on without it."""
    async with running() as bench:
        await bench.log.create_topics(
            [TopicInfo("headrace.tiny", 1, {"max.message.bytes": "120"})], replication_factor=1
        )
        await bench.incoming.send(
            [bench.request(kafka_replyTopic=b"headrace.tiny"), bench.request()]
        )
        await bench.acked()
        assert await bench.statuses() == {1: "ok"}
        assert await bench.committed() == AckedOffsets(2)
        assert counted(bench.instruments, "unanswerable_requests_total") == 1


async def test_permanent_refusal_by_responses_ends_process() -> None:
    """A topic of ours that takes nothing is for a person to fix."""
    with pytest.raises(ExceptionGroup) as ended:
        await answer_where_responses_are_forbidden()
    assert ended.group_contains(LogRefused)


async def answer_where_responses_are_forbidden() -> None:
    """One answer, which nobody takes."""
    async with running() as bench:
        bench.log.faults.topics.forbid(RESPONSES.topic)
        await bench.incoming.send([bench.request()])
        await bench.acked()


async def test_answers_whose_offsets_do_not_fit_metadata_wait() -> None:
    """Unsealed, until lower ones make room; nothing that is visible is missing in the commit."""
    async with running(offsets_tuning=TIGHT) as bench:
        requests = [bench.request() for _ in range(80)]
        await bench.incoming.send(requests[1::2])
        await eventually(lambda: bench.tracker.in_flight() < 80)
        for _ in range(10):
            await asyncio.sleep(0)
        seen = await bench.statuses()
        assert 0 < len(seen) < 40
        committed = await bench.committed()
        assert [each for each in range(80) if each in committed] == sorted(seen)

        await bench.incoming.send(requests[0::2])
        await bench.acked()
        assert await bench.statuses() == dict.fromkeys(range(80), "ok")
        assert await bench.committed() == AckedOffsets(80)


async def test_lost_partition_writes_no_answer_and_frees_its_bytes() -> None:
    """Requests that wait for a transaction are revoked, and their bytes are freed."""
    async with running() as bench:
        bench.log.faults.transactions.hold()
        await bench.incoming.send([bench.request() for _ in range(10)])
        await eventually(bench.log.faults.transactions.open)
        await bench.incoming.send([bench.request() for _ in range(10)])
        (member,) = bench.log.faults.groups.members("headrace")
        bench.log.faults.groups.expire_session("headrace", member, noticed=False)
        await bench.log.transactional_producer(
            "headrace.headrace.requests.0", "headrace"
        ).__aenter__()
        bench.log.faults.transactions.release()
        await eventually(lambda: not bench.tracker.budget.used_bytes)
        assert await bench.statuses() == {}
        assert counted(bench.instruments, "revoked_requests_total") == 20


async def offsets_in_order(bench: TransactionalHarness) -> Sequence[int]:
    """Return the source offsets of the visible answers, in the order of the log."""
    return [source_of(each)[1] for each in await visible(bench.log, RESPONSES.topic)]


@pytest.mark.parametrize("exactly_once", [True, False])
async def test_transactional_answers_in_order_do_not_overtake(exactly_once: bool) -> None:
    """Order holds also when a transaction is split, or an answer is refused."""
    async with running("partition", exactly_once=exactly_once) as bench:
        requests = [bench.request(size=2000 if each % 5 == 3 else 1) for each in range(20)]
        for request in reversed(requests):
            await bench.incoming.send([request])
        await bench.acked()
        assert await offsets_in_order(bench) == list(range(20))


@pytest.mark.parametrize("exactly_once", [True, False])
@pytest.mark.parametrize("topic", ["headrace.compacted", "headrace.forbidden"])
async def test_answers_in_order_that_reply_topic_refuses_are_not_overtaken(
    topic: str, exactly_once: bool
) -> None:
    """They go to `responses`, each in its place among the others there."""
    async with running("partition", exactly_once=exactly_once) as bench:
        await bench.log.create_topics(
            [TopicInfo("headrace.forbidden", 1, {})], replication_factor=1
        )
        bench.log.faults.topics.forbid("headrace.forbidden")
        requests = [
            bench.request(kafka_replyTopic=topic.encode()) if each % 3 == 1 else bench.request()
            for each in range(10)
        ]
        for request in requests[1::3]:
            request.key = None
        for request in reversed(requests):
            await bench.incoming.send([request])
        await bench.acked()
        assert await offsets_in_order(bench) == list(range(10))


async def test_transaction_is_limited_to_one_encoded_chunk() -> None:
    """Other answers go with the next transaction; the committed offset shows the progress."""
    async with running(tuning=replace(QUICK.responder, max_step_answers=5)) as bench:
        bench.log.faults.transactions.hold()
        await bench.incoming.send([bench.request() for _ in range(12)])
        await eventually(bench.log.faults.transactions.open)
        (offsets,) = bench.log.faults.transactions.open().values()
        assert offsets == {SOURCE: Committed(5)}
        bench.log.faults.transactions.release()
        await bench.acked()
        assert await bench.statuses() == dict.fromkeys(range(12), "ok")


async def test_chunk_divided_between_transactions_releases_its_bytes() -> None:
    """Without room for a queued answer, the next chunk is taken only once all is released."""
    tuning = replace(QUICK.responder, max_step_answers=5, max_queued_answer_bytes=0)
    async with running(tuning=tuning) as bench:
        for _ in range(2):
            await bench.incoming.send([bench.request(size=each) for each in range(1, 13)])
            await bench.acked()
        assert await bench.statuses() == dict.fromkeys(range(24), "ok")
