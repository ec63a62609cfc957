"""The responder: one answer for each request, where it was asked for, and dead letters."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.source_offsets import SourceOffsets
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.protocol.codec import Answer, decode_response
from headrace.services.responder.ordered import OrderBy
from tests.support.answering import (
    DEAD_LETTERS,
    LIMIT_BYTES,
    MINE,
    RESPONSES,
    answerable,
    error_of,
    failed,
    running,
    status,
)
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener
from tests.support.services import counted
from tests.support.tuning import QUICK
from tests.support.work import NOW_US, make_request, receipt_of


async def test_answer_carries_outputs_and_identity_of_request() -> None:
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


async def test_answer_goes_to_reply_topic_and_partition() -> None:
    """The partition is the one asked for, or the request's own modulo the topic's count."""
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
        ({"kafka_replyTopic": b"elsewhere"}, r"a match of headrace\..* (topics.reply_allowed)"),
        ({"kafka_replyTopic": b"headrace.requests"}, "which is ours"),
        ({"kafka_replyTopic": b"headrace.missing"}, "a topic that exists"),
        (
            {"kafka_replyTopic": b"headrace.mine", "kafka_replyPartition": struct.pack(">i", 3)},
            "expected 0 to 2",
        ),
        ({"kafka_replyTopic": b"headrace.compacted"}, "expected a key"),
    ],
)
async def test_answer_for_unusable_reply_topic_becomes_error_on_responses(
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


async def test_deleted_reply_topic_does_not_end_process() -> None:
    """While its partitions are remembered the log refuses it: the answer goes to `responses`."""
    async with running() as bench:
        await bench.answer(answerable(kafka_replyTopic=b"headrace.mine"))
        bench.log.faults.topics.delete(MINE.topic)
        await bench.answer(answerable(kafka_replyTopic=b"headrace.mine"))
        records = await bench.responses()

    assert [status(record) for record in records] == ["INVALID_REQUEST"]


async def test_answer_goes_to_reply_topic_made_anew_with_fewer_partitions() -> None:
    """While its former partitions are remembered, as before the first answer."""
    first, second = (answerable(kafka_replyTopic=b"headrace.mine") for _ in range(2))
    first.partition = second.partition = 2
    async with running() as bench:
        await bench.answer(first)
        bench.log.faults.topics.delete(MINE.topic)
        await bench.log.create_topics([TopicInfo(MINE.topic, 1, {})], replication_factor=1)
        await bench.answer(second)
        records = await bench.records(MINE.topic)

    assert [(record.partition, status(record)) for record in records] == [(0, "ok")]


async def test_answer_goes_to_partition_added_to_responses_meanwhile() -> None:
    """A client or gateway that starts later may have chosen it."""
    asked = {"kafka_replyTopic": RESPONSES.topic.encode()}
    added, absent = (
        answerable(**asked, kafka_replyPartition=struct.pack(">i", number)) for number in (2, 3)
    )
    async with running() as bench:
        bench.log.faults.topics.delete(RESPONSES.topic)
        await bench.log.create_topics([TopicInfo(RESPONSES.topic, 3, {})], replication_factor=1)
        await bench.answer(added, absent)
        records = await bench.responses()

    assert [(record.partition, status(record)) for record in records] == [
        (0, "INVALID_REQUEST"),
        (2, "ok"),
    ]
    assert "expected 0 to 2" in error_of(records[0])


async def test_reply_topic_lookup_delays_no_other_answers() -> None:
    """While one topic's partitions are asked for, all other answers go out."""
    waiting, good = answerable(kafka_replyTopic=b"headrace.mine"), answerable()
    async with running() as bench:
        bench.log.faults.topics.hold_descriptions(MINE.topic)
        await bench.incoming.send([waiting, good])
        await eventually(lambda: receipt_of(good).acked)
        assert not receipt_of(waiting).acked
        bench.log.faults.topics.release_descriptions(MINE.topic)
        await eventually(lambda: receipt_of(waiting).acked)
        records = await bench.records(MINE.topic)

    assert [status(record) for record in records] == ["ok"]


async def test_answer_revoked_during_reply_topic_lookup_is_dropped() -> None:
    """Its partition's new owner gives it, and knows nothing of this one."""
    request = answerable(kafka_replyTopic=MINE.topic.encode())
    async with running(tuning=QUICK.responder) as bench:
        bench.log.faults.brokers.take_down()
        await bench.incoming.send([request])
        for _ in range(5):
            await asyncio.sleep(0)
        receipt_of(request).revoked = True
        bench.log.faults.brokers.bring_back()
        await eventually(lambda: receipt_of(request).acked)
        assert await bench.records(MINE.topic) == []
        assert counted(bench.instruments, "revoked_requests_total") == 1


