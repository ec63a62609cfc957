"""Repository of models: `<repository>/<model>/<version>/model.onnx`, and `<model>/model.toml`.

A version is a directory whose name is a number; `python` models have a `model.py` in it. Other
directories, and names that begin with a dot, are ignored. A broken model, or a broken version, does
not hide the others: its faults are reported separately.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from headrace.config import Settings
from headrace.errors import ConfigurationError, NotLoadableHere, describe_error
from headrace.models.backends.python import python_signature
from headrace.models.config import (
    DeclaredTensor,
    ModelConfig,
    find_model_config,
    read_model_config,
)
from headrace.models.packing.files import check_version
from headrace.models.packing.manifest import MANIFEST_NAME
from headrace.models.packing.signatures import Trust, read_trust
from headrace.models.processing import plan_processing
from headrace.models.signature import Signature, TensorSpec
from headrace.models.signature_child import read_large_signature
from headrace.protocol.control import WantedModel
from headrace.protocol.messages import MAX_INPUTS
from headrace.tuning import TUNING, ModelTuning

MODEL_FILES = {"onnx": "model.onnx", "python": "model.py"}

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,255}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


WantedModels: TypeAlias = Mapping[str, WantedModel]
"""Models to be loaded, by name: their versions, and overrides of their `model.toml`."""


class FoundVersion(NamedTuple):
    """One version of a model on disk.

    Attributes:
        stamp: changes whenever a file of the version, or of the model beside it, does.
        trust: who must have signed the version.
        fault: why its files are not there, or empty.
    """

    version: str
    directory: Path
    stamp: str
    trust: Trust = Trust()
    fault: str = ""


class FoundModel(NamedTuple):
    """One model on disk.

    Attributes:
        config: None if it cannot be read; `fault` says why.
        versions: the versions that its configuration selects, lowest first.
        fault: fault of the model as a whole, or empty.
        reads: see `headrace.protocol.control.WantedModel`.
    """

    name: str
    directory: Path
    config: ModelConfig | None
    versions: tuple[FoundVersion, ...]
    fault: str = ""
    reads: int = 0


class Repository:
    """A directory of models.

    Args:
        path: path of the directory.
        settings: defaults for keys missing in `model.toml`.

    Attributes:
        outages, emptied, cache_size: see `headrace.models.repositories.ModelRepository`.
    """

    outages: tuple[str, ...] = ()
    emptied: tuple[str, ...] = ()
    cache_size: None = None

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self._settings = settings
        self._had_models = False

    def scan(self, wanted: WantedModels | None = None) -> list[FoundModel]:
        """See `headrace.models.repositories.ModelRepository`.

        Raises:
            ConfigurationError: the directory itself, or a trusted key, cannot be read.
        """
        trust = read_trust(
            self._settings.models.require_signature, self._settings.models.trusted_keys
        )
        directories = self._list_directories()
        self.emptied = (str(self.path),) if self._had_models and not directories else ()
        self._had_models = bool(directories)
        return [
            self._read_model(each, trust, None if wanted is None else wanted[each.name])
            for each in directories
            if wanted is None or each.name in wanted
        ]

    def list_versions(self) -> dict[str, list[int]]:
        """See `headrace.models.repositories.ModelRepository`.

        Raises:
            ConfigurationError: the directory cannot be read.
        """
        try:
            return {
                each.name: find_versions(each)
                for each in self._list_directories()
                if not find_model_fault(each.name)  # `lost+found` cannot even be read
            }
        except OSError as error:
            raise ConfigurationError(f"{error.filename}: {error.strerror}") from error

    def select(self, name: str, overrides: Mapping[str, Any]) -> list[int]:
        """See `headrace.models.repositories.ModelRepository`.

        Raises:
            ConfigurationError: there is no such model, or it cannot be served with the overrides.
        """
        directories = {each.name: each for each in self._list_directories()}
        if name not in directories:
            raise missing_model(name, directories)
        path = find_model_config(directories[name])
        config = read_model_config(path, self._settings, overrides)
        return select_versions(_find_some_versions(directories[name]), config, str(path))

    def _list_directories(self) -> list[Path]:
        try:
            directories = sorted(entry for entry in self.path.iterdir() if entry.is_dir())
        except OSError as error:
            raise ConfigurationError(f"models.repository: {self.path}: {error.strerror}") from error
        return [each for each in directories if not each.name.startswith(".")]

    def shorten(self, fault: str) -> str:
        """Make the paths in a fault relative to the repository, as remote callers may see it."""
        return fault.replace(f"{self.path}{os.sep}", "")

    def fetch_again(self, directory: Path) -> bool:
        """See `headrace.models.repositories.ModelRepository`."""
        return False

    def release_unused(self, in_use: Collection[Path]) -> None:
        """Do nothing: the directory is not a cache."""

    def _read_model(self, directory: Path, trust: Trust, wanted: WantedModel | None) -> FoundModel:
        name = directory.name
        fault = find_model_fault(name)
        if fault:
            return FoundModel(name, directory, None, (), fault)
        try:
            overrides = {} if wanted is None else wanted.overrides
            config = read_model_config(find_model_config(directory), self._settings, overrides)
            versions = _select_versions(directory, config, trust, wanted)
        except ConfigurationError as error:
            return FoundModel(name, directory, None, (), str(error))
        except OSError as error:
            fault = f"{error.filename or directory}: {error.strerror}"
            return FoundModel(name, directory, None, (), fault)
        except Exception as error:  # noqa: BLE001 - a surprising file must not hide other models
            fault = f"{directory}: {describe_error(error)}"
            return FoundModel(name, directory, None, (), fault)
        reads = 0 if wanted is None else wanted.reads
        return FoundModel(name, directory, config, versions, reads=reads)


def find_model_fault(name: str) -> str:
    """Return what is wrong with the name of a model; empty if nothing is."""
    if _MODEL_NAME.fullmatch(name):
        return ""
    return f"expected a name of letters, digits, '.', '_' and '-', got {name!r}"


def is_version(text: str) -> bool:
    """Return whether a text is the number of a version."""
    return _VERSION.fullmatch(text) is not None


def find_versions(directory: Path) -> list[int]:
    """Return the numbers of the versions in a model's directory, ascending.

    Raises:
        OSError: the directory cannot be read.
    """
    return sorted(
        int(entry.name)
        for entry in directory.iterdir()
        if entry.is_dir() and _VERSION.fullmatch(entry.name)
    )


def _find_some_versions(directory: Path) -> list[int]:
    """Return as `find_versions`. Raises `ConfigurationError`, also if there is none."""
    try:
        present = find_versions(directory)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    if not present:
        raise ConfigurationError(
            f"{directory}: expected a version, a directory such as 1, got none"
        )
    return present


def missing_model(name: str, present: Iterable[str]) -> ConfigurationError:
    """Return the error of a model that is not in the repository."""
    listed = ", ".join(sorted(present)) or "which has none"
    return ConfigurationError(f"model: expected one of the repository, {listed}, got {name!r}")


def _select_versions(
    directory: Path, config: ModelConfig, trust: Trust, wanted: WantedModel | None
) -> tuple[FoundVersion, ...]:
    present = _find_some_versions(directory)
    selected = (
        select_versions(present, config, str(find_model_config(directory)))
        if wanted is None
        else [*map(int, wanted.versions)]
    )
    beside = _compute_stamp(path for path in directory.iterdir() if path.is_file())
    if wanted is not None and wanted.overrides:
        beside += hashlib.sha256(json.dumps(wanted.overrides, sort_keys=True).encode()).hexdigest()
    return tuple(
        FoundVersion(str(number), path, beside + _compute_stamp(list_files(path)), trust)
        if number in present
        else missing_version(number, present, str(directory), trust)
        for number in selected
        for path in [directory / str(number)]
    )


def missing_version(number: int, present: list[int], place: str, trust: Trust) -> FoundVersion:
    """Return a wanted version that is not there, with this as its fault."""
    fault = f"{place}: expected version {number}, got {', '.join(map(str, present))}"
    return FoundVersion(str(number), Path(), "", trust, fault)


def select_versions(present: list[int], config: ModelConfig, place: str) -> list[int]:
    """Return the versions that a model's configuration selects, ascending.

    Args:
        present: numbers of the versions that are there, ascending; at least one.
        config: of the model.
        place: of the configuration, for the error.

    Raises:
        ConfigurationError: a selected one is missing.
    """
    if config.versions == "latest":
        return present[-1:]
    if config.versions == "all":
        return present
    if isinstance(config.versions, str):
        return present[-int(config.versions.removeprefix("latest:")) :]
    numbers = sorted(set(config.versions))
    if missing := set(numbers).difference(present):
        raise ConfigurationError(
            f"{place}: versions: expected some of {present}, got {sorted(missing)}"
        )
    return numbers


def list_files(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory except Python's caches, sorted by relative name."""
    yield from sorted(
        path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def stamp_files(directory: Path) -> str:
    """Return what changes when a file below a directory does, by name, size or time.

    Raises:
        ConfigurationError: the files cannot be listed, or one disappeared meanwhile.
    """
    with files_of(directory) as files:
        return _compute_stamp(files)


@contextmanager
def files_of(directory: Path) -> Iterator[Iterator[Path]]:
    """Yield the files of a version, as `list_files` does, for work on them in the context.

    Raises:
        ConfigurationError: they cannot be listed, or the work has raised an `OSError`.
    """
    try:
        yield list_files(directory)
    except OSError as error:  # the path in its text may have thousands of characters
        why = error.strerror or describe_error(error)
        raise ConfigurationError(f"{directory}: its files cannot be read: {why}") from error


def _compute_stamp(files: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def compute_checksum(directory: Path) -> str:
    """Return the checksum of a version, in the form of `checksum` in `model.toml`.

    It is SHA-256 over, for each file below the directory in the order of its relative name (with
    forward slashes, compared as UTF-8 bytes; without Python's caches and the manifest): the name, a
    zero byte, the content's length as 8 bytes big-endian, and the content.
    """
    digest = hashlib.sha256()
    files = {
        path.relative_to(directory).as_posix().encode(): path
        for path in list_files(directory)
        if path != directory / MANIFEST_NAME
    }
    for name, path in sorted(files.items()):
        digest.update(name + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(TUNING.models.checksum_chunk_bytes):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def check_files(found: FoundVersion, config: ModelConfig, *, packed: bool = True) -> None:
    """Check that a version's files are there, and are those of its manifest and checksum.

    Args:
        found: the version on disk.
        config: configuration of its model.
        packed: check the manifest, if there is one.

    Raises:
        ConfigurationError: a file is missing, or the checksum or the manifest differs.
    """
    if found.fault:
        raise NotLoadableHere(found.fault)
    if packed:
        check_version(found.directory, config, found.trust)
    if config.checksum is not None:
        try:
            checksum = compute_checksum(found.directory)
        except OSError as error:
            raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
        if checksum != config.checksum:
            raise ConfigurationError(
                f"{found.directory}: checksum: expected {config.checksum}, got {checksum}"
            )


def read_signature(
    found: FoundVersion,
    config: ModelConfig,
    *,
    packed: bool = True,
    tuning: ModelTuning = TUNING.models,
) -> Signature:
    """Check a version's files and read its signature.

    Args:
        found: the version on disk.
        config: configuration of its model.
        packed: check the manifest, if there is one.
        tuning: from which size on a file is read in a child process.

    Raises:
        ConfigurationError: a file is missing or broken, the checksum or the manifest differs, or no
            request can have all of the inputs.
    """
    check_files(found, config, packed=packed)
    path = found.directory / MODEL_FILES[config.backend]
    if not path.is_file():
        raise ConfigurationError(f"{path}: expected the model here, got no file")
    if config.backend == "python":
        signature = python_signature(path, config)
    else:
        file_signature = read_large_signature(path, tuning)
        _compare_declared("inputs", config.inputs, file_signature.inputs, are_all=True)
        _compare_declared("outputs", config.outputs, file_signature.outputs, are_all=False)
        signature = plan_processing(file_signature, config, found.directory).signature
    count = len(signature.inputs)
    if count > MAX_INPUTS and config.transform is None:
        expected = f"at most {MAX_INPUTS}, the most of a request, or a transform"
        raise ConfigurationError(f"{path}: inputs: expected {expected}, got {count}")
    return signature


def _compare_declared(
    kind: str, declared: Sequence[DeclaredTensor], found: Sequence[TensorSpec], *, are_all: bool
) -> None:
    """Compare the tensors of a configuration with those of the ONNX file; none declares nothing.

    Raises:
        ConfigurationError: one is not there, or has another datatype or shape; or `are_all` are
            needed, and one is missing.
    """
    known = {spec.name: spec for spec in found}
    if are_all and declared and (missing := known.keys() - {each.name for each in declared}):
        raise ConfigurationError(
            f"{kind}: expected all of the model, missing {', '.join(sorted(missing))}"
        )
    for each in declared:
        spec = known.get(each.name)
        if spec is None:
            raise ConfigurationError(
                f"{kind}: expected some of {', '.join(known)}, as the model has, got {each.name}"
            )
        if each.datatype != spec.datatype or not _may_be_equal(each.shape, spec.shape):
            raise ConfigurationError(
                f"{kind}: {each.name}: expected {spec.datatype} {list(spec.shape)}, as the model "
                f"has, got {each.datatype} {list(each.shape)}"
            )


def _may_be_equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(
        a == b or -1 in (a, b) for a, b in zip(one, other, strict=True)
    )
