"""`model.toml`: what it may say, and how its faults are told."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace.config import Settings, make_settings
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, make_model_config, read_model_config

CUDA = {"experimental_cuda": True}
SETTINGS = make_settings({"batching": {"max_batch_size": 16}, "executor": {"instances": 2}})


def faults_of(values: dict[str, Any]) -> list[str]:
    """The lines with which values are refused."""
    with pytest.raises(ConfigurationError) as caught:
        make_model_config(values, SETTINGS)
    return str(caught.value).splitlines()


def test_missing_model_config_uses_settings(tmp_path: Path) -> None:
    """Without a `model.toml` the settings' defaults hold."""
    config = read_model_config(tmp_path / "model.toml", SETTINGS)
    assert (config.max_batch_size, config.instances, config.backend) == (16, 2, "onnx")


def test_model_config_overrides_settings(tmp_path: Path) -> None:
    """Values of the file hold for its model; the settings give all others."""
    path = tmp_path / "model.toml"
    path.write_text("max_batch_size = 4\nrange.input_ids = [0, 30521]\n", encoding="utf-8")
    config = read_model_config(path, SETTINGS)
    assert (config.max_batch_size, config.instances) == (4, 2)
    assert config.range == {"input_ids": (0, 30521)}


def test_model_config_of_invalid_toml_is_refused(tmp_path: Path) -> None:
    """The message has the path and the place."""
    path = tmp_path / "model.toml"
    path.write_text("max_batch_size =", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"model\.toml: Invalid value \(at end"):
        read_model_config(path, SETTINGS)


def test_model_config_faults_are_reported_together() -> None:
    """One line for each fault, each with its key."""
    lines = faults_of({"max_batch_size": 0, "colour": "red", "device": "gpu"})
    assert len(lines) == 3
    assert "model.toml: colour: there is no such key" in lines


def test_mistyped_key_gets_name_that_was_meant() -> None:
    """In a table nothing is proposed, since its keys may be those of several forms."""
    lines = faults_of({"max_batch": 8, "transform": {"tokns": {}}})
    assert "model.toml: max_batch: there is no such key; did you mean `max_batch_size`?" in lines
    assert "model.toml: transform.tokns: there is no such key" in lines


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"range": {"x": [3, 1]}}, "range.x: expected [lowest, highest], got [3, 1]"),
        (
            {"provider_options": {"CUDAExecutionProvider": {"gpu_mem_limit": 1}}},
            "provider_options.CUDAExecutionProvider: expected one of the providers in use, "
            "CPUExecutionProvider",
        ),
        (
            {"providers": ["CUDAExecutionProvider"]},
            "providers: CUDAExecutionProvider first does not fit device cpu",
        ),
        (
            {"providers": ["CPUExecutionProvider"], "device": "cuda:0", **CUDA},
            "providers: CPUExecutionProvider first does not fit device cuda:0",
        ),
        (
            {"backend": "python", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]},
            "inputs, outputs: expected both or neither",
        ),
        (
            {"device": "cuda:0"},
            "device cuda:0: expected experimental_cuda = true beside it, here or in [executor], "
            "since the code for GPUs is experimental; got false",
        ),
        (
            {"device": "cuda:0", **CUDA, "providers": ["TensorrtExecutionProvider"], "ring": True},
            "ring: expected false with TensorrtExecutionProvider, whose runs go by no stream "
            "of ours",
        ),
        (
            {"device": "cuda:0", **CUDA, "cuda_graphs": True},
            "cuda_graphs: expected ring = true and CUDAExecutionProvider alone beside it, got "
            "ring = false and CUDAExecutionProvider",
        ),
    ],
    ids=[
        *("range", "options", "providers", "device", "half a signature", "experimental"),
        *("ring", "graphs"),
    ],
)
def test_contradicting_model_config_values_are_refused(values: dict[str, Any], fault: str) -> None:
    """Values that are valid alone may contradict each other."""
    assert faults_of(values) == [f"model.toml: {fault}"]


FLOAT = "expected a finite number, got"


