"""An executor that loads nothing: it follows the registry, for the registry's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import Rejected
from headrace.models.lifecycle import VersionChange
from headrace.models.registry import Models
from headrace.models.scan import VersionScanner
from headrace.models.version import ModelVersion, State
from tests.support.models import settings_for


class Executor:
    """Follows the changes as an executor does, and loads when it is told to."""

    def __init__(self, repository: Path, scanner: VersionScanner | None = None) -> None:
        self.models = Models(settings_for(repository), executes=True, scanner=scanner)
        self.changes: list[VersionChange] = []
        self.models.open()
        self.models.lifecycle.subscribe(self.changes.append)

    def loading(self) -> ModelVersion:
        """The one version that is loading."""
        [version] = self.models.catalog.versions(State.LOADING)
        return version

    def load(self) -> ModelVersion:
        """Have the one version that is loading become ready."""
        version = self.loading()
        self.models.lifecycle.mark_ready(version)
        return version

    def told(self) -> list[tuple[str, str]]:
        """Actions and numbers since the last call."""
        told = [(str(change.action), change.version.version) for change in self.changes]
        self.changes.clear()
        return told


def refusal(models: Models, name: str, version: str | None = None) -> Rejected:
    """How a look-up is refused."""
    with pytest.raises(Rejected) as caught:
        models.catalog.lookup(name, version)
    return caught.value
