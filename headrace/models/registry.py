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
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypeAlias

from headrace.config import Settings
from headrace.errors import Rejected
from headrace.models.catalog import (
    REPLACED,
    ModelCatalog,
    ModelEntry,
    ReplacedVersions,
    RequestedVersions,
    Swap,
    refuse_unloaded,
)
from headrace.models.compatibility import find_breaking_changes
from headrace.models.cores import Cores
from headrace.models.memory import ModelMemory
from headrace.models.profiling.batch_safety import Verdict
from headrace.models.repositories import open_repository
from headrace.models.scan import (
    KnownVersions,
    OpenedModel,
    Retry,
    TryOpening,
    VersionScanner,
    has_retired_version,
    is_retried,
)
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.stores.cache import CacheSize
from headrace.models.user_code import run_on_daemon_thread
from headrace.models.version import ModelVersion, State
from headrace.models.wanted import FormerNames, Wanted
from headrace.protocol.events import ExecutorEvent
from headrace.tuning import TUNING, ModelTuning


class VersionChange(NamedTuple):
    """A task for an executor: load a version, or unload a retired one. Or for what has requests
    that wait for a version which cannot be loaded: decide about them anew, or refuse them.

    Attributes:
        reason: of a load or unload, see `headrace.telemetry.metrics.Metrics.model_loaded`.
        refusal: why they are refused.
        leaves_waiting: the unloaded version leaves requests that wait to its successor.
    """

    action: Literal["load", "unload", "reassign", "refuse"]
    version: ModelVersion
    reason: str = ""
    refusal: Rejected | None = None
    leaves_waiting: bool = False


