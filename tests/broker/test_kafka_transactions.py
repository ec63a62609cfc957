"""Transactions on a real broker: time-outs, refusals, answers that never come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiokafka.errors import KafkaError
from msgspec.structs import replace

from headrace.config import KafkaSettings
from headrace.log.errors import (
    Fenced,
    LogRefused,
    LogUnavailable,
    RecordsRefused,
    RecordTooLarge,
    TopicForbidden,
    TransactionTimedOut,
)
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.consumer import KafkaMember
from headrace.log.kafka.errors import in_port_words
from headrace.log.kafka.log import KafkaLog
from headrace.log.kafka.producer import RecordBatch
from headrace.log.kafka.topic_cache import TopicLimits
from headrace.log.kafka.transactions import ProducerEpoch
from headrace.log.port import Committed, Membership, NewRecord, TopicInfo, TopicPartition
from headrace.tools.local_kafka import LocalKafka
from tests.support.acl import Operation, Resource, allow_only
from tests.support.conditions import eventually
from tests.support.deployments import administration
from tests.support.limits import set_limit
from tests.support.logs import PATIENT, RecordingListener, polling, read, values, write_to

ROOMY = TopicLimits(limit_bytes=1_000_000, needs_key=False)
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("asyncio_logs_nothing")]


@pytest.fixture
async def log(kafka: LocalKafka) -> AsyncIterator[KafkaLog]:
    """The shared broker, with a transaction timeout that passes soon."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, transaction_timeout_ms=1000)
    async with KafkaLog(settings) as log:
        yield log


@pytest.fixture
async def partitions(log: KafkaLog, unique_name: str) -> tuple[TopicPartition, TopicPartition]:
    """The partition of the answers, and that of the requests."""
    await log.create_topics([TopicInfo(unique_name, 2, {})], replication_factor=1)
    return TopicPartition(unique_name, 0), TopicPartition(unique_name, 1)


@asynccontextmanager
async def epoch_of(
    cluster: LocalKafka, transactional_id: str, timeout_ms: int
) -> AsyncIterator[ProducerEpoch]:
    """An entered epoch, whose transactions the broker ends after this time."""
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    client = await Connection(settings).open_client()
    epoch = ProducerEpoch(client, transactional_id, timeout_ms, settings.request_timeout_ms)
    try:
        await epoch.enter()
        yield epoch
    finally:
        await epoch.close()


async def test_transaction_ended_by_broker_keeps_membership(
    kafka: LocalKafka,
    log: KafkaLog,
    partitions: tuple[TopicPartition, TopicPartition],
    unique_name: str,
) -> None:
    """Its producer is fenced as by a successor, and the group tells the difference."""
    answers, _ = partitions
    listener = RecordingListener()
    late = RecordBatch(answers, ROOMY, codec=0, max_bytes=1000, is_transactional=True)
    late.add([NewRecord(None, b"late")], 0)
    async with (
        log.member(unique_name, [unique_name], listener) as member,
        polling(member, []),
        log.reader([answers]) as reader,
        epoch_of(kafka, unique_name, timeout_ms=1000) as epoch,
    ):
        await eventually(lambda: listener.held)
        await epoch.write([[late]], unique_name, {})

        async def is_aborted() -> bool:
            return await reader.end_offsets([answers]) == {answers: 2}

        await eventually(is_aborted, what="the record and its marker are behind the stable end")
        with pytest.raises(KafkaError) as refused:
            await epoch.commit()
        assert isinstance(in_port_words(refused.value, "commit"), Fenced)
        assert await member.is_member()


async def test_written_end_is_behind_records_of_open_transaction(
    kafka: LocalKafka,
    log: KafkaLog,
    partitions: tuple[TopicPartition, TopicPartition],
    unique_name: str,
) -> None:
    """The stable end is before them."""
    answers, _ = partitions
    undecided = RecordBatch(answers, ROOMY, codec=0, max_bytes=1000, is_transactional=True)
    undecided.add([NewRecord(None, b"undecided")], 0)
    async with (
        log.reader([answers]) as reader,
        epoch_of(kafka, unique_name, timeout_ms=30_000) as epoch,
    ):
        await epoch.write([[undecided]], unique_name, {})
        await write_to(log, answers, b"later")
        assert await reader.end_offsets([answers]) == {answers: 0}
        assert await log.written_ends([answers]) == {answers: 2}
        await epoch.commit()


async def test_removed_member_is_denied_by_group(
    log: KafkaLog, partitions: tuple[TopicPartition, TopicPartition], unique_name: str
) -> None:
    """The group says so before the member's own heartbeat has noticed."""
    listener = RecordingListener()
    member = log.member(unique_name, [unique_name], listener)
    assert isinstance(member, KafkaMember)
    async with member, polling(member, []):
        await eventually(lambda: listener.held == set(partitions))
        assert await log.remove_member(unique_name, member.member_id)
        assert not await member.is_member()


