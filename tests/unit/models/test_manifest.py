"""The fields of a manifest, and the check of a directory against it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, read_model_config
from headrace.models.packing.files import (
    check_version,
    find_differences,
    make_manifest,
    write_manifest,
)
from headrace.models.packing.manifest import (
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    Difference,
    File,
    Manifest,
    compare_files,
    parse_manifest,
)
from headrace.models.packing.signatures import Trust, check_signature, sign
from headrace.models.repository import FoundVersion, read_signature
from tests.support.models import add_version, digits

CREATED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SHA256 = "0" * 64


def config_of(directory: Path) -> ModelConfig:
    """The configuration of a version's model."""
    return read_model_config(directory.parent / "model.toml", Settings())


def packed(repository: Path, config: str = "") -> tuple[Path, Manifest]:
    """Version 1 of `digits`, with its manifest."""
    add_version(repository, "digits", 1, digits(), config)
    directory = repository / "digits" / "1"
    found = FoundVersion("1", directory, "")
    signature = read_signature(found, config_of(directory))
    manifest = make_manifest(
        directory, config_of(directory), signature, CREATED, {"accuracy": 0.97}
    )
    write_manifest(directory, manifest)
    return directory, manifest


def as_json(**changes: Any) -> bytes:
    """The content of a manifest of one file, with other values."""
    values = {
        "model": "digits",
        "version": "1",
        "files": {"model.onnx": {"bytes": 1, "sha256": SHA256}},
        "model_files": {},
        "inputs": [],
        "outputs": [],
        "created": "2026-01-02T03:04:05+00:00",
        "tools": {},
    }
    return json.dumps(values | changes).encode()


def test_manifest_describes_version_and_its_origin(tmp_path: Path) -> None:
    """It has files, texts beside them, inputs and outputs, time and metadata."""
    _, manifest = packed(tmp_path, "max_batch_size = 4")
    assert (manifest.model, manifest.version) == ("digits", "1")
    assert list(manifest.files) == ["model.onnx"]
    assert manifest.model_files == {"model.toml": "max_batch_size = 4"}
    assert [(each.name, each.datatype, each.shape) for each in manifest.inputs] == [
        ("pixels", "FP32", (-1, 64))
    ]
    assert manifest.created == "2026-01-02T03:04:05+00:00"
    assert manifest.metadata == {"accuracy": 0.97}
    assert "onnx" in manifest.tools


def test_written_manifest_reads_as_the_same(tmp_path: Path) -> None:
    """Nothing is lost between writing and reading."""
    directory, manifest = packed(tmp_path)
    assert parse_manifest((directory / "manifest.json").read_bytes()) == manifest


def test_packed_version_has_no_other_new_file(tmp_path: Path) -> None:
    """The temporary file of the manifest is gone."""
    packed(tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["manifest.json", "model.onnx"]


@pytest.mark.parametrize(
    "name",
    [
        "../model.onnx",
        "/etc/passwd",
        "a/../../b",
        "a//b",
        "./a",
        "",
        "a\\b",
        "C:model.onnx",
        "a\0b",
        "a\nb",
        "__pycache__/a.pyc",
        "x" * 256,
        "/".join("a" * 17),
        "manifest.json",
        "MANIFEST.JSON",
    ],
    ids=[
        "parent", "absolute", "parent-within", "empty-part", "dot", "empty", "backslash", "drive",
        "nul", "newline", "cache", "long", "deep", "itself", "itself-in-capitals",
    ],
)  # fmt: skip
def test_name_that_leads_elsewhere_is_refused(name: str) -> None:
    """No name leaves the directory or means something else on another system."""
    content = as_json(files={name: {"bytes": 1, "sha256": SHA256}})
    with pytest.raises(ConfigurationError, match="expected"):
        parse_manifest(content)


@pytest.mark.parametrize("name", ["../secrets.toml", "/etc/passwd"], ids=["parent", "absolute"])
def test_text_beside_version_has_no_name_that_leads_elsewhere(name: str) -> None:
    """The rule for names holds for both lists of files."""
    with pytest.raises(ConfigurationError, match="below the directory"):
        parse_manifest(as_json(model_files={name: ""}))


@pytest.mark.parametrize(
    ("one", "other"),
    [("Model.onnx", "model.onnx"), ("Straße", "STRASSE"), ("a/b", "A/B"), ("a", "A/b")],
    ids=["case", "sharp-s", "directory", "file-and-directory"],
)
def test_names_of_one_file_on_some_system_are_refused(one: str, other: str) -> None:
    """Two names that a file system may take for one are a fault."""
    file = {"bytes": 1, "sha256": SHA256}
    with pytest.raises(ConfigurationError, match="expected a"):
        parse_manifest(as_json(files={one: file, other: file}))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": {"a": {"bytes": -1, "sha256": SHA256}}},
        {"files": {"a": {"bytes": 2**50, "sha256": SHA256}}},
        {"files": {"a": {"bytes": 1, "sha256": "abc"}}},
        {"files": {f"{n}": {"bytes": 1, "sha256": SHA256} for n in range(MAX_FILES + 1)}},
        {"model_files": {"labels.txt": "x" * 2**20, "model.toml": "x"}},
        {"version": "01"},
        {"format": 2},
        {"colour": 1},
    ],
    ids=[
        "no-files", "negative-size", "huge-file", "no-hash", "too-many-files", "long-texts",
        "version", "format", "unknown-field",
    ],
)  # fmt: skip
def test_manifest_with_value_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    """Numbers, sizes and fields have bounds."""
    with pytest.raises(ConfigurationError, match=r"^manifest\.json: "):
        parse_manifest(as_json(**changes))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff", b"{" * 100_000, b'{"a":' * 100_000, b" " * (MAX_MANIFEST_BYTES + 1)],
    ids=["empty", "list", "binary", "braces", "deep", "large"],
)
def test_content_that_is_no_manifest_is_refused(content: bytes) -> None:
    """Any bytes give a refusal and nothing worse."""
    with pytest.raises(ConfigurationError, match=r"^manifest\.json: "):
        parse_manifest(content)


