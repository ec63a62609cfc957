"""Topics in the place of channels: what goes in comes out, and what does not fit is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.crash_isolation.isolation import is_isolated
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.errors import Code, Rejected
from headrace.log.errors import LogRefused
from headrace.log.memory import MemoryLog
from headrace.log.port import Committed, NewRecord, Producer, SentBatch, TopicInfo, TopicPartition
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import decode_items, encode_items, encode_results, refer_all_to_source
from headrace.protocol.messages import Batch, Envelope, Failure, Request
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage
from headrace.transport.batch_io import BatchReceiver, BatchWriter
from headrace.transport.shared_values import SharedValuesReader, SharedValuesWriter
from headrace.transport.topic_io import (
    item_receiver,
    item_sender,
    refuse_oversized,
    result_receiver,
    result_sender,
)
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.logs import write_to
from tests.support.work import Tray, make_request, receipt_of, requests_alive

TOPIC = "topic"
PARTITION = TopicPartition(TOPIC, 0)
PIXELS = {"pixels": np.arange(64, dtype=np.float32).reshape(1, 64)}


async def make_log(max_message_bytes: int = 1_000_000) -> MemoryLog:
    """A log with the topic, of two partitions."""
    log = MemoryLog()
    config = {"max.message.bytes": str(max_message_bytes)}
    await log.create_topics([TopicInfo(TOPIC, 2, config)], replication_factor=1)
    return log


@asynccontextmanager
async def reading(
    log: MemoryLog, suspects: int = 0, model_share: float = 1.0
) -> AsyncIterator[Source]:
    """A source of the topic that runs until the end of the context.

    Args:
        log: with the topic.
        suspects: number of records of the first partition that are to run alone, since earlier
            processes that ran them ended uncleanly.
        model_share: part of the budget that one model may hold.
    """
    settings = SourceSettings(
        TOPIC,
        "group",
        "group",
        True,
        1_000_000,
        5.0,
        model_share=model_share,
        max_attempts=3 if suspects else 0,
        runs=True,
    )
    if suspects:
        marker = CrashMarker(is_open=True, stop=suspects, ends=2, suspects=((0, suspects),))
        await CrashMarkers(log, "group").write({TopicPartition(TOPIC, 0): marker}, NOBODY)
    source = Source(log, settings, Metrics(CollectorRegistry()))
    async with asyncio.TaskGroup() as tasks, source:
        running = tasks.create_task(source.run())
        await source.assigned.wait()
        yield source
        source.stop_reading()
        await source.close_down(5)
        await running


async def written(log: MemoryLog, make_sender: Callable[..., Any], *requests: Request) -> None:
    """Write requests through a sender, and close it."""
    async with log.producer() as producer, asyncio.TaskGroup() as tasks:
        sender = make_sender(producer, TOPIC)
        tasks.create_task(sender.run())
        await asyncio.sleep(0)
        writer = sender.writer()
        await writer.send(list(requests))
        writer.close()


async def received(source: Source, make_receiver: Any, count: int) -> list[Request]:
    """The first requests that come, by offset."""
    found: list[Request] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await make_receiver(source).receive()
    return sorted(found, key=lambda request: request.offset)


async def test_items_survive_topic() -> None:
    """Origin, model, inputs and headers; the sender's ack handles are acknowledged once
    acknowledged.
    """
    log = await make_log()
    sent = [make_request(inputs=PIXELS, deadline_ms=number) for number in range(3)]
    sent[1].partition = 1

    await written(log, lambda producer, topic: item_sender(producer, topic, Tray()), *sent)
    async with reading(log) as source:
        got = await received(source, lambda of: item_receiver(of, Tray()), 3)
        for request in got:
            request.ack_handle.ack()

    assert [receipt_of(one).acked for one in sent] == [1, 1, 1]
    for before, after in zip(sent, got, strict=True):
        assert (after.partition, after.offset) == (before.partition, before.offset)
        assert (after.previous, after.timestamp_ms) == (before.previous, before.timestamp_ms)
        assert (after.model, after.version, after.rows) == ("digits", "1", 1)
        assert after.envelope.deadline_ms == before.envelope.deadline_ms
        after.restore()
        assert bytes(after.inputs[0].data) == PIXELS["pixels"].tobytes()


async def test_results_survive_topic() -> None:
    """Outputs of one, the failure of another, with its value for the dead letter."""
    log = await make_log()
    done, failed = make_request(inputs=PIXELS), make_request()
    done.outputs, done.inputs = done.inputs, ()
    failed.fail(Failure(Code.MODEL_FAILED, "no", "executor", 5))

    await written(log, result_sender, done, failed)
    async with reading(log) as source:
        first, second = await received(source, result_receiver, 2)
        first.ack_handle.ack()
        second.ack_handle.ack()

    assert first.outputs is not None
    assert bytes(first.outputs[0].data) == PIXELS["pixels"].tobytes()
    assert first.value is None
    assert second.failure == failed.failure
    assert bytes(second.value or b"") == b"value"


@pytest.mark.parametrize("make_receiver", [lambda of: item_receiver(of, Tray()), result_receiver])
@pytest.mark.parametrize(
    "fault", [("partition", 99), ("previous", 1 << 40), ("previous", -2), ("offset", 1 << 63)]
)
async def test_record_of_impossible_origin_is_dropped(
    make_receiver: Any, fault: tuple[str, int]
) -> None:
    """The next topic may not have that partition or offset, and no progress follows from a range
    that ends before it begins: each would end a process.
    """
    log = await make_log()
    strange, good = make_request(inputs=PIXELS), make_request(inputs=PIXELS)
    setattr(strange, *fault)
    encode = encode_results if make_receiver is result_receiver else encode_items
    for request in (strange, good):
        if encode is encode_results:
            request.outputs = request.inputs
        await write_to(log, PARTITION, encode([request]))

    async with reading(log) as source:
        (got,) = await received(source, make_receiver, 1)
        got.ack_handle.ack()
        await eventually(lambda: is_committed(log, 2))

    assert got.offset == good.offset


@pytest.mark.parametrize("part", ["key", "header"])
async def test_received_items_are_charged_for_keys_and_headers(part: str) -> None:
    """They lie in the record's value, and decoded a second time beside it."""
    log = await make_log()
    sent = make_request(inputs=PIXELS)
    if part == "key":
        sent.key = b"x" * 50_000
    else:
        sent.headers = [("name", b"x" * 50_000)]

    await written(log, lambda producer, topic: item_sender(producer, topic, Tray()), sent)
    async with reading(log) as source:
        (got,) = await received(source, lambda of: item_receiver(of, Tray()), 1)
        charged_bytes = source.snapshot().in_flight_bytes
        got.ack_handle.ack()

    assert charged_bytes >= 2 * 50_000


