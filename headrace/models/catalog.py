"""Catalog of the models of a process: which version a request gets, and what operators see.

It answers requests from the event loop's thread. `headrace.models.lifecycle` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from headrace.errors import Code, Rejected
from headrace.models.version import ModelVersion, State
from headrace.protocol.control import WantedModel
from headrace.tuning import TUNING, ModelTuning

LABEL_SIGN = "@"
"""Between the name of a model and a label of one of its versions; names of models have none."""

REPLACED = "replaced; kept while requests that are bound to it may come"


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
        if version.state is State.READY:  # otherwise its reason says why it is not
            version.reason = REPLACED
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
        if kept.version.reason == REPLACED:
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


class Swap(NamedTuple):
    """A change of versions in which the old ones are unloaded before the new ones are loaded.

    Attributes:
        leaving: versions that are still in memory.
        pending: versions to load when none is.
        fallback: versions to load again if no new one can be loaded.
    """

    leaving: set[ModelVersion]
    pending: list[ModelVersion]
    fallback: list[ModelVersion]


class ModelEntry:
    """One model and its versions, by number.

    Attributes:
        selected: versions that the configuration selects, in any state.
        serving: ready versions, including those whose successor is not ready yet.
        awaited: versions that requests get although they are not loaded yet, since those that they
            replace were unloaded first; the requests wait.
        swap: the change under way in which that happens.
        faults: faults of versions that cannot be opened; under "" that of the model as a whole.
        rejected: numbers of those that cannot be opened because of their files or configuration.
        wanted_names: numbers of the versions that the control topic names, by label; under "" the
            default. None if it says nothing: the highest version is the default.
        former_names: what these names meant before, the latest first.
        names: the same as far as it is in effect: a name moves when its new version is ready.
        read_as: as it was wanted when the repository was read; None before, and if the control
            topic says nothing.
    """

    def __init__(self) -> None:
        self.selected: dict[str, ModelVersion] = {}
        self.serving: dict[str, ModelVersion] = {}
        self.awaited: dict[str, ModelVersion] = {}
        self.swap: Swap | None = None
        self.faults: dict[str, str] = {}
        self.rejected: Collection[str] = ()
        self.wanted_names: dict[str, str] | None = None
        self.former_names: Mapping[str, Sequence[str]] = {}
        self.names: dict[str, str] = {}
        self._reached: dict[str, str] = {}
        """Wanted versions that names have meant here."""
        self._before_swap: dict[str, str] = {}
        """What names meant that mean a version which is not loaded yet, since the old one was
        unloaded first."""
        self.read_as: WantedModel | None = None

    def was_read_as(self, wanted: WantedModel) -> bool:
        """Return whether its files have been read since this was wanted of them."""
        read_as = self.read_as
        return read_as is not None and (read_as.overrides, read_as.reads) == (
            wanted.overrides,
            wanted.reads,
        )

    def is_requested_again(self, number: str, wanted: WantedModel) -> bool:
        """Return whether a version, which has failed, is yet to be tried on other terms."""
        read_as = self.read_as
        return read_as is not None and (
            read_as.compatible.get(number) != wanted.compatible.get(number)
        )

    @property
    def bindable(self) -> dict[str, ModelVersion]:
        """The versions that requests may get, by number."""
        return {**self.serving, **self.awaited}

    def move_names(self) -> None:
        """Let each name mean its wanted version, if requests may get it, and otherwise what it did.

        Without wanted names the default is the highest version. In a process that has started
        since, a name whose wanted version has failed means what it did in the others, by the
        history of changes.
        """
        there = self.bindable
        wanted = self.wanted_names
        if wanted is None:
            self.names = {"": max(there, key=int)} if there else {}
            return
        candidates = {
            name: [number, *self._find_earlier(name, number)] for name, number in wanted.items()
        }
        found = {
            name: [number for number in numbers if number in there]
            for name, numbers in candidates.items()
        }
        before, self.names = (
            self.names,
            {name: numbers[0] for name, numbers in found.items() if numbers},
        )
        self._note_swap(before)
        self._reached |= {
            name: number
            for name, number in self.names.items()
            if number == wanted[name] and number in self.serving
        }

    def _note_swap(self, before: Mapping[str, str]) -> None:
        """Remember what names meant that wait for their version to be loaded."""
        for name, number in self.names.items():
            if number in self.serving:
                self._before_swap.pop(name, None)
            elif before.get(name, number) != number:
                self._before_swap.setdefault(name, before[name])

    def _find_earlier(self, name: str, number: str) -> Sequence[str]:
        """Return what a name may mean instead of its wanted version, the first choice first."""
        if name in self.names:
            # If the version for which a name waits fails, the one before is loaded again.
            old = self._before_swap.get(name)
            return [self.names[name], *([] if old is None else [old])]
        # Not before it has failed: in the other processes the name may mean it already. And not
        # when it has served here: a version that breaks while it serves has no substitute.
        if self._reached.get(name) == number or not self._has_failed(number):
            return ()
        return self.former_names.get(name, ())

    def _has_failed(self, number: str) -> bool:
        """Return True if a version cannot be opened or loaded, here or in the executors."""
        version = self.selected.get(number)
        if version is None:
            return number in self.faults or "" in self.faults
        return version.state is State.FAILED or (
            version.state is State.LOADING and version.has_failed_elsewhere
        )

    def versions(self) -> dict[int, ModelVersion]:
        """Return all versions by identity: a changed version and its predecessor share a number."""
        found = [*self.selected.values(), *self.serving.values(), *self.awaited.values()]
        return {id(version): version for version in found}

    def replaced_by(self, versions: Collection[ModelVersion]) -> list[ModelVersion]:
        """Return the versions that have to be unloaded before these are loaded.

        There are none if no setting says so, unless that has already happened. Nor is a version
        among them that a name means because its wanted version cannot be bound, and is not added.
        """
        first = self.swap is not None or any(
            each.config.swap == "unload_first" for each in versions
        )
        there = {*self.bindable, *(each.version for each in versions)}
        named = {
            self.names.get(name)
            for name, wanted in (self.wanted_names or {}).items()
            if wanted not in there
        }
        return [
            version
            for number, version in [*self.serving.items(), *self.awaited.items()]
            if first
            and self.selected.get(number) is not version
            and number not in self.faults
            and number not in named
        ]

    def begin_swap(self, added: Iterable[ModelVersion], replaced: Sequence[ModelVersion]) -> None:
        """Let requests wait for new versions until those that they replace are unloaded."""
        before = self.swap or Swap(set(), [], [])
        # Those that a swap under way was to load have served nothing yet.
        fallback = [each for each in replaced if each.is_servable] or before.fallback
        pending = [each for each in before.pending if each not in replaced]
        self.swap = Swap(before.leaving | {*replaced}, [*pending, *added], fallback)
        for version in replaced:
            self.serving.pop(version.version, None)
            self.awaited.pop(version.version, None)
        self.awaited |= {version.version: version for version in added}

    def end_awaited(self, version: ModelVersion) -> Sequence[ModelVersion]:
        """Note that a version of a swap is ready, or has failed.

        When one has failed, requests wait for the version that served under its number before, and
        for what names meant that mean it: these are to be loaded again, and returned here. When the
        last one has failed and none is ready, that holds for all versions that served before.
        """
        swap = self.swap
        if self.awaited.pop(version.version, None) is None or swap is None:
            return ()
        restored: Sequence[ModelVersion] = ()
        if version.state is State.FAILED:
            lost = {version.version} | {
                self._before_swap.get(name, number)
                for name, number in self.names.items()
                if number == version.version
            }
            there = self.bindable
            restored = [
                each
                for each in swap.fallback
                if (each.version in lost or not there)
                and each.version not in there
                and each.state is State.UNLOADING  # otherwise it was loaded again already
            ]
        swap.pending.extend(restored)
        self.awaited |= {each.version: each for each in restored}
        if not self.awaited:
            self.swap = None
        return restored

    def outdated(self) -> list[ModelVersion]:
        """Return unselected serving versions, once all selected ones settled, here or in the
        executors, and one is servable.

        A version that a label, or the default, still means is not among them: its successor is not
        ready.
        """
        selected = self.selected.values()
        is_any_loading = any(
            version.state is State.LOADING and not version.has_failed_elsewhere
            for version in selected
        )
        is_any_servable = any(version.is_servable for version in selected)
        if is_any_loading or not is_any_servable or "" in self.faults:
            return []
        return [
            version
            for number, version in self.serving.items()
            if number not in self.selected
            and number not in self.faults
            and (self.wanted_names is None or number not in self.names.values())
        ]


class ModelCatalog:
    """Versions that requests may get, by model and number.

    Args:
        replaced: versions that are no longer selected, but kept for requests bound to them.
        binds: this process binds requests to versions.
        passes_on: this process sends requests to executors in other processes.
        on_demand: called with an unloaded version when a request comes for it.
        tuning: texts and retry times of refusals.

    Attributes:
        models: all models, including those with faults, by name.
        is_read: whether the repository has been read; before, any name may be that of a model.
    """

    def __init__(
        self,
        replaced: ReplacedVersions,
        *,
        binds: bool = False,
        passes_on: bool = False,
        on_demand: Callable[[ModelVersion], None] = lambda _: None,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._passes_on = passes_on
        self._on_demand = on_demand
        self._replaced = replaced
        self._binds = binds
        self._tuning = tuning
        self._ready: dict[tuple[str, str], ModelVersion] = {}
        self.models: dict[str, ModelEntry] = {}
        self.is_read = False

    def lookup(self, name: str, version: str | None = None) -> ModelVersion:
        """Return the ready version with this number; without a number, the default.

        A replaced version that is kept is found by its number, unless new requests are bound here.

        Args:
            name: of the model, or `model@label`.
            version: number of the version.

        Raises:
            Rejected: `UNKNOWN_MODEL`, with the available ones; `MODEL_NOT_READY`, with the reason;
                `INVALID_REQUEST` without a name, or with a label and a number.
        """
        number = version or ""
        found = self._ready.get((name, number)) if self._binds else self.find(name, number)
        if found is None:
            self._refuse(name, number)
        return found

    def lookup_bound(self, name: str, version: str) -> ModelVersion:
        """Return the version that a request was bound to, and keep it if it was replaced.

        If it was unloaded while it was idle, it is loaded again, and the request waits.

        Raises:
            Rejected: see `lookup`.
        """
        self._replaced.note_use(name, version)
        found = self.find(name, version) or self.lookup(name, version)
        if found.state is State.UNLOADED:
            self._on_demand(found)
        return found

    def lookup_again(self, name: str) -> ModelVersion:
        """Return the version for a request with this name whose own version is gone.

        As with `find`, it may be one that waits for executors in other processes.

        Args:
            name: of the model, or `model@label`.

        Raises:
            Rejected: see `lookup`.
        """
        try:
            return self.lookup(name)
        except Rejected:
            plain, _, label = name.partition(LABEL_SIGN)
            model = self.models.get(plain)
            wanted = {} if model is None else model.wanted_names or {}
            found = self.find(plain, wanted[label]) if label in wanted else None
            if found is None:
                raise
            return found

    def note_use(self, name: str, version: str) -> None:
        """Extend the life of a replaced version, since requests bound to it still come."""
        self._replaced.note_use(name, version)

    def versions(self, state: State | None = None) -> list[ModelVersion]:
        """Return all versions, or those in one state, by name and number."""
        found = [
            version
            for model in self.models.values()
            for version in model.versions().values()
            if state in (None, version.state)
        ]
        found += [
            version for version in self._replaced.versions() if state in (None, version.state)
        ]
        return sorted(found, key=lambda version: (version.name, int(version.version)))

    def servable(self) -> list[ModelVersion]:
        """Return the versions whose requests are run: those that are ready, and those that are
        loaded again when a request comes.
        """
        return [version for version in self.versions() if version.is_servable]

    def offered(self) -> list[ModelVersion]:
        """Return as `servable`, without the versions that are kept only for requests which were
        bound to them before they were replaced.
        """
        offered = {*self._ready.values()}
        return [version for version in self.servable() if version in offered]

    def names(self) -> list[str]:
        """Return the names of all models, including those with faults."""
        return sorted(self.models)

    def faults(self, name: str) -> dict[str, str]:
        """Return why versions of a model cannot be opened, by number; under "" the model itself."""
        model = self.models.get(name)
        return dict(model.faults) if model else {}

    def find(self, name: str, number: str) -> ModelVersion | None:
        """Return the ready or replaced version with this number; None if there is none.

        Without an executor it may also be one that is opened, and waits for executors: requests
        that another process bound to it are passed on.
        """
        found = self._ready.get((name, number)) or self._replaced.find(name, number)
        if found is None and self._passes_on and name in self.models:
            version = self.models[name].selected.get(number)
            found = version if version is not None and version.state is State.LOADING else None
        return found

    def publish(self, name: str) -> None:
        """Update the table of `lookup` from the model."""
        ready = {
            key: version
            for key, version in self._ready.items()
            if key[0].partition(LABEL_SIGN)[0] != name
        }
        model = self.models.get(name)
        if model is not None:
            model.move_names()
            there = model.bindable
            for number, version in there.items():
                ready[name, number] = version
            for label, number in model.names.items():
                ready[f"{name}{LABEL_SIGN}{label}" if label else name, ""] = there[number]
        self._ready = ready  # at once: other threads look up versions meanwhile

    def status(self) -> list[dict[str, Any]]:
        """Return one entry for each version and each fault, for operators."""
        entries = [
            {
                "name": version.name,
                "version": version.version,
                "is_default": self._has_name(version, ""),
                "labels": self._labels_of(version),
                "state": str(version.state),
                "reason": version.reason,
                "max_batch_size": version.max_batch_size,
                "batching_off": version.batching_off,
                "contradiction": version.contradiction,
                "warm_up_omitted": version.warm_up_omitted,
                "load_s": version.load_s,
                "memory_bytes": version.memory_bytes,
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

    def _has_name(self, version: ModelVersion, name: str) -> bool:
        """Return whether a label of the model, or under "" its default, means this version now."""
        model = self.models.get(version.name)
        return (
            model is not None
            and model.names.get(name) == version.version
            and model.bindable.get(version.version) is version
        )

    def _labels_of(self, version: ModelVersion) -> list[str]:
        model = self.models.get(version.name)
        names = sorted(model.names) if model is not None else []
        return [name for name in names if name and self._has_name(version, name)]

    def _refuse(self, name: str, number: str) -> NoReturn:
        if not name:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "model_name",
                expected="a name, in the value or in the header x-model",
                got="none",
            )
        name, sign, label = name.partition(LABEL_SIGN)
        model = self.models.get(name)
        if model is None and not self.is_read:
            raise Rejected(
                Code.MODEL_NOT_READY,
                "model_name: the model repository has not been read yet",
                retry_after_ms=self._tuning.loading_retry_after_ms,
            )
        if model is not None and sign:
            if number:
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST,
                    "model_version",
                    expected=f"none beside the label {label}, which names one",
                    got=f'"{number}"',
                )
            number = self._require_label(name, model, label)
        if model is None:
            raise Rejected.mismatch(
                Code.UNKNOWN_MODEL,
                "model_name",
                expected=self._list_names(self.names()),
                got=f'"{name}"',
            )
        there = {*model.selected, *model.bindable, *model.faults}
        if number and number not in there and "" not in model.faults:
            if sign:  # wanted by the control topic, and not read from the repository yet
                _refuse_loading(f"model {name}/{number}", self._tuning.loading_retry_after_ms)
            raise Rejected.mismatch(
                Code.UNKNOWN_MODEL,
                "model_version",
                expected=f"{self._list_names(sorted(there, key=int))} of {name}",
                got=f'"{number}"',
            )
        _refuse_unready(model, name, number, self._tuning.loading_retry_after_ms)

    def _require_label(self, name: str, model: ModelEntry, label: str) -> str:
        """Return the number of the version that a label should name. Raises `Rejected`."""
        wanted = model.wanted_names or {}
        if not label or label not in wanted:
            labels = sorted(each for each in wanted if each)
            raise Rejected.mismatch(
                Code.UNKNOWN_MODEL,
                "model_name",
                expected=f"{self._list_names(labels)} as a label of {name}"
                if labels
                else f"a label of {name}, of which there is none",
                got=f'"{label}"',
            )
        return wanted[label]

    def _list_names(self, names: list[str]) -> str:
        if not names:
            return "a model, of which there is none"
        listed = ", ".join(names[: self._tuning.listed_names])
        more = len(names) - self._tuning.listed_names
        return f"one of {listed}" + (f" and {more} more" if more > 0 else "")


class RequestedVersions:
    """Look-up of versions for requests that have not begun to wait for one yet.

    A request for an unloaded version of a model that does not let requests wait is refused, and
    has the version loaded again. Any thread may look up.

    Args:
        catalog: the versions.
        schedule: calls a function on the event loop, from any thread.
        on_demand: see `ModelCatalog`.
        tuning: retry time of a version that was never loaded.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        schedule: Callable[[Callable[[], None]], object],
        on_demand: Callable[[ModelVersion], None],
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._catalog = catalog
        self._schedule = schedule
        self._on_demand = on_demand
        self._tuning = tuning

    def lookup(self, name: str, version: str | None = None) -> ModelVersion:
        """Return the version that a new request gets. Raises `Rejected`, see `ModelCatalog`."""
        found = self._catalog.lookup(name, version)
        refusal = self._refusal(found)
        if refusal is not None:
            raise refusal
        return found

    def refusal_of_bound(self, name: str, number: str) -> Rejected | None:
        """Return why a request that was bound to a version is refused; None if it is not."""
        found = self._catalog.find(name, number)
        return None if found is None else self._refusal(found)

    def require_loaded(self, name: str, number: str) -> None:
        """Check that a version is in memory; if it was unloaded, have it loaded again.

        Raises:
            Rejected: it is not, or it is not served.
        """
        found = self._catalog.lookup_bound(name, number)
        if found.state is not State.READY:
            raise refuse_unloaded(found, found.reason or str(found.state), self._tuning)

    def _refusal(self, version: ModelVersion) -> Rejected | None:
        if version.state is not State.UNLOADED or version.config.unload_idle != "refuse":
            return None
        self._schedule(partial(self._on_demand, version))
        return refuse_unloaded(version, version.reason, self._tuning)


