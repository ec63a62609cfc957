"""Headers of a copy: the original's key, value and headers, except those that a new time, place or
run invalidates. Pure.
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
    """Differences between copies and their originals.

    Attributes:
        run_id: of this run.
        keep_reply: keep the reply topic and partition; otherwise the callers of the originals do
            not get the copies' answers.
        reply_to: reply topic of all copies; overrides `keep_reply`.
    """

    run_id: str
    keep_reply: bool = False
    reply_to: str | None = None

    def copy_of(self, record: Record, now_ms: int) -> NewRecord:
        """Return the record to send; the log that takes it sets its timestamp.

        `x-deadline-ms` is moved by the time since the original's timestamp, so that the copy has as
        much time as its original had; an unreadable one is kept. `x-timeout-ms` counts from the
        copy's own timestamp anyway. The marks replace those of an earlier replay.
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
