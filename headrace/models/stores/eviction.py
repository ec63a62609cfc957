"""Rule of the cache: which versions make room for another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Cached(NamedTuple):
    """A version in the cache.

    Attributes:
        digest: SHA-256 of its manifest.
        used_s: time of its last use.
        in_use: a process of this machine holds it.
        files: size in bytes by SHA-256; versions may share files.
    """

    digest: str
    used_s: float
    in_use: bool
    files: Mapping[str, int]


class Room(NamedTuple):
    """Versions to remove from the cache so that a new one fits, and the resulting sizes.

    Attributes:
        evicted: versions to remove, the longest unused first.
        kept_bytes: size of the versions that stay, without the new one.
        total_bytes: size including the new one; above the limit if removing all unused versions
            is not enough.
    """

    evicted: tuple[Cached, ...]
    kept_bytes: int
    total_bytes: int


def make_room(cached: Iterable[Cached], wanted: Mapping[str, int], limit_bytes: int) -> Room:
    """Choose the versions to remove so that a new one fits; none if no choice would be enough.

    Args:
        cached: versions that are there.
        wanted: files of the new version: size in bytes by SHA-256.
        limit_bytes: of all files together.
    """
    kept = list(cached)
    unused = sorted((each for each in kept if not each.in_use), key=lambda each: each.used_s)
    evicted: list[Cached] = []
    room = _measure(kept, wanted, evicted)
    while room.total_bytes > limit_bytes and unused:
        evicted.append(unused.pop(0))
        kept.remove(evicted[-1])
        room = _measure(kept, wanted, evicted)
    return room if room.total_bytes <= limit_bytes else room._replace(evicted=())


def _measure(kept: Iterable[Cached], wanted: Mapping[str, int], evicted: Iterable[Cached]) -> Room:
    files: dict[str, int] = {}
    for each in kept:
        files.update(each.files)
    kept_bytes = sum(files.values())
    return Room(tuple(evicted), kept_bytes, sum((files | dict(wanted)).values()))
