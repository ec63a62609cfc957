"""`headrace models` on a repository of tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from headrace.cli.outcome import Exit
from tests.support.command_line import Call
from tests.support.models import (
    add_version,
    digits,
    embedding,
    falsely_batched,
    identity,
    make_model,
)

LEAKY = """
class Model:
    inputs = [("x", "FP32", (-1, 2))]
    outputs = [("y", "FP32", (-1, 2))]

    def run(self, inputs):
        return {"y": inputs["x"] - inputs["x"].max()}
"""


@pytest.fixture
def repository(tmp_path: Path, call: Call) -> Path:
    """The repository that the default settings name; the calls run beside it."""
    path = tmp_path / "models"
    path.mkdir()
    return path


def test_list_shows_versions_without_loading_them(repository: Path, call: Call) -> None:
    """The list has one line for each version."""
    add_version(repository, "digits", 1, digits())
    result = call("models", "list")
    assert (result.exit_code, result.stdout) == (Exit.DONE, "digits/1: found\n")


@pytest.mark.parametrize("command", ["list", "check", "verify"])
def test_empty_repository_is_noted_only_on_stderr(
    repository: Path, call: Call, command: str
) -> None:
    """The results are empty; a job that checks the wrong directory should not look successful."""
    result = call("models", command)
    assert (result.exit_code, result.stdout) == (Exit.DONE, "")
    assert "no models in models" in result.stderr


def test_list_is_written_as_json(repository: Path, call: Call) -> None:
    """A broken model is in the list, with its fault."""
    add_version(repository, "bad", 1, digits(), "colour = 1")
    [entry] = json.loads(call("models", "list", "--json").stdout)
    assert (entry["name"], entry["state"]) == ("bad", "failed")
    assert "colour" in entry["reason"]


@pytest.mark.parametrize("command", ["list", "check", "verify"])
def test_name_of_model_is_shown_with_escaped_control_characters(
    repository: Path, call: Call, command: str
) -> None:
    """A repository may come from others, and must not steer a terminal."""
    add_version(repository, "red\x1b[31m", 1, digits())
    assert call("models", command).stdout.startswith(r"red\x1b[31m")


def test_described_names_of_inputs_have_escaped_control_characters(
    repository: Path, call: Call
) -> None:
    """They are in the model's file."""
    model = identity("FP32")
    model.graph.input[0].name = model.graph.node[0].input[0] = "x\x1b[31m"
    add_version(repository, "red", 1, model)
    assert r"  input x\x1b[31m: FP32" in call("models", "describe", "red").stdout


def test_command_without_repository_is_wrong_configuration(call: Call) -> None:
    """The exit code is that of wrong settings."""
    result = call("models", "list")
    assert result.exit_code == Exit.USAGE
    assert "models.repository: models: No such file" in result.stderr


def test_describe_shows_inputs_with_their_dimensions(repository: Path, call: Call) -> None:
    """Free dimensions by the model's own names, and the settings that hold."""
    add_version(repository, "digits", 1, digits(), "max_batch_size = 4")
    result = call("models", "describe", "digits")
    assert result.exit_code == Exit.DONE
    assert "digits/1\n  input pixels: FP32 [batch, 64]\n" in result.stdout
    assert "  max_batch_size = 4\n" in result.stdout


def test_described_checksum_is_accepted_in_model_config(repository: Path, call: Call) -> None:
    """The line that `describe` shows is valid in `model.toml`."""
    add_version(repository, "digits", 1, digits())
    lines = call("models", "describe", "digits").stdout.splitlines()
    [line] = [line for line in lines if line.startswith("  checksum = ")]
    (repository / "digits" / "model.toml").write_text(line.strip(), encoding="utf-8")
    assert call("models", "check").exit_code == Exit.DONE


def test_describe_is_written_as_json(repository: Path, call: Call) -> None:
    """The same for programs."""
    add_version(repository, "digits", 1, digits())
    [entry] = json.loads(call("models", "describe", "digits", "--json").stdout)
    assert entry["outputs"][0]["shape"] == [-1, 10]


def test_describe_of_broken_model_fails_with_its_fault(repository: Path, call: Call) -> None:
    """A model that cannot be described fails with the reason."""
    add_version(repository, "bad", 1, digits(), "colour = 1")
    result = call("models", "describe", "bad")
    assert result.exit_code == Exit.FAILED
    assert "error: bad: bad/model.toml: colour" in result.stderr