def test_comparison_shows_each_file_with_both_contents() -> None:
    """A changed, a missing and an additional file are three differences."""
    one, other = File(1, SHA256), File(2, SHA256)
    differences = compare_files(
        {"changed": one, "missing": one, "same": one},
        {"changed": other, "same": one, "extra": "a symbolic link"},
    )
    assert differences == [
        Difference("changed", str(one), str(other)),
        Difference("extra", "no file", "a symbolic link"),
        Difference("missing", str(one), "no file"),
    ]


def test_changed_byte_is_found_by_hash(tmp_path: Path) -> None:
    """A file of the same size is read."""
    directory, manifest = packed(tmp_path)
    content = bytearray((directory / "model.onnx").read_bytes())
    content[-1] ^= 1
    (directory / "model.onnx").write_bytes(content)
    [difference] = find_differences(directory, manifest)
    assert difference.file == "model.onnx"
    assert difference.expected == str(manifest.files["model.onnx"])


def test_link_in_packed_version_is_a_difference(tmp_path: Path) -> None:
    """A symbolic link to the same content does not count as the file."""
    directory, manifest = packed(tmp_path)
    (directory / "model.onnx").rename(tmp_path / "elsewhere")
    (directory / "model.onnx").symlink_to(tmp_path / "elsewhere")
    [difference] = find_differences(directory, manifest)
    assert difference.got == "a symbolic link"


def test_version_with_link_is_not_packed(tmp_path: Path) -> None:
    """A manifest lists files only."""
    directory, _ = packed(tmp_path)
    (directory / "weights").symlink_to(tmp_path)
    signature = read_signature(FoundVersion("1", directory, ""), config_of(directory), packed=False)
    with pytest.raises(ConfigurationError, match="expected a file, got a symbolic link"):
        make_manifest(directory, config_of(directory), signature, CREATED, {})


def test_version_under_another_number_is_refused(tmp_path: Path) -> None:
    """A manifest is one of its own model and version, so an old one cannot pass for a new one."""
    directory, _ = packed(tmp_path)
    directory.rename(directory.with_name("2"))
    with pytest.raises(ConfigurationError, match="that of digits/1"):
        check_version(directory.with_name("2"), config_of(directory), Trust())


def test_changed_model_config_is_no_difference(tmp_path: Path) -> None:
    """Settings belong to whoever serves the model."""
    directory, _ = packed(tmp_path, "max_batch_size = 4")
    (directory.parent / "model.toml").write_text("max_batch_size = 8")
    check_version(directory, config_of(directory), Trust())


def test_code_beside_version_that_was_not_packed_is_refused(tmp_path: Path) -> None:
    """A `transform.py` that came later is not what the manifest vouches for."""
    directory, _ = packed(tmp_path)
    (directory.parent / "model.toml").write_text('transform = "python"')
    (directory.parent / "transform.py").write_text("")
    with pytest.raises(ConfigurationError, match=r"\.\./transform\.py: expected no file"):
        check_version(directory, config_of(directory), Trust())


def test_unpacked_version_is_refused_where_signature_is_required(tmp_path: Path) -> None:
    """Without a manifest there is no signature."""
    add_version(tmp_path, "digits", 1, digits())
    directory = tmp_path / "digits" / "1"
    with pytest.raises(ConfigurationError, match="require_signature"):
        check_version(directory, config_of(directory), Trust(True))


def test_signature_of_trusted_key_is_accepted(tmp_path: Path) -> None:
    """One of several trusted keys is enough, and the signature survives the file."""
    key = Ed25519PrivateKey.generate()
    directory, manifest = packed(tmp_path)
    write_manifest(directory, sign(manifest, key))
    trust = Trust(True, (Ed25519PrivateKey.generate().public_key(), key.public_key()))
    check_version(directory, config_of(directory), trust)


def test_signature_of_another_key_is_refused(tmp_path: Path) -> None:
    """A valid signature of an unknown key counts for nothing."""
    _, manifest = packed(tmp_path)
    trust = Trust(True, (Ed25519PrivateKey.generate().public_key(),))
    with pytest.raises(ConfigurationError, match=r"a key of models\.trusted_keys, got "):
        check_signature(sign(manifest, Ed25519PrivateKey.generate()), trust)


@pytest.mark.parametrize(
    "changes",
    [{"version": "2"}, {"metadata": {"accuracy": 1.0}}, {"model_files": {"model.toml": ""}}],
    ids=["version", "metadata", "texts"],
)
def test_manifest_changed_after_signing_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The signature covers all fields."""
    key = Ed25519PrivateKey.generate()
    _, manifest = packed(tmp_path)
    changed = msgspec.structs.replace(sign(manifest, key), **changes)
    with pytest.raises(ConfigurationError, match="got one of something else"):
        check_signature(changed, Trust(True, (key.public_key(),)))
