"""The repositories that `models.repository` names: directories, object stores, or several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.config import Settings
from headrace.models.repository import FoundModel, Repository, WantedModels, missing_model
from headrace.models.stores.cache import CacheSize, ModelCache
from headrace.models.stores.remote import RemoteRepository
from headrace.models.stores.store import open_store
from headrace.tuning import TUNING, ModelTuning


class ModelRepository(Protocol):
    """Models, wherever they are; implemented by `Repository`, and by those below."""

    @property
    def outages(self) -> tuple[str, ...]:
        """Why stores could not be reached by the last scan; empty if all could."""

    @property
    def emptied(self) -> tuple[str, ...]:
        """Repositories in which the last scan found no models, unlike the one before."""

    @property
    def cache_size(self) -> CacheSize | None:
        """Size of the cache after the last scan; None before, and if no store is used."""

    def scan(self, wanted: WantedModels | None = None) -> list[FoundModel]:
        """Return models by name: all with the versions that their `model.toml` selects, or those
        that are there of the wanted ones. Blocks. Raises `ConfigurationError`.
        """

    def list_versions(self) -> dict[str, list[int]]:
        """Return the versions of all models. Blocks. Raises `ConfigurationError`."""

    def select(self, name: str, overrides: Mapping[str, Any]) -> list[int]:
        """Return the versions of a model that its configuration selects, ascending. Blocks.

        Raises `ConfigurationError`, also if the configuration is not valid with the overrides.
        """

    def shorten(self, fault: str) -> str:
        """Remove from a fault what remote callers need not see."""

    def fetch_again(self, directory: Path) -> bool:
        """Fetch a version of the last scan again, whose files differ from its manifest. Blocks.

        Returns False if no store has it. Raises `ConfigurationError`, `StoreUnavailable` or
        `FileNotFoundError`.
        """

    def release_unused(self, in_use: Collection[Path]) -> None:
        """Let go of versions in other directories than these."""


class RepositoryList:
    """Several repositories as one; of models with the same name, the first one counts."""

    def __init__(self, repositories: Sequence[ModelRepository]) -> None:
        self._repositories = repositories

    def scan(self, wanted: WantedModels | None = None) -> list[FoundModel]:
        """See `ModelRepository`.

        Raises:
            ConfigurationError: one of the repositories cannot be read.
        """
        found: dict[str, FoundModel] = {}
        for repository in self._repositories:
            for model in repository.scan(wanted):
                found.setdefault(model.name, model)
        return [found[name] for name in sorted(found)]

    def list_versions(self) -> dict[str, list[int]]:
        """See `ModelRepository`.

        Raises:
            ConfigurationError: one of the repositories cannot be read.
        """
        found: dict[str, list[int]] = {}
        for repository in self._repositories:
            for name, versions in repository.list_versions().items():
                found.setdefault(name, versions)
        return found

    def select(self, name: str, overrides: Mapping[str, Any]) -> list[int]:
        """See `ModelRepository`.

        Raises:
            ConfigurationError: there is no such model, or it cannot be served with the overrides.
        """
        listed: set[str] = set()
        for repository in self._repositories:
            names = repository.list_versions().keys()
            if name in names:
                return repository.select(name, overrides)
            listed |= names
        raise missing_model(name, listed)

    @property
    def outages(self) -> tuple[str, ...]:
        """Why stores could not be reached by the last scan; empty if all could."""
        return tuple(reason for each in self._repositories for reason in each.outages)

    @property
    def emptied(self) -> tuple[str, ...]:
        """Repositories in which the last scan found no models, unlike the one before."""
        return tuple(name for each in self._repositories for name in each.emptied)

    @property
    def cache_size(self) -> CacheSize | None:
        """Size of the cache that all stores share, as the last of them saw it."""
        sizes = [each.cache_size for each in self._repositories if each.cache_size is not None]
        return sizes[-1] if sizes else None

    def shorten(self, fault: str) -> str:
        """Remove from a fault what remote callers need not see."""
        for repository in self._repositories:
            fault = repository.shorten(fault)
        return fault

    def fetch_again(self, directory: Path) -> bool:
        """See `ModelRepository`."""
        return any(each.fetch_again(directory) for each in self._repositories)

    def release_unused(self, in_use: Collection[Path]) -> None:
        """Let go of versions in other directories than these."""
        for repository in self._repositories:
            repository.release_unused(in_use)


def open_repository(settings: Settings, tuning: ModelTuning = TUNING.models) -> ModelRepository:
    """Return what `models.repository` names. Nothing is read yet.

    Raises:
        ConfigurationError: a store cannot be opened, or the package for it is missing.
    """
    repositories = [_open(location, settings, tuning) for location in settings.models.locations]
    return repositories[0] if len(repositories) == 1 else RepositoryList(repositories)


def _open(location: Path | str, settings: Settings, tuning: ModelTuning) -> ModelRepository:
    if isinstance(location, Path):
        return Repository(location, settings)
    models = settings.models
    cache = ModelCache(models.cache_dir.expanduser(), models.cache_bytes, tuning)
    return RemoteRepository(open_store(location, tuning), cache, settings, tuning)
