"""Commands that change models by the control topic, as far as they need no broker."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.cli.models_control import describe_status, user_name
from headrace.cli.outcome import Exit
from headrace.config import make_settings
from headrace.control.processes import ProcessReport
from headrace.models.wanted import Deployment
from tests.support.command_line import Call
from tests.support.kept_topic import KeptTopic
from tests.support.models import add_version, digits


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


# --- changes of a kept topic ----------------------------------------------------------------------

BEFORE = [("load", "digits", "1"), ("load", "digits", "2"), ("load", "digits", "3")]
COMPATIBLE = "2 compatible with 1, 3 compatible with 1"
CHANGES = {
    "load": (
        ("load", "digits", "4"),
        f"versions 1, 2, 3, 4, default 1, {COMPATIBLE}, 4 compatible with 1",
    ),
    "unload": (("unload", "digits", "3"), "versions 1, 2, default 1, 2 compatible with 1"),
    "label": (
        ("label", "digits", "canary", "2"),
        f"versions 1, 2, 3, default 1, canary -> 2, {COMPATIBLE}",
    ),
    "default": (("default", "digits", "2"), f"versions 1, 2, 3, default 2, {COMPATIBLE}"),
    "rollback": (("rollback", "digits", "--to", "1"), "versions 1, default 1"),
}


@pytest.fixture
def topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptTopic:
    """An empty control topic, and a repository with four versions of `digits`."""
    for number in (1, 2, 3, 4):
        add_version(tmp_path / "models", "digits", number, digits(number))
    topic = KeptTopic(
        make_settings(
            {
                "kafka": {"bootstrap_servers": "127.0.0.1:1"},
                "models": {"repository": tmp_path / "models", "mode": "explicit"},
            }
        )
    )
    topic.use(monkeypatch)
    return topic


@pytest.fixture
def operate(call: Call, topic: KeptTopic) -> Call:
    """Runs a command of `headrace models` that reads and writes this topic."""
    return lambda *arguments: call("models", *arguments, obj=topic.settings)


@pytest.mark.parametrize(("change", "after"), CHANGES.values(), ids=CHANGES)
def test_dry_run_shows_change_and_writes_nothing(
    operate: Call, topic: KeptTopic, change: tuple[str, ...], after: str
) -> None:
    """In text and in JSON it shows what the same command then does, and why."""
    for each in BEFORE:
        assert operate(*each).exit_code == Exit.DONE
    before = topic.records
    manner = ("--reason", "ticket 4711", "--who", "ada", "--dry-run")
    as_text = operate(*change, *manner)
    as_json = operate(*change, *manner, "--json")
    head, removed, added = as_text.stdout.splitlines()
    shown = json.loads(as_json.stdout)

    assert [each.exit_code for each in (as_text, as_json)] == [Exit.DONE] * 2
    assert head.startswith(f"generation 4: {change[0]} by ada at ")
    assert head.endswith(", ticket 4711")
    assert removed == f"  - digits: versions 1, 2, 3, default 1, {COMPATIBLE}"
    assert added == f"  + digits: {after}"
    assert (shown["dry_run"], shown["generation"], shown["followed"]) == (True, 3, None)
    assert [each.stderr for each in (as_text, as_json)] == ["dry run: nothing was changed\n"] * 2
    assert topic.records == before
    assert len(before) == len(BEFORE)

    made = json.loads(operate(*change, *manner[:-1], "--json").stdout)
    *_, last = json.loads(operate("history", "--json").stdout)
    assert (made["dry_run"], made["generation"], made["change"]) == (False, 4, last)
    assert last == shown["change"] | {"at": last["at"]}
    assert (last["action"], last["who"], last["why"]) == (change[0], "ada", "ticket 4711")
