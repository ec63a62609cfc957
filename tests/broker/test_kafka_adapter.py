"""The Kafka adapter while a real broker stops, comes back, hangs or refuses a request."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import aiokafka
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from aiokafka.errors import RequestTimedOutError
from aiokafka.protocol.metadata import MetadataRequest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headrace.config import KafkaSettings
from headrace.delivery.producing import deliver, deliver_in_order
from headrace.log.errors import Fenced, LogRefused, LogUnavailable, RecordTooLarge
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaMember
from headrace.log.kafka.log import KafkaLog
from headrace.log.kafka.producer import Acknowledgement
from headrace.log.port import Committed, NewRecord, Record, TopicInfo, TopicPartition
from headrace.telemetry.metrics import Metrics
from headrace.tools.local_kafka import LocalKafka
from headrace.tuning import TUNING
from tests.support.aiokafka_tasks import fetching_tasks
from tests.support.broker import running
from tests.support.conditions import eventually
from tests.support.limits import set_limit
from tests.support.logs import PATIENT, RecordingListener, polling, read, values, write, write_to

SMALL_REQUEST_BYTES = 1024 * 1024

CLOSE_S = 7.0
"""Two seconds of courtesy and one for what is cut off, per part; a slow machine doubles it."""

pytestmark = pytest.mark.usefixtures("asyncio_logs_nothing")


@pytest.fixture(scope="module")
def own_kafka(kafka_installed: None) -> Iterator[LocalKafka]:
    """A broker of this file's tests."""
    yield from running(LocalKafka())


@pytest.fixture
def small_requests(kafka_installed: None) -> Iterator[LocalKafka]:
    """A broker that accepts small requests only."""
    limit = {"socket.request.max.bytes": str(SMALL_REQUEST_BYTES)}
    yield from running(LocalKafka(properties=limit))


@pytest.fixture
async def fragile(own_kafka: LocalKafka) -> AsyncIterator[LocalKafka]:
    """A broker that this test may break: it runs, whatever the one before has done to it."""
    if not own_kafka.node().is_running:
        await own_kafka.start_node()
    yield own_kafka
    if own_kafka.node().is_running and _is_held(own_kafka):
        own_kafka.kill_node()  # once resumed it would refuse topics until its heartbeats count


def settings(cluster: LocalKafka, request_timeout_ms: int = 5000) -> KafkaSettings:
    """Short timeouts, so that what is cut off is cut off soon."""
    return KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers,
        request_timeout_ms=request_timeout_ms,
        session_timeout_ms=6000,
    )


async def hold(cluster: LocalKafka) -> None:
    """Stop the node's threads, all of which have stopped on return; it keeps its connections."""
    cluster.pause_node()
    await eventually(lambda: _is_held(cluster))


def _is_held(cluster: LocalKafka) -> bool:
    threads = Path(f"/proc/{cluster.pid()}/task")
    return all("State:\tT" in (each / "status").read_text() for each in threads.iterdir())


async def make_topic(log: KafkaLog, name: str, **config: str) -> TopicPartition:
    """A topic with one partition."""
    info = TopicInfo(name, 1, {key.replace("_", "."): value for key, value in config.items()})
    await log.create_topics([info], replication_factor=1)
    return TopicPartition(name, 0)


async def test_absent_broker_error_names_address() -> None:
    """The error names the address at which no broker listens, and comes at once."""
    async with KafkaLog(KafkaSettings(bootstrap_servers="127.0.0.1:1")) as log:
        with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1:1: .*Connect"):
            await log.describe_topics(["any"])
        with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1:1: .*Connect"):
            await log.producer().__aenter__()


async def test_request_without_answer_leaves_no_cycle_of_references(fragile: LocalKafka) -> None:
    """It may hold megabytes of records, and the garbage collector looks rarely."""
    connection = Connection(settings(fragile, request_timeout_ms=2000))
    client = await connection.open_client()
    node, request = client.get_random_node(), MetadataRequest([])
    await client.send(node, request)
    await hold(fragile)
    kept = weakref.ref(request)
    gc.disable()
    try:
        with suppress(RequestTimedOutError):
            await client.send(node, request)
        del request
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()
        await connection.close_client(client)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "held"])
