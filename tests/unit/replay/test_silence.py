"""When a reading up to a known end is given up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import Consumer, TopicInfo, TopicPartition
from headrace.tools.replay.silence import Silence

PLACE = TopicPartition("t", 0)


@pytest.fixture
async def reader() -> AsyncIterator[Consumer]:
    """A reader of an empty partition, from offset 7 on."""
    async with MemoryLog() as log:
        await log.create_topics([TopicInfo("t", 1, {})], replication_factor=1)
        async with log.reader([PLACE]) as reader:
            reader.seek(PLACE, 7)
            yield reader


async def test_reading_for_which_nothing_comes_ends_with_the_place(reader: Consumer) -> None:
    """A broker that cannot read its log answers without records, for as long as it is asked."""
    silence = Silence(limit_s=30.0)
    for _ in range(3):
        await silence.check(reader, [PLACE], 15.0)
    with pytest.raises(LogUnavailable, match=r"t/0 from offset 7 on, got none for 45 s"):
        await silence.check(reader, [PLACE], 15.0)


async def test_reading_goes_on_while_its_position_moves(reader: Consumer) -> None:
    """Polls return nothing of aborted transactions, however many there are."""
    silence = Silence(limit_s=30.0)
    for offset in range(8, 12):
        await silence.check(reader, [PLACE], 29.0)
        reader.seek(PLACE, offset)