async def test_oversized_item_becomes_error() -> None:
    """It becomes `TOO_LARGE`, its value kept for the dead letter, its ack handle not yet
    acknowledged.
    """
    log = await make_log(max_message_bytes=2000)
    small, large = make_request(inputs=PIXELS), make_request()
    large.value = b"x" * 5000
    refused = Tray()

    await written(log, lambda producer, topic: item_sender(producer, topic, refused), small, large)

    assert refused.requests == [large]
    assert large.failure is not None
    assert (large.failure.code, large.failure.stage) == (Code.TOO_LARGE, Stage.INGEST)
    assert large.value == b"x" * 5000
    assert [receipt_of(small).acked, receipt_of(large).acked] == [1, 0]
    assert refused.closed


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda request: setattr(request, "outputs", request.inputs * 1), ("value", "key")),
        (lambda request: setattr(request, "value", b"x" * 5000), ("key",)),
        (lambda request: setattr(request, "key", b"x" * 5000), ()),
        (lambda request: request.headers.append(("long", b"x" * 5000)), ()),
    ],
    ids=["outputs", "value", "key", "headers"],
)
async def test_oversized_result_is_sent_as_error(
    change: Callable[[Request], None], kept: tuple[str, ...]
) -> None:
    """An error that can still be routed replaces the result, whichever part of it is too large."""
    log = await make_log(max_message_bytes=2000)
    routing = [("kafka_correlationId", b"7"), ("kafka_replyTopic", b"headrace.mine")]
    request = make_request(inputs={"y": np.zeros((1, 1000), np.float32)}, envelope=Envelope())
    request.headers = list(routing)
    change(request)
    if request.outputs is None:
        request.fail(Failure(Code.MODEL_FAILED, "no", "executor"))

    await written(log, result_sender, request)
    async with reading(log) as source:
        (got,) = await received(source, result_receiver, 1)
        got.ack_handle.ack()

    assert got.failure is not None
    assert got.failure.stage == Stage.EXECUTOR
    assert [name for name in ("value", "key") if getattr(got, name) is not None] == list(kept)
    assert [tuple(header) for header in got.headers] == routing
    assert receipt_of(request).acked == 1