async def test_clients_close_without_broker(
    fragile: LocalKafka, unique_name: str, how: str
) -> None:
    """A member, a reader and a producer with unsent records let go within seconds, quietly."""
    log = KafkaLog(settings(fragile))
    partition = await make_topic(log, unique_name)
    member = log.member(unique_name, [unique_name], RecordingListener())
    reader, producer = log.reader([partition]), log.producer()
    await asyncio.gather(member.__aenter__(), reader.__aenter__(), producer.__aenter__())
    await write(producer, partition, b"v")
    await read(member, 1)
    if how == "killed":
        fragile.kill_node()
    else:
        await hold(fragile)
    runs = [*await producer.send(partition, [NewRecord(None, b"lost")])]
    start = time.monotonic()
    await asyncio.gather(member.close(), reader.close(), producer.close(), log.close())
    took_s = time.monotonic() - start
    with pytest.raises(LogUnavailable):
        await runs[0].acknowledged
    assert took_s < CLOSE_S


@pytest.mark.slow
async def test_work_resumes_when_broker_comes_back(fragile: LocalKafka, unique_name: str) -> None:
    """Over a restart every acknowledged record is read once, in order, and polling never fails."""
    async with KafkaLog(settings(fragile, request_timeout_ms=20_000)) as log:
        partition = await make_topic(log, unique_name)
        member = log.member(unique_name, [unique_name], RecordingListener())
        seen: list[Record] = []
        async with log.producer() as producer, member, polling(member, seen):
            await write(producer, partition, *(b"%d" % number for number in range(50)))
            await eventually(lambda: len(seen) == 50)
            await fragile.stop_node()
            during = [
                sent
                for number in range(50, 100)
                for sent in await producer.send(partition, [NewRecord(None, b"%d" % number)])
            ]
            await fragile.start_node()
            for sent in during:
                await sent.acknowledged
            await write(producer, partition, *(b"%d" % number for number in range(100, 150)))
            await eventually(lambda: len(seen) >= 150, deadline_s=30)
            assert values(seen) == [b"%d" % number for number in range(150)]
            assert member.last_contact_s() < 5.0


@pytest.mark.slow
async def test_hung_broker_fails_record_by_deadline(fragile: LocalKafka, unique_name: str) -> None:
    """An acknowledgement that does not come is an error in time, and the producer recovers."""
    async with KafkaLog(settings(fragile)) as log:
        partition = await make_topic(log, unique_name)
    tuning = replace(TUNING.kafka, topic_timeout_s=3.0)
    async with (
        KafkaLog(settings(fragile, request_timeout_ms=3000), tuning=tuning) as log,
        log.producer() as producer,
    ):
        await write(producer, partition, b"before")
        await hold(fragile)
        (sent,) = await producer.send(partition, [NewRecord(None, b"unknown")])
        with pytest.raises(LogUnavailable, match="not acknowledged within 6 s"):
            await sent.acknowledged
        with pytest.raises(LogUnavailable, match="no answer within 3 s"):
            await producer.partitions_for(f"{unique_name}-other")
        fragile.resume_node()

        async def is_written() -> bool:
            try:
                await write(producer, partition, b"after")
            except LogUnavailable:
                return False
            return True

        await eventually(is_written)


@pytest.mark.slow
async def test_records_in_order_do_not_overtake_when_batch_is_not_sent(
    fragile: LocalKafka, unique_name: str
) -> None:
    """The first one is in another caller's batch, whose deadline passes while the broker hangs."""
    metrics, tuning = Metrics(CollectorRegistry()), TUNING.delivery
    async with (
        KafkaLog(settings(fragile, request_timeout_ms=1000), tuning=PATIENT) as log,
        log.producer() as producer,
        asyncio.TaskGroup() as tasks,
    ):
        partition = await make_topic(log, unique_name)
        async with log.reader([partition]) as reader:
            await write(producer, partition, b"0")
            await hold(fragile)

            async def fill() -> None:
                with pytest.raises(LogUnavailable):
                    await write(producer, partition, bytes(TUNING.kafka.max_batch_bytes - 20_000))

            # One batch is in flight, two are queued behind it, and the last one has room for more.
            filling = [tasks.create_task(fill()) for _ in range(4)]
            records = [NewRecord(None, name * 12_000) for name in (b"a", b"b", b"c")]
            tasks.create_task(
                deliver_in_order(producer, partition, records, metrics, tuning=tuning)
            )
            await asyncio.gather(*filling)
            fragile.resume_node()
            seen: list[Record] = []
            async with polling(reader, seen):
                await eventually(lambda: b"c" in _names(seen), deadline_s=30)
    assert [name for name in dict.fromkeys(_names(seen)) if name in b"abc"] == [b"a", b"b", b"c"]


