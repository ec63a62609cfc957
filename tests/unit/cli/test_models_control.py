"""Commands that change models by the control topic, as far as they need no broker."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_explicit_mode_without_broker_is_refused(call: Call, tmp_path: Path) -> None:
    """Such a process would never load a model."""
    (tmp_path / "headrace.toml").write_text('[models]\nmode = "explicit"\n', encoding="utf-8")
    result = call("run")
    assert result.exit_code == Exit.USAGE
    assert "explicit needs a broker (kafka.bootstrap_servers)" in result.stderr
