"""Registry of the models, and of the versions that take requests now.

A version takes requests once it is ready: in a process without an executor, when its signature has
been read; otherwise when the executor reports that it is loaded. A version is retired only when its
successor is ready, so a broken version never replaces a working one.

If ingest is another process, it decides which version a request gets, and learns of a change later
or earlier than this process. A version retired here is therefore kept until no request has come for
it for a while.

All calls come from one thread, the event loop's; `reload` reads the disk in another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from headrace.config import Settings
from headrace.errors import Code, Rejected
from headrace.models.profiling.batch_safety import Verdict
from headrace.models.repository import Repository
from headrace.models.scan import (
    KnownVersions,
    OpenedModel,
    UnfinishedImports,
    has_retired_version,
    open_versions,
    relative_to_repository,
)
from headrace.models.user_code import run_on_daemon_thread
from headrace.models.version import ModelVersion, State
from headrace.protocol.events import ExecutorEvent
from headrace.tuning import TUNING, ModelTuning

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


class Change(NamedTuple):
    """A task for an executor: load a new version, or unload a retired one."""

    action: Literal["load", "unload"]
    version: ModelVersion


class Reloaded(NamedTuple):
    """Result of a scan of the repository; versions as `name/version`, faults as lines.

    A removed version keeps serving until its successor is ready. A failed version that is retried
    counts as changed.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    faults: tuple[str, ...]


Subscriber: TypeAlias = Callable[[Change], None]


class _Model:
    """One model and its versions, by number.

    Attributes:
        selected: versions that the configuration selects, in any state.
        serving: ready versions, including those whose successor is not ready yet.
        faults: of versions that cannot be opened; under "" that of the model as a whole.
    """

    def __init__(self) -> None:
        self.selected: dict[str, ModelVersion] = {}
        self.serving: dict[str, ModelVersion] = {}
        self.faults: dict[str, str] = {}

    def versions(self) -> dict[int, ModelVersion]:
        """Return all versions by identity: a changed version and its predecessor share a number."""
        both = [*self.selected.values(), *self.serving.values()]
        return {id(version): version for version in both}

    def outdated(self) -> list[ModelVersion]:
        """Return unselected serving versions, once all selected ones settled and one is ready."""
        states = {version.state for version in self.selected.values()}
        if State.LOADING in states or State.READY not in states or "" in self.faults:
            return []
        return [
            version
            for number, version in self.serving.items()
            if number not in self.selected and number not in self.faults
        ]


