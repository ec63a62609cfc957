"""The answering step for exactly once, where a partition has no leader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.memory.producer import MemoryTransactionalProducer
from headrace.log.port import Committed, Membership, NewRecord, TopicInfo, TopicPartition
from tests.support.conditions import eventually
from tests.support.services import counted
from tests.support.tuning import QUICK
from tests.unit.services.test_transactional import RESPONSES, offsets_in_order, running

SOON = replace(QUICK.responder, stalled_target_retry_s=0.02, waiting_answers_retry_s=0.02)


class LeaderlessLog(MemoryLog):
    """One topic's partitions have no leader: whatever is sent there is not acknowledged in time.

    Attributes:
        leaderless: the topic; empty while all have leaders.
    """

    leaderless = ""

    def transactional_producer(
        self, transactional_id: str, group: str
    ) -> MemoryTransactionalProducer:
        producer = super().transactional_producer(transactional_id, group)
        commit_transaction = producer.commit_transaction

        async def fail(
            records: Mapping[TopicPartition, Sequence[NewRecord]],
            offsets: Mapping[TopicPartition, Committed],
            membership: Membership | None = None,
        ) -> None:
            if any(partition.topic == self.leaderless for partition in records):
                raise LogUnavailable("the records were not acknowledged in time")
            await commit_transaction(records, offsets, membership)

        producer.commit_transaction = fail  # type: ignore[method-assign]  # a fault of this topic's alone
        return producer


async def test_reply_partition_without_leader_delays_no_other_answers() -> None:
    """Its answers are put aside, and are given once it has a leader again."""
    log = LeaderlessLog()
    log.leaderless = "headrace.mine"
    async with running(log=log, tuning=SOON) as bench:
        await log.create_topics([TopicInfo("headrace.mine", 1, {})], replication_factor=1)
        stuck = [bench.request(kafka_replyTopic=b"headrace.mine") for _ in range(3)]
        await bench.incoming.send([*stuck, bench.request()])
        await eventually(lambda: bench.in_flight == 3)
        await bench.incoming.send([bench.request() for _ in range(5)])
        await eventually(lambda: bench.in_flight == 3)
        assert await bench.statuses() == dict.fromkeys(range(3, 9), "ok")

        log.leaderless = ""
        await bench.acked()
        assert await bench.statuses("headrace.mine") == dict.fromkeys(range(3), "ok")
        assert await bench.committed() == AckedOffsets(9)


@pytest.mark.parametrize("topic", ["headrace.mine", RESPONSES.topic])
async def test_known_leaderless_partition_costs_no_transaction(
    topic: str,
) -> None:
    """The same producer commits the answers to other topics at once."""
    async with running(tuning=SOON) as bench:
        for name in ("headrace.mine", "headrace.yours"):
            await bench.log.create_topics([TopicInfo(name, 1, {})], replication_factor=1)
        bench.log.faults.topics.take_leaders(topic)
        identity = "headrace.headrace.requests.0"
        entered = bench.log.faults.transactions.entered_producers(identity)
        topics = ["headrace.mine", "headrace.yours", RESPONSES.topic] * 3
        await bench.incoming.send(
            [bench.request(kafka_replyTopic=each.encode()) for each in topics]
        )
        await eventually(lambda: bench.in_flight == 3)
        stuck = {place for place, each in enumerate(topics) if each == topic}
        committed = await bench.committed()
        assert [each for each in range(9) if each not in committed] == sorted(stuck)
        assert bench.log.faults.transactions.entered_producers(identity) == entered

        bench.log.faults.topics.elect(topic)
        await bench.acked()
        assert await bench.committed() == AckedOffsets(9)
        assert await bench.statuses(topic) == dict.fromkeys(sorted(stuck), "ok")


async def test_leaderless_partition_in_order_delays_following_answers() -> None:
    """Nothing is put aside, and nothing fenced: the answers come in order once it has one."""
    async with running("partition") as bench:
        bench.log.faults.topics.take_leaders(RESPONSES.topic)
        await bench.incoming.send([bench.request() for _ in range(9)])
        await eventually(lambda: counted(bench.instruments, "revoked_requests_total") == 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert bench.in_flight == 9
        bench.log.faults.topics.elect(RESPONSES.topic)
        await bench.acked()
        assert await offsets_in_order(bench) == list(range(9))
