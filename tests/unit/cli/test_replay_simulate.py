"""`headrace replay simulate`: from a capture file to a table, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from onnx import TensorProto, helper

from headrace.cli.outcome import Exit
from headrace.log.port import Record
from headrace.tools.replay.capture import CaptureWriter
from tests.support.command_line import Call
from tests.support.models import add_version, digits, make_model
from tests.support.recordings import recorded, request

SIMULATE = ("replay", "simulate", "--file", "requests.capture")


def capture(path: Path, records: Sequence[Record]) -> None:
    """Write a capture file."""
    with CaptureWriter(path, "test") as writer:
        writer.add(records)


@pytest.fixture
def requests(tmp_path: Path) -> None:
    """A capture of 400 requests at 1,000 a second."""
    records = [recorded(number) for number in range(400)]
    capture(tmp_path / "requests.capture", records)


def outcomes(output: str) -> list[dict[str, Any]]:
    """Return the outcomes that `--json` prints."""
    found: list[dict[str, Any]] = json.loads(output)["outcomes"]
    return found


def test_simulate_runs_every_combination_with_present_first(call: Call, requests: None) -> None:
    """Two rates and two limits; what is not asked for stays as it is."""
    given = ("--service-time", "700+100", "--rate-factor", "1,4", "--max-batch-size", "2,32")
    found = call(*SIMULATE, *given, "--json")

    assert found.exit_code == 0, found.output
    asked = [(each["rate_factor"], each["max_batch_size"]) for each in outcomes(found.stdout)]
    assert asked == [(1, None), (1, 2), (1, 32), (4, 2), (4, 32)]
    present, *_, narrow, wide = outcomes(found.stdout)
    assert present["p99_ms"] == pytest.approx(0.8, abs=0.001)
    assert narrow["load"] == pytest.approx(4 * 0.45, rel=0.01)
    assert narrow["p99_ms"] > 50
    assert wide["p99_ms"] < 5
    assert wide["mean_batch"] > 4


def test_simulate_table_has_line_for_each_scenario(call: Call, requests: None) -> None:
    """The known service times S(b) stand above the table."""
    found = call(*SIMULATE, "--service-time", "digits=700+100", "--instances", "1,2")

    lines = found.output.splitlines()
    assert lines[0] == "S(b) of digits: 700 + 100.0 b us"
    assert [line.split("  ")[0] for line in lines[1:]] == [
        *("scenario", "present", "1 instance", "2 instances")
    ]


def test_simulate_learns_service_times_from_answers(
    call: Call, requests: None, tmp_path: Path
) -> None:
    """Their medians for each batch size."""
    answer = {"parameters": {"compute_us": 300, "batch_size": 1}, "model_name": "digits"}
    answers = [recorded(number, value=msgpack.packb(answer)) for number in range(10)]
    capture(tmp_path / "answers.capture", answers)
    found = call(*SIMULATE, "--answers-file", "answers.capture", "--json")

    assert outcomes(found.stdout)[0]["p50_ms"] == pytest.approx(0.3)


def test_simulate_measures_models(call: Call, requests: None, tmp_path: Path) -> None:
    """Every size that was measured is told."""
    add_version(tmp_path / "models", "digits", 1, digits(), "max_batch_size = 4\n")
    found = call(*SIMULATE, "--models", "models", "--json")

    points = json.loads(found.stdout)["service_times"]["digits"]["points"]
    assert [each["rows"] for each in points] == [1, 2, 4]
    assert all(each["us"] > 0 for each in points)


def test_simulate_uses_limits_of_each_model(call: Call, requests: None, tmp_path: Path) -> None:
    """The model's own delay is the present one."""
    config = "max_batch_size = 4\nmax_queue_delay_ms = 1.5\n"
    add_version(tmp_path / "models", "digits", 1, digits(), config)
    found = call(*SIMULATE, "--models", "models", "--service-time", "100+1", "--json")

    (outcome,) = outcomes(found.stdout)
    assert set(outcome["reasons"]) == {"delay"}
    assert outcome["p50_ms"] > 0.5


def test_simulate_counts_request_of_model_without_batching_as_one_row(
    call: Call, tmp_path: Path
) -> None:
    """Dimension 0 of its inputs has no rows, and differs between them."""
    model = make_model(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        [("x", TensorProto.FLOAT, [4, 3]), ("weights", TensorProto.FLOAT, [3, 2])],
        [("y", TensorProto.FLOAT, [4, 2])],
    )
    add_version(tmp_path / "models", "product", 1, model)
    shapes = {"x": [4, 3], "weights": [3, 2]}
    inputs = [{"name": name, "datatype": "FP32", "shape": shapes[name]} for name in shapes]
    value = msgpack.packb({"model_name": "product", "inputs": inputs})
    capture(tmp_path / "requests.capture", [recorded(0, value=value)])
    found = call(*SIMULATE, "--models", "models", "--service-time", "100+1", "--json")

    assert (found.exit_code, found.stderr) == (Exit.DONE, "")
    assert outcomes(found.stdout)[0]["mean_batch"] == 1


def test_simulate_skips_requests_without_service_time(call: Call, tmp_path: Path) -> None:
    """Requests of a model without service time, and records that are no requests."""
    records = [recorded(number) for number in range(3)]
    records += [recorded(3, value=request(3, "other")), recorded(4, value=b"junk")]
    capture(tmp_path / "requests.capture", records)
    found = call(*SIMULATE, "--service-time", "digits=100+1", "--json")

    assert outcomes(found.stdout)[0]["requests"] == 3
    assert "1 records are no requests" in found.stderr
    assert "1 requests of other left out: its service time is not known" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "how long do batches take?"),
        (("--service-time", "fast"), "expected [MODEL=]T0+A in microseconds"),
        (("--service-time", "1+1", "--max-batch-size", "0"), "numbers from 1 to 1,000,000"),
        (("--service-time", "1+1", "--max-batch-size", "1000001"), "numbers from 1 to 1,000,000"),
        (("--service-time", "1+1", "--instances", "0"), "expected numbers from 1 to 256"),
        (("--service-time", "1+1", "--instances", "2,257"), "expected numbers from 1 to 256"),
        (("--service-time", "1+1", "--max-queue-delay-ms", "1e300"), "from 0 to 3,600,000"),
        (("--service-time", "1+1", "--max-queue-delay-ms", "nan"), "from 0 to 3,600,000"),
        (("--service-time", "1+1", "--rate-factor", "0"), "numbers from 0.001 to 1,000,000"),
        (("--service-time", "1+1", "--rate-factor", "1e-300"), "from 0.001 to 1,000,000"),
        (("--service-time", "1e300+1"), "of an hour at most"),
        (("--service-time", "inf"), "of an hour at most"),
        (("--service-time", "1+1", "--instances", "1.5"), "expected numbers as 1,2,4"),
        (("--service-time", "other=1+1"), "expected requests of models whose service time"),
        (("--answers", "responses"), "expected a broker"),
    ],
)
def test_simulate_refuses_invalid_options(
    call: Call, requests: None, arguments: tuple[str, ...], message: str
) -> None:
    """The exit code is 2, and the error says what was expected: what the settings take."""
    found = call(*SIMULATE, *arguments)

    assert found.exit_code == 2
    assert message in " ".join(found.output.replace("│", " ").split())
