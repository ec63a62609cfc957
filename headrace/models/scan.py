"""Scan of the repository that opens new versions and keeps known ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

from headrace.errors import ConfigurationError, FilesDiffer, describe_error
from headrace.models.load_faults import is_fault_of_model
from headrace.models.repositories import ModelRepository
from headrace.models.repository import FoundModel, FoundVersion, WantedModels
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.stores.cache import CacheSize
from headrace.models.user_code import StillImporting
from headrace.models.version import ModelVersion, State
from headrace.tuning import TUNING, ModelTuning

KnownVersions: TypeAlias = Mapping[tuple[str, str, str], ModelVersion]
"""Versions that are already open, by model, number and stamp."""

TryOpening: TypeAlias = Callable[[FoundModel, FoundVersion, ModelTuning], None]
"""See `VersionScanner`."""

Retry: TypeAlias = bool | Collection[tuple[str, str]]
"""Failed versions to try again although nothing of them has changed; True: all of them."""


def is_retried(name: str, number: str, retry: Retry) -> bool:
    """Return whether a version is among those to try again."""
    return retry if isinstance(retry, bool) else (name, number) in retry


class UnfinishedImport(NamedTuple):
    """A version whose import exceeded its time limit, with the stamp that it had."""

    stamp: str
    error: StillImporting

    def is_under_way(self, stamp: str) -> bool:
        """Return whether the import of these same files is still running."""
        return self.stamp == stamp and self.error.thread.is_alive()


UnfinishedImports: TypeAlias = dict[tuple[str, str], UnfinishedImport]
"""Unfinished imports by model and number; kept between scans, so that only the first one waits."""


class OpenedModel(NamedTuple):
    """A model on disk.

    Attributes:
        versions: servable versions, by number; known ones are the same objects.
        faults: reasons why the others are not servable, by number; under "" the fault of the model
            as a whole.
        rejected: numbers of those whose files or configuration are the reason.
    """

    name: str
    versions: dict[str, ModelVersion]
    faults: dict[str, str]
    rejected: Collection[str] = ()


class _Fault(NamedTuple):
    """Why a version could not be opened, and whether its files or configuration are the reason."""

    text: str
    is_rejected: bool = False


class VersionScanner:
    """Opens the new and changed versions of a repository.

    Args:
        repository: the repository to scan.
        tuning, registry: passed on to the versions.
        try_opening: called for each version before it is opened; raises `ConfigurationError` if
            that would end this process. None: versions are not tried.
    """

    def __init__(
        self,
        repository: ModelRepository,
        tuning: ModelTuning = TUNING.models,
        registry: SchemaRegistry | None = None,
        try_opening: TryOpening | None = None,
    ) -> None:
        self._repository = repository
        self._try_opening = try_opening
        self._registry = registry
        self._tuning = tuning
        self._importings: UnfinishedImports = {}
        self._refused: dict[tuple[str, str], tuple[str, _Fault]] = {}
        """Stamps and faults of versions that could not be opened, by model and number."""

    def scan(
        self, known: KnownVersions, wanted: WantedModels | None = None, *, retry: Retry = True
    ) -> list[OpenedModel]:
        """Scan the repository and open new or changed versions. Blocks; any thread may call it.

        Args:
            known: open versions, which are kept if they have not changed.
            wanted: see `headrace.models.repositories.ModelRepository.scan`.
            retry: versions to open again that could not be opened, and have not changed: all,
                none, or these, by model and number.

        Raises:
            ConfigurationError: the repository is missing. Faults of single models are returned.
        """
        self._refused = {
            key: why for key, why in self._refused.items() if not is_retried(*key, retry)
        }
        opened: list[OpenedModel] = []
        repository = self._repository.scan(wanted)
        absent = (wanted or {}).keys() - {found.name for found in repository}
        opened += [
            OpenedModel(name, {}, {"": f"{name}: expected the model in the repository, got none"})
            for name in sorted(absent)
        ]
        for found in repository:
            if found.fault:
                opened.append(OpenedModel(found.name, {}, {"": self.shorten(found.fault)}))
            else:
                opened.append(self._open_model(found, known))
        failed = {(each.name, number) for each in opened for number in each.faults}
        self._refused = {key: why for key, why in self._refused.items() if key in failed}
        in_use = {version.directory for version in known.values()}
        in_use.update(version.directory for each in opened for version in each.versions.values())
        self._repository.release_unused(in_use)
        return opened

    @property
    def outages(self) -> tuple[str, ...]:
        """Why stores could not be reached by the last scan; empty if all could."""
        return self._repository.outages

    @property
    def emptied(self) -> tuple[str, ...]:
        """Repositories in which the last scan found no models, unlike the one before."""
        return self._repository.emptied

    @property
    def cache_size(self) -> CacheSize | None:
        """Size of the cache after the last scan; None before, and if no store is used."""
        return self._repository.cache_size

    def shorten(self, fault: str) -> str:
        """Remove from a fault the paths that remote callers need not see."""
        return self._repository.shorten(fault)

    def _open_model(self, found: FoundModel, known: KnownVersions) -> OpenedModel:
        versions: dict[str, ModelVersion] = {}
        faults: dict[str, _Fault] = {}
        for each in found.versions:
            same = known.get((found.name, each.version, each.stamp))
            if same is not None:
                versions[each.version] = same
                continue
            opened = self._open_version(found, each)
            if isinstance(opened, _Fault):
                faults[each.version] = opened
            else:
                versions[each.version] = opened
        return OpenedModel(
            found.name,
            versions,
            {number: fault.text for number, fault in faults.items()},
            {number for number, fault in faults.items() if fault.is_rejected},
        )

    def _open_version(self, model: FoundModel, found: FoundVersion) -> ModelVersion | _Fault:
        importings = self._importings
        key = (model.name, found.version)
        importing = importings.get(key)
        if importing is not None and importing.is_under_way(found.stamp):
            return _Fault(self.shorten(str(importing.error)))
        importings.pop(key, None)
        stamp, refused = self._refused.get(key, ("", None))
        if refused is not None and stamp == found.stamp:
            return refused
        try:
            try:
                return self._try_and_open(model, found)
            except FilesDiffer:
                if not self._repository.fetch_again(found.directory):
                    raise
            return self._try_and_open(model, found)
        except ConfigurationError as error:
            fault = _Fault(self.shorten(str(error)), is_fault_of_model(error))
            if isinstance(error, StillImporting):
                importings[key] = UnfinishedImport(found.stamp, error)
            elif not found.fault:  # its files are there; a store may come back
                self._refused[key] = (found.stamp, fault)
            return fault
        except Exception as error:  # noqa: BLE001 - a surprising file must not hide other models
            return _Fault(self.shorten(describe_error(error)))

    def _try_and_open(self, model: FoundModel, found: FoundVersion) -> ModelVersion:
        if self._try_opening is not None and not found.fault:
            self._try_opening(model, found, self._tuning)
        return ModelVersion(model, found, self._tuning, self._registry)


def has_retired_version(opened: list[OpenedModel]) -> bool:
    """Return whether a version that was found unchanged was replaced during the scan."""
    versions = (version for each in opened for version in each.versions.values())
    return any(version.state is State.UNLOADING for version in versions)
