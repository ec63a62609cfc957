"""Checkpoint file: records the progress of a run, so that it can be resumed.

A checkpoint holds, for each partition of the recording, the offset up to which copies are
acknowledged. It is written after their acknowledgement, so a killed run has sent records that its
checkpoint does not know. The target topic itself provides exactly once: every copy carries the
run's id and its original's identity, so a resumed run reads the end of the target and leaves out
what is already there.

That end begins at the checkpoint's *floor*: offsets of the target below which there is no copy
unknown to the checkpoint. End offsets are requested while sending continues. They become the floor
once everything handed over before the response is acknowledged and recorded; anything handed over
later has offsets at or above them.

There are two conditions. A resumed run reads the target up to its last stable offset, so no produce
request of the killed process may arrive at the broker after that; the broker drops what it has not
read from a closed connection, and restarting takes longer than appending what it has read. And the
target must still hold the records above the floor (its retention must be longer than the pause
between the two runs). A transaction of another producer in the target hides what follows it, so a
resumed run first waits for its end (`headrace.tools.decided`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.client.rpc import last_header
from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.port import Consumer, Log, TopicPartition
from headrace.protocol.headers import HeaderName
from headrace.tools.replay.recording import Filters, Selection, Span, Window
from headrace.tools.replay.topic_recording import open_topic

if sys.platform != "win32":
    import fcntl

VERSION = 1


class CheckpointFault(HeadraceError):
    """A checkpoint cannot be written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Progress of a run.

    Attributes:
        run_id: of the run; a resumed run keeps it.
        options: identify the run: source, selection, target. A checkpoint with other options is
            refused.
        spans: of the recording, fixed when the run began; `begin` is the next offset to send.
        floor: offsets of the target's partitions, see above; by number.
        records: number of acknowledged records.
        finished: whether all records are acknowledged.
    """

    run_id: str
    options: Mapping[str, Any]
    spans: Sequence[Span]
    floor: Mapping[int, int]
    records: int = 0
    finished: bool = False

    def advanced(self, positions: Mapping[TopicPartition, int]) -> Checkpoint:
        """Return the checkpoint with the next offsets of some partitions updated."""
        spans = [
            span._replace(begin=positions.get(span.partition, span.begin)) for span in self.spans
        ]
        return replace(self, spans=spans)

    def rest_of(self, selection: Selection) -> Selection:
        """Return the part of the run's original selection that is still to be sent."""
        fixed = {span.partition: (span.begin, span.end) for span in self.spans}
        window = replace(selection.window, fixed=fixed)
        limit = None if selection.limit is None else max(selection.limit - self.records, 0)
        return replace(selection, window=window, limit=limit)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint file atomically and durably.

    Raises:
        CheckpointFault: the file cannot be written.
    """
    content = {
        "version": VERSION,
        "run": checkpoint.run_id,
        "options": checkpoint.options,
        "spans": [
            {**span.partition._asdict(), "begin": span.begin, "end": span.end}
            for span in checkpoint.spans
        ],
        "floor": {str(number): offset for number, offset in checkpoint.floor.items()},
        "records": checkpoint.records,
        "finished": checkpoint.finished,
    }
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise CheckpointFault(f"{path}: {error.strerror}") from error


@contextmanager
def sole_run(path: Path) -> Iterator[None]:
    """Let no other run use a checkpoint during the context: each would send what is left.

    Raises:
        ConfigurationError: another run uses it.
        CheckpointFault: the file that says so cannot be made beside it.
    """
    beside = path.with_name(f"{path.name}.lock")
    try:
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointFault(f"{beside}: {error.strerror}") from error
    try:
        if not _lock(file, beside):
            raise ConfigurationError(
                f"{path}: expected no other run with this checkpoint, but one is under way"
            )
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes no open file
                beside.unlink()
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> bool:
    """Lock a file; return False if another process has, or has just removed it."""
    if sys.platform == "win32":  # has no such locks
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        raise CheckpointFault(f"{path}: {error.strerror}") from error


def read_checkpoint(path: Path, options: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint of a run with these options; None if there is no file.

    Raises:
        ConfigurationError: the file is not a checkpoint, or belongs to another run.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: expected a checkpoint, got {error}") from error
    try:
        checkpoint = _checkpoint(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path}: expected a checkpoint, got {error!r}") from error
    for name in sorted({*options, *checkpoint.options}):
        then, now = checkpoint.options.get(name), options.get(name)
        if then != now:
            raise ConfigurationError(
                f"{path}: is of another run: {name}: expected {then!r}, got {now!r}"
            )
    return checkpoint


def _checkpoint(content: Any) -> Checkpoint:
    if content["version"] != VERSION:
        raise ValueError(f"version {content['version']}, which this release does not read")
    return Checkpoint(
        run_id=str(content["run"]),
        options=dict(content["options"]),
        spans=[
            Span(
                TopicPartition(str(each["topic"]), int(each["partition"])),
                int(each["begin"]),
                int(each["end"]),
            )
            for each in content["spans"]
        ],
        floor={int(number): int(offset) for number, offset in content["floor"].items()},
        records=int(content["records"]),
        finished=bool(content["finished"]),
    )


# --- writing and resuming ------------------------------------------------------------------------


WRITE_EVERY_S = 1.0


class CheckpointWriter:
    """Keeps a run's checkpoint; made by `keeping`.

    Args:
        target: a reader of the target's partitions, only for their end offsets.
        write_every_s: least time between two writes.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: Checkpoint,
        target: Consumer,
        partitions: list[TopicPartition],
        write_every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._write_every_s = write_every_s
        self.checkpoint = checkpoint
        self._path = path
        self._target = target
        self._partitions = partitions
        self._next_floor: tuple[int, Mapping[int, int]] | None = None
        self._handed_over = 0
        self._write_at_s = time.monotonic()

    def hand_over(self) -> int:
        """Begin a turn, before its records go to the producer, and return its number."""
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
        self._write_at_s = now_s + self._write_every_s
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
    log: Log,
    path: Path,
    checkpoint: Checkpoint,
    target: tuple[str, int],
    *,
    is_new: bool,
    write_every_s: float = WRITE_EVERY_S,
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
        keeper = CheckpointWriter(path, checkpoint, reader, partitions, write_every_s)
        if is_new:
            await keeper.write()
        yield keeper


async def already_there(log: Log, topic: str, checkpoint: Checkpoint) -> set[str]:
    """Return the identities of originals whose copies, of this run, are in the target above the
    floor.

    Raises:
        LogUnavailable: no broker answers.
    """
    mark = (HeaderName.REPLAY_RUN, checkpoint.run_id.encode())
    floor: dict[int | None, int] = dict(checkpoint.floor.items())
    selection = Selection(Window(from_offsets=floor), Filters(headers=(mark,)))
    found: set[str] = set()
    async with (
        open_topic(log, topic, selection) as tail,
        aclosing(tail.chunks()) as chunks,
    ):
        async for chunk in chunks:
            for record in chunk:
                found.add((last_header(record.headers, HeaderName.REPLAY_OF) or b"").decode())
    return found


async def _ends(reader: Consumer, partitions: Sequence[TopicPartition]) -> dict[int, int]:
    ends = await reader.end_offsets(partitions)
    return {partition.partition: offset for partition, offset in ends.items()}
