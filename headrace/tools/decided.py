"""Waiting until no open transaction hides records that a resumed run has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.log.errors import LogUnavailable
from headrace.log.port import Log, TopicPartition

DECIDED_WITHIN_S = 30.0
"""Longest wait for transactions of other programs: most end within a second."""

_ASK_EVERY_S = 0.2


async def wait_until_decided(
    log: Log, partitions: Sequence[TopicPartition], timeout_s: float
) -> None:
    """Wait until readers see all that the partitions hold now.

    Readers see nothing from the first record of an open transaction on, whoever has written it.

    Args:
        log: an open log.
        partitions: of any topics.
        timeout_s: time for the transactions to end.

    Raises:
        LogUnavailable: a transaction is still open; the error has its partition.
    """
    written = await log.written_ends(partitions)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    async with log.reader(partitions) as reader:
        reader.pause(partitions)  # used for end offsets, never for reading
        while True:
            stable = await reader.end_offsets(partitions)
            hidden = [each for each in partitions if stable[each] < written[each]]
            if not hidden:
                return
            if loop.time() >= until_s:
                first = hidden[0]
                raise LogUnavailable(
                    f"{first}: expected all records below offset {written[first]} to be readable, "
                    f"but an open transaction of another producer hides those from {stable[first]} "
                    "on; run it again when that transaction has ended"
                )
            await asyncio.sleep(_ASK_EVERY_S)
