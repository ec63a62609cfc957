"""Events that clients, readers and nemeses saw in one run, in a form that can be kept in a file.

All times are epoch milliseconds of one machine's clock: those of answers are when the broker wrote
them, so that they can be laid beside what the nemeses did, which set clocks of processes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

NO_NUMBER = -1
"""In the place of a number that an answer does not carry."""


class Identity(NamedTuple):
    """A request: the partition and offset of its record on the requests topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.offset}"


class Sent(NamedTuple):
    """A request that the log holds.

    Attributes:
        number: the caller's name for it; its input, and so its right output, follow from it.
        statuses: what its answer's `x-status` may say; empty for a record that cannot be read, and
            gets no answer.
        size_bytes: of its value.
    """

    at_ms: int
    number: int
    partition: int
    offset: int
    key: str
    statuses: tuple[str, ...]
    size_bytes: int = 0

    @property
    def identity(self) -> Identity:
        return Identity(self.partition, self.offset)


class Answered(NamedTuple):
    """An answer that a `read_committed` reader saw.

    Attributes:
        topic: where the answer stands, with its `partition` and `offset` there.
        request_partition: from its `x-request`, as is `request_offset`.
        number: from its correlation id.
        output: the number that its outputs tell of; `NO_NUMBER` for an error.
    """

    at_ms: int
    topic: str
    partition: int
    offset: int
    request_partition: int
    request_offset: int
    number: int
    output: int
    status: str

    @property
    def identity(self) -> Identity:
        """The request that it says it answers."""
        return Identity(self.request_partition, self.request_offset)


class FaultKind(StrEnum):
    """Kinds of fault; `checker.EXPLAINING` has those that excuse a repeated answer."""

    KILLED = "killed"
    CRASHED = "crashed"
    FROZEN = "frozen"
    LOST_PARTITION = "lost its partitions"
    BROKER_RESTARTED = "broker restarted"
    CONNECTIONS_CUT = "connections cut"
    BROKER_SILENT = "the broker gave no answer"
    UNACKNOWLEDGED = "a write was not acknowledged in time"
    DRAIN_CUT_SHORT = "its time to drain was too short"
    JOINED = "joined"
    LEFT = "left"
    REDEPLOYED = "redeployed"
    CLOCK_SET_BACK = "its clock was set back"
    THROTTLED = "producers were throttled"
    CHILD_KILLED = "a child with a transform was killed"
    CHILD_FROZEN = "a child with a transform was frozen"
    STORE_UNAVAILABLE = "the store of claims was unavailable, or slow"


class Fault(NamedTuple):
    """Something that was done to the system, or happened to it.

    Attributes:
        ended_ms: when its effect was over: a killed process reaped, a frozen one told that it
            had lost its partitions, a broker reachable again.
        stages: of the process that was hit; empty where all are.
    """

    began_ms: int
    ended_ms: int
    kind: FaultKind
    stages: tuple[str, ...]


class Kept(NamedTuple):
    """A dead letter of the request with this partition and offset."""

    partition: int
    offset: int

    @property
    def identity(self) -> Identity:
        return Identity(self.partition, self.offset)


class Committed(NamedTuple):
    """The offsets that the group had committed for one source partition.

    Attributes:
        at_ms: when the coordinator's answer had come.
        answered: ranges above the base, each from the first up to, and without, the second.
    """

    at_ms: int
    partition: int
    base: int
    answered: tuple[tuple[int, int], ...]

    def covers(self, offset: int) -> bool:
        """Whether it says that the request at this offset is answered."""
        return offset < self.base or any(start <= offset < stop for start, stop in self.answered)


class Deleted(NamedTuple):
    """A deletion of all requests of a partition below an offset, as retention deletes them.

    Attributes:
        at_ms: just before it began.
        end: the first offset that was left.
        from_bytes: values of this size or more were only in the deleted records; None if none was,
            because all stages shared a process.
    """

    at_ms: int
    partition: int
    end: int
    from_bytes: int | None


class Skipped(NamedTuple):
    """Offsets from `first` up to `end` that ingest reported as deleted before it read them."""

    at_ms: int
    partition: int
    first: int
    end: int


Happening: TypeAlias = Sent | Answered | Kept | Fault | Committed | Deleted | Skipped


@dataclass
class History:
    """The events of one run; each list in the order in which its writer saw them."""

    sent: list[Sent] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    deleted: list[Deleted] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def add(self, happening: Happening) -> None:
        """Append to the list of its kind."""
        if isinstance(happening, Sent):
            self.sent.append(happening)
        elif isinstance(happening, Answered):
            self.answered.append(happening)
        elif isinstance(happening, Fault):
            self.faults.append(happening)
        elif isinstance(happening, Kept):
            self.kept.append(happening)
        elif isinstance(happening, Deleted):
            self.deleted.append(happening)
        elif isinstance(happening, Skipped):
            self.skipped.append(happening)
        else:
            self.committed.append(happening)

    def __iter__(self) -> Iterator[Happening]:
        yield from self.sent
        yield from self.answered
        yield from self.faults
        yield from self.committed
        yield from self.kept
        yield from self.deleted
        yield from self.skipped

    def save(self, path: Path) -> None:
        """One line of JSON for each event: its kind, then its fields in order."""
        with path.open("w", encoding="utf-8") as file:
            for happening in self:
                file.write(json.dumps([type(happening).__name__, *happening]) + "\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """The inverse of `save`."""
        with path.open(encoding="utf-8") as file:
            return cls.of(_happening(*json.loads(line)) for line in file)

    @classmethod
    def of(cls, happenings: Iterable[Happening]) -> History:
        """A history of these events."""
        history = cls()
        for happening in happenings:
            history.add(happening)
        return history


_OF_NUMBERS_AND_TEXTS: dict[str, type[Answered | Kept | Deleted | Skipped]] = {
    each.__name__: each for each in (Answered, Kept, Deleted, Skipped)
}


def _happening(kind: str, *fields: Any) -> Happening:
    """An event from what JSON has kept of it."""
    if kind == "Sent":
        return Sent(*fields)._replace(statuses=tuple(fields[5]))
    if kind == "Fault":
        return Fault(fields[0], fields[1], FaultKind(fields[2]), tuple(fields[3]))
    if kind == "Committed":
        ranges = tuple((start, stop) for start, stop in fields[3])
        return Committed(*fields)._replace(answered=ranges)
    return _OF_NUMBERS_AND_TEXTS[kind](*fields)
