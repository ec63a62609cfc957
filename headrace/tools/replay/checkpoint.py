"""How far a run has come, in a file, and how a run goes on from it.

A checkpoint says up to where, in each partition of the recording, copies are acknowledged. It is
written after their acknowledgement, so a run that is killed has sent records that its checkpoint
does not know. Exactly once is had from the target topic itself: every copy carries the run's id
and its original's identity, so a resumed run reads the end of the target and leaves out what is
there already.

Where that end begins is the checkpoint's *floor*: offsets of the target below which there is no
copy that the checkpoint does not know. End offsets are asked for while sending goes on; they
become the floor once everything that had been handed over by the time of the answer is
acknowledged and known. What a run handed over later lies at or above them.

Two conditions. A resumed run reads the target up to its last stable offset, so a produce request
of the killed process must not arrive at the broker after that; the broker drops what it has not
read from a connection that is closed, and starting anew takes longer than what it has read takes
to be appended. And the target must still hold what lies above the floor (its retention must be
longer than the pause between the two runs).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.port import TopicPartition
from headrace.tools.replay.recording import Span
from headrace.tools.replay.selection import Selection

VERSION = 1


class CheckpointFault(HeadraceError):
    """A checkpoint cannot be written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a run has come.

    Attributes:
        run_id: of the run; a resumed run keeps it.
        options: what makes it this run: source, selection, target. Another run's checkpoint is
            refused by them.
        spans: what the recording is, fixed when the run began; `begin` is the next offset to be
            sent.
        floor: offsets of the target's partitions, see above; by number.
        records: how many are acknowledged.
        finished: whether that is all.
    """

    run_id: str
    options: Mapping[str, Any]
    spans: Sequence[Span]
    floor: Mapping[int, int]
    records: int = 0
    finished: bool = False

    def advanced(self, positions: Mapping[TopicPartition, int]) -> Checkpoint:
        """With the next offsets of some partitions."""
        spans = [
            span._replace(begin=positions.get(span.partition, span.begin)) for span in self.spans
        ]
        return replace(self, spans=spans)

    def rest_of(self, selection: Selection) -> Selection:
        """What is left to be sent of the selection with which the run began."""
        fixed = {span.partition: (span.begin, span.end) for span in self.spans}
        window = replace(selection.window, fixed=fixed)
        limit = None if selection.limit is None else max(selection.limit - self.records, 0)
        return replace(selection, window=window, limit=limit)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Put it in the place of the last one, whole or not at all, on the disk.

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


def read_checkpoint(path: Path, options: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of a run with these options; None where no file is.

    Raises:
        ConfigurationError: the file is no checkpoint, or another run's.
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
