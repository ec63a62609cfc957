"""Where marks are kept: as metadata of offsets that a group of their own commits.

The group is called after the one that reads, with `.marks` behind it, and has no members, so that
a mark can be written at any moment, by whoever thinks that a partition is his. Marks are hints: one
that is lost, or overwritten by a process that is no owner any more, costs a repeated search, and
never an answer.

The text is JSON, since people read it when they look for a culprit:

    {"v": 2, "open": true, "stop": 900, "ends": 2, "running": "17:1rAAE", "alone": 0,
     "attempts": [[17, 0, 2]], "accused": "17:1rAAM", "member": "headrace-5e1f…",
     "process": "gpu-1/8d2c6f1e/4026531840/9f3cba10d24e7f68"}

`attempts` are offset, place and count; ranges of offsets are written as in the metadata of answers
(`headrace.delivery.acked_offsets`), behind the first offset.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from headrace.crash_isolation.liveness import is_gone
from headrace.crash_isolation.poison_search import CLEAN, CrashMarker
from headrace.delivery.acked_offsets import Range, UnknownMetadata, decode_ranges, encode_ranges
from headrace.log.port import Committed, Log, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

VERSION = 2
MOST_ATTEMPTS = 16
"""So many requests with attempts fit into the metadata; each one has cost a restart or more."""
MOST_CHARACTERS = 1400
"""So long may the text of what is running be, and that of what is accused: about 250 ranges."""


class Owner(NamedTuple):
    """Who wrote a mark.

    Attributes:
        member: its id in the group that reads.
        process: see `headrace.crash_isolation.liveness`.
    """

    member: str
    process: str


NOBODY = Owner("", "")


class CrashMarkers:
    """The marks of the partitions that one group reads.

    Args:
        group: the one that reads.
    """

    def __init__(self, log_: Log, group: str) -> None:
        self._log = log_
        self._reading = group
        self._group = f"{group}.marks"
        self._kept: dict[TopicPartition, tuple[CrashMarker, Owner]] = {}
        self._turn = asyncio.Lock()

    async def read(
        self, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, tuple[CrashMarker, Owner]]:
        """What is kept of these partitions, and who wrote it.

        Raises:
            LogUnavailable: nobody answers.
        """
        committed = await self._log.committed(self._group, partitions)
        found = {each: _read(each, committed[each]) for each in partitions}
        self._kept.update(found)
        return found

    async def write(self, marks: Mapping[TopicPartition, CrashMarker], owner: Owner) -> None:
        """Keep these marks; those that are kept already cost nothing.

        Raises:
            LogUnavailable: no acknowledgement; they are kept, or not.
        """
        async with self._turn:
            news = {
                each: mark for each, mark in marks.items() if self._kept.get(each) != (mark, owner)
            }
            if not news:
                return
            for each in news:
                self._kept.pop(each, None)
            await self._log.commit(
                self._group,
                {
                    each: Committed(mark.stop, encode_mark(mark, owner))
                    for each, mark in news.items()
                },
            )
            self._kept.update((each, (mark, owner)) for each, mark in news.items())

    async def remove_dead_members(self, topic: str) -> None:
        """Take those out of the group that wrote marks and whose processes are gone, so that their
        successor need not wait until their sessions have timed out. Most have left by themselves.

        Raises:
            LogUnavailable: nobody answers.
        """
        described = (await self._log.describe_topics([topic]))[topic]
        count = 0 if described is None else described.partitions
        partitions = [TopicPartition(topic, number) for number in range(count)]
        found = await self.read(partitions)
        dead = {owner for _, owner in found.values() if is_gone(owner.process)}
        for owner in sorted(dead):
            if await self._log.remove_member(self._reading, owner.member):
                log.warning(Event.MEMBER_REMOVED, member=owner.member, process=owner.process)


def _read(partition: TopicPartition, committed: Committed | None) -> tuple[CrashMarker, Owner]:
    if committed is None or not committed.metadata:
        return CLEAN, NOBODY
    try:
        return decode_mark(committed.metadata)
    except ValueError as error:
        # A hint that nobody can read is none.
        log.warning(Event.CRASH_MARKER_UNREADABLE, partition=str(partition), reason=str(error))
        return CLEAN, NOBODY


def encode_mark(mark: CrashMarker, owner: Owner = NOBODY) -> str:
    """Return a mark as text, within the bounds of a commit's metadata."""
    worst = sorted(mark.attempts.items(), key=lambda item: (-item[1], item[0]))[:MOST_ATTEMPTS]
    fields: dict[str, Any] = {
        "v": VERSION,
        "open": mark.is_open,
        "stop": mark.stop,
        "ends": mark.ends,
        "running": _ranges_text(mark.running),
        "alone": mark.alone,
        "attempts": [[offset, place, count] for (offset, place), count in worst],
        "accused": _ranges_text(mark.accused),
        "member": owner.member,
        "process": owner.process,
    }
    return json.dumps(
        {name: value for name, value in fields.items() if value not in (None, "", [])},
        separators=(",", ":"),
    )


def decode_mark(text: str) -> tuple[CrashMarker, Owner]:
    """Return what `encode_mark` was given. Raises `ValueError`."""
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise ValueError(f"mark: expected version {VERSION}, got {text[:40]!r}")
    alone = fields.get("alone")
    try:
        mark = CrashMarker(
            is_open=bool(fields["open"]),
            stop=int(fields["stop"]),
            ends=int(fields["ends"]),
            running=_ranges(fields.get("running", "")),
            alone=None if alone is None else int(alone),
            attempts=_attempts(fields.get("attempts", [])),
            accused=_ranges(fields.get("accused", "")),
        )
        owner = Owner(str(fields.get("member", "")), str(fields.get("process", "")))
    except (KeyError, TypeError, UnknownMetadata) as error:
        raise ValueError(f"mark: expected its fields, got {text[:40]!r}") from error
    return mark, owner


def _ranges_text(ranges: Sequence[Range]) -> str:
    """Return ranges as text of a bounded length; where they do not fit, with what lies between the
    nearest of them: a record that is accused without cause runs alone, one that is left out never
    would.
    """
    if not ranges:
        return ""
    kept = list(ranges)
    while len(text := f"{kept[0][0]}:{encode_ranges(kept[0][0], kept)}") > MOST_CHARACTERS:
        kept = _nearest_joined(kept, len(kept) * 3 // 4)
    return text


def _nearest_joined(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return at most so many ranges with all offsets of these, and as few others as can be."""
    gaps = sorted(range(1, len(ranges)), key=lambda at: ranges[at - 1][1] - ranges[at][0])
    cuts = sorted(gaps[: count - 1])
    starts, stops = [0, *cuts], [*cuts, len(ranges)]
    return [
        (ranges[start][0], ranges[stop - 1][1]) for start, stop in zip(starts, stops, strict=True)
    ]


def _ranges(text: str) -> tuple[Range, ...]:
    if not text:
        return ()
    base, _, encoded = text.partition(":")
    return tuple(decode_ranges(int(base), encoded))


def _attempts(value: Iterable[Sequence[Any]]) -> dict[tuple[int, int], int]:
    return {(int(offset), int(place)): int(count) for offset, place, count in value}
