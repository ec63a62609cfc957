"""Scan of the repository that opens new versions and keeps known ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from headrace.errors import ConfigurationError
from headrace.models.repository import FoundModel, Repository
from headrace.models.user_code import StillImporting, describe
from headrace.models.version import ModelVersion, State
from headrace.tuning import TUNING, ModelTuning

Known: TypeAlias = Mapping[tuple[str, str], ModelVersion]
"""Versions that are already open, by model and number."""


class Importing(NamedTuple):
    """A version whose import exceeded its time limit, with the stamp that it had."""

    stamp: str
    error: StillImporting

    def is_under_way(self, stamp: str) -> bool:
        """Return whether the import of these same files is still running."""
        return self.stamp == stamp and self.error.thread.is_alive()


Importings: TypeAlias = dict[tuple[str, str], Importing]
"""Unfinished imports by model and number; kept between scans, so that only the first one waits."""


class Opened(NamedTuple):
    """A model on disk.

    Attributes:
        versions: servable versions, by number; known ones are the same objects.
        faults: reasons why the others are not servable, by number; under "" the fault of the model
            as a whole.
    """

    name: str
    versions: dict[str, ModelVersion]
    faults: dict[str, str]


def look(
    repository: Repository,
    known: Known,
    importings: Importings,
    tuning: ModelTuning = TUNING.models,
) -> list[Opened]:
    """Scan the repository and open new or changed versions. Blocks; any thread may call it.

    Args:
        repository: the repository to scan.
        known: open versions, which are kept if they have not changed.
        importings: unfinished imports of earlier scans; changed in place.
        tuning: passed on to the versions.

    Raises:
        ConfigurationError: the repository is missing. Faults of single models are returned.
    """
    opened: list[Opened] = []
    for found in repository.scan():
        if found.fault:
            opened.append(Opened(found.name, {}, {"": relative(found.fault, repository.path)}))
        else:
            opened.append(_open(found, known, importings, repository.path, tuning))
    return opened


def is_outrun(opened: list[Opened]) -> bool:
    """Return whether a version that was found unchanged was replaced during the scan."""
    versions = (version for each in opened for version in each.versions.values())
    return any(version.state is State.UNLOADING for version in versions)


def relative(fault: str, repository: Path) -> str:
    """Make the paths in a fault relative to the repository, as remote callers may see it."""
    return fault.replace(f"{repository}{os.sep}", "")


def _open(
    found: FoundModel,
    known: Known,
    importings: Importings,
    repository: Path,
    tuning: ModelTuning,
) -> Opened:
    versions: dict[str, ModelVersion] = {}
    faults: dict[str, str] = {}
    for each in found.versions:
        key = (found.name, each.version)
        same, importing = known.get(key), importings.get(key)
        if same is not None and same.stamp == each.stamp:
            versions[each.version] = same
            continue
        if importing is not None and importing.is_under_way(each.stamp):
            faults[each.version] = relative(str(importing.error), repository)
            continue
        importings.pop(key, None)
        try:
            versions[each.version] = ModelVersion(found, each, tuning)
        except ConfigurationError as error:
            faults[each.version] = relative(str(error), repository)
            if isinstance(error, StillImporting):
                importings[key] = Importing(each.stamp, error)
        except Exception as error:  # noqa: BLE001 - a surprising file must not hide other models
            faults[each.version] = relative(describe(error), repository)
    return Opened(found.name, versions, faults)