async def test_transaction_timeout_over_broker_limit_is_refused(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Entering says which error it is, instead of trying on."""
    settings = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers, transaction_timeout_ms=3_600_000
    )
    async with KafkaLog(settings) as log:
        with pytest.raises(LogRefused, match="InvalidTransactionTimeout"):
            await log.transactional_producer(unique_name, unique_name).__aenter__()


async def test_member_reads_offsets_only_after_open_transaction_has_ended(
    kafka: LocalKafka, partitions: tuple[TopicPartition, TopicPartition], unique_name: str
) -> None:
    """Whichever producer has written them; the error says what it has waited for."""
    _, source = partitions
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    impatient = replace(PATIENT, stable_offsets_timeout_s=0.0)
    listener = RecordingListener()
    async with (
        KafkaLog(settings, tuning=impatient) as log,
        log.member(unique_name, [unique_name], listener) as member,
        polling(member, []),
        epoch_of(kafka, unique_name, timeout_ms=60_000) as epoch,
    ):
        await eventually(lambda: listener.held)
        await epoch.write([], unique_name, {source: Committed(5)}, member.membership)
        with pytest.raises(LogUnavailable, match="UnstableOffsetCommit"):
            await member.committed([source])
        assert await log.committed(unique_name, [source]) == {source: None}
        await epoch.commit()

        async def is_read() -> bool:
            with suppress(LogUnavailable):
                return await member.committed([source]) == {source: Committed(5)}
            return False

        await eventually(is_read)


async def test_end_of_transaction_by_former_producer_is_fenced(
    kafka: LocalKafka, partitions: tuple[TopicPartition, TopicPartition], unique_name: str
) -> None:
    """It was suspended before the end. A coordinator has another error for this than a broker."""
    _, source = partitions
    async with epoch_of(kafka, unique_name, timeout_ms=60_000) as former:
        await former.write([], unique_name, {source: Committed(5)})
        async with epoch_of(kafka, unique_name, timeout_ms=60_000):
            with pytest.raises(KafkaError) as refused:
                await former.commit()
    assert isinstance(in_port_words(refused.value, "commit"), Fenced)


async def test_record_refused_by_broker_aborts_transaction(
    kafka: LocalKafka,
    log: KafkaLog,
    partitions: tuple[TopicPartition, TopicPartition],
    unique_name: str,
) -> None:
    """Its limit was lowered unnoticed: no other record and no offset of the seal is seen."""
    answers, source = partitions
    small, large = NewRecord(None, b"small"), NewRecord(None, bytes(20_000))
    async with log.reader([answers, source]) as reader:
        async with log.transactional_producer(unique_name, unique_name) as producer:
            await producer.commit_transaction({answers: [NewRecord(None, b"before")]}, {})
            await set_limit(kafka, answers, 10_000)
            with pytest.raises(RecordTooLarge):
                await producer.commit_transaction(
                    {source: [small], answers: [large]}, {source: Committed(7)}
                )
        async with log.transactional_producer(unique_name, unique_name) as successor:
            assert (await log.committed(unique_name, [source]))[source] is None
            await successor.commit_transaction({answers: [NewRecord(None, b"after")]}, {})
        assert values(await read(reader, 2)) == [b"before", b"after"]


async def test_transaction_to_deleted_topic_ends_before_its_timeout(
    kafka: LocalKafka, unique_name: str
) -> None:
    """It would keep all others of its source partition waiting until then, and be halved."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    answers, answer = TopicPartition(unique_name, 0), NewRecord(None, b"answer")
    async with (
        KafkaLog(settings) as log,
        log.transactional_producer(unique_name, unique_name) as producer,
    ):
        await log.create_topics([TopicInfo(unique_name, 1, {})], replication_factor=1)
        await producer.commit_transaction({answers: [answer]}, {})
        async with administration(kafka.bootstrap_servers) as admin:
            await admin.delete_topics([unique_name])
        with pytest.raises(LogUnavailable, match="no such topic or partition any more"):
            await producer.commit_transaction({answers: [answer]}, {})


async def test_raised_topic_limit_is_noticed_by_transactions(
    kafka: LocalKafka,
    log: KafkaLog,
    partitions: tuple[TopicPartition, TopicPartition],
    unique_name: str,
) -> None:
    """An operator raises it because records were refused, and expects that no more are."""
    answers, _ = partitions
    large = NewRecord(None, bytes(20_000))
    await set_limit(kafka, answers, 10_000)
    async with log.transactional_producer(unique_name, unique_name) as producer:

        async def is_accepted() -> bool:
            try:
                await producer.commit_transaction({answers: [large]}, {})
            except RecordsRefused:
                return False
            return True

        assert not await is_accepted()
        await set_limit(kafka, answers, 30_000)
        await eventually(is_accepted)


@pytest.mark.slow
async def test_transaction_without_answer_has_unknown_outcome(
    kafka_installed: None, unique_name: str
) -> None:
    """It ends by its deadline; once a broker answers, a successor finds all of it or nothing."""
    # Longer than the pause: a broker that has to register anew knows of none for a while.
    properties = {"broker.session.timeout.ms": "120000"}
    async with LocalKafka(properties=properties) as cluster:
        # Long enough for the first offsets of a group, for which a new broker makes their topic.
        settings = KafkaSettings(
            bootstrap_servers=cluster.bootstrap_servers, transaction_timeout_ms=10_000
        )
        async with KafkaLog(settings) as log:
            await log.create_topics([TopicInfo(unique_name, 2, {})], replication_factor=1)
            answers, source = TopicPartition(unique_name, 0), TopicPartition(unique_name, 1)
            reader = log.reader([answers])
            former = log.transactional_producer(unique_name, unique_name)
            async with reader, former:
                await former.commit_transaction(
                    {answers: [NewRecord(None, b"a")]}, {source: Committed(1)}
                )
                cluster.pause_node()
                with pytest.raises(TransactionTimedOut):
                    await former.commit_transaction(
                        {answers: [NewRecord(None, b"b")]}, {source: Committed(2)}
                    )
                cluster.resume_node()
                async with log.transactional_producer(unique_name, unique_name) as successor:
                    at = (await log.committed(unique_name, [source]))[source]
                    await successor.commit_transaction({answers: [NewRecord(None, b"c")]}, {})
                expected = [b"a", b"c"] if at == Committed(1) else [b"a", b"b", b"c"]
                assert values(await read(reader, len(expected))) == expected


@pytest.mark.slow
async def test_cluster_without_second_version_commits_by_first(
    kafka_installed: None, unique_name: str
) -> None:
    """A cluster that was upgraded keeps its level until its operator raises it."""
    async with LocalKafka(features={"transaction.version": 1}) as cluster:
        settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with KafkaLog(settings) as log:
            await log.create_topics([TopicInfo(unique_name, 2, {})], replication_factor=1)
            answers, source = TopicPartition(unique_name, 0), TopicPartition(unique_name, 1)
            listener = RecordingListener()
            async with (
                log.reader([answers]) as reader,
                log.member(unique_name, [unique_name], listener) as member,
                polling(member, []),
                log.transactional_producer(unique_name, unique_name) as producer,
            ):
                await eventually(lambda: listener.held)
                for number in range(3):
                    await producer.commit_transaction(
                        {answers: [NewRecord(None, b"%d" % number)]},
                        {source: Committed(number)},
                        member.membership,
                    )
                    assert await member.committed([source]) == {source: Committed(number)}
                assert values(await read(reader, 3)) == [b"0", b"1", b"2"]
                with pytest.raises(Fenced):
                    await producer.commit_transaction(
                        {}, {source: Committed(9)}, Membership(1_000, "a stranger")
                    )


async def test_forbidden_transaction_is_reported(kafka: LocalKafka, unique_name: str) -> None:
    """An id refuses entering; a group and a topic refuse their seal; a successor works on."""
    servers = kafka.bootstrap_servers
    unruled, readable, closed = (f"{unique_name}.{kind}" for kind in ("open", "readable", "closed"))
    open_topic, read_only = TopicPartition(unruled, 0), TopicPartition(readable, 0)
    record = [NewRecord(None, b"v")]
    async with KafkaLog(KafkaSettings(bootstrap_servers=servers)) as log:
        topics = [TopicInfo(name, 1, {}) for name in (unruled, readable)]
        await log.create_topics(topics, replication_factor=1)
        await allow_only(servers, readable, Operation.READ)
        await allow_only(servers, closed, Operation.DESCRIBE, Resource.GROUP)
        await allow_only(servers, closed, Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
        with pytest.raises(LogRefused, match="TransactionalIdAuthorizationFailed"):
            await log.transactional_producer(closed, unruled).__aenter__()
        async with log.transactional_producer(unruled, closed) as producer:
            with pytest.raises(LogRefused, match="GroupAuthorizationFailed"):
                await producer.commit_transaction({open_topic: record}, {open_topic: Committed(1)})
        async with log.transactional_producer(unruled, unruled) as producer:
            with pytest.raises(TopicForbidden, match=readable):
                await producer.commit_transaction({read_only: record, open_topic: record}, {})
        async with log.reader([open_topic]) as reader:
            async with log.transactional_producer(unruled, unruled) as producer:
                await producer.commit_transaction({open_topic: record}, {})
            assert values(await read(reader, 1)) == [b"v"]
