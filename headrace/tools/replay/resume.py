"""Checkpoints of a run into a topic: created, updated while sending, and resumed from.

`headrace.tools.replay.checkpoint` explains why no record is sent twice, or left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from headrace.client.rpc import last_header
from headrace.log.port import Consumer, Log, TopicPartition
from headrace.tools.replay.checkpoint import Checkpoint, write_checkpoint
from headrace.tools.replay.marking import REPLAY_OF, REPLAY_RUN
from headrace.tools.replay.selection import Filters, Selection, Window
from headrace.tools.replay.topic_recording import open_topic

WRITE_EVERY_S = 1.0


class CheckpointWriter:
    """Keeps a run's checkpoint; made by `keeping`.

    Args:
        target: a reader of the target's partitions, only for their end offsets.
    """

    def __init__(
        self, path: Path, checkpoint: Checkpoint, target: Consumer, partitions: list[TopicPartition]
    ) -> None:
        self.checkpoint = checkpoint
        self._path = path
        self._target = target
        self._partitions = partitions
        self._next_floor: tuple[int, Mapping[int, int]] | None = None
        self._handed_over = 0
        self._write_at_s = time.monotonic()

    def hand_over(self) -> int:
        """Called before records are handed to the producer; returns the number of the turn."""
        self._handed_over += 1
        return self._handed_over

    async def acknowledged(
        self, turn: int, records: int, positions: Mapping[TopicPartition, int]
    ) -> None:
        """Record that all turns up to this one are acknowledged; write the checkpoint when due."""
        before = self.checkpoint
        self.checkpoint = replace(before.advanced(positions), records=before.records + records)
        now_s = time.monotonic()
        if now_s < self._write_at_s:
            return
        self._write_at_s = now_s + WRITE_EVERY_S
        if self._next_floor is not None and self._next_floor[0] <= turn:
            self.checkpoint = replace(self.checkpoint, floor=self._next_floor[1])
            self._next_floor = None
        await self.write()
        if self._next_floor is None:
            ends = await _ends(self._target, self._partitions)
            self._next_floor = (self._handed_over, ends)

    async def finish(self) -> None:
        """Record that everything is acknowledged."""
        self.checkpoint = replace(self.checkpoint, finished=True)
        await self.write()

    async def write(self) -> None:
        """Write the checkpoint to the disk."""
        await asyncio.to_thread(write_checkpoint, self._path, self.checkpoint)


@asynccontextmanager
async def keeping(
    log: Log, path: Path, checkpoint: Checkpoint, target: tuple[str, int], *, is_new: bool
) -> AsyncIterator[CheckpointWriter]:
    """Keep a checkpoint during the context; a new one is written before the context is entered.

    `target` is the topic's name and its number of partitions.
    """
    topic, count = target
    partitions = [TopicPartition(topic, number) for number in range(count)]
    async with log.reader(partitions) as reader:
        reader.pause(partitions)  # used for end offsets, never for reading
        if is_new:
            checkpoint = replace(checkpoint, floor=await _ends(reader, partitions))
        keeper = CheckpointWriter(path, checkpoint, reader, partitions)
        if is_new:
            await keeper.write()
        yield keeper


async def already_there(log: Log, topic: str, checkpoint: Checkpoint) -> set[str]:
    """Return the identities of originals whose copies, of this run, are in the target above the
    floor.

    Raises:
        LogUnavailable: no broker answers.
    """
    mark = (REPLAY_RUN, checkpoint.run_id.encode())
    floor: dict[int | None, int] = dict(checkpoint.floor.items())
    selection = Selection(Window(from_offsets=floor), Filters(headers=(mark,)))
    found: set[str] = set()
    async with (
        open_topic(log, topic, selection) as tail,
        aclosing(tail.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                found.add((last_header(record.headers, REPLAY_OF) or b"").decode())
    return found


async def _ends(reader: Consumer, partitions: Sequence[TopicPartition]) -> dict[int, int]:
    ends = await reader.end_offsets(partitions)
    return {partition.partition: offset for partition, offset in ends.items()}
