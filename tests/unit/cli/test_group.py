"""Help, exit codes, and what is said of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner, Result

from headrace import __version__
from headrace.cli import COMMANDS
from headrace.cli.group import CommandLine, main
from headrace.cli.outcome import Exit, explain
from headrace.cli.settings import everywhere, pass_invocation, pass_settings
from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected, Retriable
from tests.support.command_line import Call


def call_failing(error: BaseException, *options: str) -> Result:
    """Call a command line whose only command, `fail`, raises the error."""

    @click.command()
    def fail() -> None:
        raise error

    root = CommandLine("headrace", modules={}, commands={"fail": fail}, params=everywhere())
    return CliRunner().invoke(root, [*options, "fail"])


def test_version_option_prints_version(call: Call) -> None:
    """`--version` prints the package's version."""
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"headrace {__version__}\n")


def test_help_lists_every_command(call: Call) -> None:
    """The help names each command and what it does."""
    result = call("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("receive", [pass_settings, pass_invocation])
def test_warning_of_command_goes_to_standard_error(receive: Callable[..., Any]) -> None:
    """What goes to standard output may be JSON for a program."""

    @click.command()
    @receive
    def warn(_: object) -> None:
        log = structlog.get_logger()
        log.info("nobody asked")
        log.warning("something is odd")
        click.echo("{}")

    root = CommandLine("headrace", modules={}, commands={"warn": warn}, params=everywhere())
    result = CliRunner().invoke(root, ["warn"], obj=make_settings({}))
    assert result.stdout == "{}\n"
    assert "something is odd" in result.stderr
    assert "nobody" not in result.stderr


def test_help_imports_no_command_module() -> None:
    """`headrace --help` is fast: it loads neither settings nor NumPy nor aiokafka."""
    script = (
        "import sys; from headrace.cli import main; main(['--help'], standalone_mode=False); "
        "print(sorted(set(sys.modules) & {'numpy', 'aiokafka', 'pydantic', 'structlog'}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert shown.stdout.endswith("[]\n")


def test_unknown_command_is_wrong_usage(call: Call) -> None:
    """A command that is not there ends with exit code 2."""
    result = call("serve")
    assert result.exit_code == Exit.USAGE
    assert "No such command 'serve'" in result.stderr


def test_wrong_settings_are_printed_one_line_each(call: Call, tmp_path: Path) -> None:
    """All faults of a settings file come at once, without a traceback, with exit code 2."""
    path = tmp_path / "wrong.toml"
    path.write_text("[topics]\npartitions = 0\nreplicas = 3\n")
    result = call("--config", str(path), "topics", "check")
    assert result.exit_code == Exit.USAGE
    assert result.stderr.splitlines() == [
        f"headrace: {path}: topics.partitions: expected at least 1, got 0",
        f"headrace: {path}: topics.replicas: there is no such setting",
    ]


def test_missing_settings_file_is_wrong_configuration(call: Call) -> None:
    """A `--config` that is not there is a wrong configuration."""
    result = call("--config", "nowhere.toml", "topics", "check")
    assert result.exit_code == Exit.USAGE
    assert result.stderr == "headrace: nowhere.toml: No such file or directory\n"


def test_settings_file_may_come_from_environment(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HEADRACE_CONFIG` stands in for `--config`."""
    path = tmp_path / "other.toml"
    path.write_text('namespace = "vision"\n')
    monkeypatch.setenv("HEADRACE_CONFIG", str(path))
    assert "vision.requests" in call("topics", "describe").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", "other.toml", "topics", "describe", "--json"),
        ("topics", "--config", "other.toml", "describe", "--json"),
        ("topics", "describe", "--json", "--config", "other.toml"),
    ],
)
def test_settings_file_may_be_named_before_or_after_command(
    call: Call, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The option is accepted in either place."""
    (tmp_path / "other.toml").write_text('namespace = "other"\n', encoding="utf-8")

    result = call(*arguments)

    assert result.exit_code == Exit.DONE, result.stderr
    assert '"topic": "other.requests"' in result.stdout


def test_debug_may_come_after_command(call: Call, tmp_path: Path) -> None:
    """It shows the traceback there, too."""
    result = call("infer", "digits", "--input", "x=1", "--config", "none.toml", "--debug")
    assert result.exit_code == Exit.USAGE
    assert "Traceback (most recent call last)" in result.stderr


def test_interrupted_command_exits_with_130() -> None:
    """The exit code is that of a shell's SIGINT, and one line says why."""
    result = call_failing(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "headrace: interrupted\n")


def test_package_runs_as_module() -> None:
    """`python -m headrace`, where the script is not on the path."""
    result = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"headrace {__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [("--help",), ("topics", "describe")])
def test_output_that_full_disk_refuses_is_one_line(arguments: tuple[str, ...]) -> None:
    """No traceback, neither of the command nor of Python's last attempt to write."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (
        Exit.FAILED,
        "headrace: cannot write: No space left on device\n",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_command_runs_with_closed_standard_streams(closed: str) -> None:
    """Uvloop ended the process: its own files had the numbers of the closed ones."""
    command = [sys.executable, "-m", "headrace", "offsets", "show"]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], check=False)
    assert ended.returncode == Exit.USAGE  # there is no broker


def test_help_of_command_needs_no_settings(call: Call) -> None:
    """A broken settings file does not stand in the way of help."""
    assert call("--config", "nowhere.toml", "topics", "check", "--help").exit_code == 0


def test_headrace_error_is_printed_as_one_line() -> None:
    """A `HeadraceError` ends a command with exit code 1 and its own words."""
    result = call_failing(Rejected(Code.TOO_LARGE, "expected less"))
    assert (result.exit_code, result.stdout) == (Exit.FAILED, "")
    assert result.stderr == "headrace: TOO_LARGE: expected less\n"


def test_printed_error_escapes_control_characters() -> None:
    """An error may quote a caller; a terminal must not obey it."""
    result = call_failing(Rejected(Code.TOO_LARGE, "got \x1b]52;c;aGk=\x07 \u202e\udce9"))
    assert result.stderr == "headrace: TOO_LARGE: got \\x1b]52;c;aGk=\\x07 \\u202e?\n"


def test_debug_shows_traceback() -> None:
    """With `--debug` the traceback comes before the line, and the exit code stays."""
    result = call_failing(ConfigurationError("wrong"), "--debug")
    assert result.exit_code == Exit.USAGE
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("headrace: wrong\n")


def test_error_group_is_printed_once_per_cause() -> None:
    """Errors that several tasks raise together are printed one a line, the same cause once."""
    group = ExceptionGroup(
        "tasks", [Retriable("no broker"), ExceptionGroup("more", [Retriable("no broker")])]
    )
    assert explain(group) == (Exit.FAILED, ["no broker"])


def test_configuration_error_in_group_decides_exit_code() -> None:
    """A configuration error in a group makes the exit code 2."""
    group = ExceptionGroup("tasks", [Retriable("late"), ConfigurationError("wrong")])
    assert explain(group) == (Exit.USAGE, ["late", "wrong"])


def test_unexpected_exception_keeps_traceback() -> None:
    """An error that was not raised on purpose keeps its traceback."""
    assert explain(ExceptionGroup("tasks", [Retriable("late"), KeyError("defect")])) is None


def test_command_table_leads_to_every_command() -> None:
    """Each name in the table leads to a click command with a help text."""
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str()