def refuse_unloaded(version: ModelVersion, reason: str, tuning: ModelTuning) -> Rejected:
    """Return the refusal of a request whose version is not in memory.

    The retry time is how long the version took to load before.
    """
    return Rejected(
        Code.MODEL_NOT_READY,
        f"model {version.name}/{version.version}: {reason}",
        retry_after_ms=max(tuning.loading_retry_after_ms, int(1000 * (version.load_s or 0))),
    )


def _refuse_unready(model: ModelEntry, name: str, number: str, retry_after_ms: int) -> NoReturn:
    """Reject with the reason, and with a retry time if waiting may help."""
    requested = f"model {name}/{number}" if number else f"model {name}"
    wanted = model.selected.get(number)
    candidates = [wanted] if wanted else list(model.selected.values())
    if any(version.state is State.LOADING for version in candidates):
        _refuse_loading(requested, retry_after_ms)
    reasons = [version.reason for version in candidates if version.reason]
    reasons += [fault for key, fault in model.faults.items() if key in ("", number) or not number]
    listed = "; ".join(reason.splitlines()[0] for reason in reasons)
    raise Rejected(Code.MODEL_NOT_READY, f"{requested}: {listed}")


def _refuse_loading(requested: str, retry_after_ms: int) -> NoReturn:
    raise Rejected(Code.MODEL_NOT_READY, f"{requested} is loading", retry_after_ms=retry_after_ms)
