"""Registry of the models of a process: brings their versions in line with the repository.

A version takes requests once it is ready: in a process without an executor, when its signature has
been read and the executors of other processes announce it; otherwise when the executor reports that
it is loaded. What becomes of a version then is in `headrace.models.lifecycle`.

All calls come from one thread, the event loop's; `reload` reads the disk in another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from headrace.config import Settings
from headrace.models.catalog import ModelCatalog, ModelEntry, ReplacedVersions
from headrace.models.compatibility import find_breaking_changes
from headrace.models.cores import Cores
from headrace.models.lifecycle import ModelObserver, VersionLifecycle
from headrace.models.memory import ModelMemory
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
from headrace.models.version import ModelVersion, State
from headrace.models.wanted import FormerNames, Wanted, WantedState
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.protocol.events import ExecutorEvent, UnreadyVersion
from headrace.tuning import TUNING, ModelTuning


class Reloaded(NamedTuple):
    """Result of a scan of the repository; versions as `name/version`, faults as lines.

    A removed version keeps serving until its successor is ready. A failed version that is retried
    counts as changed. `outages` says why stores could not be reached; their models stay as they
    were. `emptied` has the repositories that had models at the scan before, and have none.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    faults: tuple[str, ...]
    outages: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()


class Models:
    """Models of a process: reads the repository, and has the wanted versions loaded and unloaded.

    Args:
        settings: location of the repository, and the defaults of all models.
        executes: this process has an executor, which loads the models and reports on them.
        keeps_replaced: requests that were bound to a version may come after it was replaced, so it
            is kept for `models.keep_replaced_s` after its last use.
        binds: this process binds requests to versions; it binds none to a replaced one.
        awaited: returns why other processes are not ready for requests to a version, given its
            model and number; None if they are. None where no other process matters.
        clock_s: monotonic.
        scanner: reads the repository; by default that of the settings.
        registry: has the schemas of framed records; open while they are served.
        observer: notified of each change; `open` calls it on its own thread.
        try_opening: see `headrace.models.scan.VersionScanner`.
        tuning: passed on to the versions.

    Attributes:
        catalog: the versions that requests may get.
        lifecycle: states of the versions; an executor subscribes to it, and reports to it.
        wanted: state that the control topic wants.
        remote: executors of other processes; None if this process has one.
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
        awaited: Callable[[str, str], UnreadyVersion | None] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        scanner: VersionScanner | None = None,
        registry: SchemaRegistry | None = None,
        observer: ModelObserver | None = None,
        try_opening: TryOpening | None = None,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        keep_s = settings.models.keep_replaced_s if keeps_replaced else 0.0
        replaced = ReplacedVersions(keep_s, clock_s)
        if registry is None and settings.schema_registry is not None:
            registry = SchemaRegistry(settings.schema_registry)
        self._scanner = scanner or VersionScanner(
            open_repository(settings, tuning), tuning, registry, try_opening
        )
        self._observer = observer or ModelObserver()
        self.catalog = ModelCatalog(
            replaced,
            binds=binds,
            passes_on=awaited is not None,
            on_demand=self._load_again,
            tuning=tuning,
        )
        self.lifecycle = VersionLifecycle(
            self.catalog,
            replaced,
            executes=executes,
            shorten=self._scanner.shorten,
            observer=self._observer,
            tuning=tuning,
        )
        self.wanted = WantedState(self.catalog)
        self.remote = (
            None
            if executes
            else RemoteExecutors(self.catalog, self.lifecycle, self.wanted, awaited)
        )
        self.cores = Cores.of_process(settings.executor.cores)
        self.memory = ModelMemory(settings.models.memory_bytes)
        self._models = self.catalog.models
        self._reloading = asyncio.Lock()

    def want(self, wanted: Wanted, former: FormerNames = MappingProxyType({})) -> None:
        """Follow a wanted state from now on, instead of each model's `model.toml`.

        Labels and defaults move at once to versions that are ready; `open` or `reload` loads and
        unloads versions.

        Args:
            wanted: models by name.
            former: what their labels and defaults meant before, for those whose version has failed
                when this process starts.
        """
        self.wanted.follow(wanted, former)
        for name, model in self._models.items():
            if name in wanted:
                self.wanted.set_names(name, model)
                self.lifecycle.publish_and_retire(name)

    def open(self) -> Reloaded:
        """Read the repository for the first time. Blocks; call it before serving.

        Raises:
            ConfigurationError: the repository is missing. Faults of single models are recorded.
        """
        wanted = self.wanted.models
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
            while True:
                wanted = self.wanted.models
                # Use a daemon thread: an import that hangs must not keep the process from ending.
                scan = partial(self._scanner.scan, self._find_known(retry), wanted, retry=retry)
                opened = await run_on_daemon_thread(scan)
                if not has_retired_version(opened):
                    return self._apply(opened, wanted)

    def _find_known(self, retry: Retry) -> KnownVersions:
        """Return the versions that a scan does not open again if their files have not changed."""
        # A changed version that is loading, and its predecessor, have one number.
        known = {
            (version.name, version.version, version.stamp): version
            for version in self.catalog.versions()
            if version.state not in (State.FAILED, State.UNLOADING)
        }
        if retry is not True:  # what failed last is not opened again
            known |= {
                (name, number, version.stamp): version
                for name, model in self._models.items()
                for number, version in model.selected.items()
                if version.state is not State.UNLOADING and not is_retried(name, number, retry)
            }
        return known

    @property
    def outages(self) -> tuple[str, ...]:
        """Why stores could not be reached by the last scan; empty if all could."""
        return self._scanner.outages

    @property
    def cache_size(self) -> CacheSize | None:
        """Size of the cache after the last scan; None before, and if no store is used."""
        return self._scanner.cache_size

    def _load_again(self, version: ModelVersion) -> None:
        self.lifecycle.load_again(version)

    def _apply(self, opened: list[OpenedModel], wanted: Wanted | None) -> Reloaded:
        before = {name: dict(model.selected) for name, model in self._models.items()}
        for name in self._models.keys() - {each.name for each in opened}:
            self.lifecycle.remove(name)
        for each in opened:
            model = self._models.setdefault(each.name, ModelEntry())
            model.read_as = None if wanted is None else wanted.get(each.name)
            self._update(model, each)
        self.catalog.is_read = True
        return _summarize_changes(before, self._models)._replace(
            outages=self.outages, emptied=self._scanner.emptied
        )

    def _update(self, model: ModelEntry, opened: OpenedModel) -> None:
        for number, fault in opened.faults.items():
            if model.faults.get(number) != fault:
                self._observer.could_not_open(opened.name, number, fault)
        model.faults, model.rejected = opened.faults, opened.rejected
        self.wanted.set_names(opened.name, model)
        if not opened.versions:
            # No version can be opened, so the versions selected before stay.
            self.lifecycle.publish(opened.name, model, model.names)
            return
        dropped = model.selected
        model.selected = opened.versions
        self.lifecycle.restore_replaced(model)
        for version in dropped.values():
            if id(version) not in model.versions() and version.state is State.LOADING:
                self.lifecycle.unload(version)
        known = dropped.values()
        added = [
            version
            for version in opened.versions.values()
            if version.state is State.LOADING
            and version not in known
            and self._is_compatible(model, version)
        ]
        if self.remote is None:
            self.lifecycle.load(model, added)
        else:
            for version in added:
                self.remote.mark_ready_or_wait(version)
        self.lifecycle.publish_and_retire(opened.name)

    def _is_compatible(self, model: ModelEntry, version: ModelVersion) -> bool:
        """Return whether a new version may serve; otherwise it has failed."""
        fault = _find_breaking_changes(version, self._find_served(model, version))
        self.lifecycle.begin(version, fault)
        return not fault

    def _find_served(self, model: ModelEntry, version: ModelVersion) -> ModelVersion | None:
        """Return the version that a new one must be compatible with; None if there is none.

        With a wanted state it is the one that was the default when the new one was first wanted, so
        that all processes decide alike, whenever they start. Otherwise it is the default in
        service, unless that has a higher number: going back is always possible.
        """
        if self.wanted.models is not None:
            wanted = self.wanted.models.get(version.name)
            number = wanted.compatible.get(version.version, "") if wanted is not None else ""
            return model.selected.get(number) or model.serving.get(number)
        served = model.serving.get(model.names.get("", ""))
        if served is None or int(served.version) > int(version.version):
            return None
        return served


class RemoteExecutors:
    """Executors of other processes, which load the versions that are only opened in this one.

    Args:
        catalog: the models of this process.
        lifecycle: notified when a version may get requests.
        wanted: the wanted state.
        awaited: see `Models`.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        lifecycle: VersionLifecycle,
        wanted: WantedState,
        awaited: Callable[[str, str], UnreadyVersion | None] | None,
    ) -> None:
        self._catalog = catalog
        self._lifecycle = lifecycle
        self._wanted = wanted
        self._awaited = awaited

    def look_at_announcements(self) -> None:
        """Let opened versions take requests for which nothing is awaited any more."""
        waiting = [
            version
            for model in self._catalog.models.values()
            for version in model.selected.values()
            if version.state is State.LOADING
        ]
        for version in waiting:
            self.mark_ready_or_wait(version)

    def mark_ready_or_wait(self, version: ModelVersion) -> None:
        """Let an opened version take requests, or record why it has to wait for other processes."""
        awaited = None if self._awaited is None else self._awaited(version.name, version.version)
        if awaited is None:
            self._lifecycle.mark_ready(version)
        elif awaited.reason != version.reason:
            version.reason = awaited.reason
            version.has_failed_elsewhere = not awaited.is_under_way
            version.is_rejected = awaited.is_rejected
            if version.name in self._catalog.models:
                self._lifecycle.publish_and_retire(version.name)

    def apply_event(self, event: ExecutorEvent) -> None:
        """Apply an executor event: batch limits of its models, and durations of its runs.

        A version that was replaced here is kept as long as an executor announces it.
        """
        for hosted in event.models:
            # With the control topic it is the stages before that say how long a version is needed.
            if not self._wanted.is_followed:
                self._catalog.note_use(hosted.name, hosted.version)
            version = self._catalog.find(hosted.name, hosted.version)
            if version is not None:
                version.max_batch_size = hosted.max_batch_size
                version.batching_off = hosted.batching_off
        for done in event.completions:
            version = self._catalog.find(done.model, done.version)
            if version is not None and done.compute_us and done.rows > 0:
                version.latency.observe(tuple(done.shape_class), done.rows, done.compute_us)


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
