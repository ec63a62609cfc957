"""Repository of models in an object store, read through the cache of this machine.

A version is there when its manifest is: whoever copies a version to a store writes that last. The
configuration of a model is the one that its highest version was packed with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, parse_model_config
from headrace.models.packing.manifest import MANIFEST_NAME, Manifest, parse_manifest
from headrace.models.packing.signatures import Trust, check_signature, read_trust
from headrace.models.repository import (
    FoundModel,
    FoundVersion,
    WantedModels,
    find_model_fault,
    missing_model,
    missing_version,
    select_versions,
)
from headrace.models.stores.cache import CacheSize, ModelCache
from headrace.models.stores.store import Store, StoreUnavailable
from headrace.protocol.control import WantedModel
from headrace.tuning import TUNING, ModelTuning

Digests: TypeAlias = dict[str, dict[str, str]]
"""SHA-256 of manifests, by model and version."""


class Described(NamedTuple):
    """A version's manifest, and its content as the store has it."""

    content: bytes
    manifest: Manifest

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()


class RemoteRepository:
    """The models of an object store.

    Args:
        store: has the models.
        cache: of this machine.
        settings: defaults of `model.toml`, and who is trusted.
        tuning: the longest wait where the cache can stand in for the store.

    Attributes:
        outages: why the store could not be reached by the last scan, or broke off a download,
            or why the cache has no note of it, or no size; empty if nothing of that happened.
        emptied: the store's name, if the last scan found no models, and one before had found some;
            empty otherwise.
        cache_size: as the last scan left it; None before the first one, and if it cannot be read.
    """

    def __init__(
        self,
        store: Store,
        cache: ModelCache,
        settings: Settings,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self.name = store.name
        self._tuning = tuning
        self._store = store
        self._cache = cache
        self._settings = settings
        self._note_name = hashlib.sha256(store.name.encode()).hexdigest()
        self._digests: Digests = {}
        self._manifests: dict[str, bytes] = {}
        """Those of the last scan, by digest: a version that is not downloaded has none cached."""
        self._is_unreachable = False
        self.outages: tuple[str, ...] = ()
        self.emptied: tuple[str, ...] = ()
        self.cache_size: CacheSize | None = None

    def scan(self, wanted: WantedModels | None = None) -> list[FoundModel]:
        """See `headrace.models.repositories.ModelRepository`; download these versions. Blocks.

        While the store is unavailable or refuses, the models are those of the last scan that are
        cached.

        Raises:
            ConfigurationError: the store is unavailable, or refuses, and was never read; or it is
                not there.
        """
        models = self._settings.models
        trust = read_trust(models.require_signature, models.trusted_keys)
        known = _parse_note(self._cache.read_note(self._note_name))
        had_models = bool(known or self._digests)
        self._digests = {}
        listed = self._list(known)
        self.emptied = (self.name,) if had_models and not listed else ()
        found = [
            self._read_model(
                (name, listed[name]),
                known.get(name, {}),
                trust,
                None if wanted is None else wanted[name],
            )
            for name in listed
            if wanted is None or name in wanted
        ]
        if not self._is_unreachable and self._add_to_note(known, listed) != known:
            try:
                self._cache.change_note(
                    self._note_name,
                    lambda note: json.dumps(self._add_to_note(_parse_note(note), listed)).encode(),
                )
            except ConfigurationError as error:  # such as a full disk; all else goes well
                self.outages = self.outages or (str(error),)
        seen = {digest for digests in self._digests.values() for digest in digests.values()}
        self._manifests = {key: each for key, each in self._manifests.items() if key in seen}
        try:
            self.cache_size = self._cache.measure()
        except ConfigurationError as error:  # such as on a disk that fails; models serve on
            self.outages = self.outages or (str(error),)
            self.cache_size = None
        return found

    def list_versions(self) -> dict[str, list[int]]:
        """See `headrace.models.repositories.ModelRepository`.

        Raises:
            ConfigurationError: the store is unavailable, or refuses.
        """
        try:
            return self._store.list_versions()
        except (FileNotFoundError, StoreUnavailable) as error:
            raise ConfigurationError(f"models.repository: {error}") from error

    def select(self, name: str, overrides: Mapping[str, Any]) -> list[int]:
        """See `headrace.models.repositories.ModelRepository`.

        Raises:
            ConfigurationError: there is no such model, or it cannot be served with the overrides;
                or the store is unavailable, or refuses.
        """
        listed = self.list_versions()
        if name not in listed:
            raise missing_model(name, listed)
        try:
            files = self._describe(name, listed[name][-1], {}).manifest.model_files
        except (FileNotFoundError, StoreUnavailable) as error:
            raise ConfigurationError(f"{self.name}/{name}: {error}") from error
        config = parse_model_config(files, name, self._settings, overrides)
        return select_versions(listed[name], config, f"{self.name}/{name}")

    def shorten(self, fault: str) -> str:
        """Make the paths in a fault relative to the cache, as remote callers may see it."""
        return fault.replace(f"{self._cache.directory}{os.sep}", "")

    def fetch_again(self, directory: Path) -> bool:
        """See `headrace.models.repositories.ModelRepository`: only files that differ are read.

        Raises:
            ConfigurationError, StoreUnavailable, FileNotFoundError: as `ModelCache.fetch`. The next
                scan fetches it.
        """
        content = self._manifests.get(self._cache.digest_of(directory))
        if content is None:
            return False
        manifest = parse_manifest(content)
        self._cache.discard(directory)
        try:
            read_range = partial(self._read_range, f"{manifest.model}/{manifest.version}")
            self._cache.fetch(content, manifest, read_range)
        except StoreUnavailable as error:
            self.outages = self.outages or (str(error),)
            raise
        return True

    def release_unused(self, in_use: Collection[Path]) -> None:
        """Let versions in other directories than these be removed from the cache."""
        self._cache.release_unused(in_use)

    def _add_to_note(self, note: Digests, listed: Mapping[str, Collection[int]]) -> Digests:
        """Return the note with what this scan has seen, without what the store has no longer."""
        both = {
            name: {
                version: digest
                for version, digest in {**note.get(name, {}), **self._digests.get(name, {})}.items()
                if int(version) in numbers
            }
            for name, numbers in listed.items()
        }
        return {name: digests for name, digests in both.items() if digests}

    def _list(self, known: Digests) -> dict[str, list[int]]:
        self.outages, self._is_unreachable = (), False
        # What is cached serves if the store does not answer, so nobody waits for it for long.
        within_s = self._tuning.store_cached_s if known else None
        try:
            return self._store.list_versions(within_s)
        except FileNotFoundError as error:
            raise ConfigurationError(f"models.repository: {error}") from error
        except (StoreUnavailable, ConfigurationError) as error:  # the latter: a login that expired
            if not known:
                raise ConfigurationError(f"models.repository: {error}") from error
            self._note_outage(error)
            return {name: sorted(map(int, versions)) for name, versions in sorted(known.items())}

    def _note_outage(self, error: Exception) -> None:
        self.outages, self._is_unreachable = (str(error),), True

    def _read_model(
        self,
        listed: tuple[str, list[int]],
        known: dict[str, str],
        trust: Trust,
        wanted: WantedModel | None,
    ) -> FoundModel:
        name, numbers = listed
        fault = find_model_fault(name)
        if fault:
            return FoundModel(name, Path(), None, (), fault)
        try:
            # A version that is there, but not wanted, must not change the others.
            served = [each for each in numbers if wanted is None or str(each) in wanted.versions]
            highest = self._describe_highest(name, served or numbers, known)
            overrides = {} if wanted is None else wanted.overrides
            files = highest.manifest.model_files
            config = parse_model_config(files, name, self._settings, overrides)
            selected = (
                select_versions(numbers, config, f"{self.name}/{name}")
                if wanted is None
                else [*map(int, wanted.versions)]
            )
        except (ConfigurationError, StoreUnavailable, FileNotFoundError) as error:
            self._digests.setdefault(name, known)
            return FoundModel(name, Path(), None, (), str(error))
        stamp = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
        versions = [
            self._read_version(name, number, config, known, trust)
            if number in numbers
            else missing_version(number, numbers, f"{self.name}/{name}", trust)
            for number in selected
        ]
        found = tuple(each._replace(stamp=each.stamp + stamp) for each in versions)
        # `transform.py` is that of the highest version that is here.
        here = [each.directory.parent for each in found if not each.fault]
        reads = 0 if wanted is None else wanted.reads
        return FoundModel(name, here[-1] if here else Path(), config, found, reads=reads)

    def _read_version(
        self, name: str, number: int, config: ModelConfig, known: dict[str, str], trust: Trust
    ) -> FoundVersion:
        version = str(number)
        try:
            content, manifest = described = self._describe(name, number, known)
            check_signature(manifest, trust)
            if not self._settings.models.allow_python:
                _refuse_python(manifest, config)
            read_range = partial(self._read_range, f"{name}/{version}")
            directory = self._cache.fetch(content, manifest, read_range)
        except (ConfigurationError, StoreUnavailable, FileNotFoundError) as error:
            if isinstance(error, StoreUnavailable) and not self.outages:
                self.outages = (str(error),)  # other downloads may go well
            fault = f"{self.name}/{name}/{version}: {error}"
            return FoundVersion(version, Path(), "", trust, fault)
        return FoundVersion(version, directory, described.digest, trust)

    def _read_range(self, prefix: str, name: str, start: int, length: int) -> bytes:
        if self._is_unreachable:
            raise StoreUnavailable(f"{self.name} is unavailable, and the version is not cached")
        return self._store.read_range(f"{prefix}/{name}", start, length)

    def _describe_highest(
        self, name: str, numbers: Sequence[int], known: dict[str, str]
    ) -> Described:
        """Return the highest version whose manifest can be used, as `_describe` does.

        Raises:
            ConfigurationError, StoreUnavailable, FileNotFoundError: of the highest, if none can.
        """
        faults: list[Exception] = []
        for number in reversed(numbers):
            try:
                return self._describe(name, number, known)
            except (ConfigurationError, StoreUnavailable, FileNotFoundError) as error:
                faults.append(error)
        raise faults[0]

    def _describe(self, name: str, number: int, known: dict[str, str]) -> Described:
        """Return a version's manifest, from the cache while the store is unavailable."""
        content = None
        if not self._is_unreachable:
            within_s = self._tuning.store_cached_s if str(number) in known else None
            try:
                content = self._store.read(f"{name}/{number}/{MANIFEST_NAME}", within_s)
            except StoreUnavailable as error:
                self._note_outage(error)
        if content is None:
            digest = known.get(str(number), "")
            content = self._cache.read_manifest(digest) or self._manifests.get(digest)
        if content is None:
            raise StoreUnavailable(f"{self.name} is unavailable, and the version is not cached")
        manifest = parse_manifest(content)
        if (manifest.model, manifest.version) != (name, str(number)):
            raise ConfigurationError(
                f"{MANIFEST_NAME}: expected that of {name}/{number}, "
                f"got that of {manifest.model}/{manifest.version}"
            )
        described = Described(content, manifest)
        self._manifests[described.digest] = content
        self._digests.setdefault(name, {})[str(number)] = described.digest
        return described


def _parse_note(note: bytes | None) -> Digests:
    """Return which versions the store had when processes of this machine saw it last."""
    try:
        return cast(Digests, json.loads(note or b"{}"))
    except ValueError:
        return {}


def _refuse_python(manifest: Manifest, config: ModelConfig) -> None:
    names = [name for name in (*manifest.files, *manifest.model_files) if name.endswith(".py")]
    uses = config.backend == "python" or bool(config.code_beside)
    if names or uses:
        raise ConfigurationError(
            "models.allow_python: expected a version without Python code, got "
            + (", ".join(names) or "a model.toml that runs some")
        )