class Reloaded(NamedTuple):
    """Result of a scan of the repository; versions as `name/version`, faults as lines.

    A removed version keeps serving until its successor is ready. A failed version that is retried
    counts as changed. `away` says why stores could not be reached, whose models stay as they were.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    faults: tuple[str, ...]
    away: tuple[str, ...] = ()


NOT_READ = "not read yet"
"""Why a wanted version is not ready that the last scan of the repository did not look for."""
UNDER_WAY = (f": {NOT_READ}", f": {State.LOADING}")
"""Ends of the lines for wanted versions that become ready, unless something goes wrong."""

Subscriber: TypeAlias = Callable[[VersionChange], None]

LoadOutcome: TypeAlias = Literal["ready", "failed", "withdrawn"]
"""How loading a version ended; withdrawn: it was no longer selected."""


class ModelObserver(Protocol):
    """Notified of the changes in a process; `headrace.telemetry.model_spans.ModelSpans`."""

    def load_began(self, version: ModelVersion) -> None: ...
    def load_ended(self, version: ModelVersion, outcome: LoadOutcome, reason: str) -> None: ...
    def could_not_open(self, model: str, number: str, fault: str) -> None: ...
    def unloaded(self, version: ModelVersion, reason: str) -> None: ...
    def names_moved(
        self, model: str, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None: ...


class NoObserver:
    """Ignores all changes."""

    def load_began(self, version: ModelVersion) -> None: ...
    def load_ended(self, version: ModelVersion, outcome: LoadOutcome, reason: str) -> None: ...
    def could_not_open(self, model: str, number: str, fault: str) -> None: ...
    def unloaded(self, version: ModelVersion, reason: str) -> None: ...
    def names_moved(
        self, model: str, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None: ...


class Models:
    """Models of a process: reads the repository, and follows the executor that loads them.

    Args:
        settings: location of the repository, and the defaults of all models.
        executes: this process has an executor, which loads the models and reports on them.
        keeps_replaced: requests that were bound to a version may come after it was replaced, so it
            is kept for `models.keep_replaced_s` after its last use.
        binds: this process binds requests to versions; it binds none to a replaced one.
        awaited: returns what has to happen in other processes before requests may be sent to a
            version; empty if nothing has. None where nothing is awaited.
        clock_s: monotonic.
        scanner: reads the repository; by default that of the settings.
        registry: has the schemas of framed records; open while they are served.
        observer: notified of each change; `open` calls it on its own thread.
        try_opening: see `headrace.models.scan.VersionScanner`.
        tuning: passed on to the versions.

    Attributes:
        catalog: the versions that requests may get.
        cores: cores of the process, for pinned instances.
        memory: budget for the versions that this process loads.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        executes: bool = False,
        keeps_replaced: bool = False,
        binds: bool = False,
        awaited: Callable[[str, str], str] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        scanner: VersionScanner | None = None,
        registry: SchemaRegistry | None = None,
        observer: ModelObserver | None = None,
        try_opening: TryOpening | None = None,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._executes = executes
        keep_s = settings.models.keep_replaced_s if keeps_replaced else 0.0
        self._replaced = ReplacedVersions(keep_s, clock_s)
        if registry is None and settings.schema_registry is not None:
            registry = SchemaRegistry(settings.schema_registry)
        self._scanner = scanner or VersionScanner(
            open_repository(settings, tuning), tuning, registry, try_opening
        )
        self._awaited = awaited
        self._observer = observer or NoObserver()
        self.catalog = ModelCatalog(
            self._replaced,
            binds=binds,
            passes_on=awaited is not None,
            on_demand=self.load_again,
            tuning=tuning,
        )
        self._tuning = tuning
        self._demanded: set[ModelVersion] = set()
        self.cores = Cores.of_process(settings.executor.cores)
        self.memory = ModelMemory(settings.models.memory_bytes)
        self._models = self.catalog.models
        self._subscribers: list[Subscriber] = []
        self._reloading = asyncio.Lock()
        self._wanted: Wanted | None = None
        self._former: FormerNames = {}

    # --- wanted state -----------------------------------------------------------------------------

    def want(self, wanted: Wanted, former: FormerNames = MappingProxyType({})) -> None:
        """Follow a wanted state from now on, instead of each model's `model.toml`.

        Labels and defaults move at once to versions that are ready; `open` or `reload` loads and
        unloads versions.

        Args:
            wanted: models by name.
            former: what their labels and defaults meant before, for those whose version has failed
                when this process starts.
        """
        self._wanted, self._former = wanted, former
        for name, model in self._models.items():
            if name in wanted:
                self._set_names(name, model)
                self._publish_and_retire(name)

    def unready(self) -> list[str]:
        """Return the wanted versions that are not ready, as `name/version`, with the reason."""
        wanted = {} if self._wanted is None else self._wanted
        found = []
        for name, each in sorted(wanted.items()):
            model = self._models.get(name, ModelEntry())
            for number in each.versions:
                version = model.selected.get(number)
                if not model.was_read_as(each):
                    found.append(f"{name}/{number}: {NOT_READ}")
                    continue
                reason = model.faults.get(number) or model.faults.get("")
                if not reason and version is None:
                    reason = NOT_READ
                if not reason and version is not None and model.serving.get(number) is not version:
                    reason = version.reason or str(version.state)
                if reason:
                    found.append(f"{name}/{number}: {reason}")
        return found

    def is_on_its_way(self, name: str, number: str) -> bool:
        """Return True for a version that is loading, for the first time or again, or wanted and not
        read yet.

        Requests for a version that is not wanted get another one, by their names. It is on its way
        while no version has one of these names yet, as after a start.
        """
        found = self.catalog.find(name, number)
        if found is not None:
            return found.state is not State.READY
        model = self._models.get(name, ModelEntry())
        version = model.selected.get(number)
        if version is not None and version.state is State.LOADING:
            return True
        wanted = None if self._wanted is None else self._wanted.get(name)
        if wanted is None:
            return False
        if number not in wanted.versions:
            names = {"": wanted.default, **wanted.labels}
            return any(
                label not in model.names and self.is_on_its_way(name, each)
                for label, each in names.items()
                if each in wanted.versions
            )
        has_fault = number in model.faults or "" in model.faults
        return not model.was_read_as(wanted) or (version is None and not has_fault)

    def _set_names(self, name: str, model: ModelEntry) -> None:
        if self._wanted is not None and name in self._wanted:
            wanted = self._wanted[name]
            model.wanted_names = {"": wanted.default, **wanted.labels}
            model.former_names = self._former.get(name, {})

    # --- repository -------------------------------------------------------------------------------

    def open(self) -> Reloaded:
        """Read the repository for the first time. Blocks; call it before serving.

        Raises:
            ConfigurationError: the repository is missing. Faults of single models are recorded.
        """
        wanted = self._wanted
        return self._apply(self._scanner.scan({}, wanted), wanted)

    async def reload(self, *, retry: Retry = True) -> Reloaded:
        """Scan the repository again.

        Args:
            retry: try failed versions again even if their files have not changed: all, none, or
                these, by model and number.

        Raises:
            ConfigurationError: the repository is missing; nothing has changed then.
        """
        async with self._reloading:
            known = {
                (version.name, version.version): version
                for version in self.catalog.versions()
                if version.state not in (State.FAILED, State.UNLOADING)
            }
            if retry is not True:  # what failed last, rather than a predecessor that serves
                known |= {
                    (name, number): version
                    for name, model in self._models.items()
                    for number, version in model.selected.items()
                    if not is_retried(name, number, retry)
                }
            wanted = self._wanted
            opened = await self._scan(known, wanted, retry=retry)
            while has_retired_version(opened):
                wanted = self._wanted
                opened = await self._scan({}, wanted)
            return self._apply(opened, wanted)

    @property
    def cache_size(self) -> CacheSize | None:
        """Size of the cache after the last scan; None before, and if no store is used."""
        return self._scanner.cache_size

    async def _scan(
        self, known: KnownVersions, wanted: Wanted | None, *, retry: Retry = True
    ) -> list[OpenedModel]:
        # Use a daemon thread: an import that hangs must not keep the process from ending.
        return await run_on_daemon_thread(lambda: self._scanner.scan(known, wanted, retry=retry))

    def _apply(self, opened: list[OpenedModel], wanted: Wanted | None) -> Reloaded:
        before = {name: dict(model.selected) for name, model in self._models.items()}
        for name in self._models.keys() - {each.name for each in opened}:
            self._remove(name)
        for each in opened:
            model = self._models.setdefault(each.name, ModelEntry())
            model.read_as = None if wanted is None else wanted.get(each.name)
            self._update(model, each)
        return _summarize_changes(before, self._models)._replace(away=self._scanner.away)

    def _update(self, model: ModelEntry, opened: OpenedModel) -> None:
        for number, fault in opened.faults.items():
            if model.faults.get(number) != fault:
                self._observer.could_not_open(opened.name, number, fault)
        model.faults = opened.faults
        self._set_names(opened.name, model)
        if not opened.versions:
            # No version can be opened, so the versions selected before stay.
            self._publish(opened.name, model, model.names)
            return
        dropped = model.selected
        model.selected = opened.versions
        self._restore_replaced(model)
        for version in dropped.values():
            if id(version) not in model.versions() and version.state is State.LOADING:
                self._unload(version)
        known = dropped.values()
        added = [
            version
            for version in opened.versions.values()
            if version.state is State.LOADING
            and version not in known
            and self._is_compatible(model, version)
        ]
        if self._executes:
            self._load_added(model, added)
        else:
            for version in added:
                self._mark_ready_or_wait(version)
        self._publish_and_retire(opened.name)

    def _is_compatible(self, model: ModelEntry, version: ModelVersion) -> bool:
        """Return whether a new version may serve; otherwise it has failed."""
        self._observer.load_began(version)
        reason = _find_breaking_changes(version, self._find_served(model, version))
        if reason:
            version.state, version.reason = State.FAILED, reason
            self._observer.load_ended(version, "failed", reason)
        return not reason

    def _load_added(self, model: ModelEntry, added: Sequence[ModelVersion]) -> None:
        """Have new versions loaded, at once or when those that they replace are unloaded."""
        replaced = model.replaced_by(added) if added else []
        if not replaced and (model.swap is None or not added):
            for version in added:
                self._notify(VersionChange("load", version, "added"))
            return
        before = model.swap or Swap(set(), [], [])
        # Those that a swap under way was to load have served nothing yet.
        fallback = [each for each in replaced if each.is_servable] or before.fallback
        model.swap = Swap(before.leaving | {*replaced}, [*added], fallback)
        for version in replaced:
            model.serving.pop(version.version, None)
            model.awaited.pop(version.version, None)
        # From now on requests are bound to the new versions. So nothing more comes for one with
        # another number, and it is unloaded when it has answered what waits for it.
        model.awaited |= {version.version: version for version in added}
        self._publish_and_retire(added[0].name)
        for version in replaced:
            self._unload(version, "swap", leaves_waiting=version.version in model.awaited)

    def mark_gone(self, version: ModelVersion) -> None:
        """Record that an executor has unloaded a version, and has freed its memory."""
        model = self._models.get(version.name)
        swap = None if model is None else model.swap
        if swap is None or version not in swap.leaving:
            return
        swap.leaving.discard(version)
        if not swap.leaving:
            self._load_pending(swap)

    def _load_pending(self, swap: Swap) -> None:
        pending = swap.pending[:]
        swap.pending.clear()
        for version in pending:
            is_restored = version in swap.fallback
            self._notify(VersionChange("load", version, "restored" if is_restored else "added"))

    def _end_awaited(self, model: ModelEntry, version: ModelVersion) -> None:
        """Note that a version of a swap is ready, or has failed.

        When the last one has failed and none is ready, the versions that served before are loaded
        again.
        """
        swap = model.swap
        if model.awaited.pop(version.version, None) is None or swap is None or model.awaited:
            return
        failed = version.state is State.FAILED and not model.serving
        model.swap = None
        if not failed or version in swap.fallback or not swap.fallback:
            return
        restored = swap.fallback
        model.swap = Swap(set(), [*restored], restored)
        for each in restored:
            self._observer.load_began(each)
            each.state = State.LOADING
            each.reason = f"loading again, since version {version.version} failed"
        model.awaited = {each.version: each for each in restored}

    def _find_served(self, model: ModelEntry, version: ModelVersion) -> ModelVersion | None:
        """Return the version that a new one must be compatible with; None if there is none.

        With a wanted state it is the one that was the default when the new one was first wanted, so
        that all processes decide alike, whenever they start. Otherwise it is the default in
        service, unless that has a higher number: going back is always possible.
        """
        if self._wanted is not None:
            wanted = self._wanted.get(version.name)
            number = wanted.compatible.get(version.version, "") if wanted is not None else ""
            return model.selected.get(number) or model.serving.get(number)
        served = model.serving.get(model.names.get("", ""))
        if served is None or int(served.version) > int(version.version):
            return None
        return served

    def _remove(self, name: str) -> None:
        model = self._models.pop(name)
        self.catalog.publish(name)
        for version in model.versions().values():
            if version.is_servable:
                self._retain_or_unload(version)
            elif version.state is not State.FAILED:
                self._unload(version)
        for version in model.awaited.values():  # their requests waited for them to be loaded
            self._notify(VersionChange("reassign", version))

    # --- executor of this process -----------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` on every change from now on. For versions already loading see
        `versions`.
        """
        self._subscribers.append(subscriber)

    def mark_ready(self, version: ModelVersion, verdict: Verdict | None = None) -> None:
        """Let a version take requests; they may share runs unless the verdict forbids it.

        Its predecessor with the same number is unloaded; other numbers are retired once no selected
        version is loading. A version that is no longer selected is ignored, unless it was ready
        before and is still needed.
        """
        self._demanded.discard(version)
        if version.state is State.UNLOADED:
            self._observer.load_ended(version, "ready", "")
            version.state, version.reason = State.READY, self._reason_while_ready(version)
            return
        model = self._models.get(version.name)
        if model is None:
            return
        is_awaited = model.awaited.get(version.version) is version
        if not is_awaited and model.selected.get(version.version) is not version:
            return
        if verdict is not None:
            version.apply_verdict(verdict)
        if version.state is State.LOADING:
            self._observer.load_ended(version, "ready", "")
        version.state, version.reason = State.READY, ""
        # The new version is published before the old one is unloaded, so that lookups never fail.
        previous = model.serving.get(version.version)
        model.serving[version.version] = version
        if is_awaited:
            self._end_awaited(model, version)
        self._publish_and_retire(version.name)
        if previous is not None and previous is not version:
            self._unload(previous)
        replaced = self._replaced.take(version.name, version.version)
        if replaced is not None:  # batches name versions by number, which now means the new one
            self._unload(replaced)

    def mark_failed(self, version: ModelVersion, reason: str) -> None:
        """Record that a version cannot take requests (any more); its predecessor stays."""
        state = version.state
        version.state, version.reason = State.FAILED, self._scanner.shorten(reason)
        self._demanded.discard(version)
        if state in (State.LOADING, State.UNLOADED):
            self._observer.load_ended(version, "failed", version.reason)
        elif state is State.READY:
            self._observer.unloaded(version, version.reason)
        if self._replaced.find(version.name, version.version) is version:
            self._replaced.take(version.name, version.version)
        model, is_awaited = self._models.get(version.name), False
        if model is not None:
            if model.serving.get(version.version) is version:
                del model.serving[version.version]
            is_awaited = model.awaited.get(version.version) is version
            if is_awaited:
                self._end_awaited(model, version)
            self._publish_and_retire(version.name)
        if is_awaited or state is not State.LOADING:  # requests may wait for it
            self._notify(VersionChange("reassign", version))
        swap = model.swap if is_awaited and model is not None else None
        if swap is not None and not swap.leaving:
            self._load_pending(swap)

    # --- versions that are unloaded while they are idle -------------------------------------------

    def mark_unloaded(self, version: ModelVersion, reason: str) -> None:
        """Record that a ready version is not in memory until a request comes for it."""
        self._observer.unloaded(version, "")
        version.state, version.reason = State.UNLOADED, reason

    def load_again(self, version: ModelVersion) -> None:
        """Have an unloaded version loaded, since a request has come for it."""
        if version.state is State.UNLOADED and version not in self._demanded:
            self._demanded.add(version)
            self._observer.load_began(version)
            self._notify(VersionChange("load", version, "requested"))

    def requested_versions(
        self, schedule: Callable[[Callable[[], None]], object]
    ) -> RequestedVersions:
        """Return the look-up for new requests; for `schedule` see there."""
        return RequestedVersions(self.catalog, schedule, self.load_again, self._tuning)

    def refuse_waiting(self, version: ModelVersion, reason: str) -> None:
        """Refuse the requests that wait for an unloaded version; a later one has it loaded again.

        Args:
            version: could not be loaded now.
            reason: why not.
        """
        self._demanded.discard(version)
        self._observer.load_ended(version, "failed", reason)
        refusal = refuse_unloaded(version, reason, self._tuning)
        self._notify(VersionChange("refuse", version, refusal=refusal))

    # --- executors of other processes -------------------------------------------------------------

    @property
    def is_controlled(self) -> bool:
        """True if a wanted state says which versions are loaded."""
        return self._wanted is not None

    def look_at_announcements(self) -> None:
        """Let opened versions take requests for which nothing is awaited any more.

        It has no effect in a process that loads its versions itself.
        """
        if self._executes:
            return
        waiting = [
            version
            for model in self._models.values()
            for version in model.selected.values()
            if version.state is State.LOADING
        ]
        for version in waiting:
            self._mark_ready_or_wait(version)

    def _mark_ready_or_wait(self, version: ModelVersion) -> None:
        awaited = "" if self._awaited is None else self._awaited(version.name, version.version)
        if not awaited:
            self.mark_ready(version)
        elif awaited != version.reason:
            version.reason = awaited
            if version.name in self._models:
                self._publish_and_retire(version.name)

    def apply_executor_event(self, event: ExecutorEvent) -> None:
        """Apply an executor event: batch limits of its models, and durations of its runs.

        A version that was replaced here is kept as long as an executor announces it.
        """
        for hosted in event.models:
            # With the control topic it is the stages before that say how long a version is needed.
            if not self.is_controlled:
                self._replaced.note_use(hosted.name, hosted.version)
            version = self.catalog.find(hosted.name, hosted.version)
            if version is not None:
                version.max_batch_size = hosted.max_batch_size
                version.batching_off = hosted.batching_off
        for done in event.completions:
            version = self.catalog.find(done.model, done.version)
            if version is not None and done.compute_us:
                version.latency.observe(tuple(done.shape_class), done.rows, done.compute_us)

    # --- replaced versions --------------------------------------------------------------------

    def unload_unused(self) -> None:
        """Unload replaced versions that were not used for `models.keep_replaced_s`."""
        for version in self._replaced.take_unused():
            self._unload(version)

    def _reason_while_ready(self, version: ModelVersion) -> str:
        """Return the reason of a version that is ready: it has one if it was replaced."""
        is_kept = self._replaced.find(version.name, version.version) is version
        return REPLACED if is_kept else ""

    def _retain_or_unload(self, version: ModelVersion) -> None:
        """Keep a version that is no longer selected, or unload it at once if none are kept.

        Where executors are other processes, one that they have unloaded first is not kept: its
        requests get another version.
        """
        is_gone = not self._executes and version.config.swap == "unload_first"
        if is_gone or not self._replaced.add(version):
            self._unload(version)
        if is_gone:
            self._notify(VersionChange("reassign", version))

    def _restore_replaced(self, model: ModelEntry) -> None:
        """Let replaced versions that are selected again serve as before."""
        for number, version in model.selected.items():
            if self._replaced.find(version.name, number) is version:
                self._replaced.take(version.name, number)
                model.serving[number] = version

    # --- publishing -------------------------------------------------------------------------------

    def _publish_and_retire(self, name: str) -> None:
        model = self._models[name]
        before = model.names
        model.move_names()
        outdated = model.outdated()
        for version in outdated:
            del model.serving[version.version]
        self._publish(name, model, before)
        for version in outdated:
            self._retain_or_unload(version)

    def _publish(self, name: str, model: ModelEntry, before: Mapping[str, str]) -> None:
        """Publish a model whose names were these until now."""
        self.catalog.publish(name)
        if model.names != before:
            self._observer.names_moved(name, before, model.names)

    def _unload(
        self, version: ModelVersion, reason: str = "removed", *, leaves_waiting: bool = False
    ) -> None:
        if version.state is State.LOADING:
            self._observer.load_ended(version, "withdrawn", "")
        elif version.state is State.READY:
            self._observer.unloaded(version, "")
        self._demanded.discard(version)
        version.state = State.UNLOADING
        self._notify(VersionChange("unload", version, reason, leaves_waiting=leaves_waiting))

    def _notify(self, change: VersionChange) -> None:
        for subscriber in self._subscribers:
            subscriber(change)


def _find_breaking_changes(version: ModelVersion, served: ModelVersion | None) -> str:
    """Return why a new version may not serve beside or instead of another one; empty if it may."""
    if served is None or version.config.allow_breaking_versions:
        return ""
    changes = find_breaking_changes(served.signature, version.signature)
    if not changes:
        return ""
    return (
        f"expected the inputs and outputs of version {served.version}, which is in service: "
        f"{'; '.join(changes)}; allow_breaking_versions permits it"
    )


def _summarize_changes(
    before: Mapping[str, Mapping[str, ModelVersion]], models: Mapping[str, ModelEntry]
) -> Reloaded:
    old = {f"{name}/{n}": v for name, versions in before.items() for n, v in versions.items()}
    new = {f"{name}/{n}": v for name, model in models.items() for n, v in model.selected.items()}
    faults = [
        f"{name}{number and '/'}{number}: {fault}"
        for name, model in sorted(models.items())
        for number, fault in [
            *model.faults.items(),
            *((n, each.reason) for n, each in model.selected.items() if each.state is State.FAILED),
        ]
    ]
    return Reloaded(
        tuple(sorted(new.keys() - old.keys())),
        tuple(sorted(key for key in new.keys() & old.keys() if new[key] is not old[key])),
        tuple(sorted(old.keys() - new.keys())),
        tuple(faults),
    )
