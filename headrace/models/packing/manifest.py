"""`manifest.json` of a version: what its files must be, and where they come from.

These are rules without I/O. `headrace.models.packing.files` makes a manifest from a directory.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from headrace.errors import ConfigurationError
from headrace.models.config import CONFIG_FILES

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 8 * 1024 * 1024
MAX_FILES = 10_000
MAX_FILE_BYTES = 2**40
MAX_MODEL_FILE_BYTES = 1024 * 1024
"""Limit of all texts in `model_files` together."""

_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255
_MAX_PARTS = 16
_REFUSED_CHARACTERS = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
"""Control characters, and what separates or means something else in a name on some system."""

_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of one file."""

    bytes: _Size
    sha256: _Sha256

    def __str__(self) -> str:
        return f"{self.bytes} bytes, sha256:{self.sha256}"


class PackedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output as requests see it; -1 stands for a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Ed25519 signature (RFC 8032) of the manifest; both in base64.

    Attributes:
        key: public key, 32 bytes.
        signature: 64 bytes, over `Manifest.signed_bytes`.
    """

    key: _Text
    signature: _Text


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a model.

    Attributes:
        model: name of the model; a manifest counts only at its own place.
        files: files in the version's directory, by their relative name with forward slashes.
        model_files: texts of the files beside the version that it uses, such as `model.toml`.
        inputs: inputs of the version, after pre- and postprocessing are applied.
        created: when it was packed, in RFC 3339.
        tools: versions of the packages that it was packed with.
        metadata: anything about its origin, such as the training run, metrics, or its parent.
    """

    model: _Text
    version: Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,17}$")]
    files: Annotated[dict[str, File], msgspec.Meta(min_length=1, max_length=MAX_FILES)]
    model_files: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_FILES)]
    inputs: tuple[PackedTensor, ...]
    outputs: tuple[PackedTensor, ...]
    created: _Text
    tools: dict[str, str]
    metadata: dict[str, Any] = {}
    signatures: tuple[Signed, ...] = ()
    format: Literal[1] = 1

    @property
    def total_bytes(self) -> int:
        """Size of all files of the version."""
        return sum(file.bytes for file in self.files.values())

    def signed_bytes(self) -> bytes:
        """Return what a signature covers: everything but the signatures, as canonical JSON.

        Keys are sorted, and there is no white space.
        """
        values = msgspec.to_builtins(self)
        del values["signatures"]
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        return json.dumps(msgspec.to_builtins(self), indent=2).encode() + b"\n"


class Difference(NamedTuple):
    """A file that is not what the manifest says."""

    file: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, got {self.got}"


def parse_manifest(content: bytes) -> Manifest:
    """Read and check a manifest.

    Raises:
        ConfigurationError: it is too large, no manifest, or names a file that it must not name.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise ConfigurationError(
            f"{MANIFEST_NAME}: expected at most {MAX_MANIFEST_BYTES} bytes, got {len(content)}"
        )
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ConfigurationError(f"{MANIFEST_NAME}: {error}") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Check the names and sizes that a manifest has.

    Raises:
        ConfigurationError: a name leads elsewhere, two are the same file on some system, or the
            texts are too large.
    """
    for files in (manifest.files, manifest.model_files):
        faults = list(_find_bad_names(files))
        if faults:
            raise ConfigurationError(f"{MANIFEST_NAME}: {faults[0]}")
    if _fold(MANIFEST_NAME) in {_fold(name) for name in manifest.files}:
        raise ConfigurationError(f"{MANIFEST_NAME}: expected other files than the manifest itself")
    text_bytes = sum(len(text.encode()) for text in manifest.model_files.values())
    if text_bytes > MAX_MODEL_FILE_BYTES:
        raise ConfigurationError(
            f"{MANIFEST_NAME}: model_files: expected at most {MAX_MODEL_FILE_BYTES} bytes, "
            f"got {text_bytes}"
        )


def _find_bad_names(names: Iterable[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    directories: dict[str, str] = {}
    for name in names:
        fault = find_name_fault(name)
        if fault:
            yield f"{name!r}: {fault}"
            return
        folded = _fold(name)
        if folded in seen:
            yield f"{name!r}: expected a name that differs in more than case, got {seen[folded]!r}"
        seen[folded] = name
        parts = folded.split("/")
        directories.update({"/".join(parts[:end]): name for end in range(1, len(parts))})
    for folded in seen.keys() & directories.keys():
        yield f"{seen[folded]!r}: expected a file, got the directory of {directories[folded]!r}"


def find_name_fault(name: str) -> str:
    """Return what is wrong with the relative name of a file; empty if nothing is."""
    parts = name.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "expected Unicode text"
    if any(part in ("", ".", "..") for part in parts):
        return "expected a relative name below the directory"
    if _REFUSED_CHARACTERS.search(name):
        return 'expected a name without control characters and without any of \\ : * ? " < > |'
    if len(parts) > _MAX_PARTS or max(sizes) > _MAX_PART_BYTES or sum(sizes) > _MAX_NAME_BYTES:
        return (
            f"expected at most {_MAX_PARTS} parts of {_MAX_PART_BYTES} bytes, "
            f"and {_MAX_NAME_BYTES} bytes in all"
        )
    if "__pycache__" in parts:
        return "expected no cache of Python"
    return ""


def _fold(name: str) -> str:
    """Return the same text for names that are the same file on a system that ignores case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def compare_files(
    expected: Mapping[str, File], found: Mapping[str, File | str]
) -> list[Difference]:
    """Return how the files of a directory differ from those of a manifest, by name.

    Args:
        expected: of the manifest.
        found: of the directory; a text says what is there instead of a file.
    """
    return [
        Difference(name, str(expected.get(name, "no file")), str(found.get(name, "no file")))
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def compare_model_files(
    expected: Mapping[str, str], found: Mapping[str, str | None]
) -> list[Difference]:
    """Return how the files beside a version differ from those of its manifest.

    `model.toml` and `config.pbtxt` may differ: they belong to whoever serves the model.

    Args:
        expected: texts of the manifest.
        found: texts of the files; None if a file is not UTF-8.
    """
    return [
        Difference(f"../{name}", _describe(expected, name), _describe(found, name))
        for name in sorted(expected.keys() | found.keys())
        if name not in CONFIG_FILES and (name not in expected or expected[name] != found.get(name))
    ]


def _describe(texts: Mapping[str, str | None], name: str) -> str:
    if name not in texts:
        return "no file"
    text = texts[name]
    return "a file that is not UTF-8" if text is None else f"a text of {len(text.encode())} bytes"
