"""What a copy carries: its original's key, value and headers, but for those that time, place or
the run make wrong. Pure rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.log.port import NewRecord, Record
from headrace.tools.replay.recording import identity

REPLAY_OF = "x-replay-of"
"""`topic/partition/offset` of the original."""

REPLAY_RUN = "x-replay-run"
"""The id of the run that made the copy."""

DEADLINE = "x-deadline-ms"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"


@dataclass(frozen=True, slots=True)
class Marking:
    """How copies differ from their originals.

    Attributes:
        run_id: of this run.
        keep_reply: leave the reply topic and partition as they are; otherwise nobody who waited
            for the original's answer gets the copy's.
        reply_to: the reply topic of all copies; over `keep_reply`.
    """

    run_id: str
    keep_reply: bool = False
    reply_to: str | None = None

    def copy_of(self, record: Record, now_ms: int) -> NewRecord:
        """The record as it is sent again, stamped by the log that takes it.

        `x-deadline-ms` moves by the time that has passed since the original's timestamp, so that
        the copy has as long as its original had; one that cannot be read stays as it is.
        `x-timeout-ms` counts from the copy's own timestamp anyway. The marks replace those of an
        earlier replay.
        """
        headers = [
            (name, self._moved(value, record, now_ms) if name == DEADLINE else value)
            for name, value in record.headers
            if not self._is_replaced(name)
        ]
        if self.reply_to is not None:
            headers.append((REPLY_TOPIC, self.reply_to.encode()))
        headers.append((REPLAY_OF, identity(record).encode()))
        headers.append((REPLAY_RUN, self.run_id.encode()))
        return NewRecord(record.key, record.value, headers)

    def _is_replaced(self, name: str) -> bool:
        if name in {REPLY_TOPIC, REPLY_PARTITION}:
            return self.reply_to is not None or not self.keep_reply
        return name in {REPLAY_OF, REPLAY_RUN}

    @staticmethod
    def _moved(value: bytes | None, record: Record, now_ms: int) -> bytes | None:
        if value is None or not value.isdigit() or record.timestamp < 0:
            return value
        return b"%d" % (int(value) + now_ms - record.timestamp)