@pytest.mark.parametrize(
    ("toml", "fault"),
    [
        ("max_queue_delay_ms = inf", f"max_queue_delay_ms: {FLOAT} inf"),
        ("max_execution_s = inf", f"max_execution_s: {FLOAT} inf"),
        ("max_load_s = nan", f"max_load_s: {FLOAT} nan"),
        ("max_load_s = 1e300", "max_load_s: expected at most 86400, got 1e+300"),
        ("instances = 3000", "instances: expected at most 256, got 3000"),
        ("instances = true", "instances: expected a number, got true"),
        (
            "max_batch_size = 1_000_000_000",
            "max_batch_size: expected at most 1000000, got 10000000",
        ),
        ("max_batch_size = 0", "max_batch_size: expected at least 1, got 0"),
        ("range.x = [-inf, 3]", f"range.x.0: {FLOAT} -inf"),
        ("pad.x = nan", f"pad.x: {FLOAT} nan"),
        ('preprocess.x = {datatype = "UINT8", scale = nan}', f"preprocess.x.scale.0: {FLOAT} nan"),
        ("batch_tolerance = nan", f"batch_tolerance: {FLOAT} nan"),
        (
            "instances = 200\nintra_op_threads = 200",
            "instances: expected at most 1024 threads in all of them, got 40000",
        ),
        (
            "provider_options.CPUExecutionProvider = {x = inf}",
            f"provider_options.CPUExecutionProvider.x: {FLOAT} inf",
        ),
    ],
)
def test_model_config_number_out_of_bounds_is_refused(toml: str, fault: str) -> None:
    """With what is expected and what the file has."""
    assert any(line.startswith(f"model.toml: {fault}") for line in faults_of(tomllib.loads(toml)))


@pytest.mark.parametrize("model", [ModelConfig, Settings])
def test_model_config_numbers_have_bounds(model: type[BaseModel]) -> None:
    """Below and above: a number without a bound ends a process, or fills its memory."""
    schema = model.model_json_schema()
    # Options are ONNX Runtime's own, and are only required to be finite.
    schema["properties"].pop("provider_options", None)
    assert [path for path, number in numbers_in(schema) if not is_bounded(number)] == []


def numbers_in(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a JSON schema that are numbers, with where they are."""
    if isinstance(schema, list):
        for place, part in enumerate(schema):
            yield from numbers_in(part, f"{path}/{place}")
    elif isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, part in schema.items():
            yield from numbers_in(part, f"{path}/{key}")


def is_bounded(number: dict[str, Any]) -> bool:
    """Whether a number of a JSON schema has a minimum and a maximum."""
    return bool(number.keys() & {"minimum", "exclusiveMinimum"}) and "maximum" in number


def test_unknown_datatype_is_refused() -> None:
    """A declared tensor has one of the protocol's datatypes."""
    half = [{"name": "x", "datatype": "float", "shape": [-1]}]
    lines = faults_of({"backend": "python", "inputs": half, "outputs": half})
    assert lines[0].startswith("model.toml: inputs.0: datatype: expected one of BOOL,")


@pytest.mark.parametrize(
    ("values", "providers"),
    [
        ({}, ("CPUExecutionProvider",)),
        ({"device": "cuda:1", **CUDA}, ("CUDAExecutionProvider",)),
        (
            {
                "device": "cuda:0",
                **CUDA,
                "providers": ["TensorrtExecutionProvider", "CUDAExecutionProvider"],
            },
            ("TensorrtExecutionProvider", "CUDAExecutionProvider"),
        ),
    ],
    ids=["cpu", "cuda", "tensorrt"],
)
def test_providers_follow_device_unless_named(
    values: dict[str, Any], providers: tuple[str, ...]
) -> None:
    """`device` is enough; `providers` says more."""
    assert make_model_config(values, SETTINGS).execution_providers == providers


def test_model_config_is_frozen() -> None:
    """Nobody changes a model's configuration while it serves."""
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig().instances = 3  # type: ignore[misc]  # that it cannot be set is the test


# --- overrides ----------------------------------------------------------------------------------


def test_overrides_go_over_file_and_count_as_declared(tmp_path: Path) -> None:
    """Keys that they leave out are the file's."""
    path = tmp_path / "model.toml"
    path.write_text("max_batch_size = 4\nprobe = false\n", encoding="utf-8")
    config = read_model_config(path, SETTINGS, {"max_batch_size": 8})
    assert (config.max_batch_size, config.probe) == (8, False)
    assert config.declares("max_batch_size")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"max_batch": 8}, "overrides: max_batch: "),
        ({"max_batch_size": 0}, "overrides: max_batch_size: "),
        ({"mask": "x", "sequence_buckets": [8], "pad": {"x": 1}}, "toml with overrides: pad.x: "),
    ],
    ids=["unknown key", "bad value", "several values"],
)
def test_fault_of_override_is_told_from_one_of_file(
    tmp_path: Path, overrides: dict[str, object], fault: str
) -> None:
    """The file need not be looked at where the override is wrong."""
    with pytest.raises(ConfigurationError) as refused:
        read_model_config(tmp_path / "model.toml", SETTINGS, overrides)
    assert fault in str(refused.value)
