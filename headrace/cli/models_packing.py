"""`headrace models pack|verify`: write the manifests of versions, and check them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from headrace.cli.options import json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, find_model_config, read_model_config
from headrace.models.packing.files import (
    find_differences,
    make_manifest,
    read_manifest,
    write_manifest,
)
from headrace.models.packing.signatures import (
    Trust,
    check_signature,
    read_private_key,
    read_trust,
    sign,
)
from headrace.models.repository import FoundVersion, find_versions, read_signature


class Verified(NamedTuple):
    """Result for one version.

    Attributes:
        state: `ok`, `differs` or `no manifest`.
        reason: why the manifest as a whole does not count; empty if it does.
        differences: files that differ, with the keys `file`, `expected` and `got`.
    """

    name: str
    version: str
    state: str
    reason: str
    differences: list[dict[str, str]]


@click.command()
@click.argument("model")
@click.argument("version", required=False)
@click.option(
    "--metadata",
    multiple=True,
    metavar="KEY=VALUE",
    help="Something to record, such as the training run; VALUE is JSON or text. May be repeated.",
)
@click.option(
    "--sign-key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Ed25519 private key in PEM to sign the manifest with.",
)
@pass_settings
def pack(
    settings: Settings,
    model: str,
    version: str | None,
    metadata: tuple[str, ...],
    sign_key: Path | None,
) -> None:
    """Write the manifest of MODEL's VERSION, by default the highest one.

    The manifest has the hash of each file, inputs and outputs, and what --metadata says.
    """
    directory = find_version(settings.models.directory / model, version)
    config = read_model_config(find_model_config(directory.parent), settings)
    signature = read_signature(FoundVersion(directory.name, directory, ""), config, packed=False)
    try:
        manifest = make_manifest(
            directory, config, signature, datetime.now(UTC), dict(map(_parse_pair, metadata))
        )
        if sign_key is not None:
            manifest = sign(manifest, read_private_key(sign_key))
        write_manifest(directory, manifest)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    signed = f", signed by {manifest.signatures[0].key}" if manifest.signatures else ""
    say(
        f"{model}/{directory.name}: packed, {len(manifest.files)} files of "
        f"{manifest.total_bytes} bytes{signed}"
    )


def find_version(directory: Path, version: str | None) -> Path:
    """Return the directory of a model's version, by default the highest one.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        present = [str(number) for number in find_versions(directory)]
    except OSError as error:
        raise ConfigurationError(f"{directory}: {error.strerror}") from error
    if not present or version not in (None, *present):
        listed = ", ".join(present) or "a directory such as 1"
        raise ConfigurationError(
            f"{directory}: version: expected one of {listed}, got {version or 'none'}"
        )
    return directory / (version or present[-1])


def _parse_pair(pair: str) -> tuple[str, Any]:
    key, separator, text = pair.partition("=")
    if not key or not separator:
        raise ConfigurationError(f"--metadata: expected KEY=VALUE, got {pair}")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


@click.command()
@click.argument("model", required=False)
@json_option
@pass_settings
def verify(settings: Settings, model: str | None, in_json: bool) -> None:
    """Compare versions with their manifests, file by file.

    All versions of MODEL, or of all models. Exit code 1 when one differs, or lacks a manifest that
    models.require_signature asks for.
    """
    repository = settings.models.directory
    trust = read_trust(settings.models.require_signature, settings.models.trusted_keys)
    try:
        names = [model] if model else sorted(_name_models(repository))
        verified = [
            _verify(directory / str(number), settings, trust)
            for directory in (repository / name for name in names)
            for number in find_versions(directory)
        ]
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    if in_json:
        click.echo(json.dumps([each._asdict() for each in verified], indent=2))
    else:
        for each in verified:
            say(_describe(each))
        if not verified:
            note_no_models(settings)
    missing = trust.require_signature
    if any(each.state == "differs" or (missing and each.state != "ok") for each in verified):
        raise Unsuccessful


def note_no_models(settings: Settings) -> None:
    """Say on standard error that the repository is empty."""
    click.echo(f"no models in {settings.models.repository}", err=True)


def _name_models(repository: Path) -> Iterator[str]:
    for entry in repository.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            yield entry.name


def _verify(directory: Path, settings: Settings, trust: Trust) -> Verified:
    name, version = directory.parent.name, directory.name
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            return Verified(name, version, "no manifest", "", [])
        check_signature(manifest, trust)
    except ConfigurationError as error:
        return Verified(name, version, "differs", str(error), [])
    differences = find_differences(directory, manifest, _read_config(directory, settings))
    state = "differs" if differences else "ok"
    return Verified(name, version, state, "", [each._asdict() for each in differences])


def _read_config(directory: Path, settings: Settings) -> ModelConfig | None:
    try:
        return read_model_config(find_model_config(directory.parent), settings)
    except ConfigurationError:
        return None  # `headrace models list` tells; the files can be compared all the same


def _describe(verified: Verified) -> str:
    lines = [verified.reason] if verified.reason else []
    lines += [
        f"{each['file']}: expected {each['expected']}, got {each['got']}"
        for each in verified.differences
    ]
    return f"{verified.name}/{verified.version}: {verified.state}" + "".join(
        f"\n  {line}" for line in lines
    )
