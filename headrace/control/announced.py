"""Rules for announcements of processes: when requests may be sent to a version.

Stages in processes of their own learn of a change at different times. A process sends requests to
a version only when the stages after it have it: a batcher when enough executors have announced it,
and ingest when all batchers have, too. A process keeps a version that is no longer wanted as long
as a process with earlier stages announces it. So a change reaches the stages from the last one to
the first, and an unload from the first one to the last. Synchronous; no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from headrace.protocol.events import NOT_CONTROLLED, ExecutorEvent, UnreadyVersion
from headrace.topics import STAGES, Stage


class AnnouncedVersions:
    """The last announcement of each process that follows the control topic.

    Args:
        stages: of this process.
        min_ready: executors that must have a version ready.
        silent_s: a process without an announcement for so long has ended.
    """

    def __init__(self, stages: Collection[Stage], min_ready: int, silent_s: float) -> None:
        self._first = min((STAGES.index(each) for each in stages), default=0)
        self._has_batcher = Stage.BATCHER in stages
        self._min_ready = min_ready
        self._silent_s = silent_s
        self._heard: dict[str, tuple[float, ExecutorEvent]] = {}

    def apply(self, events: Iterable[ExecutorEvent], now_s: float) -> None:
        """Apply announcements, and forget processes that are silent."""
        for event in events:
            if event.generation != NOT_CONTROLLED and event.stages:
                self._heard[event.executor] = (now_s, event)
        self._heard = {
            name: heard for name, heard in self._heard.items() if now_s - heard[0] <= self._silent_s
        }

    def awaited(self, model: str, version: str, generation: int) -> UnreadyVersion | None:
        """Return what is missing before this process may send requests to a version.

        Args:
            model: its name.
            version: its number.
            generation: of the change that this process has read; what others announced before
                they had read it may be about other files or settings.

        Returns:
            None if nothing is missing.
        """
        executors = self._with_stage(Stage.EXECUTOR)
        ready = [each for each in executors if _has(each, model, version, generation)]
        if len(ready) < self._min_ready:
            failures = _failures(executors, model, version, generation)
            if failures:
                reason = "; ".join(f"executor {name}: {each.reason}" for name, each in failures)
                is_rejected = all(each.is_rejected for _, each in failures)
                return UnreadyVersion(model, version, reason, is_rejected=is_rejected)
            reason = f"announced by {len(ready)} of {self._min_ready} executors: loading"
            return UnreadyVersion(model, version, reason, is_under_way=True)
        if self._has_batcher:
            return None
        batchers = self._with_stage(Stage.BATCHER)
        missing = [each for each in batchers if not _has(each, model, version, generation)]
        if missing or not batchers:
            reason = (
                f"announced by {len(batchers) - len(missing)} of {max(1, len(batchers))} "
                "batchers: loading"
            )
            return UnreadyVersion(model, version, reason, is_under_way=True)
        return None

    def needed(self) -> set[tuple[str, str]]:
        """Return the versions, by model and number, that earlier stages may send requests to."""
        return {
            (model.name, model.version)
            for _, event in self._heard.values()
            if min(STAGES.index(Stage(each)) for each in event.stages) < self._first
            for model in event.models
        }

    def has_executor(self, model: str, version: str) -> bool:
        """Return whether an executor announces a version, wanted or not."""
        return any(
            (each.name, each.version) == (model, version)
            for event in self._with_stage(Stage.EXECUTOR)
            for each in event.models
        )

    def _with_stage(self, stage: Stage) -> list[ExecutorEvent]:
        """Return the announcements of processes with a stage, but without ingest.

        One with ingest and executor runs its own requests alone.
        """
        return [
            event
            for _, event in self._heard.values()
            if stage in event.stages and Stage.INGEST not in event.stages
        ]


def _has(event: ExecutorEvent, model: str, version: str, generation: int) -> bool:
    """Return whether a process has a version ready as it is wanted at a generation."""
    return (
        event.generation >= generation
        and any((each.name, each.version) == (model, version) for each in event.models)
        and not any(
            (each.name, each.version) == (model, version) for each in event.unready_versions()
        )
    )


def _failures(
    events: Sequence[ExecutorEvent], model: str, version: str, generation: int
) -> list[tuple[str, UnreadyVersion]]:
    """Return what executors say of a version that they cannot load, with their names."""
    return [
        (event.executor, each)
        for event in events
        if event.generation >= generation
        for each in event.unready_versions()
        if (each.name, each.version) == (model, version) and not each.is_under_way
    ]
