"""`headrace models load|unload|label|default|rollback|history|status`: change models by the log."""

from __future__ import annotations

import getpass
import json
import os
import socket
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click
import msgspec

from headrace.cli.event_loop import run
from headrace.cli.options import FiniteRange, json_option, options_as
from headrace.cli.outcome import Unsuccessful
from headrace.cli.settings import invocation, pass_settings, require_broker
from headrace.config import Settings
from headrace.control.changing import ChangeOutcome, Choose, ModelChanges
from headrace.control.processes import ProcessReport, open_processes
from headrace.control.topic import ControlTopic
from headrace.errors import ConfigurationError
from headrace.models.wanted import (
    Author,
    Deployment,
    describe,
    fold,
    load,
    remove_label,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.printable import printable
from headrace.protocol.control import ControlRecord
from headrace.runtime.log_factory import open_log
from headrace.tuning import TUNING, Tuning

NO_PROCESS = (
    'no process was heard that runs with models.mode = "explicit", kafka.bootstrap_servers and '
    "namespace as here"
)


class Manner(NamedTuple):
    """Options of each change.

    Attributes:
        reason: recorded in the history.
        who: recorded in the history; empty: the user and the machine.
        wait: wait until all processes have followed, for `timeout_s` at most.
        dry_run: show the change, and do not make it.
    """

    reason: str
    who: str
    wait: bool
    timeout_s: float
    dry_run: bool
    in_json: bool


_with_manner = options_as(
    Manner,
    click.option("--reason", default="", help="Why; recorded in the history."),
    click.option("--who", default="", help="Recorded in the history.  [default: user@machine]"),
    click.option("--wait", is_flag=True, help="Wait until all processes have followed."),
    click.option(
        "--timeout",
        "timeout_s",
        type=FiniteRange(min=0),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="Longest wait; exit code 1 after it.",
    ),
    click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing."),
    json_option,
)


@click.command("load")
@click.argument("model")
@click.argument("version")
@click.option(
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of model.toml, in TOML, for all versions of MODEL instead of what the file says; "
    "several replace all former ones.",
)
@click.option("--no-overrides", is_flag=True, help="Remove all overrides of MODEL.")
@click.option(
    "--instead-of",
    metavar="OLD",
    help="Unload version OLD by the same change; the default and labels that name it name VERSION.",
)
@click.option(
    "--allow-breaking",
    is_flag=True,
    help="Serve VERSION even if its inputs and outputs break callers of the default version.",
)
@click.option(
    "--again",
    is_flag=True,
    help="Read the files of MODEL again, and load versions of it that failed once more.",
)
@_with_manner
@pass_settings
def load_command(
    settings: Settings,
    model: str,
    version: str,
    overrides: tuple[str, ...],
    no_overrides: bool,
    instead_of: str | None,
    allow_breaking: bool,
    again: bool,
    given: Manner,
) -> None:
    """Load MODEL's VERSION beside those that are loaded, or instead of one.

    The first version of a model becomes its default; a later one gets requests that name it, or a
    label of it. Overrides may also be given for a version that is loaded: it is loaded again with
    them, and serves meanwhile.
    """
    if overrides and no_overrides:
        raise ConfigurationError("--override, --no-overrides: expected one of them, got both")
    values = _parse_overrides(overrides) if overrides or no_overrides else None
    change = load(
        model,
        version,
        values,
        instead_of=instead_of,
        allow_breaking=allow_breaking,
        again=again,
    )
    _change(settings, given, lambda _: change)


@click.command("unload")
@click.argument("model")
@click.argument("version", required=False)
@_with_manner
@pass_settings
def unload_command(settings: Settings, model: str, version: str | None, given: Manner) -> None:
    """Unload MODEL's VERSION, or the whole model with its labels.

    The default version and versions with labels are refused.
    """
    _change(settings, given, lambda _: unload(model, version))


@click.command("label")
@click.argument("model")
@click.argument("label")
@click.argument("version", required=False)
@click.option("--remove", is_flag=True, help="Remove the label.")
@_with_manner
@pass_settings
def label_command(
    settings: Settings, model: str, label: str, version: str | None, remove: bool, given: Manner
) -> None:
    """Let LABEL name MODEL's VERSION, for requests to MODEL@LABEL."""
    if remove == (version is not None):
        raise ConfigurationError(
            "VERSION: expected one, or --remove; got " + ("both" if remove else "neither")
        )
    change = remove_label(model, label) if version is None else set_label(model, label, version)
    _change(settings, given, lambda _: change)


@click.command("default")
@click.argument("model")
@click.argument("version")
@_with_manner
@pass_settings
def default_command(settings: Settings, model: str, version: str, given: Manner) -> None:
    """Give requests that name no version of MODEL this VERSION, which must be loaded."""
    _change(settings, given, lambda _: set_default(model, version))


@click.command("rollback")
@click.argument("model", required=False)
@click.option(
    "--to",
    "generation",
    type=click.IntRange(min=1),
    required=True,
    metavar="GENERATION",
    help="As `headrace models history` shows it.",
)
@_with_manner
@pass_settings
def rollback_command(settings: Settings, model: str | None, generation: int, given: Manner) -> None:
    """Restore MODEL, or all models, as they were at a generation.

    A rollback is a change like others: it can be rolled back.
    """
    _change(
        settings,
        given,
        lambda records: roll_back(fold(records, until=generation).models, model),
    )


@click.command("history")
@click.argument("model", required=False)
@json_option
@pass_settings
def history_command(settings: Settings, model: str | None, in_json: bool) -> None:
    """Show all changes, or those of MODEL, the oldest first: when, who, what, why."""
    _require_broker(settings)
    records = [record for record in run(_read(settings)) if model is None or model in record.after]
    if in_json:
        click.echo(json.dumps([_entry(record) for record in records], indent=2))
        return
    for record in records:
        for line in _lines(record):
            click.echo(printable(line))


@click.command("status")
@json_option
@pass_settings
def status_command(settings: Settings, in_json: bool) -> None:
    """Show which versions are wanted, and what each process serves and waits for.

    It listens for some seconds to what the processes announce. Exit code 1 when one of them has
    not followed, or none was heard.
    """
    _require_broker(settings)
    status = run(_status(settings))
    if in_json:
        click.echo(json.dumps(status, indent=2))
    else:
        click.echo(f"generation {status['generation']}")
        for line in status["wanted"]:
            click.echo(printable(f"  {line}"))
        for name, report in status["processes"].items():
            for line in _process_lines(name, report, status["generation"]):
                click.echo(printable(line))
    if not status["processes"]:
        click.echo(NO_PROCESS, err=True)
    if not status["followed"]:
        raise Unsuccessful


# --- changes ----------------------------------------------------------------------------------


def _parse_overrides(given: tuple[str, ...]) -> dict[str, Any]:
    text = "\n".join(given)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--override: expected KEY=VALUE in TOML, such as max_batch_size=8, got {text!r}: "
            f"{error}"
        ) from error


