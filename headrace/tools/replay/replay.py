"""A replay run: it reads ahead, sends records when they are due, and awaits their acknowledgements.

There is one timeline for all partitions. A late record does not move those after it: their due
times stay, and all due records are sent at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from headrace.log.port import Record, SentBatch, TopicPartition
from headrace.tools.histogram import Histogram
from headrace.tools.replay.recording import Recording, identity, record_bytes
from headrace.tools.replay.sinks import Sink

# --- pace ----------------------------------------------------------------------------------------


class Pace(Protocol):
    """Maps records to positions on the timeline."""

    def at_s(self, record: Record) -> float:
        """Return seconds after the first record; called once per record, in order."""
        ...


class OriginalSpacing:
    """Spacing of the records' timestamps, `speed` times as fast.

    A record with an earlier timestamp than its predecessor, or with none, is due together with it.
    """

    def __init__(self, speed: float = 1.0) -> None:
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"speed: expected a positive number, got {speed}")
        self._speed = speed
        self._first_ms: int | None = None

    def at_s(self, record: Record) -> float:
        if record.timestamp < 0:  # Kafka's -1: none
            return 0.0
        if self._first_ms is None:
            self._first_ms = record.timestamp
        return (record.timestamp - self._first_ms) / 1000 / self._speed


class FixedRate:
    """Constant rate of `per_s` records per second."""

    def __init__(self, per_s: float) -> None:
        if not (per_s > 0 and math.isfinite(per_s)):
            raise ValueError(f"rate: expected a positive number of records per second, got {per_s}")
        self._per_s = per_s
        self._count = 0

    def at_s(self, record: Record) -> float:
        at_s = self._count / self._per_s
        self._count += 1
        return at_s


class Unpaced:
    """No pacing: everything is due at once."""

    def at_s(self, record: Record) -> float:
        return 0.0


class Schedule:
    """Due times of the records on a clock.

    Args:
        started_s: when the first record is due, on the clock whose time is passed later.
    """

    def __init__(self, pace: Pace, started_s: float) -> None:
        self._pace = pace
        self._started_s = started_s
        self._last_s = started_s

    def plan(self, records: Iterable[Record]) -> list[float]:
        """Return the due time of each of the next records; never before its predecessor's."""
        dues = []
        for record in records:
            self._last_s = max(self._last_s, self._started_s + self._pace.at_s(record))
            dues.append(self._last_s)
        return dues


def due_until(dues: Sequence[float], start: int, now_s: float) -> int:
    """Return the index after the last due record, from `start` on."""
    return bisect_right(dues, now_s, lo=start)


# --- the run -------------------------------------------------------------------------------------


CHUNKS_AHEAD = 4
TURNS_UNACKNOWLEDGED = 64


class ReplayResult(NamedTuple):
    """Result of a run.

    Attributes:
        records: number of records sent and acknowledged.
        bytes: of their keys, values and headers, as recorded.
        skipped: records left out because an earlier part of this run had sent them.
        seconds: from the first record's due time until all are acknowledged, and answered if the
            sink waits for that.
        spacing_p50_ms, spacing_p99_ms, spacing_max_ms: differences between due times and send
            times; None without a pace.
    """

    records: int
    bytes: int
    skipped: int
    seconds: float
    spacing_p50_ms: float | None = None
    spacing_p99_ms: float | None = None
    spacing_max_ms: float | None = None

    @property
    def rate_per_s(self) -> float:
        """Achieved rate in records per second."""
        return self.records / self.seconds if self.seconds else 0.0


class Watcher(Protocol):
    """Observer of acknowledgements, such as a checkpoint writer."""

    def hand_over(self) -> int:
        """Begin a turn, before its records are handed over, and return its number."""
        ...

    async def acknowledged(
        self, turn: int, records: int, positions: Mapping[TopicPartition, int]
    ) -> None:
        """Note that all turns up to this one are acknowledged.

        `positions` are the next offsets of the recording in the partitions that this turn advanced.
        """
        ...


class _Turn(NamedTuple):
    """Records that were handed over together."""

    number: int
    records: int
    bytes: int
    positions: Mapping[TopicPartition, int]
    batches: Sequence[SentBatch]


