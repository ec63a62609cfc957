"""Life of a version in a process: it is loading, ready, unloaded while idle, failed, or unloading.

A version is retired only when its successor is ready, so a broken version never replaces a working
one; but a model may ask for its old versions to be unloaded first, where both do not fit.

If ingest is another process, it decides which version a request gets, and learns of a change later
or earlier than this process. A version retired here is therefore kept until no request has come for
it for a while.

All calls come from one thread, the event loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from headrace.errors import Rejected
from headrace.models.catalog import (
    REPLACED,
    ModelCatalog,
    ModelEntry,
    ReplacedVersions,
    Swap,
    refuse_unloaded,
)
from headrace.models.profiling.batch_safety import Verdict
from headrace.models.version import ModelVersion, State
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


Subscriber: TypeAlias = Callable[[VersionChange], None]

LoadOutcome: TypeAlias = Literal["ready", "failed", "withdrawn"]
"""How loading a version ended; withdrawn: it was no longer selected."""


class ModelObserver:
    """Notified of the changes in a process; this one ignores them.

    See `headrace.telemetry.model_spans.ModelSpans`.
    """

    def load_began(self, version: ModelVersion) -> None: ...
    def load_ended(self, version: ModelVersion, outcome: LoadOutcome, reason: str) -> None: ...
    def could_not_open(self, model: str, number: str, fault: str) -> None: ...
    def unloaded(self, version: ModelVersion, reason: str) -> None: ...
    def names_moved(
        self, model: str, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None: ...


class VersionLifecycle:
    """Changes the states of versions, publishes them, and has executors load and unload them.

    Args:
        catalog: the versions that requests may get.
        replaced: versions that are no longer selected, but kept for requests bound to them.
        executes: an executor of this process loads the versions; it reports on them here.
        shorten: removes from a fault the paths that remote callers need not see.
        observer: notified of each change.
        tuning: retry times of refusals.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        replaced: ReplacedVersions,
        *,
        executes: bool,
        shorten: Callable[[str], str],
        observer: ModelObserver,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._catalog = catalog
        self._models = catalog.models
        self._replaced = replaced
        self._executes = executes
        self._shorten = shorten
        self._observer = observer
        self._tuning = tuning
        self._demanded: set[ModelVersion] = set()
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` on every change from now on. For versions already loading see
        `ModelCatalog.versions`.
        """
        self._subscribers.append(subscriber)

    # --- loading and unloading --------------------------------------------------------------------

    def begin(self, version: ModelVersion, fault: str) -> None:
        """Record that a new version was opened; it has failed if a fault forbids it to serve."""
        self._observer.load_began(version)
        if fault:
            version.state, version.reason, version.is_rejected = State.FAILED, fault, True
            self._observer.load_ended(version, "failed", fault)

    def load(self, model: ModelEntry, added: Sequence[ModelVersion]) -> None:
        """Have new versions loaded, at once or when those that they replace are unloaded."""
        replaced = model.replaced_by(added) if added else []
        if not replaced and (model.swap is None or not added):
            for version in added:
                self._notify(VersionChange("load", version, "added"))
            return
        # From now on requests are bound to the new versions. So nothing more comes for one with
        # another number, and it is unloaded when it has answered what waits for it.
        pending = [] if model.swap is None else model.swap.pending
        model.begin_swap(added, replaced)
        self.publish_and_retire(added[0].name)
        for version in replaced:
            self.unload(version, "swap", leaves_waiting=version.version in model.awaited)
            if version in pending:  # no executor will take the requests that wait for it
                self._notify(VersionChange("reassign", version))
        # At once what is added to a swap whose old versions are gone.
        self._load_pending(model.swap)

    def mark_ready(self, version: ModelVersion, verdict: Verdict | None = None) -> None:
        """Let a version take requests; they may share runs unless the verdict forbids it.

        Its predecessor with the same number is unloaded; other numbers are retired once no selected
        version is loading. A version that is no longer selected is ignored, unless it was ready
        before and is still needed.
        """
        self._demanded.discard(version)
        if version.state is State.UNLOADED:
            if verdict is not None:  # its files were changed meanwhile
                version.apply_verdict(verdict)
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
        self.publish_and_retire(version.name)
        if previous is not None and previous is not version:
            self.unload(previous)
        replaced = self._replaced.take(version.name, version.version)
        if replaced is not None:  # batches name versions by number, which now means the new one
            self.unload(replaced)

    def mark_failed(self, version: ModelVersion, reason: str, *, is_rejected: bool = False) -> None:
        """Record that a version cannot take requests (any more); its predecessor stays.

        Args:
            version: the version.
            reason: why.
            is_rejected: because of its files or its configuration.
        """
        state = version.state
        version.state, version.reason = State.FAILED, self._shorten(reason)
        version.is_rejected = is_rejected
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
            self.publish_and_retire(version.name)
        if is_awaited or state is not State.LOADING:  # requests may wait for it
            self._notify(VersionChange("reassign", version))
        if is_awaited and model is not None:
            self._load_pending(model.swap)

    def mark_gone(self, version: ModelVersion) -> None:
        """Record that an executor has unloaded a version, and has freed its memory."""
        model = self._models.get(version.name)
        swap = None if model is None else model.swap
        if swap is None or version not in swap.leaving:
            return
        swap.leaving.discard(version)
        self._load_pending(swap)

    def _load_pending(self, swap: Swap | None) -> None:
        if swap is None or swap.leaving:
            return
        pending = swap.pending[:]
        swap.pending.clear()
        for version in pending:
            is_restored = version in swap.fallback
            self._notify(VersionChange("load", version, "restored" if is_restored else "added"))

    def _end_awaited(self, model: ModelEntry, version: ModelVersion) -> None:
        for each in model.end_awaited(version):
            self._observer.load_began(each)
            each.state, each.has_failed_elsewhere = State.LOADING, False
            each.is_rejected = False
            each.reason = f"loading again, since version {version.version} failed"

    def unload(
        self, version: ModelVersion, reason: str = "removed", *, leaves_waiting: bool = False
    ) -> None:
        """Have a version unloaded; for the arguments see `VersionChange`."""
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

    # --- replaced versions ------------------------------------------------------------------------

    def unload_unused(self, is_needed: Callable[[str, str], bool] = lambda *_: False) -> None:
        """Unload replaced versions that were not used for `models.keep_replaced_s`.

        Args:
            is_needed: returns whether a version, by model and number, is in use now.
        """
        for version in self._replaced.versions():
            if is_needed(version.name, version.version):
                self._replaced.note_use(version.name, version.version)
        for version in self._replaced.take_unused():
            self.unload(version)
            if not self._executes:
                # No executor will take the requests that wait for it: an executor of this process
                # would run them before it unloads the version.
                self._notify(VersionChange("reassign", version))

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
            self.unload(version)
        if is_gone:
            self._notify(VersionChange("reassign", version))

    def restore_replaced(self, model: ModelEntry) -> None:
        """Let replaced versions that are selected again serve as before."""
        for number, version in model.selected.items():
            if self._replaced.find(version.name, number) is version:
                self._replaced.take(version.name, number)
                model.serving[number] = version

    def remove(self, name: str) -> None:
        """Remove a model that is no longer in the repository, or no longer wanted."""
        model = self._models.pop(name)
        self._catalog.publish(name)
        for version in model.versions().values():
            if version.is_servable:
                self._retain_or_unload(version)
            elif version.state is not State.FAILED:
                self.unload(version)
        for version in model.awaited.values():  # their requests waited for them to be loaded
            self._notify(VersionChange("reassign", version))

    # --- publishing -------------------------------------------------------------------------------

    def publish_and_retire(self, name: str) -> None:
        """Publish a model, and retire its versions whose successors are ready."""
        model = self._models[name]
        before = model.names
        model.move_names()
        outdated = model.outdated()
        for version in outdated:
            del model.serving[version.version]
        self.publish(name, model, before)
        for version in outdated:
            self._retain_or_unload(version)

    def publish(self, name: str, model: ModelEntry, before: Mapping[str, str]) -> None:
        """Publish a model whose names were these until now."""
        self._catalog.publish(name)
        if model.names != before:
            self._observer.names_moved(name, before, model.names)
