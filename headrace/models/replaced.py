"""Replaced versions that are kept while requests bound to them may come."""

from __future__ import annotations

from collections.abc import Callable

from headrace.models.version import ModelVersion

_REASON = "replaced; kept while requests that are bound to it may come"


class _Kept:
    """A version, and the time when a request bound to it last came."""

    __slots__ = ("last_used_s", "version")

    def __init__(self, version: ModelVersion, now_s: float) -> None:
        self.version = version
        self.last_used_s = now_s


class ReplacedVersions:
    """Replaced versions of a process, by model and number.

    Args:
        keep_s: how long a version is kept after its last use; 0 keeps none.
        clock_s: monotonic.
    """

    def __init__(self, keep_s: float, clock_s: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._clock_s = clock_s
        self._kept: dict[tuple[str, str], _Kept] = {}

    def add(self, version: ModelVersion) -> bool:
        """Keep a version from now on; return False if none are kept."""
        if not self._keep_s:
            return False
        version.reason = _REASON
        self._kept[version.name, version.version] = _Kept(version, self._clock_s())
        return True

    def find(self, name: str, number: str) -> ModelVersion | None:
        """Return the version that is kept under this number."""
        kept = self._kept.get((name, number))
        return None if kept is None else kept.version

    def note_use(self, name: str, number: str) -> None:
        """Extend the life of a kept version, if there is one: requests bound to it still come."""
        kept = self._kept.get((name, number)) if self._kept else None
        if kept is not None:
            kept.last_used_s = self._clock_s()

    def take(self, name: str, number: str) -> ModelVersion | None:
        """Remove the version that is kept under this number, and return it."""
        kept = self._kept.pop((name, number), None)
        if kept is None:
            return None
        kept.version.reason = ""
        return kept.version

    def take_unused(self) -> list[ModelVersion]:
        """Remove the versions that have not been used for `keep_s`, and return them."""
        unused_since_s = self._clock_s() - self._keep_s
        unused = [key for key, kept in self._kept.items() if kept.last_used_s <= unused_since_s]
        return [version for key in unused if (version := self.take(*key)) is not None]

    def versions(self) -> list[ModelVersion]:
        """Return all versions that are kept."""
        return [kept.version for kept in self._kept.values()]