def _names(records: Sequence[Record]) -> list[bytes]:
    return [(record.value or b"")[:1] for record in records]


@pytest.mark.slow
async def test_broker_silence_shows_as_age_of_last_contact(
    fragile: LocalKafka, unique_name: str
) -> None:
    """While the broker is unavailable polls are empty, and `last_contact_s` tells for how long."""
    async with KafkaLog(settings(fragile)) as log:
        partition = await make_topic(log, unique_name)
        async with log.reader([partition]) as reader:
            await reader.poll(0.1, 1)
            assert reader.last_contact_s() < 2.0
            fragile.kill_node()

            async def is_silent() -> bool:
                assert await reader.poll(0.1, 1) == {}
                return reader.last_contact_s() > 2.0

            await eventually(is_silent)


async def test_lowered_topic_limit_is_noticed(kafka: LocalKafka, unique_name: str) -> None:
    """When the broker refuses a batch for its size after all, what follows is sent nevertheless."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.producer() as producer, log.reader([partition]) as reader:
            await write(producer, partition, b"before")
            await set_limit(kafka, partition, 10_000)
            with pytest.raises(RecordTooLarge):
                await write(producer, partition, bytes(20_000))
            await write(producer, partition, b"after")
            assert values(await read(reader, 2)) == [b"before", b"after"]
            with pytest.raises(RecordTooLarge, match="at most 10000 bytes"):
                await write(producer, partition, bytes(20_000))


async def test_raised_topic_limit_is_noticed(kafka: LocalKafka, unique_name: str) -> None:
    """An operator raises it because records were refused, and expects that no more are."""
    record = NewRecord(None, bytes(20_000))
    async with KafkaLog(settings(kafka)) as log, log.producer() as producer:
        partition = await make_topic(log, unique_name, max_message_bytes="10000")

        async def is_accepted() -> bool:
            refused = await deliver(producer, partition, [record], tuning=TUNING.delivery)
            return not refused

        assert not await is_accepted()
        await set_limit(kafka, partition, 30_000)
        await eventually(is_accepted)


async def test_small_records_are_not_refused_for_batch_that_they_share(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Each of them is of another caller, none of which can divide the batch."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.producer() as producer:
            await write(producer, partition, b"before")
            await set_limit(kafka, partition, 10_000)
            record = NewRecord(None, bytes(2000))
            refused = await asyncio.gather(
                *(deliver(producer, partition, [record], tuning=TUNING.delivery) for _ in range(20))
            )
    assert refused == [{}] * 20


async def test_batches_stay_within_small_limit(kafka: LocalKafka, unique_name: str) -> None:
    """Many records that pass alone are never refused for the batch that they make together."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name, max_message_bytes="2000")
        async with log.producer() as producer, log.reader([partition]) as reader:
            await write(producer, partition, *([bytes(100)] * 500))
            assert len(await read(reader, 500)) == 500