class Replay:
    """Sends a recording into a sink at a given pace.

    Args:
        skip: identities of records to leave out.
        advanced: called with the records and bytes of each acknowledged turn, and the positions
            that it reached in the recording.
        watcher: keeps the checkpoint.
        clock: a monotonic one, in seconds.
        sleep: waits for seconds of that clock.
    """

    def __init__(
        self,
        recording: Recording,
        pace: Pace,
        sink: Sink,
        *,
        skip: frozenset[str] = frozenset(),
        advanced: Callable[[int, int, Mapping[TopicPartition, int]], None] = lambda *_: None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._recording = recording
        self._pace = pace
        self._sink = sink
        self._skip = skip
        self._advanced = advanced
        self._watcher = watcher
        self._clock = clock
        self._sleep = sleep
        self._ahead: asyncio.Queue[list[Record] | None] = asyncio.Queue(CHUNKS_AHEAD)
        self._turns: asyncio.Queue[_Turn | None] = asyncio.Queue(TURNS_UNACKNOWLEDGED)
        self._read_ahead = asyncio.Event()
        self._spacing_errors = Histogram()
        self._started_s = self._ended_s = 0.0
        self._records = self._bytes = self._skipped = 0

    async def run(self) -> ReplayResult:
        """Send everything, once.

        Raises:
            ExceptionGroup: with the cause of the end: an error of `Recording.chunks`, or of the
                producer (`LogUnavailable`, `RecordTooLarge`, `RecordRefused`).
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(), name="replay-read")
            tasks.create_task(self._send(), name="replay-send")
            tasks.create_task(self._await_acknowledgements(), name="replay-acknowledgements")
        await self._sink.finish()
        if self._records:
            self._ended_s = self._clock()
        seconds = self._ended_s - self._started_s
        outcome = ReplayResult(self._records, self._bytes, self._skipped, seconds)
        if isinstance(self._pace, Unpaced) or not self._records:
            return outcome
        return outcome._replace(
            spacing_p50_ms=self._spacing_errors.percentile_s(50) * 1000,
            spacing_p99_ms=self._spacing_errors.percentile_s(99) * 1000,
            spacing_max_ms=self._spacing_errors.max_s * 1000,
        )

    async def _read(self) -> None:
        async with aclosing(self._recording.chunks()) as chunks:
            async for chunk in chunks:
                await self._ahead.put(chunk)
                if self._ahead.full():
                    self._read_ahead.set()
        self._read_ahead.set()
        await self._ahead.put(None)

    async def _send(self) -> None:
        # The clock starts after reading ahead; otherwise the first records would be late.
        await self._read_ahead.wait()
        schedule: Schedule | None = None
        while (chunk := await self._ahead.get()) is not None:
            if schedule is None:
                self._started_s = self._ended_s = self._clock()
                schedule = Schedule(self._pace, self._started_s)
            dues = schedule.plan(chunk)
            start = 0
            while start < len(chunk):
                end = due_until(dues, start, self._clock())
                if end == start:
                    await self._sleep(dues[start] - self._clock())
                    continue
                await self._hand_over(chunk[start:end], dues[start:end])
                start = end
        await self._turns.put(None)

    async def _hand_over(self, records: Sequence[Record], dues: Sequence[float]) -> None:
        number = self._watcher.hand_over() if self._watcher is not None else 0
        positions = {
            TopicPartition(record.topic, record.partition): record.offset + 1 for record in records
        }
        sent = records
        if self._skip:
            sent = [record for record in records if identity(record) not in self._skip]
            self._skipped += len(records) - len(sent)
        batches = await self._sink.send(sent) if sent else ()
        now_s = self._clock()
        self._spacing_errors.add([abs(now_s - due_s) for due_s in dues])
        size = sum(map(record_bytes, sent))
        self._records += len(sent)
        self._bytes += size
        await self._turns.put(_Turn(number, len(records), size, positions, batches))

    async def _await_acknowledgements(self) -> None:
        while (turn := await self._turns.get()) is not None:
            for sent in turn.batches:
                await sent.acknowledged
            self._advanced(turn.records, turn.bytes, turn.positions)
            if self._watcher is not None:
                await self._watcher.acknowledged(turn.number, turn.records, turn.positions)
