"""The answering step for exactly once: answers that are too large, and steps that are."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from headrace.log.port import NewRecord, TopicInfo
from tests.support.conditions import eventually
from tests.support.services import counted
from tests.support.tuning import QUICK
from tests.support.visible import visible
from tests.unit.services.test_transactional import LIMIT_BYTES, RESPONSES, SOURCE, running

TRANSACTIONAL_ID = "headrace.headrace.requests.0"
ANSWER_BYTES = 1100
"""About as much as an answer with 200 numbers takes."""


@pytest.mark.parametrize("place", [0, 7, 15])
async def test_answer_refused_as_too_large_by_broker_fails_alone(place: int) -> None:
    """The topic's limit was lowered a moment ago: halving finds the one that does not fit."""
    async with running() as bench:
        bench.log.faults.topics.keep_limits_from_producers(RESPONSES.topic)
        requests = [bench.request(size=2000 if each == place else 1) for each in range(16)]
        await bench.incoming.send(requests)
        await bench.acked()
        expected = {each: "TOO_LARGE" if each == place else "ok" for each in range(16)}
        assert await bench.statuses() == expected
        assert len(await visible(bench.log, RESPONSES.topic)) == 16


async def test_oversized_answers_cost_no_producer() -> None:
    """They give way before the transaction begins, with whatever else its topic refuses."""
    async with running() as bench:
        entered = bench.log.faults.transactions.entered_producers(TRANSACTIONAL_ID)
        requests = [
            *[bench.request(size=2000) for _ in range(40)],
            *[bench.request(long=b"x" * LIMIT_BYTES) for _ in range(40)],
            *[bench.request(kafka_replyTopic=b"headrace.compacted") for _ in range(40)],
            *[bench.request() for _ in range(40)],
        ]
        for request in requests[80:120]:
            request.key = None
        for request in requests[:40]:
            request.value = b"x" * LIMIT_BYTES
        await bench.incoming.send(requests)
        await bench.acked()
        statuses = list((await bench.statuses()).values())
        assert Counter(statuses) == {"TOO_LARGE": 80, "INVALID_REQUEST": 40, "ok": 40}
        assert bench.log.faults.transactions.entered_producers(TRANSACTIONAL_ID) == entered
        assert counted(bench.instruments, "dead_letters_dropped_total") == 80


@contextmanager
def no_collector() -> Iterator[None]:
    """Leave reference cycles where they are, as the collector's raised thresholds do for long."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def encoded_answers() -> int:
    """How many records that were to be written are alive."""
    return sum(isinstance(each, NewRecord) for each in gc.get_objects())


@pytest.mark.parametrize("size", [1, 2000])
@pytest.mark.parametrize("knows_limits", [True, False])
async def test_failed_transaction_leaves_no_reference_cycle(size: int, knows_limits: bool) -> None:
    """Neither a time-out nor a refusal leaves a reference cycle that holds what was encoded."""
    async with running() as bench:
        bench.log.faults.transactions.slow_down(0)
        if not knows_limits:
            bench.log.faults.topics.keep_limits_from_producers(RESPONSES.topic)
        with no_collector():
            before = encoded_answers()
            await bench.incoming.send([bench.request(size=size) for _ in range(32)])
            await eventually(lambda: counted(bench.instruments, "transaction_timeouts_total") >= 3)
            bench.tracker.revoke(SOURCE)
            await eventually(lambda: counted(bench.instruments, "revoked_requests_total") == 32)
            assert encoded_answers() == before


@pytest.mark.parametrize("exactly_once", [True, False])
async def test_refused_answers_leave_no_reference_cycle(exactly_once: bool) -> None:
    """Once they were answered in another form, nothing of what was encoded is left."""
    async with running(exactly_once=exactly_once) as bench:
        with no_collector():
            before = encoded_answers()
            await bench.incoming.send([bench.request(size=2000) for _ in range(32)])
            await bench.acked()
            await eventually(lambda: encoded_answers() == before)


async def test_transaction_over_its_time_is_halved() -> None:
    """All requests are answered once where a producer quota lets no larger transaction end."""
    async with running() as bench:
        bench.log.faults.transactions.slow_down(3 * ANSWER_BYTES)
        await bench.incoming.send([bench.request(size=200) for _ in range(64)])
        await bench.acked()
        assert await bench.statuses() == dict.fromkeys(range(64), "ok")
        assert len(await visible(bench.log, RESPONSES.topic)) == 64
        assert counted(bench.instruments, "transaction_timeouts_total") == 5


async def test_transaction_size_that_worked_is_used_again() -> None:
    """A second burst costs no time-out that the first one has paid for."""
    async with running(tuning=replace(QUICK.responder, quick_transaction_share=0.0)) as bench:
        bench.log.faults.transactions.slow_down(3 * ANSWER_BYTES)
        for _ in range(2):
            await bench.incoming.send([bench.request(size=200) for _ in range(64)])
            await bench.acked()
        assert counted(bench.instruments, "transaction_timeouts_total") == 5


async def test_transaction_size_grows_after_quick_transactions() -> None:
    """From two answers at a time to as many as there are."""
    async with running() as bench:
        bench.log.faults.transactions.slow_down(3 * ANSWER_BYTES)
        await bench.incoming.send([bench.request(size=200) for _ in range(64)])
        await bench.acked()
        bench.log.faults.transactions.slow_down(None)
        for _ in range(8):
            await bench.incoming.send([bench.request(size=200) for _ in range(64)])
            await bench.acked()
        sealed_before = counted(bench.instruments, "commit_duration_seconds_count")
        await bench.incoming.send([bench.request(size=200) for _ in range(64)])
        await bench.acked()
        assert counted(bench.instruments, "commit_duration_seconds_count") == sealed_before + 1


async def test_slow_reply_topic_shrinks_transactions() -> None:
    """A time-out could as well be that of a lost partition: both give all of their answers."""
    tuning = replace(
        QUICK.responder,
        stalled_target_retry_s=0.01,
        max_stalled_target_retry_s=0.02,
        waiting_answers_retry_s=0.01,
    )
    async with running(tuning=tuning) as bench:
        for name in ("headrace.mine", "headrace.yours"):
            await bench.log.create_topics([TopicInfo(name, 1, {})], replication_factor=1)
        bench.log.faults.transactions.slow_down(3 * ANSWER_BYTES)
        replies = [b"headrace.mine", b"headrace.yours", RESPONSES.topic.encode()] * 20
        await bench.incoming.send(
            [bench.request(size=200, kafka_replyTopic=each) for each in replies]
        )
        await bench.acked()
        for topic in ("headrace.mine", "headrace.yours", RESPONSES.topic):
            assert len(await visible(bench.log, topic)) == 20
