"""Manifests and the files that they are about: makes, writes and checks them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError, FilesDiffer
from headrace.models.config import CONFIG_FILES, ModelConfig
from headrace.models.packing.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_MODEL_FILE_BYTES,
    Difference,
    File,
    Manifest,
    PackedTensor,
    check_manifest,
    compare_files,
    compare_model_files,
    parse_manifest,
)
from headrace.models.packing.signatures import Trust, check_signature
from headrace.models.signature import Signature, TensorSpec
from headrace.tuning import TUNING

_TOOLS = ("headrace", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu")


def make_manifest(
    directory: Path,
    config: ModelConfig,
    signature: Signature,
    created: datetime,
    metadata: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of a version as it lies in its directory.

    Raises:
        ConfigurationError: the version has a link, or a file that a manifest must not name.
        OSError: a file cannot be read.
    """
    found = hash_files(directory)
    files = {name: file for name, file in found.items() if isinstance(file, File)}
    for name in sorted(found.keys() - files.keys()):
        raise ConfigurationError(f"{directory / name}: expected a file, got {found[name]}")
    model_files: dict[str, str] = {}
    for name, text in read_model_files(directory, name_model_files(config)).items():
        if text is None:
            raise ConfigurationError(
                f"{directory.parent / name}: expected UTF-8 of at most {MAX_MODEL_FILE_BYTES} bytes"
            )
        model_files[name] = text
    manifest = Manifest(
        model=directory.parent.name,
        version=directory.name,
        files=files,
        model_files=model_files,
        inputs=tuple(_describe_tensor(spec) for spec in signature.inputs),
        outputs=tuple(_describe_tensor(spec) for spec in signature.outputs),
        created=created.isoformat(timespec="seconds"),
        tools=dict(_find_tools()),
        metadata=dict(metadata),
    )
    check_manifest(manifest)
    return parse_manifest(manifest.to_json())


def _describe_tensor(spec: TensorSpec) -> PackedTensor:
    return PackedTensor(spec.name, spec.datatype, tuple(spec.shape))


def _find_tools() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in _TOOLS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def name_model_files(config: ModelConfig) -> set[str]:
    """Return the files beside a version that its configuration uses, if they are there."""
    names = {*CONFIG_FILES, config.labels, *config.output_labels.values()}
    if config.record is not None:
        names.add(config.record.avro_schema)
        columns = [each for some in config.record.inputs.values() for each in some]
        names |= {each.vocabulary for each in columns if isinstance(each.vocabulary, str)}
    names.discard("")
    return names | config.code_beside


def read_model_files(directory: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return the texts of those files that lie beside a version; None for one that is no text."""
    texts: dict[str, str | None] = {}
    for name in names:
        path = directory.parent / name
        if not path.is_file():
            continue
        with path.open("rb") as file:
            content = file.read(MAX_MODEL_FILE_BYTES + 1)
        try:
            texts[name] = content.decode() if len(content) <= MAX_MODEL_FILE_BYTES else None
        except UnicodeDecodeError:
            texts[name] = None
    return texts


def hash_files(directory: Path, sizes: Mapping[str, File] | None = None) -> dict[str, File | str]:
    """Return the files of a version, by relative name, but for its manifest and Python's caches.

    A text says what is there instead of a file. With `sizes`, a file of another size, or of a name
    that is not expected, is described by its size, and its content is not read.
    """
    found: dict[str, File | str] = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        name = relative.as_posix()
        if "__pycache__" in relative.parts or name == MANIFEST_NAME:
            continue
        if path.is_symlink():
            found[name] = "a symbolic link"
        elif path.is_file():
            size = path.stat().st_size
            expected = None if sizes is None else sizes.get(name)
            if sizes is not None and (expected is None or expected.bytes != size):
                found[name] = f"{size} bytes"
            else:
                found[name] = hash_file(path)
        elif not path.is_dir():
            found[name] = "neither a file nor a directory"
    return found


def hash_file(path: Path) -> File:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(os.fstat(file.fileno()).st_size, digest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a version; whoever reads it meanwhile sees the old or the new one."""
    # The temporary file stands beside the version: in it, it would be a file too many.
    place = directory.resolve()
    write_atomically(place / MANIFEST_NAME, manifest.to_json(), place.parent)


def write_atomically(path: Path, content: bytes, scratch: Path) -> None:
    """Write a file whole: it appears under its name when its content is on the disk.

    Args:
        path: of the file.
        content: of the file.
        scratch: directory on the same file system, for the temporary file.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=scratch)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a version, or None if it has none.

    Raises:
        ConfigurationError: it cannot be used.
    """
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    return parse_manifest(content)


def find_differences(
    directory: Path, manifest: Manifest, config: ModelConfig | None = None
) -> list[Difference]:
    """Return how a version's directory differs from its manifest.

    Args:
        directory: of the version.
        manifest: of the version.
        config: names files beside the version that it uses; None if it cannot be read.

    Raises:
        OSError: a file cannot be read.
    """
    place = directory.resolve()  # `headrace replay compare` links versions under other numbers
    if (manifest.model, manifest.version) not in (
        (directory.parent.name, directory.name),
        (place.parent.name, place.name),
    ):
        here, said = f"{place.parent.name}/{place.name}", f"{manifest.model}/{manifest.version}"
        return [Difference(MANIFEST_NAME, f"the manifest of {here}", f"that of {said}")]
    names = manifest.model_files.keys() | (name_model_files(config) if config else set())
    return [
        *compare_files(manifest.files, hash_files(directory, manifest.files)),
        *compare_model_files(manifest.model_files, read_model_files(directory, names)),
    ]


def check_version(directory: Path, config: ModelConfig, trust: Trust) -> None:
    """Check a version against its manifest, if it has one, and the manifest's signature.

    Raises:
        FilesDiffer: a file differs.
        ConfigurationError: there is no trusted signature where one is required.
    """
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            if trust.require_signature:
                raise ConfigurationError(
                    f"{directory / MANIFEST_NAME}: models.require_signature expects it, got no file"
                )
            return
        check_signature(manifest, trust)
        differences = find_differences(directory, manifest, config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{directory}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    if differences:
        limit = TUNING.models.listed_differences
        listed = "; ".join(str(each) for each in differences[:limit])
        more = len(differences) - limit
        raise FilesDiffer(
            f"{directory}: differs from its manifest: {listed}"
            + (f"; and {more} more" if more > 0 else "")
        )