def test_intermediate_topic_that_refuses_records_ends_process() -> None:
    """When nothing is left that could go, trying again would never end."""
    request = make_request()
    request.headers = [("kafka_correlationId", b"7")]
    for _ in range(4):
        refuse_oversized(request, "results", Stage.EXECUTOR)

    with pytest.raises(LogRefused, match=r"results: expected max\.message\.bytes"):
        refuse_oversized(request, "results", Stage.EXECUTOR)


class HeldProducer:
    """Takes runs, and acknowledges them when it is told to."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        self._held: list[asyncio.Future[None]] = []

    async def send(
        self, partition: TopicPartition, records: Sequence[NewRecord]
    ) -> Sequence[SentBatch]:
        self.runs.append((partition.partition, len(records)))
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.append(acknowledged)
        return [SentBatch(len(records), acknowledged)]

    def acknowledge(self) -> None:
        """All that was taken."""
        held, self._held = self._held, []
        for each in held:
            each.set_result(None)


async def test_items_arriving_during_write_are_written_together() -> None:
    """They are written once the write is acknowledged; other partitions do not wait for it."""
    producer = HeldProducer()
    sender = result_sender(cast(Producer, producer), TOPIC)
    writer = sender.writer()
    other = make_request()
    other.partition = 1
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sender.run())
        await asyncio.sleep(0)
        await writer.send([make_request()])
        await eventually(lambda: producer.runs == [(0, 1)])
        await writer.send([make_request(), make_request()])
        await writer.send([make_request(), other])
        await eventually(lambda: len(producer.runs) == 2)
        producer.acknowledge()
        await eventually(lambda: len(producer.runs) == 3)
        producer.acknowledge()
        writer.close()

    assert producer.runs == [(0, 1), (1, 1), (0, 1)]  # the last record holds three requests


async def test_revoked_requests_are_not_written() -> None:
    """Their partition is another process's; only the budget gets its bytes back. They count."""
    log = await make_log()
    revoked = make_request()
    receipt_of(revoked).revoked = True
    metrics = Metrics(CollectorRegistry())

    await written(log, lambda producer, topic: result_sender(producer, topic, metrics), revoked)

    assert receipt_of(revoked).acked == 1
    assert metrics.registry.get_sample_value("headrace_revoked_requests_total") == 1
    async with log.reader([TopicPartition(TOPIC, 0)]) as reader:
        assert await reader.end_offsets([TopicPartition(TOPIC, 0)]) == {TopicPartition(TOPIC, 0): 0}


async def test_foreign_record_between_stages_is_passed_over() -> None:
    """A record that is not a request is acknowledged, and holds up no other."""
    log = await make_log()
    await write_to(log, TopicPartition(TOPIC, 0), b"junk")
    await written(log, result_sender, make_request())

    async with reading(log) as source:
        (got,) = await received(source, result_receiver, 1)
        assert source.tracker.in_flight() == 1
        got.ack_handle.ack()


async def write_batches(log: MemoryLog, *batches: Batch) -> Tray:
    """Write batches, as whole ones where they fit; what was refused."""
    refused = Tray()
    async with log.producer() as producer:
        writer = BatchWriter(producer, TopicPartition(TOPIC, 2), refused)
        for batch in batches:
            await writer.write_all(batch, None)
        writer.close()
    return refused


