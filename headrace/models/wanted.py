"""Rules of the wanted state: what a change makes of it, and which changes are refused; no I/O.

The wanted state of a deployment is the fold of all records on the control topic. Each record says
what one change made of the models that it concerns, so that a reader needs no rule to follow it:
the rules here decide only which records are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from headrace.errors import ConfigurationError, Fatal
from headrace.models.catalog import ModelCatalog, ModelEntry
from headrace.models.repository import find_model_fault, is_version
from headrace.models.version import State
from headrace.protocol.control import (
    FORMAT,
    FORMAT_WITHOUT_OVERRIDES,
    ControlRecord,
    WantedModel,
)
from headrace.protocol.events import NOT_READ, UnreadyVersion

Wanted: TypeAlias = Mapping[str, WantedModel]
"""Wanted models by name."""

FormerNames: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]
"""Earlier numbers of each label of a model, and under "" of its default, the latest first."""

_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")


class ChangeRefused(ConfigurationError):
    """The change makes no sense in the current state; the message says why."""


class BrokenHistory(Fatal):
    """The records on the control topic do not follow each other."""


class Deployment(NamedTuple):
    """The wanted state after some changes.

    Attributes:
        generation: number of changes so far; 0 before the first one.
        models: what is to be loaded.
        former: what names of models meant before, as far as it is still to be loaded.
    """

    generation: int = 0
    models: Wanted = MappingProxyType({})
    former: FormerNames = MappingProxyType({})

    def after(self, record: ControlRecord) -> Deployment:
        """Return the state after one more record of the topic.

        Raises:
            BrokenHistory: the record is not the next change of this state.
        """
        if self.generation == 0 and record.snapshot is not None:
            return Deployment(record.generation, record.snapshot, record.former)
        if record.generation != self.generation + 1:
            missing = "" if self.generation else ", and no snapshot is left"
            raise BrokenHistory(
                f"control topic: expected generation {self.generation + 1}, "
                f"got {record.generation}; records are missing{missing}"
            )
        changed = [name for name in record.before if record.before[name] != self.models.get(name)]
        if changed:
            raise BrokenHistory(
                f"control topic: generation {record.generation} expected "
                f"{describe(changed[0], record.before[changed[0]])}, "
                f"got {describe(changed[0], self.models.get(changed[0]))}"
            )
        models = {name: each for name, each in self.models.items() if name not in record.after}
        models |= {name: each for name, each in record.after.items() if each is not None}
        former = {name: each for name, each in self.former.items() if name not in record.after}
        for name, each in record.after.items():
            if each is None:
                continue
            earlier = _find_former(each, self.models.get(name), self.former.get(name, {}))
            if earlier:
                former[name] = earlier
        return Deployment(record.generation, models, former)


def _find_former(
    after: WantedModel, before: WantedModel | None, former: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """Return what the names of a model meant before a change, and earlier, as in `Deployment`."""
    if before is None:
        return {}
    meant = {"": before.default, **before.labels}
    found = {
        name: [
            each
            for each in dict.fromkeys([meant[name], *former.get(name, ())])
            if each != number and each in after.versions
        ]
        for name, number in {"": after.default, **after.labels}.items()
        if name in meant
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def first_complete(records: Sequence[ControlRecord]) -> Sequence[ControlRecord]:
    """Return the records from the first one that gives the whole state.

    That is the first change, or where older records are gone, the oldest snapshot that is left.
    Without either, all records are returned, which `Deployment.after` refuses.
    """
    if not records or records[0].generation == 1:
        return records
    # The changes before a snapshot are of use only to a reader that has what came before them.
    snapshots = (place for place, each in enumerate(records) if each.snapshot is not None)
    return records[next(snapshots, 0) :]


def fold(records: Sequence[ControlRecord], until: int | None = None) -> Deployment:
    """Return the state after the records, or after those up to a generation.

    Raises:
        BrokenHistory: a record is not the next one.
        ChangeRefused: the generation is not among them.
    """
    state = Deployment()
    records = first_complete(records)
    for record in records:
        if until is not None and record.generation > until:
            break
        state = state.after(record)
    if until is not None and state.generation != until:
        first = records[0].generation if records else 0
        last = records[-1].generation if records else 0
        raise ChangeRefused(f"generation: expected one from {first} to {last}, got {until}")
    return state


class Change(NamedTuple):
    """A change that an operator wants.

    Attributes:
        action: a word for the history.
        apply: returns the models after the change, given those before; raises `ChangeRefused`.
        model: the one that it is about; None: all.
    """

    action: str
    apply: Callable[[Wanted], Wanted]
    model: str | None


class Author(NamedTuple):
    """Origin of a change, for the history.

    Attributes:
        who: name of the operator or of the program that makes the change.
        why: reason that was given; empty if there is none.
    """

    who: str
    why: str = ""


def make_record(
    change: Change,
    state: Deployment,
    author: Author,
    change_id: str,
    now_ms: int,
    snapshot_every: int,
) -> ControlRecord | None:
    """Return the record of a change; None if it would change nothing.

    Args:
        change: the change.
        state: the current state.
        author: who makes it.
        change_id: unique.
        now_ms: epoch milliseconds.
        snapshot_every: number of changes from one snapshot to the next.

    Raises:
        ChangeRefused: the change makes no sense in this state.
    """
    after = change.apply(state.models)
    names = [
        name
        for name in sorted({*state.models, *after})
        if state.models.get(name) != after.get(name)
    ]
    if not names:
        return None
    generation = state.generation + 1
    models = [*state.models.values(), *after.values()]
    record = ControlRecord(
        format=FORMAT if any(each.overrides for each in models) else FORMAT_WITHOUT_OVERRIDES,
        generation=generation,
        change_id=change_id,
        at_ms=now_ms,
        who=author.who,
        why=author.why,
        action=change.action,
        before={name: state.models.get(name) for name in names},
        after={name: after.get(name) for name in names},
    )
    if generation % snapshot_every:
        return record
    former = {
        model: {name: [*numbers] for name, numbers in meant.items()}
        for model, meant in state.after(record).former.items()
    }
    return replace(record, snapshot=dict(after), former=former)


def find_requested(record: ControlRecord) -> set[tuple[str, str]]:
    """Return the versions, by model and number, that a change loads, or loads again.

    A change of a label or the default loads nothing.
    """
    return {
        (name, number)
        for name, after in record.after.items()
        if after is not None
        for number in after.versions
        if _is_requested(number, record.before.get(name), after)
    }


def find_awaited(record: ControlRecord) -> set[tuple[str, str]]:
    """Return the versions, by model and number, without which a change is not in effect: those that
    it loads, and those that the default and the labels of its models name.
    """
    return find_requested(record) | {
        (name, number)
        for name, after in record.after.items()
        if after is not None
        for number in (after.default, *after.labels.values())
    }


def _is_requested(number: str, before: WantedModel | None, after: WantedModel) -> bool:
    if before is None or number not in before.versions:
        return True
    return (before.overrides, before.reads, before.compatible.get(number)) != (
        after.overrides,
        after.reads,
        after.compatible.get(number),
    )


class WantedState:
    """State that the control topic wants of a process, and how far the process has reached it.

    Args:
        catalog: the models of the process.

    Attributes:
        models: wanted models by name; None until the first state: each `model.toml` decides.
    """

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog
        self._former: FormerNames = {}
        self.models: Wanted | None = None

    def follow(self, models: Wanted, former: FormerNames) -> None:
        """Want this state from now on; for `former` see `Deployment`."""
        self.models, self._former = models, former

    @property
    def is_followed(self) -> bool:
        """True if a wanted state says which versions are loaded."""
        return self.models is not None

    def set_names(self, name: str, model: ModelEntry) -> None:
        """Give a model the names that are wanted of it, if any are."""
        if self.models is not None and name in self.models:
            wanted = self.models[name]
            model.wanted_names = {"": wanted.default, **wanted.labels}
            model.former_names = self._former.get(name, {})

    def unready(self) -> list[UnreadyVersion]:
        """Return the wanted versions that are not ready."""
        wanted = {} if self.models is None else self.models
        found = []
        for name, each in sorted(wanted.items()):
            model = self._catalog.models.get(name, ModelEntry())
            for number in each.versions:
                version = model.selected.get(number)
                fault = model.faults.get(number) or model.faults.get("")
                is_served = version is not None and model.serving.get(number) is version
                if (
                    not model.was_read_as(each)
                    or (version is None and not fault)
                    or (not is_served and model.is_requested_again(number, each))
                ):
                    found.append(UnreadyVersion(name, number, NOT_READ, is_under_way=True))
                elif fault:
                    is_rejected = number in model.rejected
                    found.append(UnreadyVersion(name, number, fault, is_rejected=is_rejected))
                elif version is not None and not is_served:
                    is_loading = version.state is State.LOADING
                    reason = version.reason or str(version.state)
                    is_under_way = is_loading and not version.has_failed_elsewhere
                    is_rejected = version.is_rejected and not is_under_way
                    found.append(UnreadyVersion(name, number, reason, is_under_way, is_rejected))
        return found

    def is_on_its_way(self, name: str, number: str) -> bool:
        """Return True for a version that is loading, for the first time or again, or wanted and not
        read yet.

        Requests for a version that is not wanted get another one, by their names. It is on its way
        while no version has one of these names yet, as after a start.
        """
        found = self._catalog.find(name, number)
        if found is not None:
            return found.state is not State.READY
        model = self._catalog.models.get(name, ModelEntry())
        version = model.selected.get(number)
        if version is not None and version.state is State.LOADING:
            return True
        wanted = None if self.models is None else self.models.get(name)
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


# --- changes ----------------------------------------------------------------------------------


def load(
    model: str,
    version: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    instead_of: str | None = None,
    allow_breaking: bool = False,
    again: bool = False,
) -> Change:
    """Return the change that loads a version. The first one of a model becomes its default.

    Args:
        model: its name.
        version: its number.
        overrides: values for keys of `model.toml`, for all versions of the model; None leaves those
            that there are.
        instead_of: number of a loaded version that is unloaded by the same change; what names it
            names the new one.
        allow_breaking: the version's inputs and outputs may break callers of the default.
        again: read the files of a known model again, and load versions that failed once more.
    """

    def apply(models: Wanted) -> Wanted:
        fault = find_model_fault(model)
        if fault:
            raise ChangeRefused(f"model: {fault}")
        if not is_version(version):
            raise ChangeRefused(f"version: expected a number such as 1, got {version!r}")
        if instead_of is None:
            known = models.get(model) or WantedModel(versions=[], default=version)
        else:
            known = _require(models, model, instead_of)
        given = known.overrides if overrides is None else _check_overrides(overrides)
        versions = sorted({*known.versions, version}, key=int)
        compatible = {**_pair_with_default(known, [version]), **known.compatible}
        if allow_breaking:
            compatible.pop(version, None)
        loaded = replace(
            known,
            versions=versions,
            overrides=dict(given),
            compatible=compatible,
            reads=known.reads + (again and model in models),
        )
        if instead_of is not None:
            loaded = _replace_version(loaded, instead_of, version)
        return {**models, model: loaded}

    return Change("load", apply, model)


def add_versions(
    model: str, versions: Sequence[str], overrides: Mapping[str, Any], *, reads: int = 0
) -> Change:
    """Return the change that loads versions beside the others, and has all files read again.

    Args:
        model: its name.
        versions: their numbers, ascending, at least one.
        overrides: values for keys of `model.toml`; they replace former ones.
        reads: least number of this reading; one that a model of this name never had.
    """

    def apply(models: Wanted) -> Wanted:
        given = dict(_check_overrides(overrides))
        known = models.get(model)
        if known is None:
            first = WantedModel(
                versions=[*versions], default=versions[-1], overrides=given, reads=reads
            )
            return {**models, model: first}
        both = sorted({*known.versions, *versions}, key=int)
        again = replace(
            known,
            versions=both,
            overrides=given,
            reads=max(reads, known.reads + 1),
            compatible={**_pair_with_default(known, versions), **known.compatible},
        )
        return {**models, model: again}

    return Change("load", apply, model)


def keep_versions(model: str, versions: Sequence[str]) -> Change:
    """Return the change that makes the highest of these the default, and unloads unnamed others."""

    def apply(models: Wanted) -> Wanted:
        known = _require(models, model, versions[-1])
        kept = {*versions, *known.labels.values()}
        rest = [each for each in known.versions if each in kept]
        return {**models, model: replace(_keep(known, rest), default=versions[-1])}

    return Change("default", apply, model)


def restore(model: str, earlier: WantedModel | None) -> Change:
    """Return the change that wants a model again as it was; None unloads it."""
    return roll_back({} if earlier is None else {model: earlier}, model)


def unload(model: str, version: str | None = None) -> Change:
    """Return the change that unloads one version, or the model with all versions and labels.

    A version that is the default, or that a label names, is refused.
    """

    def apply(models: Wanted) -> Wanted:
        known = _require(models, model, version)
        if version is None:
            return {name: each for name, each in models.items() if name != model}
        if version == known.default:
            others = _list(each for each in known.versions if each != version)
            raise ChangeRefused(
                f"{model}/{version}: it is the default version; "
                + (f"make one of {others} the default first" if others else "unload the model")
            )
        labels = [label for label, number in known.labels.items() if number == version]
        if labels:
            raise ChangeRefused(
                f"{model}/{version}: labels name it: {_list(labels)}; move or remove them first"
            )
        rest = [each for each in known.versions if each != version]
        return {**models, model: _keep(known, rest)}

    return Change("unload", apply, model)


def set_label(model: str, label: str, version: str) -> Change:
    """Return the change that lets a label name a loaded version."""

    def apply(models: Wanted) -> Wanted:
        if not _LABEL.fullmatch(label):
            raise ChangeRefused(
                "label: expected a letter, and then letters, digits, '.', '_' and '-', at most 64 "
                f"in all, got {label!r}"
            )
        known = _require(models, model, version)
        return {**models, model: replace(known, labels={**known.labels, label: version})}

    return Change("label", apply, model)


def remove_label(model: str, label: str) -> Change:
    """Return the change that removes a label."""

    def apply(models: Wanted) -> Wanted:
        known = _require(models, model)
        if label not in known.labels:
            raise ChangeRefused(
                f"{model}: label: expected one of {_list(known.labels) or 'none'}, got {label!r}"
            )
        rest = {each: number for each, number in known.labels.items() if each != label}
        return {**models, model: replace(known, labels=rest)}

    return Change("label", apply, model)


def set_default(model: str, version: str) -> Change:
    """Return the change that gives requests without a version this loaded one."""

    def apply(models: Wanted) -> Wanted:
        known = _require(models, model, version)
        return {**models, model: replace(known, default=version)}

    return Change("default", apply, model)


def roll_back(earlier: Wanted, model: str | None = None) -> Change:
    """Return the change that restores one model, or all, as they were.

    Args:
        earlier: the models at the generation to go back to.
        model: None restores all.
    """

    def apply(models: Wanted) -> Wanted:
        restored = {name: _with_new_reads(each, models.get(name)) for name, each in earlier.items()}
        if model is None:
            return restored
        if model not in models and model not in earlier:
            raise ChangeRefused(f"model: expected one of {_list(models) or 'none'}, got {model!r}")
        rest = {name: each for name, each in models.items() if name != model}
        return {**rest, model: restored[model]} if model in earlier else rest

    return Change("rollback", apply, model)


def _with_new_reads(earlier: WantedModel, now: WantedModel | None) -> WantedModel:
    """Return a model as it was, but with no number of reads that it has had since.

    A process that has not read its files since would take its last reading for a later one.
    """
    if now is None or now.reads <= earlier.reads:
        return earlier
    same = replace(earlier, reads=now.reads)
    return same if same == now else replace(earlier, reads=now.reads + 1)


def require_present(before: Wanted, after: Wanted, present: Mapping[str, Collection[int]]) -> None:
    """Check that the versions that a change loads are in the repository.

    Raises:
        ChangeRefused: one is not.
    """
    for name, wanted in after.items():
        loaded = before[name].versions if name in before else []
        there = sorted(present.get(name, ()))
        for version in wanted.versions:
            if version not in loaded and int(version) not in there:
                raise ChangeRefused(
                    f"{name}: version: expected one of the repository, "
                    f"{_list(map(str, there)) or 'which has none'}, got {version}"
                )


def describe(name: str, wanted: WantedModel | None) -> str:
    """Return a wanted model in one line."""
    if wanted is None:
        return f"{name}: nothing loaded"
    labels = "".join(f", {label} -> {number}" for label, number in sorted(wanted.labels.items()))
    overrides = "".join(
        f", {key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in sorted(wanted.overrides.items())
    )
    compatible = "".join(
        f", {number} must be compatible with {other}"
        for number, other in sorted(wanted.compatible.items())
    )
    return (
        f"{name}: versions {_list(wanted.versions)}, default {wanted.default}{labels}{overrides}"
        f"{compatible}"
    )


def _pair_with_default(known: WantedModel, versions: Iterable[str]) -> dict[str, str]:
    """Return the default for each of the versions that is not loaded yet."""
    return {
        each: known.default for each in versions if known.versions and each not in known.versions
    }


def _keep(known: WantedModel, versions: Sequence[str]) -> WantedModel:
    """Return a model with these of its versions."""
    compatible = {
        each: other
        for each, other in known.compatible.items()
        if each in versions and other in versions
    }
    return replace(known, versions=list(versions), compatible=compatible)


def _replace_version(known: WantedModel, old: str, new: str) -> WantedModel:
    """Return a model without one of its versions, whose names name another one."""
    if old == new:
        raise ChangeRefused(f"version: expected another one than {old}, which it replaces, got it")
    kept = _keep(known, [each for each in known.versions if each != old])
    # Where the old one still serves, the new one is compared with it.
    compared = {new: known.compatible[new]} if new in known.compatible else {}
    return replace(
        kept,
        default=new if kept.default == old else kept.default,
        labels={label: new if each == old else each for label, each in kept.labels.items()},
        compatible={**kept.compatible, **compared},
    )


def _check_overrides(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the overrides. Raises `ChangeRefused`; the repository knows which values are right."""
    if "versions" in overrides:
        raise ChangeRefused("overrides: versions: expected other keys, the versions are loaded")
    return overrides


def _require(models: Wanted, model: str, version: str | None = None) -> WantedModel:
    known = models.get(model)
    if known is None:
        raise ChangeRefused(
            f"model: expected one that is loaded, {_list(models) or 'of which there is none'}, "
            f"got {model!r}"
        )
    if version is not None and version not in known.versions:
        raise ChangeRefused(
            f"{model}: version: expected one that is loaded, {_list(known.versions)}, "
            f"got {version!r}; load it first"
        )
    return known


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