class Models:
    """The models of a process.

    Args:
        settings: location of the repository, and the defaults of all models.
        executes: this process has an executor, which loads the models and reports on them.
        keeps_replaced: another process binds requests to versions, so a replaced version is kept
            for `models.keep_replaced_s` after its last use.
        clock_s: monotonic.
        tuning: passed on to the versions.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        executes: bool = False,
        keeps_replaced: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._settings = settings
        self._tuning = tuning
        self._executes = executes
        keep_s = settings.models.keep_replaced_s if keeps_replaced else 0.0
        self._replaced = ReplacedVersions(keep_s, clock_s)
        self._repository = Repository(settings.models.repository, settings)
        self._models: dict[str, _Model] = {}
        self._ready: dict[tuple[str, str], ModelVersion] = {}
        self._subscribers: list[Subscriber] = []
        self._reloading = asyncio.Lock()
        self._importings: UnfinishedImports = {}

    # --- what the services ask ----------------------------------------------------------------

    def lookup(self, name: str, version: str | None = None) -> ModelVersion:
        """Return the ready version with this number; without a number, the highest ready one.

        A replaced version that is kept is found only by its number.

        Raises:
            Rejected: `UNKNOWN_MODEL`, with the available ones; `MODEL_NOT_READY`, with the reason;
                `INVALID_REQUEST` without a name.
        """
        found = self._find(name, version or "")
        if found is None:
            self._refuse(name, version or "")
        return found

    def lookup_bound(self, name: str, version: str) -> ModelVersion:
        """Return the version that a request was bound to, and keep it if it was replaced.

        Raises:
            Rejected: see `lookup`.
        """
        self._replaced.note_use(name, version)
        return self.lookup(name, version)

    def note_use(self, name: str, version: str) -> None:
        """Extend the life of a replaced version, since requests bound to it still come."""
        self._replaced.note_use(name, version)

    def versions(self, state: State | None = None) -> list[ModelVersion]:
        """Return all versions, or those in one state, by name and number."""
        found = [
            version
            for model in self._models.values()
            for version in model.versions().values()
            if state in (None, version.state)
        ]
        found += [
            version for version in self._replaced.versions() if state in (None, version.state)
        ]
        return sorted(found, key=lambda version: (version.name, int(version.version)))

    def names(self) -> list[str]:
        """Return the names of all models, including those with faults."""
        return sorted(self._models)

    def faults(self, name: str) -> dict[str, str]:
        """Return why versions of a model cannot be opened, by number; under "" the model itself."""
        model = self._models.get(name)
        return dict(model.faults) if model else {}

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for each version and each fault, for operators."""
        entries = [
            {
                "name": version.name,
                "version": version.version,
                "state": str(version.state),
                "reason": version.reason,
                "max_batch_size": version.max_batch_size,
                "batching_off": version.batching_off,
                "contradiction": version.contradiction,
                "warm_up_omitted": version.warm_up_omitted,
                "batching": version.verdict and version.verdict.to_dict(),
                "latency": version.latency.table(),
            }
            for version in self.versions()
        ]
        entries += [
            {"name": name, "version": number, "state": str(State.FAILED), "reason": fault}
            for name in self.names()
            for number, fault in self.faults(name).items()
        ]
        return sorted(entries, key=lambda entry: (entry["name"], int(entry["version"] or 0)))

    # --- what comes from the disk -------------------------------------------------------------

    def open(self) -> Reloaded:
        """Read the repository for the first time. Blocks; call it before serving.

        Raises:
            ConfigurationError: the repository is missing. Faults of single models are recorded.
        """
        return self._apply(open_versions(self._repository, {}, self._importings, self._tuning))

    async def reload(self) -> Reloaded:
        """Scan the repository again; failed versions are retried.

        Raises:
            ConfigurationError: the repository is missing; nothing has changed then.
        """
        async with self._reloading:
            known = {
                (version.name, version.version): version
                for version in self.versions()
                if version.state is not State.FAILED
            }
            opened = await self._scan(known)
            while has_retired_version(opened):
                opened = await self._scan({})
            return self._apply(opened)

    async def _scan(self, known: KnownVersions) -> list[OpenedModel]:
        # On a daemon thread: an import that hangs must not keep the process from ending.
        return await run_on_daemon_thread(
            lambda: open_versions(self._repository, known, self._importings, self._tuning)
        )

    def _apply(self, opened: list[OpenedModel]) -> Reloaded:
        before = {name: dict(model.selected) for name, model in self._models.items()}
        for name in self._models.keys() - {each.name for each in opened}:
            self._remove(name)
        for each in opened:
            self._update(self._models.setdefault(each.name, _Model()), each)
        return self._summarize_changes(before)

    def _update(self, model: _Model, opened: OpenedModel) -> None:
        model.faults = opened.faults
        if not opened.versions:
            # No version can be opened, so the versions selected before stay.
            self._publish(opened.name)
            return
        dropped = model.selected
        model.selected = opened.versions
        self._restore_replaced(model)
        for version in dropped.values():
            if id(version) not in model.versions() and version.state is State.LOADING:
                self._unload(version)
        for version in opened.versions.values():
            if version.state is not State.LOADING or version in dropped.values():
                continue
            if self._executes:
                self._notify(Change("load", version))
            else:
                self.mark_ready(version)
        self._publish_and_retire(opened.name)

    def _remove(self, name: str) -> None:
        model = self._models.pop(name)
        self._publish(name)
        for version in model.versions().values():
            if version.state is State.READY:
                self._retain_or_unload(version)
            elif version.state is not State.FAILED:
                self._unload(version)

    # --- what the executor says ---------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` on every change from now on. For versions already loading see
        `versions`.
        """
        self._subscribers.append(subscriber)

    def mark_ready(self, version: ModelVersion, verdict: Verdict | None = None) -> None:
        """Let a version take requests; they may share runs unless the verdict forbids it.

        Its predecessor with the same number is unloaded; other numbers are retired once no selected
        version is loading. A version that is no longer selected is ignored.
        """
        model = self._models.get(version.name)
        if model is None or model.selected.get(version.version) is not version:
            return
        if verdict is not None:
            version.apply_verdict(verdict)
        version.state, version.reason = State.READY, ""
        # The new version is published before the old one is unloaded, so that lookups never fail.
        previous = model.serving.get(version.version)
        model.serving[version.version] = version
        self._publish_and_retire(version.name)
        if previous is not None and previous is not version:
            self._unload(previous)
        replaced = self._replaced.take(version.name, version.version)
        if replaced is not None:  # batches name versions by number, which now means the new one
            self._unload(replaced)

    def mark_failed(self, version: ModelVersion, reason: str) -> None:
        """Record that a version cannot take requests (any more); its predecessor stays."""
        version.state, version.reason = (
            State.FAILED,
            relative_to_repository(reason, self._repository.path),
        )
        model = self._models.get(version.name)
        if model is None:
            return
        if model.serving.get(version.version) is version:
            del model.serving[version.version]
        self._publish_and_retire(version.name)

    # --- what executors of other processes say ------------------------------------------------

    def apply_executor_event(self, event: ExecutorEvent) -> None:
        """Apply an executor event: batch limits of its models, and durations of its runs.

        A version that was replaced here is kept as long as an executor announces it.
        """
        for hosted in event.models:
            self._replaced.note_use(hosted.name, hosted.version)
            version = self._find(hosted.name, hosted.version)
            if version is not None:
                version.max_batch_size = hosted.max_batch_size
                version.batching_off = hosted.batching_off
        for done in event.completions:
            version = self._find(done.model, done.version)
            if version is not None and done.compute_us:
                version.latency.observe(tuple(done.shape_class), done.rows, done.compute_us)

    # --- replaced versions --------------------------------------------------------------------

    def unload_unused(self) -> None:
        """Unload replaced versions that were not used for `models.keep_replaced_s`."""
        for version in self._replaced.take_unused():
            self._unload(version)

    def _retain_or_unload(self, version: ModelVersion) -> None:
        """Keep a version that is no longer selected, or unload it at once if none are kept."""
        if not self._replaced.add(version):
            self._unload(version)

    def _restore_replaced(self, model: _Model) -> None:
        """Let replaced versions that are selected again serve as before."""
        for number, version in model.selected.items():
            if self._replaced.find(version.name, number) is version:
                self._replaced.take(version.name, number)
                model.serving[number] = version

    def _find(self, name: str, number: str) -> ModelVersion | None:
        return self._ready.get((name, number)) or self._replaced.find(name, number)

    # --- inside -------------------------------------------------------------------------------

    def _publish_and_retire(self, name: str) -> None:
        model = self._models[name]
        outdated = model.outdated()
        for version in outdated:
            del model.serving[version.version]
        self._publish(name)
        for version in outdated:
            self._retain_or_unload(version)

    def _publish(self, name: str) -> None:
        """Update the table of `lookup` from the model."""
        for key in [key for key in self._ready if key[0] == name]:
            del self._ready[key]
        model = self._models.get(name)
        if model is None or not model.serving:
            return
        for number, version in model.serving.items():
            self._ready[name, number] = version
        self._ready[name, ""] = model.serving[max(model.serving, key=int)]

    def _unload(self, version: ModelVersion) -> None:
        version.state = State.UNLOADING
        self._notify(Change("unload", version))

    def _notify(self, change: Change) -> None:
        for subscriber in self._subscribers:
            subscriber(change)

    def _summarize_changes(self, before: Mapping[str, Mapping[str, ModelVersion]]) -> Reloaded:
        old = {f"{name}/{n}": v for name, versions in before.items() for n, v in versions.items()}
        new = {
            f"{name}/{n}": v
            for name, model in self._models.items()
            for n, v in model.selected.items()
        }
        faults = [
            f"{name}{number and '/'}{number}: {fault}"
            for name in self.names()
            for number, fault in self._models[name].faults.items()
        ]
        return Reloaded(
            tuple(sorted(new.keys() - old.keys())),
            tuple(sorted(key for key in new.keys() & old.keys() if new[key] is not old[key])),
            tuple(sorted(old.keys() - new.keys())),
            tuple(faults),
        )

    def _refuse(self, name: str, number: str) -> NoReturn:
        if not name:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "model_name",
                expected="a name, in the value or in the header x-model",
                got="none",
            )
        model = self._models.get(name)
        if model is None:
            raise Rejected.mismatch(
                Code.UNKNOWN_MODEL,
                "model_name",
                expected=self._list_names(self.names()),
                got=f'"{name}"',
            )
        there = model.selected.keys() | model.serving.keys() | model.faults.keys()
        if number and number not in there and "" not in model.faults:
            raise Rejected.mismatch(
                Code.UNKNOWN_MODEL,
                "model_version",
                expected=f"{self._list_names(sorted(there, key=int))} of {name}",
                got=f'"{number}"',
            )
        _refuse_unready(model, name, number, self._tuning.loading_retry_after_ms)

    def _list_names(self, names: list[str]) -> str:
        if not names:
            return "a model, of which there is none"
        listed = ", ".join(names[: self._tuning.listed_names])
        more = len(names) - self._tuning.listed_names
        return f"one of {listed}" + (f" and {more} more" if more > 0 else "")


def _refuse_unready(model: _Model, name: str, number: str, retry_after_ms: int) -> NoReturn:
    """Reject with the reason, and with a retry time if waiting may help."""
    requested = f"model {name}/{number}" if number else f"model {name}"
    wanted = model.selected.get(number)
    candidates = [wanted] if wanted else list(model.selected.values())
    if any(version.state is State.LOADING for version in candidates):
        raise Rejected(
            Code.MODEL_NOT_READY, f"{requested} is loading", retry_after_ms=retry_after_ms
        )
    reasons = [version.reason for version in candidates if version.reason]
    reasons += [fault for key, fault in model.faults.items() if key in ("", number) or not number]
    listed = "; ".join(reason.splitlines()[0] for reason in reasons)
    raise Rejected(Code.MODEL_NOT_READY, f"{requested}: {listed}")