async def test_unreadable_end_of_items_is_passed_over() -> None:
    """The base goes past it, though nothing comes behind it that would close the gap."""
    log = await make_log()
    log.faults.partitions.write_unreadable(PARTITION, 3)
    async with reading(log) as source:
        receiving = asyncio.create_task(item_receiver(source, Tray()).receive())
        await eventually(lambda: is_committed(log, 3))
    assert await receiving is None


async def test_deferred_items_that_were_deleted_are_passed_over() -> None:
    """They would otherwise count as work for ever, which is never done."""
    log = await make_log()
    item = encode_items([make_request(inputs=PIXELS)])
    await write_to(log, PARTITION, *[item] * 3)
    async with reading(log, model_share=0.001) as source:
        receiver = item_receiver(source, Tray())
        [first] = await received(source, lambda _: receiver, 1)
        receiving = asyncio.create_task(received(source, lambda _: receiver, 1))
        await eventually(lambda: len(source.tracker.assignments[0].deferred) == 2)
        log.faults.partitions.trim(PARTITION, 2)
        first.ack_handle.ack()
        [last] = await receiving
        last.ack_handle.ack()

        await eventually(lambda: is_committed(log, 3))
        assert not source.tracker.assignments[0].deferred


async def is_committed(log: MemoryLog, base: int) -> bool:
    """Whether the group has done with everything in the first partition below an offset."""
    return (await log.committed("group", [PARTITION]))[PARTITION] == Committed(base)


async def test_received_batches_go_to_consumers_of_their_model() -> None:
    """A batch's record is acknowledged when all of its requests are."""
    log = await make_log()
    sent = [make_request(inputs=PIXELS) for _ in range(3)]
    refused = await write_batches(log, Batch("b-1", sent, "full"))

    async with reading(log) as source:
        feed = BatchReceiver(source, Tray(), lambda _name, _version: None)
        running = asyncio.create_task(feed.run())
        batch = await feed.batch_queue.consumer(("digits", "1")).pull()
        assert batch is not None
        in_flight = []
        for request in batch.requests:
            in_flight.append(source.tracker.in_flight())
            request.ack_handle.ack()
        in_flight.append(source.tracker.in_flight())
        source.stop_reading()
        await running

    assert (batch.batch_id, batch.reason, batch.rows) == ("b-1", "full", 3)
    assert [one.offset for one in batch.requests] == [one.offset for one in sent]
    assert in_flight == [1, 1, 1, 0]
    assert [receipt_of(one).acked for one in sent] == [1, 1, 1]
    assert refused.requests == []


@asynccontextmanager
async def receiving_batches(log: MemoryLog) -> AsyncIterator[BatchReceiver]:
    """A receiver of batches that runs until the end of the context."""
    async with reading(log) as source, asyncio.TaskGroup() as tasks:
        receiver = BatchReceiver(source, Tray(), lambda _name, _version: None)
        tasks.create_task(receiver.run(), name="receive")
        yield receiver
        source.stop_reading()


async def answer_first(receiver: BatchReceiver) -> str:
    """Take the next batch, acknowledge its first request, and return its id."""
    batch = await receiver.batch_queue.consumer(("digits", "1")).pull()
    assert batch is not None
    batch.requests[0].ack_handle.ack()
    return batch.batch_id


async def test_waiting_receiver_does_not_keep_last_batch() -> None:
    """A request that was answered is charged to no budget, with all of its inputs."""
    log = await make_log()
    await write_batches(log, Batch("b-1", [make_request(inputs=PIXELS)], "full"))
    before = requests_alive()

    async with receiving_batches(log) as feed:
        await answer_first(feed)
        await eventually(lambda: is_committed(log, 1))

        assert requests_alive() == before


async def test_batch_with_request_before_the_offset_before_it_is_dropped() -> None:
    """Its answer could not be committed, which would end the responder; the next batch runs."""
    log = await make_log()
    strange, good = make_request(inputs=PIXELS), make_request(inputs=PIXELS)
    strange.previous = strange.offset
    for batch_id, request in (("strange", strange), ("good", good)):
        await write_batches(log, Batch(batch_id, [request], "full"))

    async with receiving_batches(log) as feed:
        assert await answer_first(feed) == "good"
        await eventually(lambda: is_committed(log, 2))


