"""`headrace models push|pull`: copy packed versions between the repository and a store."""

from __future__ import annotations

import click

from headrace.cli.models_packing import find_version
from headrace.cli.output import say
from headrace.cli.settings import pass_settings
from headrace.config import Settings, read_location
from headrace.errors import ConfigurationError
from headrace.models.packing.manifest import Manifest
from headrace.models.packing.signatures import read_trust
from headrace.models.stores.copying import pull_version, push_version
from headrace.models.stores.store import Store, open_store


@click.command()
@click.argument("model")
@click.argument("version", required=False)
@click.option("--to", required=True, metavar="URL|DIR", help="Store, such as s3://BUCKET/PATH.")
@pass_settings
def push(settings: Settings, model: str, version: str | None, to: str) -> None:
    """Copy MODEL's VERSION, by default the highest one, to a store.

    It must be packed. Its manifest is written last, so nobody sees half of it.
    """
    directory = find_version(settings.models.directory / model, version)
    store = _open_store("--to", to)
    try:
        manifest = push_version(directory, store)
    except OSError as error:
        raise ConfigurationError(str(error)) from error
    say(f"{_describe(manifest)} in {store.name}")


@click.command()
@click.argument("model")
@click.argument("version", required=False)
@click.option(
    "--from",
    "origin",
    required=True,
    metavar="URL|DIR",
    help="Store, such as s3://BUCKET/PATH.",
)
@pass_settings
def pull(settings: Settings, model: str, version: str | None, origin: str) -> None:
    """Copy MODEL's VERSION, by default the highest one, from a store.

    The version appears in the repository when all of its files are there and checked.
    """
    repository = settings.models.directory
    trust = read_trust(settings.models.require_signature, settings.models.trusted_keys)
    store = _open_store("--from", origin)
    try:
        numbers = list(map(str, store.list_versions().get(model, [])))
        if not numbers or version not in (None, *numbers):
            expected = f"one of {', '.join(numbers)}" if numbers else "a version"
            got = version if numbers else "none"
            raise ConfigurationError(f"{store.name}/{model}: expected {expected}, got {got}")
        manifest = pull_version(store, model, version or numbers[-1], repository, trust)
    except OSError as error:
        raise ConfigurationError(str(error)) from error
    say(f"{_describe(manifest)} in {repository}")


def _open_store(option: str, text: str) -> Store:
    try:
        return open_store(read_location(text))
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}") from error


def _describe(manifest: Manifest) -> str:
    return (
        f"{manifest.model}/{manifest.version}: {len(manifest.files)} files of "
        f"{manifest.total_bytes} bytes are"
    )
