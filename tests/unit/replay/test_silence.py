"""When a reading up to a known end is given up."""

from __future__ import annotations

import pytest

from headrace.log.errors import LogUnavailable
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.tools.replay.silence import Silence

PLACE = TopicPartition("t", 0)


async def test_reading_for_which_nothing_comes_ends_with_the_place() -> None:
    """A broker that cannot read its log answers without records, for as long as it is asked."""
    async with MemoryLog() as log:
        await log.create_topics([TopicInfo("t", 1, {})], replication_factor=1)
        async with log.reader([PLACE]) as reader:
            reader.seek(PLACE, 7)
            silence = Silence(limit_s=30.0)
            await silence.check(reader, [PLACE], 0.0, has_read=False)
            with pytest.raises(LogUnavailable, match=r"t/0 from offset 7 on, got none for 31 s"):
                await silence.check(reader, [PLACE], 31.0, has_read=False)


async def test_reading_goes_on_after_records_that_came_late() -> None:
    """The time between two polls is the caller's, and does not count."""
    async with MemoryLog() as log:
        await log.create_topics([TopicInfo("t", 1, {})], replication_factor=1)
        async with log.reader([PLACE]) as reader:
            silence = Silence(limit_s=30.0)
            await silence.check(reader, [PLACE], 0.0, has_read=False)
            await silence.check(reader, [PLACE], 29.0, has_read=True)
            await silence.check(reader, [PLACE], 90.0, has_read=False)
            await silence.check(reader, [PLACE], 119.0, has_read=False)
