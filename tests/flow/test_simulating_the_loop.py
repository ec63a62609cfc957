"""`headrace replay simulate --measure-loop`: the event loop is measured, and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.tools.replay import loop_measuring
from headrace.tools.replay.capture import CaptureWriter
from tests.support.command_line import Call
from tests.support.models import add_version, digits
from tests.support.recordings import recorded

SIMULATE = ("replay", "simulate", "--file", "requests.capture", "--models", "models")


@pytest.fixture
def call_here(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """With a repository of digits, a capture of 100 requests, and few turns."""
    monkeypatch.setattr(loop_measuring, "TURNS", 5)
    monkeypatch.setattr(loop_measuring, "SIZES", (1, 4, 16))
    add_version(tmp_path / "models", "digits", 1, digits())
    with CaptureWriter(tmp_path / "requests.capture", "test") as writer:
        writer.add([recorded(number) for number in range(100)])
    return call


def test_the_loops_own_work_is_in_the_latencies(call_here: Call) -> None:
    """Of runs that take nothing, what is left is the turn that each request takes."""
    found = call_here(*SIMULATE, "--service-time", "1", "--measure-loop", "--json")

    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert [one["rows"] for one in told["loop_times"]["digits"]["busy"]["points"]] == [1, 4, 16]
    (outcome,) = told["outcomes"]
    assert 0.02 < outcome["in_process_p50_ms"] <= outcome["p50_ms"]


def test_without_it_the_command_says_what_is_missing(call_here: Call) -> None:
    """A model as short as digits is mostly what is left out."""
    found = call_here(*SIMULATE, "--service-time", "1", "--json")

    assert "runs of digits are made on the event loop" in found.stderr
    assert json.loads(found.stdout)["loop_times"] == {}


def test_a_model_that_has_a_thread_is_not_measured(call_here: Call) -> None:
    """There is nothing on the loop to be measured."""
    found = call_here(*SIMULATE, "--service-time", "5000", "--measure-loop")

    assert found.exit_code == 2
    assert "--measure-loop: expected a model with runs so short" in found.output
