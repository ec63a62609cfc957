"""`headrace models pack|verify` on a repository of tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import add_version, digits


@pytest.fixture
def repository(tmp_path: Path, call: Call) -> Path:
    """The repository that the default settings name, with two versions of `digits`."""
    path = tmp_path / "models"
    for number in (1, 2):
        add_version(path, "digits", number, digits())
    return path


def require_signature(directory: Path) -> Path:
    """Make a pair of keys and settings that require its signature; return the private key."""
    key = Ed25519PrivateKey.generate()
    private, public = directory / "release.key", directory / "release.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    (directory / "headrace.toml").write_text(
        '[models]\nrequire_signature = true\ntrusted_keys = ["release.pub"]\n'
    )
    return private


def test_pack_writes_manifest_of_highest_version(repository: Path, call: Call) -> None:
    """Metadata is JSON where it can be read as such, and text otherwise."""
    result = call(
        "models", "pack", "digits", "--metadata", "accuracy=0.97", "--metadata", "run=a-4711"
    )
    assert (result.exit_code, result.stderr) == (Exit.DONE, "")
    manifest = json.loads((repository / "digits" / "2" / "manifest.json").read_text())
    assert manifest["metadata"] == {"accuracy": 0.97, "run": "a-4711"}
    assert not (repository / "digits" / "1" / "manifest.json").exists()


def test_pack_of_absent_version_names_those_there(repository: Path, call: Call) -> None:
    """The refusal says which versions there are."""
    result = call("models", "pack", "digits", "3")
    assert result.exit_code == Exit.USAGE
    assert "expected one of 1, 2, got 3" in result.stderr


def test_packed_version_keeps_its_checksum(repository: Path, call: Call) -> None:
    """A checksum in `model.toml` still holds after packing."""
    [before] = json.loads(call("models", "describe", "digits", "--json").stdout)
    call("models", "pack", "digits")
    [after] = json.loads(call("models", "describe", "digits", "--json").stdout)
    assert after["checksum"] == before["checksum"]


def test_verify_tells_packed_from_unpacked_versions(repository: Path, call: Call) -> None:
    """A version without a manifest is no fault where no signature is required."""
    call("models", "pack", "digits")
    result = call("models", "verify")
    assert (result.exit_code, result.stdout) == (
        Exit.DONE,
        "digits/1: no manifest\ndigits/2: ok\n",
    )


def test_verify_shows_each_difference(repository: Path, call: Call) -> None:
    """A changed and an additional file, each with what was expected and what is there."""
    call("models", "pack", "digits")
    (repository / "digits" / "2" / "model.onnx").write_bytes(b"other")
    (repository / "digits" / "2" / "extra").touch()
    result = call("models", "verify", "digits", "--json")
    [_, changed] = json.loads(result.stdout)
    assert result.exit_code == Exit.FAILED
    assert [(each["file"], each["got"]) for each in changed["differences"]] == [
        ("extra", "0 bytes"),
        ("model.onnx", "5 bytes"),
    ]


def test_changed_version_is_listed_as_failed_with_the_difference(
    repository: Path, call: Call
) -> None:
    """Loading refuses what `verify` finds."""
    call("models", "pack", "digits")
    (repository / "digits" / "2" / "extra").touch()
    result = call("models", "list")
    assert "digits/2: failed" in result.stdout
    assert "extra: expected no file, got 0 bytes" in result.stdout


def test_version_signed_with_trusted_key_is_served(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """Keys come from PEM files, as OpenSSL writes them."""
    private = require_signature(tmp_path)
    result = call("models", "pack", "digits", "--sign-key", str(private))
    assert "signed by" in result.stdout
    assert call("models", "list").stdout == "digits/2: found\n"


def test_unsigned_version_is_refused_where_signature_is_required(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """Both `list` and `verify` give the reason."""
    require_signature(tmp_path)
    call("models", "pack", "digits")
    for verb in ("list", "verify"):
        result = call("models", verb)
        assert "expected one by a key of models.trusted_keys, got none" in result.stdout


def test_required_signature_without_keys_is_wrong_configuration(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """Nothing could ever be served."""
    (tmp_path / "headrace.toml").write_text("[models]\nrequire_signature = true\n")
    result = call("models", "list")
    assert result.exit_code == Exit.USAGE
    assert "require_signature needs trusted_keys" in result.stderr


def test_key_of_another_kind_is_wrong_configuration(
    repository: Path, tmp_path: Path, call: Call
) -> None:
    """The refusal names the file."""
    require_signature(tmp_path)
    (tmp_path / "release.pub").write_text("no key")
    result = call("models", "list")
    assert result.exit_code == Exit.USAGE
    assert "release.pub: expected an Ed25519 key in PEM" in result.stderr