async def test_written_batch_keeps_no_record_alive() -> None:
    """The batcher forgets a request only when its deadline has passed; its record is not charged
    any more by then.
    """
    log = await make_log()
    sent = [make_request(inputs=PIXELS) for _ in range(2)]
    requests = decode_items(encode_items(sent), NULL_ACK)
    assert requests[0].chunk is not None

    await write_batches(log, Batch("b-1", requests, "full"))

    assert [request.chunk for request in requests] == [None, None]


async def test_oversized_batch_is_sent_in_parts() -> None:
    """Each request alone; one that does not even fit alone is answered."""
    log = await make_log(max_message_bytes=2000)
    sent = [make_request(inputs=PIXELS) for _ in range(4)]
    sent[2].value = b"x" * 3000
    for request in sent:
        request.headers = [("padding", b"x" * 500)]

    refused = await write_batches(log, Batch("b-1", sent, "full"))

    assert refused.requests == [sent[2]]
    assert sent[2].failure is not None
    assert sent[2].failure.stage == Stage.BATCHER
    assert refused.closed
    assert [receipt_of(one).acked for one in sent] == [1, 1, 0, 1]


async def test_received_batch_of_unknown_model_is_answered() -> None:
    """Its requests fail with what the registry says, instead of waiting for an instance."""
    log = await make_log()
    await write_batches(log, Batch("b-1", [make_request(), make_request()], "full"))
    answers = Tray()

    def check(name: str, version: str) -> None:
        raise Rejected(Code.MODEL_NOT_READY, f"{name}/{version}: loading")

    async with reading(log) as source:
        feed = BatchReceiver(source, answers, check)
        running = asyncio.create_task(feed.run())
        await eventually(lambda: len(answers.requests) == 2)
        for request in answers.requests:
            request.ack_handle.ack()
        source.stop_reading()
        await running

    assert {one.failure.code for one in answers.requests if one.failure} == {Code.MODEL_NOT_READY}
    assert source.tracker.in_flight() == 0


class LoadingVersion:
    """A version that an executor does not have yet.

    Attributes:
        is_loading: it is on its way.
        is_ready: it runs here.
    """

    def __init__(self) -> None:
        self.is_loading, self.is_ready = True, False

    def check(self, name: str, version: str) -> None:
        """Raise `Rejected` while it is not ready."""
        if not self.is_ready:
            raise Rejected(Code.MODEL_NOT_READY, f"{name}/{version}: out of memory")

    def is_on_its_way(self, _name: str, _version: str) -> bool:
        """Whether it is loading."""
        return self.is_loading


@asynccontextmanager
async def receiving(
    version: LoadingVersion, *sent: Request
) -> AsyncIterator[tuple[Source, BatchReceiver, Tray]]:
    """A receiver that has read a batch of a version, and what it has answered."""
    log = await make_log()
    await write_batches(log, Batch("b-1", [*sent], "full"))
    answers = Tray()
    async with reading(log) as source:
        feed = BatchReceiver(source, answers, version.check, is_on_its_way=version.is_on_its_way)
        running = asyncio.create_task(feed.run())
        await eventually(lambda: source.tracker.in_flight() == 1)
        yield source, feed, answers
        source.stop_reading()
        await running


async def test_batch_waits_for_its_version_to_load() -> None:
    """It goes to the consumer as soon as the version is ready, also after reading has stopped."""
    version, sent = LoadingVersion(), [make_request(inputs=PIXELS) for _ in range(2)]

    async with receiving(version, *sent) as (source, feed, answers):
        pulling = asyncio.create_task(feed.batch_queue.consumer(("digits", "1")).pull())
        source.stop_reading()
        version.is_ready = True
        batch = await pulling
        assert batch is not None
        for request in batch.requests:
            request.ack_handle.ack()

    assert [one.offset for one in batch.requests] == [one.offset for one in sent]
    assert answers.requests == []


async def test_waiting_batch_of_version_that_fails_is_answered() -> None:
    """With the reason; another version may run those that name none."""
    version = LoadingVersion()

    async with receiving(version, make_request(), make_request()) as (_, _, answers):
        version.is_loading = False
        await eventually(lambda: len(answers.requests) == 2)
        for request in answers.requests:
            request.ack_handle.ack()

    assert {one.failure for one in answers.requests} == {
        Failure(
            Code.MODEL_NOT_READY,
            "digits/1: out of memory",
            Stage.EXECUTOR,
            TUNING.transport.rebind_retry_after_ms,
        )
    }


