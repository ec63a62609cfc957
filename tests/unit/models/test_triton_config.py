"""`config.pbtxt` as a configuration of Headrace: what is taken over, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models import triton_config_pb2
from headrace.models.config import ModelConfig, find_model_config, read_model_config
from headrace.models.repository import Repository, read_signature
from headrace.models.triton_config import parse_overrides, parse_triton_config
from tests.support.models import add_version, digits

OURS = triton_config_pb2.DESCRIPTOR
TRITONS = model_config_pb2.DESCRIPTOR.message_types_by_name
PIXELS = 'input [{ name: "pixels" data_type: TYPE_FP32 dims: [64] }]\n'
SCORES = 'output [{ name: "scores" data_type: TYPE_FP32 dims: [10] }]\n'


def read(directory: Path, text: str) -> ModelConfig:
    """Write `config.pbtxt` for `digits`, and read it as a process does."""
    add_version(directory, "digits", 1, digits())
    file = directory / "digits" / "config.pbtxt"
    file.write_text(text, encoding="utf-8")
    return read_model_config(find_model_config(file.parent), Settings())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('platform: "onnxruntime_onnx" max_batch_size: 8', {"max_batch_size": 8}),
        ('backend: "onnxruntime"', {"max_batch_size": 1}),
        ('name: "digits" default_model_filename: "model.onnx"', {}),
        ("instance_group [{ count: 2 kind: KIND_CPU }]", {"instances": 2, "device": "cpu"}),
        ("instance_group [{ count: 2 }, { count: 1 }]", {"instances": 3}),
        ("version_policy: { all {} }", {"versions": "all"}),
        ("version_policy: { latest { num_versions: 1 } }", {"versions": "latest"}),
        ("version_policy: { latest { num_versions: 3 } }", {"versions": "latest:3"}),
        ("version_policy: { specific { versions: [3, 1] } }", {"versions": (3, 1)}),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [4] "
            "max_queue_delay_microseconds: 1500 }",
            {"max_queue_delay_ms": 1.5},
        ),
        (
            'parameters { key: "intra_op_thread_count" value: { string_value: "3" } }',
            {"intra_op_threads": 3},
        ),
        ("optimization { input_pinned_memory { enable: true } }", {}),
        ("response_cache { enable: false } model_transaction_policy { decoupled: false }", {}),
        (
            'model_warmup [{ name: "zeros" batch_size: 1 inputs { key: "pixels" value: '
            "{ data_type: TYPE_FP32 dims: [64] zero_data: true } } }]",
            {},
        ),
        ("# a comment", {"max_batch_size": 1}),
    ],
)
def test_field_becomes_key_of_configuration(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    """A field that cannot change an answer becomes no key, and has no effect."""
    config = read(tmp_path, text)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('name: "letters"', "name: expected digits, got letters"),
        ('platform: "tensorrt_plan"', "platform: expected onnxruntime_onnx, got tensorrt_plan"),
        ('backend: "python"', "backend: expected onnxruntime, got python"),
        ('default_model_filename: "net.onnx"', "default_model_filename: expected model.onnx"),
        ("max_batch_size: -1", "max_batch_size"),
        ('input [{ name: "x" dims: [1] }]', "input 'x': data_type: expected one, got none"),
        (PIXELS.replace("dims", "optional: true dims"), "input 'pixels'.optional: has no"),
        (PIXELS.replace("dims", "format: FORMAT_NHWC dims"), "format: expected FORMAT_NONE"),
        (PIXELS.replace("dims", "reshape { shape: [8, 8] } dims"), "input 'pixels'.reshape"),
        (SCORES.replace("dims", "is_shape_tensor: true dims"), "'scores'.is_shape_tensor"),
        ("instance_group [{ kind: KIND_MODEL }]", "instance_group: kind: expected"),
        ("instance_group [{ kind: KIND_GPU }, { kind: KIND_CPU }]", "the same in all"),
        ("instance_group [{ kind: KIND_GPU gpus: [0, 1] }]", "gpus: expected at most one"),
        ("instance_group [{ kind: KIND_GPU }]", "experimental_cuda"),
        ("instance_group [{ passive: true }]", "instance_group.passive: has no counterpart"),
        ("dynamic_batching { preserve_ordering: true }", "dynamic_batching.preserve_ordering"),
        ("dynamic_batching { priority_levels: 2 }", "dynamic_batching.priority_levels"),
        ("sequence_batching { max_sequence_idle_microseconds: 1 }", "sequence_batching: has no"),
        ("sequence_batching { }", "sequence_batching: has no counterpart"),
        ('ensemble_scheduling { step [{ model_name: "a" }] }', "ensemble_scheduling: has no"),
        ("response_cache { enable: true }", "response_cache.enable: expected False, got True"),
        ("model_transaction_policy { decoupled: true }", "decoupled: expected False, got True"),
        ("optimization { graph { level: 1 } }", "optimization.graph: has no counterpart"),
        ('parameters { key: "execution_mode" value: { string_value: "1" } }', "'execution_mode'"),
        (
            'parameters { key: "intra_op_thread_count" value: { string_value: "two" } }',
            "'intra_op_thread_count': expected a number of threads, got 'two'",
        ),
        (
            'model_warmup [{ name: "one" inputs { key: "pixels" value: { data_type: TYPE_FP32 '
            'dims: [64] input_data_file: "raw" } } }]',
            "model_warmup 'one': pixels: expected zero_data or random_data",
        ),
        ("version_policy: { specific { versions: [] } }", "versions"),
        ("colour: 1", 'line 1: has no field named "colour"'),
        ("max_batch_size: eight", "config.pbtxt: 1:17"),
        ("input [{", "config.pbtxt: 1:"),
        ("\ufffd", "config.pbtxt: 1:1"),
    ],
)
def test_field_without_counterpart_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    """The model is not served in another way than its configuration says."""
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)
    assert "config.pbtxt" in str(caught.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    """Each on a line of its own, with the file."""
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, 'backend: "python" instance_group [{ kind: KIND_MODEL }]')
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{tmp_path / 'digits' / 'config.pbtxt'}: ") for line in lines)


def test_own_configuration_counts_before_tritons(tmp_path: Path) -> None:
    """A repository may serve both."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "model.toml").write_text("max_batch_size = 5")
    (tmp_path / "digits" / "config.pbtxt").write_text("max_batch_size: 6")
    found = find_model_config(tmp_path / "digits")
    assert read_model_config(found, Settings()).max_batch_size == 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_batch_size: 8\n" + PIXELS.replace("64", "63"), "pixels: expected FP32 [-1, 64]"),
        (PIXELS, "pixels: expected FP32 [-1, 64], as the model has, got FP32 [64]"),
        ("max_batch_size: 8\n" + PIXELS.replace("FP32", "FP16"), "got FP16 [-1, 64]"),
        ("max_batch_size: 8\n" + PIXELS.replace("pixels", "image"), "missing pixels"),
        ("max_batch_size: 8\n" + SCORES.replace("scores", "probabilities"), "got probabilities"),
    ],
)
def test_tensors_that_model_does_not_have_are_refused(tmp_path: Path, text: str, told: str) -> None:
    """Those of the configuration are compared with those of the ONNX file."""
    read(tmp_path, text)
    (model,) = Repository(tmp_path, Settings()).scan()
    assert model.config is not None
    with pytest.raises(ConfigurationError) as caught:
        read_signature(model.versions[0], model.config)
    assert told in str(caught.value)


