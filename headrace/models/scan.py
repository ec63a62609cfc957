"""Scan of the repository that opens new versions and keeps known ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from headrace.errors import ConfigurationError, describe_error
from headrace.models.repository import FoundModel, Repository
from headrace.models.user_code import StillImporting
from headrace.models.version import ModelVersion, State
from headrace.tuning import TUNING, ModelTuning

KnownVersions: TypeAlias = Mapping[tuple[str, str], ModelVersion]
"""Versions that are already open, by model and number."""


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
    """

    name: str
    versions: dict[str, ModelVersion]
    faults: dict[str, str]


class VersionScanner:
    """Opens the new and changed versions of a repository.

    Args:
        repository: the repository to scan.
        tuning: passed on to the versions.
    """

    def __init__(self, repository: Repository, tuning: ModelTuning = TUNING.models) -> None:
        self._repository = repository
        self._tuning = tuning
        self._importings: UnfinishedImports = {}

    def scan(self, known: KnownVersions) -> list[OpenedModel]:
        """Scan the repository and open new or changed versions. Blocks; any thread may call it.

        Args:
            known: open versions, which are kept if they have not changed.

        Raises:
            ConfigurationError: the repository is missing. Faults of single models are returned.
        """
        opened: list[OpenedModel] = []
        for found in self._repository.scan():
            if found.fault:
                fault = relative_to_repository(found.fault, self._repository.path)
                opened.append(OpenedModel(found.name, {}, {"": fault}))
            else:
                opened.append(self._open_model(found, known))
        return opened

    def _open_model(self, found: FoundModel, known: KnownVersions) -> OpenedModel:
        importings, repository = self._importings, self._repository.path
        versions: dict[str, ModelVersion] = {}
        faults: dict[str, str] = {}
        for each in found.versions:
            key = (found.name, each.version)
            same, importing = known.get(key), importings.get(key)
            if same is not None and same.stamp == each.stamp:
                versions[each.version] = same
                continue
            if importing is not None and importing.is_under_way(each.stamp):
                faults[each.version] = relative_to_repository(str(importing.error), repository)
                continue
            importings.pop(key, None)
            try:
                versions[each.version] = ModelVersion(found, each, self._tuning)
            except ConfigurationError as error:
                faults[each.version] = relative_to_repository(str(error), repository)
                if isinstance(error, StillImporting):
                    importings[key] = UnfinishedImport(each.stamp, error)
            except Exception as error:  # noqa: BLE001 - a surprising file must not hide other models
                faults[each.version] = relative_to_repository(describe_error(error), repository)
        return OpenedModel(found.name, versions, faults)


def has_retired_version(opened: list[OpenedModel]) -> bool:
    """Return whether a version that was found unchanged was replaced during the scan."""
    versions = (version for each in opened for version in each.versions.values())
    return any(version.state is State.UNLOADING for version in versions)


def relative_to_repository(fault: str, repository: Path) -> str:
    """Make the paths in a fault relative to the repository, as remote callers may see it."""
    return fault.replace(f"{repository}{os.sep}", "")
