"""Commands that change models by the control topic, as far as they need no broker."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli.models_control import NO_PROCESS, describe_status, user_name
from headrace.cli.outcome import Exit
from headrace.cli.settings import Invocation
from headrace.config import make_settings
from headrace.control.processes import ProcessReport
from headrace.models.wanted import Deployment
from headrace.protocol.events import ExecutorEvent, HostedModel
from headrace.tuning import TUNING
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


@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_timeout_that_is_not_finite_is_refused(call: Call, seconds: str) -> None:
    """No wait has such an end."""
    result = call("models", "load", "digits", "1", "--wait", "--timeout", seconds)
    assert result.exit_code == Exit.USAGE
    assert "'--timeout': expected a finite number" in result.stderr


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


def test_process_that_follows_no_more_has_not_followed() -> None:
    """Its generation is of a topic that was made anew since, and may be any."""
    reports = {
        "a": ProcessReport(3, ("digits/1",), ()),
        "b": ProcessReport(7, ("digits/1",), (), is_following=False),
    }
    assert not describe_status(Deployment(3), reports)["followed"]
    assert reports["b"].has_ended(3)
    assert not reports["b"].has_followed(3)


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
COMPATIBLE = "2 must be compatible with 1, 3 must be compatible with 1"
CHANGES = {
    "load": (
        ("load", "digits", "4"),
        f"versions 1, 2, 3, 4, default 1, {COMPATIBLE}, 4 must be compatible with 1",
    ),
    "unload": (("unload", "digits", "3"), "versions 1, 2, default 1, 2 must be compatible with 1"),
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


# --- changes that wait ----------------------------------------------------------------------------

HEARD_AT_ONCE = replace(TUNING, control=replace(TUNING.control, listen_s=0.0, poll_s=0.0))
"""What processes announce comes with the first poll, and not within some seconds."""


def announced(
    process: str, generation: int, *unready: str, failed: Sequence[str] = ()
) -> ExecutorEvent:
    """An announcement of a process that has version 1 ready."""
    digits_1 = HostedModel(name="digits", version="1", instances=1, max_batch_size=8)
    return ExecutorEvent(
        executor=process,
        silent_after_ms=1000,
        models=[digits_1],
        generation=generation,
        unready=list(unready),
        failed=list(failed),
    )


BEHIND = [announced("a", 4), announced("b", 3)]
LOADING = [announced("b", 4, "digits/4: loading")]
FAILED = [announced("b", 4, "digits/4: no ONNX model", failed=["digits/4"])]
FOLLOWED = [announced("b", 4)]
LINES_BEHIND = [
    "process a: generation 4",
    "  ready: digits/1",
    "process b: generation 3, behind 4",
    "  ready: digits/1",
]


@pytest.fixture
def wait_for(call: Call, topic: KeptTopic, operate: Call) -> Call:
    """Runs a change, of the three that went before, that waits for what processes announce."""
    for each in BEFORE:
        operate(*each)
    invocation = Invocation(given=topic.settings, tuning=HEARD_AT_ONCE)
    return lambda *arguments: call("models", *arguments, "--wait", obj=invocation)


@pytest.mark.parametrize("change", [change for change, _ in CHANGES.values()], ids=CHANGES)
def test_wait_returns_once_all_processes_have_followed(
    wait_for: Call, topic: KeptTopic, change: tuple[str, ...]
) -> None:
    """One process is behind, then it has read the change, then it has loaded what is wanted."""
    loading = [announced("b", 4, *[f"digits/{number}: loading" for number in range(1, 5)])]
    topic.announcements.extend([BEHIND, loading, FOLLOWED, LOADING])
    ended = wait_for(*change)
    assert (ended.exit_code, ended.stderr) == (Exit.DONE, "")
    assert ended.stdout.splitlines()[-4:] == [
        *LINES_BEHIND[:2],
        "process b: generation 4",
        "  ready: digits/1",
    ]
    assert list(topic.announcements) == [LOADING]


@pytest.mark.parametrize("change", [change for change, _ in CHANGES.values()], ids=CHANGES)
def test_wait_that_times_out_fails_and_shows_processes_that_have_not_followed(
    wait_for: Call, topic: KeptTopic, change: tuple[str, ...]
) -> None:
    """The change stays made, and the exit code tells a script that it has not arrived."""
    topic.announcements.append(BEHIND)
    ended = wait_for(*change, "--timeout", "0")
    assert ended.exit_code == Exit.FAILED
    assert ended.stderr == "not all processes have followed within 0 s\n"
    assert ended.stdout.splitlines()[-4:] == LINES_BEHIND
    assert [each.action for each in topic.records[3:]] == [change[0]]


def test_wait_that_times_out_shows_versions_that_are_not_ready(
    wait_for: Call, topic: KeptTopic
) -> None:
    """A reason of a failure would stand there."""
    topic.announcements.append(LOADING)
    ended = wait_for("load", "digits", "4", "--timeout", "0")
    assert ended.exit_code == Exit.FAILED
    assert ended.stdout.splitlines()[-1] == "  waits for digits/4: loading"


def test_wait_ends_once_version_has_failed_in_last_process(
    wait_for: Call, topic: KeptTopic
) -> None:
    """Nothing would change until the time is over, which is ten minutes unless given."""
    topic.announcements.extend([BEHIND, LOADING, FAILED, LOADING])
    ended = wait_for("load", "digits", "4")
    assert (ended.exit_code, ended.stderr) == (
        Exit.FAILED,
        "a version cannot be loaded, see above; the change stays made\n",
    )
    assert ended.stdout.splitlines()[-1] == "  waits for digits/4: no ONNX model"
    assert list(topic.announcements) == [LOADING]


def test_processes_of_stages_apart_are_shown_with_their_stages(
    wait_for: Call, topic: KeptTopic
) -> None:
    """Their names do not tell which of them is the executor, or that there is none."""
    apart = replace(announced("b", 4), stages=["batcher", "executor"])
    topic.announcements.append([replace(announced("a", 4), stages=["ingest"]), apart])
    shown = wait_for("load", "digits", "4").stdout.splitlines()
    assert shown[-4:-1:2] == [
        "process a (ingest): generation 4",
        "process b (batcher, executor): generation 4",
    ]


def test_wait_ends_once_process_follows_no_more(wait_for: Call, topic: KeptTopic) -> None:
    """It would announce the same until it is started again."""
    stopped = replace(announced("b", 7), is_following=False)
    topic.announcements.extend([[announced("a", 4), stopped], LOADING])
    ended = wait_for("load", "digits", "4")
    assert (ended.exit_code, ended.stderr) == (
        Exit.FAILED,
        "a process follows no changes until it is started again; the change stays made\n",
    )
    assert ended.stdout.splitlines()[-4:] == [
        *LINES_BEHIND[:2],
        "process b: generation 7, follows no changes until it is started again",
        "  ready: digits/1",
    ]


def test_wait_without_processes_fails(wait_for: Call) -> None:
    """Nothing shows that the change has arrived anywhere."""
    ended = wait_for("default", "digits", "2", "--timeout", "0")
    assert (ended.exit_code, ended.stderr) == (Exit.FAILED, f"{NO_PROCESS}\n")


@pytest.mark.parametrize(
    ("last", "exit_code"), [(FOLLOWED, Exit.DONE), (LOADING, Exit.FAILED)], ids=["all", "not all"]
)
def test_wait_in_json_has_outcome_and_processes(
    wait_for: Call, topic: KeptTopic, last: list[ExecutorEvent], exit_code: Exit
) -> None:
    """The last report of each process; the exit code is that of the text."""
    topic.announcements.append([*BEHIND, *last])
    ended = wait_for("load", "digits", "4", "--timeout", "0", "--json")
    shown = json.loads(ended.stdout)
    assert (ended.exit_code, ended.stderr) == (exit_code, "")
    assert (shown["generation"], shown["dry_run"]) == (4, False)
    assert shown["followed"] == (exit_code == Exit.DONE)
    assert {
        name: (each["generation"], each["ready"], each["unready"])
        for name, each in shown["processes"].items()
    } == {"a": (4, ["digits/1"], []), "b": (4, ["digits/1"], last[0].unready)}


@pytest.mark.parametrize("change", [change for change, _ in CHANGES.values()], ids=CHANGES)
def test_dry_run_waits_for_nothing(
    wait_for: Call, topic: KeptTopic, change: tuple[str, ...]
) -> None:
    """There is no change that processes could follow, so none of them counts as missing."""
    topic.announcements.append(BEHIND)
    as_text = wait_for(*change, "--dry-run")
    as_json = wait_for(*change, "--dry-run", "--json")
    shown = json.loads(as_json.stdout)
    for each in (as_text, as_json):
        assert (each.exit_code, each.stderr) == (Exit.DONE, "dry run: nothing was changed\n")
    assert (shown["dry_run"], shown["followed"], shown["processes"]) == (True, None, {})
    assert list(topic.announcements) == [BEHIND]
    assert len(topic.records) == len(BEFORE)
