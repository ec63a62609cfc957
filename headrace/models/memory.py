"""Memory of the loaded versions of a process: what each has taken, and the budget for all of them.

The system reports the resident memory of the whole process only. What one instance takes is
therefore the growth of that size while it is loaded, probed and warmed up, and only if no other one
was loaded at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import NotLoadableHere
from headrace.models.repository import files_of
from headrace.primitives.resident_memory import resident_bytes


class MemoryShort(NotLoadableHere):
    """A version does not fit the budget; the message has all figures.

    Attributes:
        missing_bytes: what the other versions would have to release.
    """

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


_NOT_LOADED = frozenset({"golden", "samples", "warmup"})


class MemoryShare:
    """Part of the budget that one version holds.

    Attributes:
        name: of the version, as `name/version`.
        held_bytes: the larger of its estimate and what was measured.
    """

    def __init__(self, name: str, stamp: str, estimate_bytes: int) -> None:
        self.name = name
        self.stamp = stamp
        self.held_bytes = estimate_bytes


class ModelMemory:
    """Budget for the host memory of all loaded versions.

    A version holds the larger of its estimate and its measured growth: one that is loaded into
    memory that another version has freed shows no growth, and needs the memory nevertheless.

    Args:
        limit_bytes: of all versions together; 0 means no bound.

    Attributes:
        growth: measures what each version takes.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.growth = GrowthMeter(resident_bytes)
        self._shares: list[MemoryShare] = []
        # The largest growth of each version, with the stamp of its files. There is one small entry
        # for each version that this process has ever loaded.
        self._measured: dict[str, tuple[str, int]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that all versions hold."""
        return sum(share.held_bytes for share in self._shares)

    def held_by(self) -> dict[str, int]:
        """Return the bytes that each version holds, by `name/version`.

        Versions of one name are added up: a version that was changed, and its predecessor.
        """
        held: dict[str, int] = {}
        for share in self._shares:
            held[share.name] = held.get(share.name, 0) + share.held_bytes
        return held

    def reserve(self, name: str, stamp: str, files_bytes: int) -> MemoryShare:
        """Reserve what a version is expected to need; `release` it when the version is gone.

        Args:
            name: of the version, as `name/version`.
            stamp: changes when the version's files do; what was measured before counts no more.
            files_bytes: the size of its files times its instances, for a version that was not
                measured before.

        Raises:
            MemoryShort: it does not fit.
        """
        measured_stamp, measured_bytes = self._measured.get(name, ("", 0))
        if measured_stamp != stamp:
            measured_bytes = 0
        need_bytes = max(files_bytes, measured_bytes)
        source = "measured before" if measured_bytes > files_bytes else "files times instances"
        self._require(need_bytes, source)
        share = MemoryShare(name, stamp, need_bytes)
        self._shares.append(share)
        return share

    def apply_measured(self, share: MemoryShare, measured_bytes: int) -> None:
        """Hold what a version has taken up to now, if that is more than its estimate.

        Raises:
            MemoryShort: it is more than is left.
        """
        stamp, largest_bytes = self._measured.get(share.name, ("", 0))
        if stamp == share.stamp:
            measured_bytes = max(measured_bytes, largest_bytes)
        self._measured[share.name] = share.stamp, measured_bytes
        self._require(measured_bytes, "measured", besides=share)
        share.held_bytes = max(share.held_bytes, measured_bytes)

    def release(self, share: MemoryShare) -> None:
        """Release the share of a version that is unloaded."""
        self._shares.remove(share)

    def _require(self, need_bytes: int, source: str, *, besides: MemoryShare | None = None) -> None:
        others = [share for share in self._shares if share is not besides]
        in_use_bytes = sum(share.held_bytes for share in others)
        if not self.limit_bytes or need_bytes <= self.limit_bytes - in_use_bytes:
            return
        others.sort(key=lambda share: -share.held_bytes)
        holders = ", ".join(f"{each.name} ({_format_mib(each.held_bytes)})" for each in others)
        raise MemoryShort(
            f"models.memory_bytes: the version needs {_format_mib(need_bytes)} ({source}), and "
            f"{_format_mib(in_use_bytes)} of {_format_mib(self.limit_bytes)} are in use"
            + (f", held by {holders}" if holders else ""),
            need_bytes + in_use_bytes - self.limit_bytes,
        )


class MemoryGrowth:
    """Growth of the process during one measurement.

    Attributes:
        grown_bytes: 0 if it became smaller; None before the end, and if it cannot be attributed
            to one instance, or the system does not report it.
    """

    def __init__(self) -> None:
        self.grown_bytes: int | None = None
        self.overlaps = False


class GrowthMeter:
    """Measures the growth of the process while an instance is loaded.

    Args:
        resident_bytes: returns the resident size of the process; None if it is unknown.
    """

    def __init__(self, resident_bytes: Callable[[], int | None]) -> None:
        self._resident_bytes = resident_bytes
        self._under_way: set[MemoryGrowth] = set()
        self._trimmed_bytes = 0

    def add_trimmed(self, size_bytes: int) -> None:
        """Record that the heap was trimmed, which must not make what is loaded look smaller."""
        self._trimmed_bytes += size_bytes

    @contextmanager
    def measure(self) -> Iterator[MemoryGrowth]:
        """Measure the growth until the context is left."""
        growth = MemoryGrowth()
        self._under_way.add(growth)
        if len(self._under_way) > 1:
            for each in self._under_way:
                each.overlaps = True
        before_bytes, trimmed_bytes = self._resident_bytes(), self._trimmed_bytes
        try:
            yield growth
        finally:
            self._under_way.discard(growth)
        after_bytes = self._resident_bytes()
        if before_bytes is not None and after_bytes is not None and not growth.overlaps:
            trimmed_bytes = self._trimmed_bytes - trimmed_bytes
            growth.grown_bytes = max(0, after_bytes + trimmed_bytes - before_bytes)


def loaded_files_bytes(directory: Path) -> int:
    """Return the size of the files of a version, without its samples, of which few are in memory.

    Args:
        directory: of the version.

    Raises:
        ConfigurationError: the files cannot be listed, or one disappeared meanwhile.
    """
    with files_of(directory) as files:
        return sum(
            path.stat().st_size
            for path in files
            if path.relative_to(directory).parts[0] not in _NOT_LOADED
        )


def _format_mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
