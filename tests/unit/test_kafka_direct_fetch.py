"""Fetches by offset from brokers that answer in steps, as they do when leaders change."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace.log.errors import LogAuthenticationFailed, LogUnavailable
from headrace.log.kafka.admin import TopicsRequest
from headrace.log.kafka.connection import Connection
from headrace.log.kafka.direct_fetch import DirectFetch
from headrace.log.kafka.topic_cache import TopicCache
from headrace.log.port import TopicPartition, Wanted
from headrace.tuning import KafkaTuning

PARTITION = TopicPartition("requests", 0)
NOT_LEADER, OUT_OF_RANGE, FORBIDDEN = 6, 1, 29
NOTHING: tuple[Any, ...] = (0, 9, 9, 0, [], -1, b"")
QUICK = KafkaTuning(request_retry_s=0.001, fetch_end_wait_s=0.005)


def batch(first: int, *values: bytes) -> tuple[Any, ...]:
    """A response without an error, with one batch of records."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
    for delta, value in enumerate(values):
        builder.append(delta, 1_700_000_000_000, None, value, [])
    content = bytearray(builder.build())
    content[:8] = first.to_bytes(8, "big")  # not part of the checksum: brokers set it
    return (0, 9, 9, 0, [], -1, bytes(content))


class Brokers:
    """A client of brokers with these answers, one for each request; the last one is repeated."""

    def __init__(self, answers: Sequence[tuple[Any, ...]]) -> None:
        self._answers = list(answers)
        self.updates = 0
        self.requests = 0
        self.positions: list[int] = []
        self.closed = 0
        self.cluster = SimpleNamespace(
            leader_for_partition=lambda _: 1, partitions_for_topic=lambda _: {0}
        )

    def get_random_node(self) -> int:
        return 1

    def add_topic(self, _topic: str) -> None:
        pass

    async def send(self, _node: int, request: Any) -> Any:
        self.requests += 1
        if isinstance(request, TopicsRequest):
            return SimpleNamespace(topics=[(0, "requests", None, False, [0])])
        if isinstance(request, FetchRequest):
            ((_, ((_, position, *_),)),) = request.topics
            self.positions.append(position)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return SimpleNamespace(topics=[("requests", [(0, *answer)])])

    async def force_metadata_update(self) -> None:
        self.updates += 1

    async def open_client(self) -> Any:
        return self

    async def close_client(self, _client: object) -> None:
        self.closed += 1


def fetch_from(brokers: Brokers, request_timeout_s: float = 5.0) -> DirectFetch:
    """A fetch whose connection leads to these brokers."""
    connection = SimpleNamespace(
        open_client=brokers.open_client,
        close_client=brokers.close_client,
        request_timeout_s=request_timeout_s,
        decompressed_bytes=10_000,
        tuning=QUICK,
    )
    return DirectFetch(cast("Connection", connection), TopicCache(QUICK))


async def test_record_that_new_leader_shows_late_is_waited_for() -> None:
    """It is acknowledged, and the leader does not know yet that the followers have it."""
    brokers = Brokers([NOTHING, NOTHING, batch(3, b"late")])

    found = await fetch_from(brokers).fetch(PARTITION, 3, 3, 100)

    assert [(record.offset, record.value) for record in found] == [(3, b"late")]


async def test_record_that_never_appears_is_given_up() -> None:
    """An unclean election has lost it."""
    brokers = Brokers([NOTHING])

    assert not await fetch_from(brokers).fetch(PARTITION, 3, 3, 100)


async def test_former_leader_is_left_for_new_one() -> None:
    """The metadata says which it is."""
    brokers = Brokers([(NOT_LEADER, -1, -1, -1, [], -1, b""), batch(3, b"there")])

    found = await fetch_from(brokers).fetch(PARTITION, 3, 3, 100)

    assert [record.value for record in found] == [b"there"]
    assert brokers.updates == 1


