"""`headrace replay compare` finds what was planted, and nothing where nothing was."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import onnxruntime
import pytest
from click.testing import Result

from headrace.cli.outcome import Exit
from headrace.log.port import Record
from headrace.protocol.codec import encode_request
from headrace.protocol.tensors import from_array
from headrace.tools.replay.recording import identity
from tests.support.command_line import Call
from tests.support.comparing import (
    REQUESTS,
    capture,
    digit_requests,
    one_weight_by_one_percent,
    plant,
    slowed,
    swapped,
)
from tests.support.responder import answer


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A capture of requests to the digits."""
    return capture(tmp_path / "requests.capture", digit_requests())


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """The digits as they are."""
    return plant(tmp_path / "current")


def _compare(call: Call, recording: Path, *options: object) -> Result:
    patient = ("--max-latency-ratio", 1000)  # one stall of the machine makes a side slower
    words = ["replay", "compare", "--file", recording, *patient, *options, "--json"]
    return call(*map(str, words))


def _run(call: Call, recording: Path, *options: object) -> tuple[Result, dict[str, Any]]:
    result = _compare(call, recording, *options)
    assert result.exit_code in (0, 1), result.stderr
    return result, json.loads(result.stdout)


def _failed(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["subject"], each["measure"]) for each in found["findings"] if not each["passed"]}


def test_comparing_identical_candidate_passes(call: Call, recording: Path, current: Path) -> None:
    """Deadlines that passed long ago play no part; all three answered everything."""
    result, found = _run(call, recording, "--models", current, "--candidate", current)

    assert _failed(found) == set(), [each for each in found["findings"] if not each["passed"]]
    assert (result.exit_code, found["verdict"]) == (0, "same")
    assert found["requests"] == REQUESTS
    assert found["candidate"]["codes"] == [["ok", "ok", REQUESTS]]
    assert found["noise"]["outputs"]["label"]["exact"] == REQUESTS
    answered = {name: each["end_to_end"]["answers"] for name, each in found["latency_us"].items()}
    assert answered == {"current": REQUESTS, "current again": REQUESTS, "candidate": REQUESTS}