def _change(settings: Settings, given: Manner, choose: Choose) -> None:
    _require_broker(settings)
    tuning = invocation(click.get_current_context()).tuning or TUNING
    outcome = run(_make_change(settings, given, choose, tuning))
    waited = given.wait and not given.dry_run
    if given.in_json:
        click.echo(
            json.dumps(
                {
                    "generation": outcome.generation,
                    "change": None if outcome.record is None else _entry(outcome.record),
                    "dry_run": given.dry_run,
                    "followed": outcome.followed if waited else None,
                    "processes": _reports(outcome.processes),
                },
                indent=2,
            )
        )
    else:
        if outcome.record is None:
            click.echo(f"generation {outcome.generation}: nothing to change")
        else:
            for line in _lines(outcome.record):
                click.echo(printable(line))
        for name, report in _reports(outcome.processes).items():
            for line in _process_lines(name, report, outcome.generation):
                click.echo(printable(line))
        if waited and not outcome.followed:
            click.echo(_why_not_followed(outcome, given.timeout_s), err=True)
    if given.dry_run:
        click.echo("dry run: nothing was changed", err=True)
    elif waited and not outcome.followed:
        raise Unsuccessful


def _why_not_followed(outcome: ChangeOutcome, timeout_s: float) -> str:
    if not outcome.processes:
        return NO_PROCESS
    if outcome.failed:
        if not all(each.is_following for each in outcome.processes.values()):
            return "a process follows no changes until it is started again; the change stays made"
        return "a version cannot be loaded, see above; the change stays made"
    return f"not all processes have followed within {timeout_s:g} s"