async def test_partition_without_leader_ends_as_unavailable() -> None:
    """The caller decides whether to try again; the next client is a new one."""
    brokers = Brokers([(NOT_LEADER, -1, -1, -1, [], -1, b"")])

    with pytest.raises(LogUnavailable, match=r"fetch from requests/0: no answer within 0\.05 s"):
        await fetch_from(brokers, 0.05).fetch(PARTITION, 3, 3, 100)
    assert brokers.closed == 1


async def test_partition_that_client_never_hears_of_ends_as_unavailable() -> None:
    """A topic may be deleted after one broker has described it; no fetch waits for it forever."""
    brokers = Brokers([NOTHING])
    brokers.cluster.partitions_for_topic = lambda _: None

    with pytest.raises(LogUnavailable, match=r"fetch from requests/0: no answer within 0\.05 s"):
        await fetch_from(brokers, 0.05).fetch(PARTITION, 3, 3, 100)
    assert brokers.closed == 1


async def test_offset_before_start_of_log_is_read_on_from_there() -> None:
    """Retention has removed the first records; the error does not say where the log begins."""
    out_of_range: tuple[Any, ...] = (OUT_OF_RANGE, -1, -1, -1, [], -1, b"")
    brokers = Brokers([out_of_range, (0, -1, 5), batch(5, b"kept")])

    found = await fetch_from(brokers).fetch(PARTITION, 3, 5, 100)

    assert [record.offset for record in found] == [5]


async def test_offset_behind_end_of_log_is_given_up_at_once() -> None:
    """The log was cut off before it."""
    out_of_range: tuple[Any, ...] = (OUT_OF_RANGE, -1, -1, -1, [], -1, b"")
    brokers = Brokers([out_of_range, (0, -1, 0)])

    assert not await fetch_from(brokers).fetch(PARTITION, 3, 3, 100)
    assert brokers.requests == 2


async def test_batch_that_was_damaged_on_its_way_is_read_again() -> None:
    """The log still has it, so its request need not fail."""
    damaged = bytearray(batch(4, b"there")[-1])
    damaged[-1] ^= 1
    both = batch(3, b"first")[-1] + bytes(damaged)
    brokers = Brokers([(0, 9, 9, 0, [], -1, both), batch(4, b"there")])

    found = await fetch_from(brokers).fetch(PARTITION, 3, 4, 1000)

    assert [(record.offset, record.value) for record in found] == [(3, b"first"), (4, b"there")]
    assert brokers.positions == [3, 4]


async def test_damaged_batch_is_passed_over() -> None:
    """The records behind it are there."""
    damaged = bytearray(batch(3, b"damaged")[-1])
    damaged[-1] ^= 1
    both = bytes(damaged) + batch(4, b"whole")[-1]
    brokers = Brokers([(0, 9, 9, 0, [], -1, both)])

    found = await fetch_from(brokers).fetch(PARTITION, 3, 4, 1000)

    assert [(record.offset, record.value) for record in found] == [(4, b"whole")]


async def test_batches_between_wanted_records_are_neither_read_nor_kept() -> None:
    """They may be of another model, and large."""
    first, last = batch(3, b"first", b"other"), batch(9, b"large" * 100, b"last", b"other")
    brokers = Brokers([first, last])
    wanted = Wanted([3, 10], others_bytes=len(b"other"))

    found = await fetch_from(brokers).fetch(PARTITION, 3, 10, 100, wanted)

    assert [(each.offset, each.value) for each in found] == [
        (3, b"first"),
        (4, b"other"),
        (10, b"last"),
    ]
    assert brokers.positions == [3, 10]


async def test_forbidden_topic_ends_process() -> None:
    """Its rules do not allow what this process has to do."""
    brokers = Brokers([(FORBIDDEN, -1, -1, -1, [], -1, b"")])

    with pytest.raises(LogAuthenticationFailed):
        await fetch_from(brokers).fetch(PARTITION, 3, 3, 100)