async def test_oversized_record_fails_alone(kafka: LocalKafka, unique_name: str) -> None:
    """In the middle of a chunk the record is a batch of its own; those around it are written."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name, max_message_bytes="2000")
        async with log.producer() as producer, log.reader([partition]) as reader:
            records = [NewRecord(None, value) for value in (b"a", b"b", bytes(3000), b"c")]
            runs = await producer.send(partition, records)
            outcomes = await asyncio.gather(
                *(sent.acknowledged for sent in runs), return_exceptions=True
            )
            kinds = [type(each) for each in outcomes]
            assert [sent.size for sent in runs] == [2, 1, 1]
            assert kinds == [type(None), RecordTooLarge, type(None)]
            assert values(await read(reader, 3)) == [b"a", b"b", b"c"]


async def test_batches_of_many_partitions_stay_within_request_limit(
    small_requests: LocalKafka, unique_name: str
) -> None:
    """A broker closes the connection over which a larger request comes, however often it comes."""
    tuning = replace(PATIENT, max_request_bytes=SMALL_REQUEST_BYTES // 2)
    async with KafkaLog(settings(small_requests), tuning=tuning) as log:
        await log.create_topics([TopicInfo(unique_name, 8, {})], replication_factor=1)
        partitions = [TopicPartition(unique_name, number) for number in range(8)]
        value = bytes(SMALL_REQUEST_BYTES // 5)
        async with log.producer() as producer:
            await asyncio.gather(*(write(producer, each, value) for each in partitions))
        records = {each: [NewRecord(None, value)] for each in partitions}
        async with log.transactional_producer(unique_name, unique_name) as transactional:
            await transactional.commit_transaction(records, {})
        async with log.reader(partitions) as reader:
            ends = await reader.end_offsets(partitions)

    assert ends == dict.fromkeys(partitions, 3)  # two records and the transaction's marker


async def test_closing_producer_flushes(kafka: LocalKafka, unique_name: str) -> None:
    """Closing a producer writes all records that were sent but not awaited."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.reader([partition]) as reader:
            async with log.producer() as producer:
                for _ in range(5):
                    await producer.send(partition, [NewRecord(None, bytes(1000))] * 500)
            assert await reader.end_offsets([partition]) == {partition: 2500}


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_records_of_every_compression_are_read(
    kafka: LocalKafka, unique_name: str, compression: str
) -> None:
    """Batches come back from each codec that the settings name."""
    compressed = KafkaSettings.model_validate(
        {"bootstrap_servers": kafka.bootstrap_servers, "compression": compression}
    )
    async with KafkaLog(compressed, tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.producer() as producer, log.reader([partition]) as reader:
            await write(producer, partition, *([bytes(1000)] * 100))
            assert values(await read(reader, 100)) == [bytes(1000)] * 100


async def test_concurrent_small_sends_share_batches(kafka: LocalKafka, unique_name: str) -> None:
    """Hundreds of callers with a record each do not wait for a round trip each."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.producer() as producer:
            sends = [producer.send(partition, [NewRecord(None, b"v")]) for _ in range(300)]
            runs = [sent for each in await asyncio.gather(*sends) for sent in each]
            for sent in runs:
                await sent.acknowledged
        assert sum(sent.size for sent in runs) == 300
        batches = set()
        for sent in runs:
            assert isinstance(sent.acknowledged, Acknowledgement)
            batches.add(sent.acknowledged.ended)
        assert len(batches) < 30


async def test_cancelled_send_takes_no_other_record_along(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Callers who share a batch are independent of each other."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.producer() as producer, log.reader([partition]) as reader:
            await write(producer, partition, b"first")
            tasks = [
                asyncio.create_task(write(producer, partition, b"%d" % number), name="write")
                for number in range(20)
            ]
            await asyncio.sleep(0)
            tasks[0].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert outcomes[1:] == [None] * 19
            found = values(await read(reader, 20))
            assert {b"%d" % number for number in range(1, 20)} <= set(found)


async def test_member_refused_by_group_raises(kafka: LocalKafka, unique_name: str) -> None:
    """A session timeout that the broker refuses comes out of `poll`, not as eternal silence."""
    refused = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers, session_timeout_ms=60 * 60 * 1000
    )
    async with KafkaLog(refused, tuning=PATIENT) as log:
        await make_topic(log, unique_name)
        async with log.member(unique_name, [unique_name], RecordingListener()) as member:
            with pytest.raises(LogRefused, match="InvalidSessionTimeout"):
                await read(member, 1)


async def test_member_that_closes_while_it_joins_leaves_its_group(
    kafka: LocalKafka, unique_name: str
) -> None:
    """It joins until the other member's next heartbeat, and would be given partitions then."""
    rare_heartbeats = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers, session_timeout_ms=60_000
    )
    async with KafkaLog(rare_heartbeats, tuning=PATIENT) as log:
        await make_topic(log, unique_name)
        listener = RecordingListener()

        async def has_members(count: int) -> bool:
            return len(await log.members(unique_name)) == count

        member = log.member(unique_name, [unique_name], listener)
        async with member as first, polling(first, []):
            await eventually(lambda: bool(listener.held))
            joining = log.member(unique_name, [unique_name], RecordingListener())
            async with joining as second, polling(second, []):
                await eventually(lambda: has_members(2))
            assert await has_members(1)


