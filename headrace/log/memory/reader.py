"""Reading partitions of the embedded log: positions, pausing, seeking, polling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from headrace.log.errors import Fenced, LogRefused, OffsetOutOfRange
from headrace.log.memory.faults import Faults
from headrace.log.memory.partition import Partition
from headrace.log.memory.topics import Topics
from headrace.log.port import MAX_POLL_BYTES, Committed, Gap, Record, TopicPartition


class MemoryReader:
    """A reader of given partitions, in no group; it starts at their ends.

    Args:
        topics: the log's topics.
        faults: the injected faults.
        partitions: the partitions to read.
    """

    def __init__(
        self, topics: Topics, faults: Faults, partitions: Sequence[TopicPartition]
    ) -> None:
        self._topics = topics
        self._faults = faults
        self._requested = tuple(partitions)
        self._reading: dict[TopicPartition, Partition] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._turns: list[TopicPartition] = []
        self._gaps: list[Gap] = []
        self._gate_is_open = False
        self._is_closed = False
        self._news = asyncio.Event()

    async def poll(
        self, timeout_s: float, max_records: int, max_bytes: int = MAX_POLL_BYTES
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """See the port. Partitions are read in turn, so that a busy one does not starve the
        others.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)  # a poll that always finds records must not block the loop
        while True:
            self._raise_what_ended_it()
            self._news.clear()
            found = self._take(max_records, max_bytes)
            if found or self._gaps or loop.time() >= deadline:
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                return {}

    def gaps(self) -> Sequence[Gap]:
        return self._gaps

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._reading)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._require(partitions)
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._require(partitions)
        self._paused.difference_update(partitions)
        self._news.set()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._require((partition,))
        self._positions[partition] = offset
        self._news.set()

    async def position(self, partition: TopicPartition) -> int:
        self._require((partition,))
        return self._positions[partition]

    async def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        raise LogRefused(f"a reader is in no group: it cannot commit {dict(offsets)}")

    async def committed(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, Committed | None]:
        return dict.fromkeys(partitions)

    async def beginning_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        await self._faults.answered()
        return {name: self._topics.partition(name).begin for name in partitions}

    async def end_offsets(
        self, partitions: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        await self._faults.answered()
        return {name: self._topics.partition(name).stable_end for name in partitions}

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int | None]:
        await self._faults.answered()
        return {
            name: self._topics.partition(name).offset_at(timestamp_ms)
            for name, timestamp_ms in timestamps_ms.items()
        }

    def last_contact_s(self) -> float:
        """Return 0.0, or the seconds since a fault made the log unavailable."""
        return self._faults.down_for_s()

    @property
    def member_id(self) -> str:
        return ""

    async def is_member(self) -> bool:
        return False

    async def close(self) -> None:
        """Release the partitions; a pending poll ends, and later ones raise."""
        self._is_closed = True
        self._give_up()
        self._faults.unwatch(self._news.set)
        self._news.set()

    async def __aenter__(self) -> Self:
        await self._faults.answered()
        self._faults.watch(self._news.set)
        self._take_up({name: self._topics.partition(name).stable_end for name in self._requested})
        self._gate_is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _take_up(self, positions: Mapping[TopicPartition, int]) -> None:
        """Start reading these partitions from these positions, once the gate is open."""
        self._reading = {name: self._topics.partition(name) for name in positions}
        self._positions = dict(positions)
        self._turns = sorted(positions)
        for partition in self._reading.values():
            partition.watch(self._news.set)

    def _give_up(self) -> None:
        """Stop reading, and forget positions and pauses."""
        for partition in self._reading.values():
            partition.unwatch(self._news.set)
        self._gate_is_open = False
        self._reading, self._positions, self._turns = {}, {}, []
        self._paused.clear()

    def _take(self, max_records: int, max_bytes: int) -> dict[TopicPartition, Sequence[Record]]:
        found: dict[TopicPartition, Sequence[Record]] = {}
        self._gaps = []
        if not self._gate_is_open or self._faults.is_down:
            return found
        turns = [name for name in self._turns if name not in self._paused]
        self._require_positions_in_range(turns)  # before any position moves
        for name in turns:
            partition, position = self._reading[name], self._positions[name]
            stable_end = partition.stable_end
            if position >= stable_end:
                continue
            records, size_bytes = partition.read(position, max_records, max_bytes)
            if records:
                found[name] = records
                self._positions[name] = records[-1].offset + 1
                max_records -= len(records)
                max_bytes -= size_bytes
            else:
                self._positions[name] = stable_end  # the rest is a gap
            self._gaps += partition.gaps_between(position, self._positions[name])
            if not max_records or max_bytes <= 0:
                break
        if found:
            self._turns = [name for name in self._turns if name not in found] + list(found)
        return found

    def _require_positions_in_range(self, names: Iterable[TopicPartition]) -> None:
        outside = {
            name: self._positions[name]
            for name in names
            if not self._reading[name].begin <= self._positions[name] <= self._reading[name].end
        }
        if outside:
            where = "; ".join(
                f"{name}: expected an offset from {self._reading[name].begin} "
                f"to {self._reading[name].end}, stood at {position}"
                for name, position in outside.items()
            )
            raise OffsetOutOfRange(where, outside)

    def _require(self, partitions: Sequence[TopicPartition]) -> None:
        strangers = [name for name in partitions if name not in self._reading]
        if strangers:
            raise Fenced(f"not assigned: {', '.join(map(str, strangers))}")

    def _raise_what_ended_it(self) -> None:
        if self._is_closed:
            raise RuntimeError("the consumer is closed")
