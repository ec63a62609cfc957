"""Positions move past what is never returned, where nothing follows it."""

from __future__ import annotations

from headrace.log.port import Log, NewRecord
from tests.contract.conftest import MakeTopic
from tests.support.conditions import eventually


async def test_position_passes_transaction_marker_at_end(
    log: Log, make_topic: MakeTopic, unique_name: str
) -> None:
    """All that the log holds has been read, though its last offset holds no record."""
    (partition,) = await make_topic()
    async with log.transactional_producer(unique_name, unique_name) as producer:
        await producer.commit_transaction(
            {partition: [NewRecord(None, b"a"), NewRecord(None, b"b")]}, {}
        )
    async with log.reader([partition]) as reader:
        reader.seek(partition, 0)
        end = (await reader.end_offsets([partition]))[partition]
        found = 0

        async def is_past() -> bool:
            nonlocal found
            found += sum(map(len, (await reader.poll(0.1, 10)).values()))
            return await reader.position(partition) >= end

        await eventually(is_past)

    assert (found, end) == (2, 3)
