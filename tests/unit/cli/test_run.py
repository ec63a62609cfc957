"""The stages that `headrace run` takes, and how it starts them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from headrace.cli.outcome import Exit
from headrace.cli.run import SWITCH_INTERVAL_S
from headrace.cli.stages import parse_stages
from headrace.config import Settings
from headrace.telemetry.flood import Flood
from headrace.topics import STAGES, Stage
from tests.support.command_line import Call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Stage, ...]]]:
    """The stages with which the services were started; in place of the services."""
    calls: list[tuple[Stage, ...]] = []

    async def run(settings: Settings, stages: tuple[Stage, ...], flood: Flood) -> int:
        calls.append(tuple(stages))
        return 0 if settings.namespace == "headrace" else 1

    monkeypatch.setattr("headrace.pipeline.run", run)
    before = sys.getswitchinterval()
    yield calls
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("ingest", (Stage.INGEST,)),
        ("batcher,executor", (Stage.BATCHER, Stage.EXECUTOR)),
        ("batcher, executor", (Stage.BATCHER, Stage.EXECUTOR)),
        ("ingest,batcher,executor,responder", STAGES),
    ],
)
def test_adjacent_stages_are_taken(text: str, stages: tuple[Stage, ...]) -> None:
    """Any unbroken run of the path may share a process."""
    assert parse_stages(text) == stages


@pytest.mark.parametrize(
    "text", ["", "ingest,executor", "executor,batcher", "ingest,ingest", "ingest,", "gpu"]
)
def test_other_stages_are_refused(text: str) -> None:
    """Gaps, another order, repetitions and unknown names are refused."""
    with pytest.raises(ValueError, match=r"expected (adjacent )?stages"):
        parse_stages(text)


def test_wrong_stages_are_wrong_usage(call: Call) -> None:
    """The command line says what was expected and what came."""
    result = call("run", "ingest,executor")
    assert result.exit_code == Exit.USAGE
    assert "in the order of ingest, batcher, executor, responder" in " ".join(result.stderr.split())


def test_all_stages_run_when_none_is_named(call: Call, started: list[tuple[Stage, ...]]) -> None:
    """Without an argument the whole path runs in one process."""
    assert call("run").exit_code == Exit.DONE
    assert started == [STAGES]


def test_threads_get_the_interpreter_soon(call: Call, started: list[tuple[Stage, ...]]) -> None:
    """The dispatcher's thread does not wait Python's 5 ms for a busy event loop."""
    call("run", "executor")
    assert started == [(Stage.EXECUTOR,)]
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)


def test_exit_code_is_that_of_the_services(
    call: Call, started: list[tuple[Stage, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the services end with is what the process ends with."""
    monkeypatch.setenv("HEADRACE_NAMESPACE", "other")
    assert call("run").exit_code == Exit.FAILED
