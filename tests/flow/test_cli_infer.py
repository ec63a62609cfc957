"""`headrace infer` without a broker: the four services run for one request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import add_version, digits, identity


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one model, where `headrace` looks by default."""
    version = tmp_path / "models" / "digits" / "1"
    version.mkdir(parents=True)
    onnx.save(digits(), version / "model.onnx")
    return version


def test_infer_command_prints_answer(call: Call, repository: Path, tmp_path: Path) -> None:
    """The answer is what the model computes."""
    np.save(tmp_path / "ones.npy", np.ones((2, 64), np.float32))
    result = call("infer", "digits", "--input", "pixels=@ones.npy", "--json")
    assert result.exit_code == Exit.DONE, result.stderr
    (output,) = json.loads(result.stdout)["outputs"]
    assert (output["name"], output["shape"]) == ("scores", [2, 10])
    assert output["data"] == [64.0 * number for number in range(10)] * 2


@pytest.mark.parametrize("name", ["answer.npz", "answer.json"])
def test_infer_command_writes_whole_outputs_to_file(
    call: Call, repository: Path, tmp_path: Path, name: str
) -> None:
    """The file holds arrays by name, or the protocol's JSON; nothing is cut, nothing printed."""
    np.save(tmp_path / "ones.npy", np.ones((200, 64), np.float32))
    result = call("infer", "digits", "--input", "pixels=@ones.npy", "--output", name)
    assert (result.exit_code, result.stdout) == (Exit.DONE, ""), result.stderr

    if name.endswith(".npz"):
        scores = np.load(tmp_path / name)["scores"]
    else:
        (output,) = json.loads((tmp_path / name).read_text())["outputs"]
        scores = np.array(output["data"]).reshape(output["shape"])
    assert scores.shape == (200, 10)
    assert scores[-1, 1] == 64.0


def test_infer_command_writes_outputs_of_text_to_npz(call: Call, tmp_path: Path) -> None:
    """In MessagePack, as in Triton, elements of BYTES are bytes; NumPy writes text."""
    add_version(tmp_path / "models", "texts", 1, identity("BYTES", ("batch",)))
    result = call("infer", "texts", "--input", 'x=["größer", "a"]', "--output", "answer.npz")
    assert result.exit_code == Exit.DONE, result.stderr
    assert np.load(tmp_path / "answer.npz")["y"].tolist() == ["größer", "a"]


def test_infer_command_prints_code_and_field_of_refusal(call: Call, repository: Path) -> None:
    """A request that does not fit the model ends with 1 and the service's own words."""
    result = call("infer", "digits", "--input", "pixels=[[0.5]]")
    assert (result.exit_code, result.stdout) == (Exit.FAILED, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("headrace: INVALID_TENSOR: inputs[0].shape")


def test_command_without_repository_is_wrong_configuration(call: Call) -> None:
    """Without models there is nothing to run, which is told before anything is asked."""
    result = call("infer", "digits", "--input", "pixels=[[0.5]]")
    assert result.exit_code == Exit.USAGE
    assert "models.repository" in result.stderr