async def test_late_answer_becomes_deadline_error() -> None:
    """Outputs that come after the deadline are not sent as if they were in time."""
    request = answerable(x_deadline_ms=str(NOW_US // 1000 + 5).encode())
    async with running() as bench:
        bench.clock.now_us += 5000
        await bench.answer(request)
        (record,) = await bench.responses()

    assert status(record) == "DEADLINE_EXCEEDED"
    assert "responder" in error_of(record)


async def test_final_failure_becomes_dead_letter_unchanged() -> None:
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
async def test_retriable_failure_makes_no_dead_letter(code: Code) -> None:
    """A request that may be sent again is answered, and no more."""
    async with running() as bench:
        await bench.answer(failed(code))
        records = await bench.responses()
        letters = await bench.records(DEAD_LETTERS.topic)

    assert [status(record) for record in records] == [code]
    assert len(letters) == code.is_dead_letter


async def test_oversized_answer_becomes_error() -> None:
    """The others of its chunk are sent."""
    large, good = answerable(), answerable()
    large.outputs = make_request(inputs={"y": np.zeros((1, 2000), np.float32)}).inputs
    async with running() as bench:
        await bench.answer(large, good)
        records = await bench.responses()

    assert sorted(map(status, records)) == ["TOO_LARGE", "ok"]
    assert counted(bench.instruments, "unanswerable_requests_total") == 0


async def test_oversized_error_is_sent_without_headers_of_caller() -> None:
    """A key or headers that fill a record must not keep an answer from being given."""
    request = answerable(long=b"x" * LIMIT_BYTES)
    async with running() as bench:
        await bench.answer(request)
        (record,) = await bench.responses()

    assert status(record) == "TOO_LARGE"
    assert record.key is None
    assert [name for name, _ in record.headers] == ["content-type", "x-status", "x-request"]


async def test_oversized_dead_letter_is_counted() -> None:
    """The answer is given all the same."""
    request = failed()
    request.value = b"x" * LIMIT_BYTES
    async with running() as bench:
        await bench.answer(request)
        assert [status(record) for record in await bench.responses()] == ["MODEL_FAILED"]
        assert counted(bench.instruments, "dead_letters_dropped_total") == 1


async def test_revoked_request_is_not_answered() -> None:
    """Its partition's new owner gives it."""
    revoked, good = answerable(), answerable()
    receipt_of(revoked).revoked = True
    async with running() as bench:
        await bench.answer(revoked, good)
        assert len(await bench.responses()) == 1
        assert counted(bench.instruments, "revoked_requests_total") == 1


async def origins_of(log: MemoryLog) -> SourceOffsets:
    """Origins of an assigned partition of which nothing is answered."""
    await log.create_topics(
        [TopicInfo("headrace.requests", 1, {}), TopicInfo("headrace.results", 1, {})],
        replication_factor=1,
    )
    source_offsets = SourceOffsets(log, "headrace.requests")
    listener = RecordingListener()
    async with log.member("headrace", ["headrace.results"], listener) as member:
        await eventually(lambda: listener.held)
        await source_offsets.on_assigned(member, [0])
    return source_offsets


async def test_repeated_result_is_answered_once() -> None:
    """At once, and after the answer; both records of `results` are acknowledged."""
    log = MemoryLog()
    source_offsets = await origins_of(log)
    requests = [answerable() for _ in range(3)]
    for request in requests:
        request.offset, request.previous = 0, -1
    async with running(source_offsets, log) as bench:
        await bench.answer(*requests[:2])
        await bench.answer(requests[2])
        assert len(await bench.responses()) == 1
        assert counted(bench.instruments, "duplicate_results_total") == 2


@pytest.mark.parametrize("order", ["none", "partition"])
async def test_deleted_range_with_answered_end_moves_base(
    order: OrderBy,
) -> None:
    """The base moves past the deleted range; otherwise it would wait for it forever."""
    log = MemoryLog()
    source_offsets = await origins_of(log)
    ended, skipped = answerable(), answerable()
    ended.offset, ended.previous = 9, 8
    source_offsets.mark_acked([ended])
    skipped.outputs, skipped.offset, skipped.previous = None, 9, -1
    async with running(source_offsets, log, order) as bench:
        await bench.answer(skipped)
        assert source_offsets.progress(0) == AckedOffsets(10)
        assert await bench.responses() == []


async def test_deleted_range_with_held_end_releases_what_waits_behind_it() -> None:
    """The records before the end are gone, so that nothing else would ever release them."""
    log = MemoryLog()
    source_offsets = await origins_of(log)
    held, following, skipped = (answerable() for _ in range(3))
    held.offset, held.previous = 9, 8
    following.offset, following.previous = 10, 9
    skipped.outputs, skipped.offset, skipped.previous = None, 9, -1
    async with running(source_offsets, log, "partition") as bench:
        await bench.incoming.send([following, held])
        await bench.answer(skipped)
        await eventually(lambda: receipt_of(following).acked)
        assert list(map(status, await bench.responses())) == ["ok", "ok"]
        assert source_offsets.progress(0) == AckedOffsets(11)


async def test_record_is_acked_only_after_answer_is_acknowledged() -> None:
    """Only what the log has taken may be committed."""
    request = answerable()
    async with running() as bench:
        bench.log.faults.acknowledgements.hold()
        await bench.incoming.send([request])
        await eventually(
            lambda: bench.log.faults.partitions.end_offset(TopicPartition(RESPONSES.topic, 0))
        )
        assert not receipt_of(request).acked
        bench.log.faults.acknowledgements.release()
        await eventually(lambda: receipt_of(request).acked)


async def test_outage_delays_answers_and_loses_none() -> None:
    """They are sent when the broker is back, each once."""
    requests = [answerable() for _ in range(20)]
    async with running() as bench:
        bench.log.faults.brokers.take_down()
        await bench.incoming.send(requests[:10])
        await bench.incoming.send(requests[10:])
        bench.log.faults.brokers.bring_back()
        await eventually(lambda: all(receipt_of(one).acked for one in requests))
        assert len(await bench.responses()) == 20
