"""Jobs of the `headrace replay` commands: open a recording, count it, save it, or send it to a
topic.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import ConfigurationError
from headrace.log.port import Log, Producer, TopicPartition
from headrace.tools.decided import DECIDED_WITHIN_S, wait_until_decided
from headrace.tools.replay.capture import CaptureWriter, open_capture
from headrace.tools.replay.checkpoint import (
    WRITE_EVERY_S,
    Checkpoint,
    already_there,
    keeping,
    read_checkpoint,
    sole_run,
)
from headrace.tools.replay.recording import (
    PartitionTotals,
    Recording,
    Selection,
    Totals,
    record_bytes,
)
from headrace.tools.replay.replay import Pace, Replay, ReplayResult, Unpaced
from headrace.tools.replay.sinks import CaptureSink, Marking, TopicSink
from headrace.tools.replay.topic_recording import open_topic

# --- sources -------------------------------------------------------------------------------------


@asynccontextmanager
async def open_recording(
    log: Log | None, source: str | Path, selection: Selection
) -> AsyncIterator[Recording]:
    """Open a topic (a `str`, its name) or a capture file (a `Path`) as a recording.

    The log must be open; a file needs none.

    Raises:
        ConfigurationError: the topic or file is missing, or is not a capture file of this version.
        CaptureError: the file's index is damaged.
        LogUnavailable: no broker answers.
    """
    if isinstance(source, Path):
        async with open_capture(source, selection) as capture:
            yield capture
        return
    if log is None:
        raise ConfigurationError(f"{source}: a topic is read from a log, and none is open")
    async with open_topic(log, source, selection) as recording:
        yield recording


# --- jobs ----------------------------------------------------------------------------------------


Advanced: TypeAlias = Callable[[int, int, Mapping[TopicPartition, int]], None]
"""See `headrace.tools.replay.replay.Replay`."""

Watch: TypeAlias = Callable[[Recording], Advanced]
"""Takes the opened recording, and returns the progress callback."""


class RecordingSource(NamedTuple):
    """A topic (its name) or a capture file (a `Path`), and the selection of its records."""

    origin: str | Path
    selection: Selection


@dataclass(frozen=True, slots=True)
class TopicJob:
    """Parameters of a replay into a topic.

    Attributes:
        topic: an existing topic.
        checkpoint: where to keep one; an existing file is resumed from.
        options: further values that identify the run, in JSON's types; see `Checkpoint.options`.
        checkpoint_every_s: least time between two writes of the checkpoint.
        decided_within_s: how long a resumed run waits for open transactions in the target.
    """

    topic: str
    pace: Pace
    marking: Marking
    by_key: bool = False
    checkpoint: Path | None = None
    options: Mapping[str, Any] | None = None
    checkpoint_every_s: float = WRITE_EVERY_S
    decided_within_s: float = DECIDED_WITHIN_S


class Replayed(NamedTuple):
    """A successful run; `resumed` if it continued from a checkpoint."""

    run_id: str
    outcome: ReplayResult
    resumed: bool = False


def new_run_id() -> str:
    """Return a unique id."""
    return f"replay-{secrets.token_hex(6)}"


def now_ms() -> int:
    """Return the wall clock, in epoch milliseconds."""
    return time.time_ns() // 1_000_000


async def count(
    recording: Recording, advanced: Advanced = lambda *_: None
) -> list[PartitionTotals]:
    """Return what a replay would send: counts, bytes and time span of each partition."""
    totals = Totals()
    async with aclosing(recording.chunks()) as chunks:
        async for chunk in chunks:
            totals.add(chunk)
            reached = {
                TopicPartition(each.topic, each.partition): each.offset + 1 for each in chunk
            }
            advanced(len(chunk), sum(map(record_bytes, chunk)), reached)
    return totals.partitions()


async def save(recording: Recording, path: Path, advanced: Advanced) -> ReplayResult:
    """Capture a recording.

    Raises:
        ConfigurationError: the file already exists, or cannot be created.
        CaptureError: writing failed.
    """
    with CaptureWriter(path, recording.name) as writer:
        return await Replay(recording, Unpaced(), CaptureSink(writer), advanced=advanced).run()


async def replay_into_topic(
    log: Log, source: RecordingSource, job: TopicJob, watch: Watch
) -> Replayed:
    """Send marked copies into a topic; resume from a checkpoint if there is one.

    Raises:
        ConfigurationError: the topic, the reply topic or the source is missing, or the checkpoint
            belongs to another run, or is in use by one.
        CheckpointFault: the checkpoint cannot be written.
        LogUnavailable: no broker answers, or an open transaction hides a part of the target.
        ExceptionGroup: see `Replay.run`.
    """
    with nullcontext() if job.checkpoint is None else sole_run(job.checkpoint):
        return await _replay_into_topic(log, source, job, watch)


async def _replay_into_topic(
    log: Log, source: RecordingSource, job: TopicJob, watch: Watch
) -> Replayed:
    before = None
    options = dict(job.options or {})
    if job.checkpoint is not None:
        options |= await _topic_ids(log, source.origin, job.topic)
        before = await asyncio.to_thread(read_checkpoint, job.checkpoint, options)
    if before is not None and before.finished:
        return Replayed(before.run_id, ReplayResult(0, 0, before.records, 0.0), resumed=True)
    selection = source.selection if before is None else before.rest_of(source.selection)
    marking = job.marking
    if before is not None:
        marking = Marking(before.run_id, marking.keep_reply, marking.reply_to)
    async with AsyncExitStack() as stack:
        recording = await stack.enter_async_context(open_recording(log, source.origin, selection))
        if before is not None:
            recording.notice = "\n".join([recording.notice, *_deleted(before, recording)]).strip()
        producer = await stack.enter_async_context(log.producer())
        target = await topic_of(producer, job.topic)
        if marking.reply_to is not None:
            await topic_of(producer, marking.reply_to)
        keeper = None
        skip: frozenset[str] = frozenset()
        if job.checkpoint is not None:
            if before is not None:
                await wait_until_decided(
                    log,
                    [TopicPartition(job.topic, n) for n in range(target[1])],
                    job.decided_within_s,
                )
                skip = frozenset(await already_there(log, job.topic, before))
            checkpoint = before or Checkpoint(marking.run_id, options, recording.spans, {})
            keeper = await stack.enter_async_context(
                keeping(
                    log,
                    job.checkpoint,
                    checkpoint,
                    target,
                    is_new=before is None,
                    write_every_s=job.checkpoint_every_s,
                )
            )
        sink = TopicSink(producer, target, marking, now_ms, by_key=job.by_key)
        await sink.prepare()
        replay = Replay(
            recording, job.pace, sink, skip=skip, advanced=watch(recording), watcher=keeper
        )
        outcome = await replay.run()
        if keeper is not None:
            await keeper.finish()
    return Replayed(marking.run_id, outcome, before is not None)


async def _topic_ids(log: Log, *origins: str | Path) -> dict[str, str]:
    """Return the ids of topics, by which a checkpoint knows them from topics made anew."""
    topics = [each for each in origins if isinstance(each, str)]
    found = await log.describe_topics(topics)
    return {
        f"id of topic {name}": topic.topic_id for name, topic in found.items() if topic is not None
    }


def _deleted(before: Checkpoint, recording: Recording) -> Iterator[str]:
    """Yield what is no longer held of the rest of an interrupted run."""
    begins = {span.partition: span.begin for span in recording.spans}
    for span in before.spans:
        end = min(begins.get(span.partition, span.end), span.end)
        if end > span.begin:
            yield (
                f"{span.partition}: retention has deleted the records from offset {span.begin} to "
                f"{end - 1} before they were known to be sent"
            )


async def topic_of(producer: Producer, topic: str) -> tuple[str, int]:
    """Return a topic's name and number of partitions. Raises `ConfigurationError`."""
    partitions = await producer.partitions_for(topic)
    if partitions is None:
        raise ConfigurationError(f"{topic}: expected a topic, but there is none of this name")
    return topic, partitions
