"""When a reading up to a known end is given up, because nothing comes."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.log.errors import LogUnavailable
from headrace.log.port import Consumer, TopicPartition

SILENCE_S = 30.0


class Silence:
    """Ends a reading for which nothing comes, although its records are there.

    Either no broker answers, or one answers without records for as long as it cannot read its log.

    Args:
        limit_s: how long polls may wait for nothing. What is done between two of them, such as
            sending what was read at the pace of a recording, does not count.
    """

    def __init__(self, limit_s: float = SILENCE_S) -> None:
        self._limit_s = limit_s
        self._waited_s = 0.0
        self._positions: dict[TopicPartition, int] = {}

    async def check(
        self, consumer: Consumer, unfinished: Iterable[TopicPartition], waited_s: float
    ) -> None:
        """Call this after each poll.

        Args:
            consumer: which was polled.
            unfinished: the partitions that have not reached their ends.
            waited_s: how long the poll took.

        Raises:
            LogUnavailable: nothing has come for too long.
        """
        silent_s = consumer.last_contact_s()
        if silent_s > self._limit_s:
            raise LogUnavailable(f"no broker has answered for {silent_s:.0f} s")
        # They also move over what no poll returns, such as the records of aborted transactions.
        positions = {each: await consumer.position(each) for each in unfinished}
        is_stuck = positions == self._positions
        self._positions = positions
        self._waited_s = self._waited_s + waited_s if is_stuck else 0.0
        if self._waited_s > self._limit_s:
            where = ", ".join(f"{each} from offset {at} on" for each, at in positions.items())
            raise LogUnavailable(
                f"expected the records of {where}, got none for "
                f"{self._waited_s:.0f} s, although a broker answers: see its log"
            )