def test_comparing_finds_weight_changed_by_one_percent(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """Scores are further apart than noise and rounding allow, though 1 label of 120 changes."""
    candidate = plant(tmp_path / "candidate", output_weight=one_weight_by_one_percent)

    result, found = _run(call, recording, "--models", current, "--candidate", candidate)

    assert (result.exit_code, found["verdict"]) == (1, "different")
    assert ("output probabilities", "largest difference") in _failed(found)
    assert found["candidate"]["outputs"]["label"]["mismatched"] == 1


def test_comparing_finds_swapped_labels(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """Labels, scores and the index of the largest score are found to differ."""
    candidate = plant(tmp_path / "candidate", output_weight=swapped, output_bias=swapped)

    result, found = _run(call, recording, "--models", current, "--candidate", candidate)

    assert result.exit_code == 1
    assert _failed(found) >= {
        ("output label", "share that differs"),
        ("output probabilities", "largest difference"),
        ("output probabilities", "top-1 agreement"),
    }
    assert "became" in found["worst"][0]["differs"]


def test_comparing_finds_slower_candidate(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """The ratio of medians fails although the outputs are the same."""
    candidate = slowed(tmp_path / "candidate", 0.02)
    sides = ("--models", current, "--candidate", candidate)

    result, found = _run(call, recording, *sides, "--max-latency-ratio", 1.5)

    assert result.exit_code == 1
    assert _failed(found) == {
        ("latency", "median compute, ratio"),
        ("latency", "median end to end, ratio"),
    }
    assert found["latency_us"]["candidate"]["compute"]["p50_us"] >= 20_000


def test_command_of_worst_request_replays_only_that_request(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """The command in the report replays one request and finds the same difference."""
    candidate = plant(tmp_path / "candidate", output_weight=swapped, output_bias=swapped)
    _, found = _run(call, recording, "--models", current, "--candidate", candidate)
    worst = found["worst"][0]

    result = call(*worst["command"].split()[1:], "--json")

    alone = json.loads(result.stdout)
    assert (result.exit_code, alone["requests"]) == (1, 1)
    assert alone["worst"][0]["request"] == worst["request"]
    assert alone["worst"][0]["differs"].split(":")[0] == worst["differs"].split(":")[0]


def test_command_of_worst_request_names_compared_model(
    call: Call, tmp_path: Path, current: Path
) -> None:
    """Another model serves the version with the candidate's number."""
    other = plant(tmp_path / "other", output_weight=swapped, output_bias=swapped)
    shutil.copytree(other / "digits" / "1", current / "digits" / "2")
    shutil.copytree(other / "digits" / "1", current / "others" / "1")
    recording = capture(tmp_path / "some.capture", digit_requests(10))
    sides = ("--models", current, "--model", "digits", "--candidate-version", 1)
    _, found = _run(call, recording, *sides)

    result = call(*found["worst"][0]["command"].split()[1:], "--json")

    assert result.exit_code == 1, result.stderr
    assert json.loads(result.stdout)["requests"] == 1


def test_candidate_without_model_ends_with_usage_error(
    call: Call, tmp_path: Path, current: Path
) -> None:
    """The first request ends the comparison with the side and its answer, and no verdict."""
    recording = capture(tmp_path / "few.capture", digit_requests(4))
    other = plant(tmp_path / "other")
    (other / "digits").rename(other / "numbers")

    result = _compare(call, recording, "--models", current, "--candidate", other)

    assert result.exit_code == Exit.USAGE
    assert "a model that the candidate's side serves, got UNKNOWN_MODEL" in result.stderr


def test_model_that_failed_on_both_sides_ends_with_usage_error(
    call: Call, tmp_path: Path, current: Path
) -> None:
    """Both refuse every request alike, which is not the same model."""
    recording = capture(tmp_path / "few.capture", digit_requests(4))
    (current / "digits" / "1" / "model.onnx").write_bytes(b"no model")

    result = _compare(call, recording, "--models", current, "--candidate", current)

    assert result.exit_code == Exit.USAGE
    told = [line for line in result.stderr.splitlines() if line.startswith("headrace: ")]
    assert len(told) == 1, told
    assert "got MODEL_NOT_READY: model digits" in told[0]


def test_model_that_neither_side_has_ends_with_usage_error(call: Call, tmp_path: Path) -> None:
    """Another directory was meant."""
    recording = capture(tmp_path / "few.capture", digit_requests(4))
    other = plant(tmp_path / "other")
    (other / "digits").rename(other / "numbers")

    result = _compare(call, recording, "--models", other, "--candidate", other)

    assert result.exit_code == Exit.USAGE
    assert "got 4 of models that neither side has" in result.stderr


def _refused() -> list[Record]:
    value = encode_request("application/msgpack", "digits", {"pixels": np.ones((1, 9))})
    return [Record("t", 0, number, 0, None, value, []) for number in range(3)]


def test_comparing_requests_refused_by_both_sides_does_not_pass(
    call: Call, tmp_path: Path, current: Path
) -> None:
    """Nothing was compared of any output, unless the user says that this is enough."""
    recording = capture(tmp_path / "bad.capture", _refused())
    sides = ("--models", current, "--candidate", current)

    result, found = _run(call, recording, *sides)
    allowed, _ = _run(call, recording, *sides, "--min-comparable", 0)

    assert (result.exit_code, found["verdict"], allowed.exit_code) == (1, "different", 0)
    assert _failed(found) == {("requests", "share with outputs on both sides")}
    assert found["candidate"]["codes"] == [["INVALID_TENSOR", "INVALID_TENSOR", 3]]


def test_comparing_empty_recording_does_not_pass(call: Call, tmp_path: Path, current: Path) -> None:
    """A selection that meets nothing must not look like a good candidate."""
    recording = capture(tmp_path / "empty.capture", digit_requests(2))

    result, found = _run(
        call, recording, "--model", "other", "--models", current, "--candidate", current
    )

    assert (result.exit_code, found["requests"]) == (1, 0)


def test_candidate_version_is_compared_with_version_in_requests(
    call: Call, tmp_path: Path, current: Path
) -> None:
    """Requests that name version 1 are answered by the candidate's version 2 all the same."""
    plant(current, 2, output_weight=swapped, output_bias=swapped)
    recording = capture(tmp_path / "named.capture", digit_requests(10, version="2"))

    served, _ = _run(call, recording, "--models", current, "--candidate-version", 1)
    same, found = _run(
        call, recording, "--models", current, "--candidate-version", 2, "--current-version", 2
    )

    assert (served.exit_code, same.exit_code) == (1, 0)
    assert found["candidate"]["codes"] == [["ok", "ok", 10]]


def test_served_version_as_candidate_is_refused(call: Call, current: Path) -> None:
    """It would be compared with itself; the fix is named."""
    recording = capture(current.parent / "few.capture", digit_requests(1))
    words = ("--file", str(recording), "--models", str(current), "--candidate-version", "1")

    result = call("replay", "compare", *words)

    assert result.exit_code == 2
    assert "--current-version" in result.stderr


def test_comparing_uses_thresholds_of_options(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """Over the noise floor."""
    candidate = plant(tmp_path / "candidate", output_weight=one_weight_by_one_percent)
    sides = ("--models", current, "--candidate", candidate)
    lenient = ("--max-mismatched", 0.01, "--min-top1", 0.99, "--max-difference")

    allowed, _ = _run(call, recording, *sides, *lenient, 0.01)
    refused, _ = _run(call, recording, *sides, *lenient, 1e-9)

    assert (allowed.exit_code, refused.exit_code) == (0, 1)


def _recorded_answers(tmp_path: Path, repository: Path) -> Path:
    """Write the answers of a repository to `digit_requests` as a capture file."""
    session = onnxruntime.InferenceSession(repository / "digits" / "1" / "model.onnx")
    answers = []
    for number, request in enumerate(digit_requests(20)):
        assert request.value is not None
        message = msgspec.msgpack.decode(request.value)
        pixels = np.frombuffer(message["inputs"][0]["data"], np.float32).reshape(1, 64)
        names = ["probabilities", "label"]
        tensors = [
            from_array(name, array)
            for name, array in zip(names, session.run(names, {"pixels": pixels}), strict=True)
        ]
        value = answer(
            outputs=[
                {**tensor._asdict(), "shape": list(tensor.shape), "data": bytes(tensor.data)}
                for tensor in tensors
            ]
        )
        headers = [("x-request", identity(request).encode())]
        answers.append(Record("t.responses", 0, number, number, None, value, headers))
    return capture(tmp_path / "answers.capture", answers)


def test_comparing_uses_recorded_answers_as_reference(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """Recorded answers are the reference, and the current model's distance from them is the noise;
    latency is compared with the current model's run, not with the times of another machine.
    """
    answers = _recorded_answers(tmp_path, current)
    other = plant(tmp_path / "other", output_weight=swapped, output_bias=swapped)
    options = ("--limit", 20, "--models", current, "--answers-file", answers)

    same, found = _run(call, recording, *options, "--candidate", current)
    different, _ = _run(call, recording, *options, "--candidate", other)
    alone, by_itself = _run(call, recording, *options, "--candidate", current, "--without-current")

    assert _failed(found) == set()
    assert (same.exit_code, different.exit_code, alone.exit_code) == (0, 1, 0)
    assert found["candidate"]["codes"] == [["ok", "ok", 20]]
    assert set(found["latency_us"]) == {"recorded", "current", "candidate"}
    assert by_itself["noise"] is None
    assert "latency" not in {each["subject"] for each in by_itself["findings"]}


def test_comparing_reports_request_without_recorded_answer(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """It is compared with nothing; a pass needs every one, or a user who says how many."""
    answers = _recorded_answers(tmp_path, current)

    result, found = _run(
        call, recording, "--limit", 30, "--models", current, "--answers-file", answers,
        "--candidate", current,
    )  # fmt: skip

    assert (result.exit_code, found["requests"], found["missing"]) == (1, 20, 10)
    assert _failed(found) == {("requests", "share with a recorded answer")}


def test_comparison_is_shown_although_report_cannot_be_written(
    call: Call, recording: Path, current: Path
) -> None:
    """It may have taken an hour."""
    result = _compare(
        call, recording, "--models", current, "--candidate", current, "--report", "nowhere/r.html"
    )
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (2, "same")
    assert "--report: nowhere/r.html: No such file or directory" in result.stderr


def test_compare_report_needs_no_other_file(
    call: Call, recording: Path, current: Path, tmp_path: Path
) -> None:
    """The report is well-formed, has plots, and names no outside resource."""
    candidate = plant(tmp_path / "candidate", output_weight=swapped, output_bias=swapped)
    page = tmp_path / "report.html"

    _run(call, recording, "--models", current, "--candidate", candidate, "--report", page)

    text = page.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    images = [image.attrib["src"] for image in root.findall(".//img")]
    assert len(images) == 3
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
    for image in images:
        text = text.replace(f'src="{image}"', "")
    assert not re.findall(r"https?:|//|@import|url\(|<script|<link|\ssrc=|\shref=", text)
    command = root.find(".//code")
    assert command is not None
    assert (command.text or "").startswith("headrace replay compare --file ")
