"""Commands that change models by the control topic, as far as they need no broker."""

from __future__ import annotations

import json
import os

import pytest

from headrace.cli.models_control import describe_status, user_name
from headrace.cli.outcome import Exit
from headrace.control.processes import ProcessReport
from headrace.models.wanted import Deployment
from tests.support.command_line import Call


@pytest.mark.parametrize(
    "arguments",
    [
        ("load", "digits", "1"),
        ("unload", "digits"),
        ("label", "digits", "canary", "1"),
        ("default", "digits", "1"),
        ("rollback", "--to", "1"),
        ("history",),
        ("status",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_change_without_broker_is_refused(call: Call, arguments: tuple[str, ...]) -> None:
    """The control topic of an embedded log would end with the command."""
    result = call("models", *arguments)
    assert result.exit_code == Exit.USAGE
    assert "expected a broker, got none; the control topic" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "got"), [((), "neither"), (("1", "--remove"), "both")], ids=["neither", "both"]
)
def test_label_needs_version_or_removal(call: Call, arguments: tuple[str, ...], got: str) -> None:
    """One of the two says what the command is to do."""
    result = call("models", "label", "digits", "canary", *arguments)
    assert result.exit_code == Exit.USAGE
    assert f"expected one, or --remove; got {got}" in result.stderr


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--override", "max_batch_size"), "expected KEY=VALUE in TOML, such as max_batch_size=8"),
        (("--override", "probe=false", "--no-overrides"), "expected one of them, got both"),
    ],
    ids=["no value", "both"],
)
def test_overrides_that_cannot_be_read_are_refused(
    call: Call, options: tuple[str, ...], fault: str
) -> None:
    """Before anything of the broker is looked at."""
    result = call("models", "load", "digits", "1", *options)
    assert result.exit_code == Exit.USAGE
    assert fault in result.stderr


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_user_without_name_is_recorded_by_number(error: type[Exception]) -> None:
    """A container may run under a number that its `/etc/passwd` does not have."""

    def look_up() -> str:
        raise error("getpwuid(): uid not found: 4711")

    assert user_name(look_up) == f"uid-{os.getuid()}"


def test_status_without_processes_has_not_followed() -> None:
    """Nobody serves what is wanted, or all are in another namespace."""
    status = describe_status(Deployment(3), {})
    assert (status["generation"], status["processes"], status["followed"]) == (3, {}, False)


def test_status_has_memory_of_each_version_and_process() -> None:
    """Memory is listed by device, as far as it was measured."""
    taken = {"host": 1024, "cuda:0": 2048}
    reports = {
        "b": ProcessReport(3, ("digits/1",), (), {"digits/1": taken}),
        "a": ProcessReport(3, ("digits/1",), ()),
    }
    status = describe_status(Deployment(3), reports)
    assert status["followed"]
    assert [(name, each["memory_bytes"]) for name, each in status["processes"].items()] == [
        ("a", {}),
        ("b", {"digits/1": taken}),
    ]
    assert json.loads(json.dumps(status)) == status | {
        "processes": {
            name: {**each, "ready": ["digits/1"], "unready": []}
            for name, each in status["processes"].items()
        }
    }
