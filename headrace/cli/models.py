"""`headrace models list|describe|check`: list the repository, and check that its models run.

The other commands are in `headrace.cli.models_packing`, `headrace.cli.models_copying` and
`headrace.cli.models_control`.
"""

from __future__ import annotations

import json
from typing import Any

import click

from headrace.cli import models_control, models_copying, models_packing
from headrace.cli.event_loop import run
from headrace.cli.models_packing import note_no_models
from headrace.cli.options import json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.samples import check_samples
from headrace.cli.settings import pass_settings
from headrace.config import Settings
from headrace.errors import ConfigurationError, HeadraceError, describe_error
from headrace.models.loader import BackendLoader
from headrace.models.profiling.batch_safety import Batching
from headrace.models.registry import Models
from headrace.models.repository import compute_checksum
from headrace.models.signature import TensorSpec
from headrace.models.version import ModelVersion, State
from headrace.services.executor.loading import make_instance


@click.group()
def command() -> None:
    """List, check, pack or copy models (models.repository), and change which ones are served."""


for change in (
    models_control.load_command,
    models_control.unload_command,
    models_control.label_command,
    models_control.default_command,
    models_control.rollback_command,
    models_control.history_command,
    models_control.status_command,
):
    command.add_command(change)
command.add_command(models_packing.pack)
command.add_command(models_packing.verify)
command.add_command(models_copying.push)
command.add_command(models_copying.pull)


@command.command("list")
@json_option
@pass_settings
def list_models(settings: Settings, in_json: bool) -> None:
    """List the versions that the settings of each model select.

    By default that is the highest one. Faults that can be found without loading a model are
    shown, too.
    """
    entries = [
        entry | {"state": _found(entry["state"])} for entry in _opened(settings).catalog.status()
    ]
    if in_json:
        click.echo(json.dumps(entries, indent=2))
        return
    for entry in entries:
        say(_line(entry))
    if not entries:
        note_no_models(settings)


@command.command()
@click.argument("model")
@json_option
@pass_settings
def describe(settings: Settings, model: str, in_json: bool) -> None:
    """Show MODEL's inputs, outputs and settings.

    For each version that its settings select, with its checksum.
    """
    models = _opened(settings)
    _require(models, model)
    described = [
        _described(version) for version in models.catalog.versions() if version.name == model
    ]
    if in_json:
        click.echo(json.dumps(described, indent=2))
    else:
        for entry in described:
            say(_paragraph(entry))
    _tell(models, model)


@command.command()
@click.argument("model", required=False)
@json_option
@pass_settings
def check(settings: Settings, model: str | None, in_json: bool) -> None:
    """Load models, and run them as at warm-up.

    MODEL, or all models when none is named. Payloads in samples/ of a version must become inputs,
    and answers if the model makes those itself. Exit code 1 when a version cannot serve.
    """
    models = _opened(settings)
    if model is not None:
        _require(models, model)
    samples: dict[tuple[str, str], int] = {}
    for version in models.catalog.versions():
        if model in (None, version.name):
            samples[version.name, version.version] = run(_try_out(models, version, settings))
    entries = [
        entry | {"samples": samples.get((entry["name"], entry["version"]), 0)}
        for entry in models.catalog.status()
        if model in (None, entry["name"])
    ]
    if in_json:
        click.echo(json.dumps(entries, indent=2))
    else:
        for entry in entries:
            say(_line(entry))
        if not entries:
            note_no_models(settings)
    if any(entry["state"] != State.READY for entry in entries):
        raise Unsuccessful


def _opened(settings: Settings) -> Models:
    models = Models(settings, executes=True)
    models.open()
    return models


def _require(models: Models, name: str) -> None:
    if name not in models.catalog.names():
        there = ", ".join(models.catalog.names()) or "none"
        raise ConfigurationError(f"model: expected one of {there}, got {name}")