async def _make_change(
    settings: Settings, given: Manner, choose: Choose, tuning: Tuning
) -> ChangeOutcome:
    author = Author(given.who or f"{user_name()}@{socket.gethostname()}", given.reason)
    async with open_log(settings, tuning) as log:
        return await ModelChanges(log, settings, tuning).make(
            choose,
            author,
            wait_s=given.timeout_s if given.wait else None,
            dry_run=given.dry_run,
        )


def user_name(look_up: Callable[[], str] = getpass.getuser) -> str:
    """Return the name of the user, or `uid-N` in a container that has no name for it."""
    try:
        return look_up()
    except (KeyError, OSError):  # Python 3.13 raises `OSError`, those before `KeyError`
        return f"uid-{os.getuid()}"


def _require_broker(settings: Settings) -> None:
    require_broker(settings, "the control topic of a log in memory ends with its process")


# --- reading ----------------------------------------------------------------------------------


async def _read(settings: Settings) -> list[ControlRecord]:
    async with open_log(settings) as log:
        topic = ControlTopic(log, settings)
        await topic.require()
        return await topic.read()


async def _status(settings: Settings) -> dict[str, Any]:
    async with open_log(settings) as log:
        topic = ControlTopic(log, settings)
        await topic.require()
        async with open_processes(log, settings) as processes:
            await processes.listen()
            state = fold(await topic.read())
    return describe_status(state, processes.reports)


def describe_status(state: Deployment, reports: Mapping[str, ProcessReport]) -> dict[str, Any]:
    """Return what `headrace models status --json` writes.

    Args:
        state: the wanted models.
        reports: of the processes that were heard, by their names.
    """
    return {
        "generation": state.generation,
        "models": {name: msgspec.to_builtins(each) for name, each in state.models.items()},
        "wanted": [describe(name, each) for name, each in sorted(state.models.items())],
        "processes": _reports(reports),
        "followed": bool(reports)
        and all(report.has_followed(state.generation) for report in reports.values()),
    }


# --- output -----------------------------------------------------------------------------------


def _reports(reports: Mapping[str, ProcessReport]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            **report._asdict(),
            "unready": [each.line for each in report.unready],
            "memory_bytes": {version: {**taken} for version, taken in report.memory_bytes.items()},
            "stages": [*report.stages],
        }
        for name, report in sorted(reports.items())
    }


def _entry(record: ControlRecord) -> dict[str, Any]:
    return {
        "generation": record.generation,
        "at": _time(record),
        "who": record.who,
        "why": record.why,
        "action": record.action,
        "before": msgspec.to_builtins(record.before),
        "after": msgspec.to_builtins(record.after),
    }


def _lines(record: ControlRecord) -> list[str]:
    why = f", {record.why}" if record.why else ""
    return [
        f"generation {record.generation}: {record.action} by {record.who} at {_time(record)}{why}",
        *(
            f"  {sign} {describe(name, models[name])}"
            for name in sorted(record.after)
            for sign, models in (("-", record.before), ("+", record.after))
        ),
    ]


def _time(record: ControlRecord) -> str:
    return datetime.fromtimestamp(record.at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _process_lines(name: str, report: dict[str, Any], generation: int) -> list[str]:
    behind = "" if report["generation"] >= generation else f", behind {generation}"
    if not report["is_following"]:
        behind = ", follows no changes until it is started again"
    stages = f" ({', '.join(report['stages'])})" if report["stages"] else ""
    return [
        f"process {name}{stages}: generation {report['generation']}{behind}",
        f"  ready: {', '.join(report['ready']) or 'none'}",
        *(
            f"  memory of {version}: {_describe_memory(taken)}"
            for version, taken in report["memory_bytes"].items()
        ),
        *(f"  waits for {each}" for each in report["unready"]),
    ]


def _describe_memory(taken: Mapping[str, int]) -> str:
    return ", ".join(
        f"{size_bytes / 2**20:,.1f} MiB on {device}" for device, size_bytes in taken.items()
    )