def test_free_dimensions_of_either_side_agree(tmp_path: Path) -> None:
    """Triton compares free dimensions in the same way."""
    read(tmp_path, "max_batch_size: 8\n" + PIXELS.replace("64", "-1") + SCORES)
    (model,) = Repository(tmp_path, Settings()).scan()
    assert model.config is not None
    assert read_signature(model.versions[0], model.config).batched


def test_parsing_knows_no_directory_where_none_is_given() -> None:
    """The name in the file is taken as it is."""
    assert parse_triton_config('name: "any"')["max_batch_size"] == 1


@pytest.mark.parametrize("name", OURS.message_types_by_name)
def test_messages_have_names_numbers_and_types_of_triton(name: str) -> None:
    """In nested messages as well; fields that only newer releases have may be missing."""

    def compare(ours: Descriptor, theirs: Descriptor) -> None:
        known = {number: described(field) for number, field in theirs.fields_by_number.items()}
        for number, field in ours.fields_by_number.items():
            assert described(field) == known[number]
        for nested in ours.nested_types:
            compare(nested, theirs.nested_types_by_name[nested.name])

    compare(OURS.message_types_by_name[name], TRITONS[name])


def described(field: FieldDescriptor) -> tuple[Any, ...]:
    """Return the properties on which a field's text depends."""
    kind = field.message_type or field.enum_type
    return field.name, field.type, field.is_repeated, kind.name if kind else None


# --- the JSON of a load -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        ('{"name": "digits", "backend": "onnxruntime"}', {}),
        ('{"max_batch_size": 8}', {"max_batch_size": 8}),
        ('{"maxBatchSize": 0}', {"max_batch_size": 1}),
        ('{"version_policy": {"specific": {"versions": [2, 1]}}}', {"versions": [2, 1]}),
        ('{"instanceGroup": [{"count": 2, "kind": "KIND_CPU"}]}', {"instances": 2}),
        (
            '{"max_batch_size": 8, "input": [{"name": "x", "data_type": "TYPE_FP32", '
            '"dims": [2]}]}',
            {
                "max_batch_size": 8,
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            },
        ),
    ],
)
def test_json_of_load_has_only_keys_of_its_fields(text: str, expected: dict[str, Any]) -> None:
    """The others are those of the model's own file."""
    assert parse_overrides(text, "digits") == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected JSON: Expecting value"),
        ("[1]", "expected an object"),
        ('{"max_batch": 8}', 'no field named "max_batch"'),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"name": "other"}', "name: expected digits, got other"),
        ('{"sequence_batching": {}, "runtime": "x"}', "sequence_batching: has no counterpart"),
        ('{"runtime": "x", "backend": "python"}', "backend: expected onnxruntime, got python"),
        ("[" * 100_000, "too many levels"),
        (
            '{"dynamic_batching": {"preferred_batch_size": [4, -1]}}',
            "dynamic_batching.preferred_batch_size: expected 1 or more, got -1",
        ),
        (
            '{"dynamic_batching": {"preferred_batch_size": [0]}}',
            "dynamic_batching.preferred_batch_size: expected 1 or more, got 0",
        ),
    ],
)
def test_json_of_load_is_refused_by_field(text: str, told: str) -> None:
    """Nothing of it is taken over then."""
    with pytest.raises(ValueError, match=re.escape(told)):
        parse_overrides(text, "digits")
