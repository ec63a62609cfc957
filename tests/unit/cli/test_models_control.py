"""Commands that change models by the control topic, as far as they need no broker."""

from __future__ import annotations

import os

import pytest

from headrace.cli.models_control import user_name
from headrace.cli.outcome import Exit
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
    """As in a container that runs under a number which its `/etc/passwd` does not have."""

    def look_up() -> str:
        raise error("getpwuid(): uid not found: 4711")

    assert user_name(look_up) == f"uid-{os.getuid()}"
