"""Crash markers, kept in the log, and the names of the processes that wrote them.

Markers are the metadata of offsets committed by a group of their own: the reading group's name with
`.marks` appended. The group has no members, so that a marker can be written at any time, by any
process that believes it owns the partition. Markers are hints: one that is lost, or overwritten by
a former owner, costs a repeated search, and never an answer.

The text is JSON, so that an operator can read it:

    {"v": 2, "open": true, "stop": 900, "ends": 2, "running": "17:1rAAE", "alone": 0,
     "attempts": [[17, 0, 2]], "accused": "17:1rAAM", "member": "headrace-5e1f…",
     "process": "gpu-1/8d2c6f1e/4026531840/9f3cba10d24e7f68"}

`accused` are the suspects; `attempts` are offset, index and count. Ranges of offsets are written as
in the metadata of answers (`headrace.delivery.acked_offsets`), after the first offset.

`process` lets a restarted process remove its predecessor from the group: a group would notice the
death only when the session times out, and would assign nothing until then. Each process binds a
Unix socket with a random name in Linux's abstract namespace; the kernel releases it when the
process ends, however it ends. The abstract namespace belongs to a network namespace, so the full
name is `host/boot id/network namespace/token`. If all but the token are the same as here, and
nothing is bound to the token, the process has ended. Of other processes nothing is known. Without
Linux, or without permission, a process has no name, and counts as alive. Source: unix(7),
namespaces(7).
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from headrace.crash_isolation.poison_search import CLEAN, CrashMarker
from headrace.delivery.acked_offsets import Range, UnknownMetadata, decode_ranges, encode_ranges
from headrace.log.port import Committed, Log, TopicPartition
from headrace.telemetry.logs import Event

log = structlog.get_logger(__name__)

VERSION = 2
MOST_ATTEMPTS = 16
"""Most requests with attempts that fit into the metadata; each has cost at least one restart."""
MOST_CHARACTERS = 1400
"""Longest text of the ranges running, and of the suspects: about 250 ranges each."""


class Owner(NamedTuple):
    """Process that wrote a marker.

    Attributes:
        member: its member id in the reading group.
        process: its name; see `process_name`.
    """

    member: str
    process: str


NOBODY = Owner("", "")


class CrashMarkers:
    """Crash markers of the partitions that one group reads.

    Args:
        group: the reading group.
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
        """Return the markers of partitions, and the process that wrote each.

        Raises:
            LogUnavailable: no broker answered.
        """
        committed = await self._log.committed(self._group, partitions)
        found = {each: _read(each, committed[each]) for each in partitions}
        self._kept.update(found)
        return found

    async def write(self, markers: Mapping[TopicPartition, CrashMarker], owner: Owner) -> None:
        """Write the markers that differ from those last written.

        Raises:
            LogUnavailable: no acknowledgement; they are written, or not.
        """
        async with self._turn:
            changed = {
                each: marker
                for each, marker in markers.items()
                if self._kept.get(each) != (marker, owner)
            }
            if not changed:
                return
            # Before the commit: if its acknowledgement is lost, the log may hold either marker, so
            # that the next call must write again.
            for each in changed:
                self._kept.pop(each, None)
            await self._log.commit(
                self._group,
                {
                    each: Committed(marker.stop, encode_marker(marker, owner))
                    for each, marker in changed.items()
                },
            )
            self._kept.update((each, (marker, owner)) for each, marker in changed.items())

    async def remove_dead_members(self, topic: str) -> None:
        """Remove members from the group that wrote markers and whose processes have ended, so that
        the group need not wait for their session timeout. Most have left by themselves.

        Raises:
            LogUnavailable: no broker answered.
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
        return decode_marker(committed.metadata)
    except ValueError as error:
        # An unreadable hint is treated like a missing one.
        log.warning(Event.CRASH_MARKER_UNREADABLE, partition=str(partition), reason=str(error))
        return CLEAN, NOBODY


def encode_marker(marker: CrashMarker, owner: Owner = NOBODY) -> str:
    """Return a marker as text, within the size limit of a commit's metadata."""
    worst = sorted(marker.attempts.items(), key=lambda item: (-item[1], item[0]))[:MOST_ATTEMPTS]
    fields: dict[str, Any] = {
        "v": VERSION,
        "open": marker.is_open,
        "stop": marker.stop,
        "ends": marker.ends,
        "running": _ranges_text(marker.running),
        "alone": marker.alone,
        "attempts": [[offset, index, count] for (offset, index), count in worst],
        "accused": _ranges_text(marker.suspects),
        "member": owner.member,
        "process": owner.process,
    }
    return json.dumps(
        {name: value for name, value in fields.items() if value not in (None, "", [])},
        separators=(",", ":"),
    )


def decode_marker(text: str) -> tuple[CrashMarker, Owner]:
    """Return what `encode_marker` was given. Raises `ValueError`."""
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise ValueError(f"crash marker: expected version {VERSION}, got {text[:40]!r}")
    alone = fields.get("alone")
    try:
        marker = CrashMarker(
            is_open=bool(fields["open"]),
            stop=int(fields["stop"]),
            ends=int(fields["ends"]),
            running=_ranges(fields.get("running", "")),
            alone=None if alone is None else int(alone),
            attempts=_attempts(fields.get("attempts", [])),
            suspects=_ranges(fields.get("accused", "")),
        )
        owner = Owner(str(fields.get("member", "")), str(fields.get("process", "")))
    except (KeyError, TypeError, UnknownMetadata) as error:
        raise ValueError(f"crash marker: expected all of its fields, got {text[:40]!r}") from error
    return marker, owner


def _ranges_text(ranges: Sequence[Range]) -> str:
    """Return ranges as text of bounded length. If they do not fit, the nearest ones are joined: a
    record that is a suspect without cause runs alone once; one left out would never be found.
    """
    if not ranges:
        return ""
    kept = list(ranges)
    while len(text := f"{kept[0][0]}:{encode_ranges(kept[0][0], kept)}") > MOST_CHARACTERS:
        kept = _nearest_joined(kept, len(kept) * 3 // 4)
    return text


def _nearest_joined(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return at most `count` ranges that hold all these offsets, and as few others as possible."""
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
    return {(int(offset), int(index)): int(count) for offset, index, count in value}


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@functools.cache
def process_name() -> str:
    """Return the name of this process, valid until it ends; empty if it has none."""
    scope, token = _socket_scope(), secrets.token_hex(8)
    if not scope:
        return ""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(_address(token))
    except OSError:
        held.close()
        return ""
    held.detach()  # the kernel closes it when the process ends
    return f"{scope}/{token}"


def is_gone(name: str) -> bool:
    """Return True if the process of this name has certainly ended."""
    scope, _, token = name.rpartition("/")
    if not scope or scope != _socket_scope():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_address(token))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # without permission to connect, nothing is known
    return False


def _address(token: str) -> str:
    return f"\0headrace-{token}"


def _socket_scope() -> str:
    """Return `host/boot id/network namespace`, the scope in which a socket name is unique."""
    try:
        boot = _BOOT_ID.read_text("ascii").strip()[:8]
        network = _NETWORK.readlink().name.strip("net:[]")
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{network}"
