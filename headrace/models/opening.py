"""A look at the repository that opens what is new and leaves what is known as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from headrace.errors import ConfigurationError
from headrace.models.repository import FoundModel, Repository
from headrace.models.version import ModelVersion, State

Known: TypeAlias = Mapping[tuple[str, str], ModelVersion]
"""Versions that are open already, by model and number."""


class Opened(NamedTuple):
    """A model on disk.

    Attributes:
        versions: those that can be served, by number; known ones are the same objects.
        faults: why others cannot, by number; under "" the fault of the model as a whole.
    """

    name: str
    versions: dict[str, ModelVersion]
    faults: dict[str, str]


def look(repository: Repository, known: Known) -> list[Opened]:
    """Read the disk and open what is new or has changed. It blocks; any thread may call it.

    Raises:
        ConfigurationError: the repository is not there. Faults of single models are returned.
    """
    return [_open(found, known, repository.path) for found in repository.scan()]


def is_outrun(opened: list[Opened]) -> bool:
    """Whether a version that was found unchanged was put aside during the look."""
    versions = (version for each in opened for version in each.versions.values())
    return any(version.state is State.UNLOADING for version in versions)


def relative(fault: str, repository: Path) -> str:
    """A fault with its paths below the repository: it may be told to callers elsewhere."""
    return fault.replace(f"{repository}{os.sep}", "")


def _open(found: FoundModel, known: Known, repository: Path) -> Opened:
    if found.fault:
        return Opened(found.name, {}, {"": relative(found.fault, repository)})
    versions: dict[str, ModelVersion] = {}
    faults: dict[str, str] = {}
    for each in found.versions:
        same = known.get((found.name, each.version))
        if same is not None and same.stamp == each.stamp:
            versions[each.version] = same
            continue
        try:
            versions[each.version] = ModelVersion(found, each)
        except ConfigurationError as error:
            faults[each.version] = relative(str(error), repository)
    return Opened(found.name, versions, faults)