async def _try_out(models: Models, version: ModelVersion, settings: Settings) -> int:
    """Load one instance as an executor does: on its own thread, within `max_load_s`.

    Returns:
        How many sample payloads were accepted.
    """
    count, fault = 0, ""
    loader = BackendLoader(version, models.cores)
    try:
        async with make_instance(version, 0, loader) as instance:
            if loader.verdict is not None:
                version.apply_verdict(loader.verdict)
            count, fault = await check_samples(version, instance, settings)
    except HeadraceError as error:
        models.lifecycle.mark_failed(version, str(error))
    except Exception as error:  # noqa: BLE001 - one surprising model must not hide the others
        models.lifecycle.mark_failed(version, describe_error(error))
    else:
        if fault:
            models.lifecycle.mark_failed(version, fault)
        else:
            models.lifecycle.mark_ready(version, loader.verdict)
    finally:
        loader.release_cores()
    return count


def _found(state: str) -> str:
    """Return the state for commands that do not load models: a version was found, or a fault."""
    return "found" if state == State.LOADING else state


def _line(entry: dict[str, Any]) -> str:
    name = "/".join(part for part in (entry["name"], entry["version"]) if part)
    omitted = entry.get("warm_up_omitted")
    found = [
        entry["reason"],
        _batching(entry),
        entry.get("contradiction"),
        omitted and f"not warmed up: {omitted}",
        _measured(entry),
        _samples(entry),
    ]
    remarks = [remark for remark in found if remark]
    return f"{name}: {entry['state']}" + "".join(
        f"\n  {line}" for remark in remarks for line in remark.splitlines()
    )


def _batching(entry: dict[str, Any]) -> str:
    reason = entry.get("batching_off")
    return f"batching is off: {reason}" if reason else ""


def _samples(entry: dict[str, Any]) -> str:
    count = entry.get("samples", 0)
    return f"samples: {count} passed" if count else ""


def _measured(entry: dict[str, Any]) -> str:
    """Describe the evidence of a probe that found the model batchable."""
    batching = entry.get("batching")
    if not batching or batching["verdict"] != Batching.BATCHABLE or batching["rounding"] is None:
        return ""
    return (
        f"batchable: rows do not change each other; alone and batched differ by "
        f"{batching['rounding']:.1e} of the output's scale ({batching['tolerance']:.0e} is "
        f"tolerated), with {batching['seen_with']}"
    )


def _described(version: ModelVersion) -> dict[str, Any]:
    return {
        "name": version.name,
        "version": version.version,
        "inputs": [_tensor(spec) for spec in version.signature.inputs],
        "outputs": [_tensor(spec) for spec in version.signature.outputs],
        "batching_off": version.batching_off,
        "checksum": compute_checksum(version.directory),
        "config": version.config.model_dump(mode="json", exclude={"inputs", "outputs"}),
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": list(spec.shape),
        "dimensions": list(spec.dimensions),
    }


def _paragraph(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']}/{entry['version']}"]
    for kind in ("inputs", "outputs"):
        lines += [
            f"  {kind[:-1]} {tensor['name']}: {tensor['datatype']} [{_shape(tensor)}]"
            for tensor in entry[kind]
        ]
    lines += [f"  {remark}" for remark in [_batching(entry)] if remark]
    settings = entry["config"] | {"checksum": entry["checksum"]}
    lines += [f"  {key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines)


def _shape(tensor: dict[str, Any]) -> str:
    names = tensor["dimensions"] or [""] * len(tensor["shape"])
    pairs = zip(tensor["shape"], names, strict=True)
    return ", ".join(name if size == -1 and name else str(size) for size, name in pairs)


def _tell(models: Models, name: str) -> None:
    faults = models.catalog.faults(name)
    for number, fault in faults.items():
        where = f"{name}/{number}" if number else name
        say(f"error: {where}: {fault}", err=True)
    if faults:
        raise Unsuccessful