async def test_request_that_waits_for_its_version_ends_at_its_deadline() -> None:
    """The others of its batch go on waiting."""
    version = LoadingVersion()
    late = make_request(inputs=PIXELS, deadline_ms=1)
    other = make_request(inputs=PIXELS)

    async with receiving(version, late, other) as (_, feed, answers):
        await eventually(lambda: answers.requests)
        [expired] = answers.requests
        expired.ack_handle.ack()
        version.is_ready = True
        batch = await feed.batch_queue.consumer(("digits", "1")).pull()
        assert batch is not None
        [waited] = batch.requests
        waited.ack_handle.ack()

    assert expired.failure is not None
    assert (expired.failure.code, expired.offset) == (Code.DEADLINE_EXCEEDED, late.offset)
    assert waited.offset == other.offset


async def test_suspect_that_cancels_does_not_run_alone() -> None:
    """No model runs for it, and the batcher would answer it as a request of an unknown model."""
    log = await make_log()
    headers = [("x-cancel", b"requests/0/0")]
    cancelling = make_request("", envelope=Envelope(cancels=("requests", 0, 0)))
    cancelling.headers, cancelling.inputs = headers, ()
    requests = [cancelling, make_request(inputs=PIXELS)]
    await write_to(log, PARTITION, *[encode_items([each]) for each in requests])
    alone: list[bool] = []

    async with reading(log, suspects=2) as source:
        for request in requests:
            (got,) = await received(source, lambda of: item_receiver(of, Tray()), 1)
            assert got.envelope.cancels == request.envelope.cancels
            alone.append(is_isolated(got))
            if is_isolated(got):
                source.quarantine.end_isolation([got])
            got.ack_handle.ack()

    assert alone == [False, True]


async def test_batch_that_runs_alone_waits_for_its_version_to_load() -> None:
    """Its requests run one by one as soon as the version is ready, and then the next record."""
    log = await make_log()
    requests = [make_request(inputs=PIXELS) for _ in range(3)]
    await write_batches(log, Batch("b-1", requests[:2], "full"))
    await write_batches(log, Batch("b-2", requests[2:], "full"))
    version, answers, key = LoadingVersion(), Tray(), ("digits", "1")

    async with reading(log, suspects=2) as source:
        feed = BatchReceiver(source, answers, version.check, is_on_its_way=version.is_on_its_way)
        running = asyncio.create_task(feed.run())
        await eventually(lambda: feed.batch_queue.has_waiting(key))
        version.is_ready = True
        ran: list[int] = []
        while len(ran) < len(requests):
            batch = await feed.batch_queue.consumer(key).pull()
            assert batch is not None
            [request] = batch.requests
            assert is_isolated(request)
            source.quarantine.end_isolation([request])
            request.ack_handle.ack()
            ran.append(request.offset)
        source.stop_reading()
        await running

    assert ran == [one.offset for one in requests]
    assert answers.requests == []


async def test_batches_that_run_alone_are_answered_when_their_version_fails() -> None:
    """The next record is not held up by requests that never run."""
    log = await make_log()
    sent = [make_request(inputs=PIXELS) for _ in range(3)]
    await write_batches(log, Batch("b-1", sent[:2], "full"))
    await write_batches(log, Batch("b-2", sent[2:], "full"))
    version, answers = LoadingVersion(), Tray()

    async with reading(log, suspects=2) as source:
        feed = BatchReceiver(source, answers, version.check, is_on_its_way=version.is_on_its_way)
        running = asyncio.create_task(feed.run())
        await eventually(lambda: feed.batch_queue.has_waiting(("digits", "1")))
        version.is_loading = False
        await eventually(lambda: len(answers.requests) == len(sent))
        for request in answers.requests:
            request.ack_handle.ack()
        source.stop_reading()
        await running

    assert [one.offset for one in answers.requests] == [one.offset for one in sent]
    assert {one.failure.code for one in answers.requests if one.failure} == {Code.MODEL_NOT_READY}