@pytest.mark.parametrize("command", ["describe", "check"])
def test_unknown_model_is_wrong_usage(repository: Path, call: Call, command: str) -> None:
    """The message has the names that there are."""
    add_version(repository, "digits", 1, digits())
    result = call("models", command, "nope")
    assert result.exit_code == Exit.USAGE
    assert "model: expected one of digits, got nope" in result.stderr


def test_check_loads_and_runs_models(repository: Path, call: Call) -> None:
    """Sound ones are ready afterwards; a remark on batching is no fault."""
    add_version(repository, "digits", 1, digits())
    add_version(repository, "sum", 1, falsely_batched())
    result = call("models", "check")
    assert result.exit_code == Exit.DONE
    assert "digits/1: ready\n" in result.stdout
    assert (
        "sum/1: ready\n  batching is off: dimension 0 is not the batch: output y" in result.stdout
    )


def test_check_fails_when_one_model_cannot_serve(repository: Path, call: Call) -> None:
    """All are tried, and the exit code says that one is bad."""
    directory = add_version(repository, "bad", 1, embedding())
    (directory / "warmup").mkdir()
    np.savez(directory / "warmup" / "rows.npz", index=np.array([[90]]))
    add_version(repository, "digits", 1, digits())
    result = call("models", "check", "--json")
    assert result.exit_code == Exit.FAILED
    states = {entry["name"]: entry["state"] for entry in json.loads(result.stdout)}
    assert states == {"bad": "failed", "digits": "ready"}


def test_check_of_one_model_skips_others(repository: Path, call: Call) -> None:
    """A broken one beside it does not count."""
    add_version(repository, "bad", 1, digits(), "colour = 1")
    add_version(repository, "digits", 1, digits())
    result = call("models", "check", "digits")
    assert result.exit_code == Exit.DONE
    assert result.stdout.startswith("digits/1: ready\n")


def test_check_prints_measured_tolerance(repository: Path, call: Call) -> None:
    """For a sound model the line gives the largest difference and the inputs it was found with."""
    add_version(repository, "digits", 1, digits())
    assert "batchable: rows do not change each other; alone and batched differ by 0.0e+00" in (
        call("models", "check").stdout
    )


def test_check_reports_declared_batch_size_against_probe(repository: Path, call: Call) -> None:
    """A declared batch size holds, and what speaks against it is said."""
    directory = repository / "leaky" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(LEAKY, encoding="utf-8")
    toml = 'backend = "python"\nmax_batch_size = 8'
    (repository / "leaky" / "model.toml").write_text(toml, encoding="utf-8")
    result = call("models", "check")
    assert result.exit_code == Exit.DONE
    assert "max_batch_size is declared as 8; not batchable: rows leak: y of a row" in result.stdout


def huge() -> onnx.ModelProto:
    """`x` FP32 [batch, 2^33] to `y`, the same: a row is 32 GiB."""
    shape = ("batch", 2**33)
    return make_model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.FLOAT, shape)],
        [("y", TensorProto.FLOAT, shape)],
    )


def test_check_continues_after_model_too_large_to_probe(repository: Path, call: Call) -> None:
    """It can be served, as far as is known; the remark says why it was not tried out."""
    add_version(repository, "a", 1, huge())
    add_version(repository, "b", 1, digits())
    result = call("models", "check")
    assert result.exit_code == Exit.DONE
    assert "not warmed up: input x: expected a row of at most 67108864 bytes" in result.stdout
    assert "b/1: ready\n" in result.stdout


def test_check_explains_how_to_give_sample_rows(repository: Path, call: Call) -> None:
    """A model that fails with made-up rows is served, alone at first, and the remark says why."""
    add_version(repository, "model", 1, embedding(), "range.index = [90, 99]")
    result = call("models", "check")
    assert result.exit_code == Exit.DONE
    assert "batching is off: undecided: the model fails with made-up inputs" in result.stdout
    assert "put real rows into warmup/rows.npz of the version" in result.stdout


@pytest.mark.parametrize("command", ["list", "check"])
@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise KeyboardInterrupt"])
def test_check_reports_model_exiting_at_import_beside_others(
    repository: Path, call: Call, command: str, code: str
) -> None:
    """The command goes on, and ends with its own exit code."""
    directory = repository / "exits" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(code, encoding="utf-8")
    (repository / "exits" / "model.toml").write_text('backend = "python"', encoding="utf-8")
    add_version(repository, "good", 1, digits())
    result = call("models", command)
    assert result.exit_code == (Exit.FAILED if command == "check" else Exit.DONE)
    assert "exits/1: failed\n  exits/1/model.py: " in result.stdout
    assert "good/1: " in result.stdout