async def test_ended_fetching_raises(kafka: LocalKafka, unique_name: str) -> None:
    """When aiokafka's fetching is gone, polls raise instead of being empty for ever."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        async with log.reader([partition]) as reader:
            (task,) = fetching_tasks()
            task.cancel()
            await asyncio.wait([task])
            with pytest.raises(LogRefused, match="reading has ended"):
                await reader.poll(0.1, 1)


async def test_member_without_membership_cannot_commit(kafka: LocalKafka, unique_name: str) -> None:
    """The member cannot commit without a generation either, which a broker accepts for an empty
    group.
    """
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        listener = RecordingListener()
        async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
            await eventually(lambda: listener.assignments == 1)
            assert isinstance(member, KafkaMember)
            assert await log.remove_member(unique_name, member.member_id)
            for _ in range(2):
                with pytest.raises(Fenced):
                    await member.commit({partition: Committed(5)})
            await eventually(lambda: listener.assignments == 2)
            assert await member.committed([partition]) == {partition: None}
            await member.commit({partition: Committed(5)})
        assert await log.committed(unique_name, [partition]) == {partition: Committed(5)}


async def test_member_reads_topic_created_later(kafka: LocalKafka, unique_name: str) -> None:
    """Subscribing makes no topic, and waits for nothing."""
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        listener = RecordingListener()
        async with log.member(unique_name, [unique_name], listener) as member, polling(member, []):
            await eventually(lambda: listener.assignments == 1)
            assert member.assignment() == frozenset()
        assert await log.describe_topics([unique_name]) == {unique_name: None}


async def test_member_looks_up_offsets_of_partition_that_it_has_not_heard_of(
    kafka: LocalKafka, unique_name: str
) -> None:
    """The member that assigns partitions heard first that the topic has grown."""
    eager, late = (replace(PATIENT, metadata_max_age_s=age_s) for age_s in (0.5, 3600.0))
    found: dict[TopicPartition, int] = {}

    async def look_up(partitions: Sequence[TopicPartition]) -> None:
        found.update(await second.beginning_offsets(partitions))
        found.update(await second.end_offsets(partitions))

    first_heard, second_heard = RecordingListener(), RecordingListener(look_up)
    async with (
        KafkaLog(settings(kafka), tuning=eager) as log,
        KafkaLog(settings(kafka), tuning=late) as other_log,
    ):
        partition = await make_topic(log, unique_name)
        first = log.member(unique_name, [unique_name], first_heard)
        second = other_log.member(unique_name, [unique_name], second_heard)
        async with first, polling(first, []):
            await eventually(lambda: first_heard.held == {partition})
            async with second, polling(second, []):
                await eventually(lambda: second_heard.assignments == 1)
                await grow(kafka, unique_name, 4)
                await eventually(lambda: len(first_heard.held | second_heard.held) == 4)
                assert found == dict.fromkeys(second_heard.held, 0)


async def grow(cluster: LocalKafka, topic: str, partitions: int) -> None:
    """Add partitions to a topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(partitions)})
    finally:
        await admin.close()


async def test_fetch_returns_only_what_retention_has_left(
    kafka: LocalKafka, unique_name: str
) -> None:
    """The offsets before the log's start are gone, and what comes after them is there."""
    partition = TopicPartition(unique_name, 0)
    async with KafkaLog(settings(kafka), tuning=PATIENT) as log:
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
        for number in range(5):
            await write_to(log, partition, b"%d" % number)
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
        await admin.start()
        try:
            await admin.delete_records(
                {aiokafka.TopicPartition(*partition): RecordsToDelete(before_offset=3)}
            )
        finally:
            await admin.close()

        found = await log.fetch(partition, 1, 3, 1000)
        gone = await log.fetch(partition, 0, 2, 1000)

    assert [record.offset for record in found if record.offset <= 3] == [3]
    assert not [record for record in gone if record.offset <= 2]


async def test_fetch_continues_after_broker_has_returned(
    fragile: LocalKafka, unique_name: str
) -> None:
    """While it is unavailable each attempt ends, and the connections are made anew."""
    async with KafkaLog(settings(fragile, 2000), tuning=PATIENT) as log:
        partition = await make_topic(log, unique_name)
        await write_to(log, partition, b"kept")
        assert values(await log.fetch(partition, 0, 0, 1000)) == [b"kept"]
        await fragile.stop_node()
        with pytest.raises(LogUnavailable):
            await log.fetch(partition, 0, 0, 1000)
        await fragile.start_node()

        async def is_fetched() -> bool:
            try:
                return values(await log.fetch(partition, 0, 0, 1000)) == [b"kept"]
            except LogUnavailable:
                return False

        await eventually(is_fetched, deadline_s=60.0)
