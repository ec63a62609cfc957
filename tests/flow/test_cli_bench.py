"""`headrace bench` without a broker: the four services run in the command's process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import onnx
import pytest

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import digits
from tests.support.processes import START_DEADLINE_S, STOP_DEADLINE_S
from tests.support.tree import ROOT

ORDERS = ROOT / "examples" / "orders"

SHORT = ("--seconds", "1", "--warm-up", "0.2")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one model, where `headrace` looks by default."""
    version = tmp_path / "models" / "digits" / "1"
    version.mkdir(parents=True)
    onnx.save(digits(), version / "model.onnx")
    return version


def test_bench_measures_answers_at_given_rate(call: Call, repository: Path) -> None:
    """Every request is answered; percentiles, batches and advice are told."""
    result = call("bench", "digits", "--rate", "100", *SHORT, "--json")
    assert result.exit_code == Exit.DONE, result.stderr
    fields = json.loads(result.stdout)

    assert fields["answered"] == fields["sent"] > 0
    assert fields["statuses"] == {"ok": fields["sent"]}
    assert 0 < fields["latency_ms"]["p50"] <= fields["latency_ms"]["p99"]
    assert sum(size["answers_looked_into"] for size in fields["batch_sizes"]) > 0
    assert len(fields["advice"]) == 1


def test_bench_measures_saturation(call: Call, repository: Path) -> None:
    """The lines for people name what binds."""
    result = call("bench", "digits", "--saturate", "--in-flight", "64", *SHORT)
    assert result.exit_code == Exit.DONE, result.stderr

    assert "requests answered" in result.stdout
    assert "rows in a run" in result.stdout


def take_interrupts() -> None:
    """Have SIGINT end this process, as it does by default."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(120)
async def test_interrupted_bench_says_how_many_were_answered(repository: Path) -> None:
    """The exit code is that of a shell's SIGINT."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "bench", "digits", "--rate", "50", "--seconds", "600"),
        cwd=repository.parents[2],
        env={name: value for name, value in os.environ.items() if "HEADRACE" not in name},
        stderr=asyncio.subprocess.PIPE,
        # A shell starts its background jobs with SIGINT ignored, and so do the tests it runs there.
        preexec_fn=take_interrupts,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_DEADLINE_S + STOP_DEADLINE_S):
            first = await process.stderr.readline()
            process.send_signal(signal.SIGINT)
            rest = await process.stderr.read()
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # its pipe is closed as well

    assert b" requests answered" in first
    assert code == Exit.INTERRUPTED
    assert re.fullmatch(rb"headrace: interrupted: \d+ of \d+ requests answered\n", rest)


def test_bench_takes_requests_from_command_line(call: Call, repository: Path) -> None:
    """The option `--json` sends them as JSON; a refused request counts as answered."""
    result = call(
        *("bench", "digits", "--rate", "50", *SHORT, "--json"),
        *("--input", "pixels=[[0.5]]", "--encoding", "json"),
    )
    assert result.exit_code == Exit.DONE, result.stderr
    fields = json.loads(result.stdout)

    assert fields["statuses"] == {"INVALID_TENSOR": fields["sent"]}
    assert [each["binds"] for each in fields["advice"]] == ["errors", "nothing", "json"]


def test_bench_of_answers_without_timings_shows_no_times(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers in a payload's own format have none: they looked like a model that never ran."""
    monkeypatch.setenv("HEADRACE_MODELS__REPOSITORY", str(ORDERS / "models"))
    file = str(ORDERS / "orders.json")

    result = call("bench", "fraud", "--rate", "50", "--file", file, *SHORT)

    assert result.exit_code == Exit.DONE, result.stderr
    assert "rows in a run" not in result.stdout
    assert "unknown: The answers have no timings" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--rate", "5", "--saturate"),
        ("--saturate", "--input", "x=1", "--capture", "models/digits/1/model.onnx"),
        ("--saturate", "--content-type", "image/png"),
    ],
)
def test_contradicting_bench_options_are_wrong_usage(
    call: Call, repository: Path, arguments: tuple[str, ...]
) -> None:
    """The error comes before anything is started."""
    result = call("bench", "digits", *arguments)

    assert result.exit_code == Exit.USAGE
    assert "give" in result.stderr or "goes with" in result.stderr


def test_bench_of_unknown_model_needs_requests(call: Call, repository: Path) -> None:
    """No request can be synthesised without the signature."""
    result = call("bench", "other", "--rate", "5", *SHORT)

    assert result.exit_code == Exit.USAGE
    assert "--input, --file or --capture" in result.stderr
