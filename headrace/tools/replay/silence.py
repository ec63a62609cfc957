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
        limit_s: how long nothing may come.
    """

    def __init__(self, limit_s: float = SILENCE_S) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    async def check(
        self,
        consumer: Consumer,
        unfinished: Iterable[TopicPartition],
        now_s: float,
        *,
        has_read: bool,
    ) -> None:
        """Call this after each poll.

        Args:
            consumer: which was polled.
            unfinished: the partitions that have not reached their ends.
            now_s: monotonic seconds.
            has_read: whether the poll returned, or passed over, anything.

        Raises:
            LogUnavailable: nothing has come for too long.
        """
        silent_s = consumer.last_contact_s()
        if silent_s > self._limit_s:
            raise LogUnavailable(f"no broker has answered for {silent_s:.0f} s")
        if has_read or self._since_s is None:
            self._since_s = None if has_read else now_s
        elif now_s - self._since_s > self._limit_s:
            where = [
                f"{each} from offset {await consumer.position(each)} on" for each in unfinished
            ]
            raise LogUnavailable(
                f"expected the records of {', '.join(where)}, got none for "
                f"{now_s - self._since_s:.0f} s, although a broker answers: see its log"
            )