async def test_record_of_many_items_is_done_with_last_of_them() -> None:
    """The record is in flight, and would be read again, until the last of its items is answered."""
    log = await make_log()
    sent = [make_request(inputs=PIXELS) for _ in range(3)]

    await written(log, lambda producer, topic: item_sender(producer, topic, Tray()), *sent)
    async with reading(log) as source:
        got = await received(source, lambda of: item_receiver(of, Tray()), 3)
        left = []
        for request in got:
            left.append(source.snapshot().in_flight_records)
            request.ack_handle.ack()
        left.append(source.snapshot().in_flight_records)

    assert log.faults.partitions.end_offset(TopicPartition(TOPIC, 0)) == 1
    assert left == [1, 1, 1, 0]


async def test_items_that_do_not_fit_together_travel_alone() -> None:
    """None of them is refused, since each fits by itself."""
    log = await make_log(max_message_bytes=2000)
    sent = [make_request(inputs=PIXELS) for _ in range(3)]
    for request in sent:
        request.value = b"x" * 1000
    refused = Tray()

    await written(log, lambda producer, topic: item_sender(producer, topic, refused), *sent)

    assert refused.requests == []
    assert [receipt_of(one).acked for one in sent] == [1, 1, 1]
    assert log.faults.partitions.end_offset(TopicPartition(TOPIC, 0)) == 3


@asynccontextmanager
async def sending(
    directory: Path, unread_values: int, read_values: int = 1, since_s: float = 0.0
) -> AsyncIterator[asyncio.Task[None]]:
    """A task that writes an item behind values in shared memory, each of which takes a sixty-fourth
    of it and was put there so long ago; the item was acknowledged. The sender's pauses never end.
    """
    log = await make_log()
    endless = replace(TUNING.transport, shared_far_ahead_pause_s=3600.0)
    ring_bytes = 1 << 20
    value, metrics = bytes(ring_bytes // 64), Metrics(CollectorRegistry())
    with (
        SharedValuesWriter(directory, ring_bytes, metrics) as shared,
        SharedValuesReader(directory, metrics) as reader,
    ):
        for number in range(read_values + unread_values):
            large = make_request(inputs={"x": np.frombuffer(value, np.uint8).reshape(1, -1)})
            large.value = value
            large.inputs = (large.inputs[0]._replace(data=memoryview(value)),)
            shared.put([large], refer_all_to_source([large], 1), time.monotonic() - since_s)
            if number < read_values:
                assert reader.read([large]) == []
        async with log.producer() as producer, asyncio.TaskGroup() as tasks:
            sender = item_sender(producer, TOPIC, Tray(), None, endless, ring_bytes, shared)
            tasks.create_task(sender.run())
            await asyncio.sleep(0)
            writer = sender.writer()
            item = make_request(inputs=PIXELS)
            task = asyncio.create_task(writer.send([item]))
            await eventually(lambda: bool(receipt_of(item).acked))
            yield task
            task.cancel()
            await asyncio.wait([task])
            writer.close()


async def test_writer_near_readers_of_shared_memory_does_not_pause(tmp_path: Path) -> None:
    """A sixteenth of the memory is room enough for values that are read as they come."""
    async with sending(tmp_path, unread_values=4) as task:
        assert task.done()


async def test_writer_far_ahead_of_readers_of_shared_memory_pauses(tmp_path: Path) -> None:
    """Otherwise values would soon find no room; what was sent is written meanwhile."""
    async with sending(tmp_path, unread_values=5) as task:
        assert not task.done()


async def test_writer_of_shared_memory_that_nobody_reads_does_not_pause(tmp_path: Path) -> None:
    """The executors are on other machines: a pause would gain nothing."""
    async with sending(tmp_path, unread_values=5, read_values=0) as task:
        assert task.done()


async def test_writer_of_shared_memory_that_is_read_no_longer_does_not_pause(
    tmp_path: Path,
) -> None:
    """Its executor has ended, and only values that travel in their records have come since then."""
    since_s = TUNING.transport.shared_abandoned_s
    async with sending(tmp_path, unread_values=5, since_s=since_s) as task:
        assert task.done()
