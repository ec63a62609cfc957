"""`config.pbtxt`, the configuration of a model in a repository of Triton, as one of Headrace.

A field without a counterpart is refused by name, so that no model is served in another way than
its configuration says; fields that cannot change an answer are accepted and have no effect
(docs/models.md lists both). Source: Triton's `model_config.proto` and its page "Model
Configuration".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from headrace.models.triton_config_pb2 import (
    DataType,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelVersionPolicy,
    ModelWarmup,
)

MODEL_FILE: Final = "model.onnx"

_PLATFORM, _BACKEND = "onnxruntime_onnx", "onnxruntime"
_INTRA_OP_THREADS: Final = "intra_op_thread_count"
_MESSAGE_WITHOUT_FIELD: Final = re.compile(r'(\d+):\d+ : Message type "[\w.]*" (has no field .*)\.')

_Values: TypeAlias = dict[str, Any]
_Reader: TypeAlias = Callable[[Any], Iterator[tuple[str, Any]]]
"""Yields keys of `model.toml` for the value of a field; raises `ValueError`."""


def parse_triton_config(text: str, model: str = "") -> Mapping[str, Any]:
    """Return the values of a `config.pbtxt` under the keys of `model.toml`.

    Args:
        text: of the file.
        model: name of the model's directory; empty if it is not known.

    Raises:
        ValueError: with each fault on a line of its own, by field.
    """
    try:
        config = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        found = _MESSAGE_WITHOUT_FIELD.match(str(error))
        raise ValueError(f"line {found[1]}: {found[2]}" if found else str(error)) from error
    # 0 says that the model has no batch dimension: each request is run alone, whatever its shape.
    return {**_read_config(config, model), "max_batch_size": config.max_batch_size or 1}


def parse_overrides(text: str, model: str) -> Mapping[str, Any]:
    """Return the values of a `config.pbtxt` in JSON under the keys of `model.toml`.

    Those of fields that it leaves out are not among them: they are those of the model's own file.

    Args:
        text: the JSON, as Triton's clients send it with a load.
        model: name of the model.

    Raises:
        ValueError: with each fault on a line of its own, by field.
    """
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("expected an object")  # noqa: TRY004 - callers expect one kind
        config = json_format.ParseDict(given, ModelConfig())
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON: {error}") from error
    except json_format.ParseError as error:
        raise ValueError(str(error).replace(f"{ModelConfig.DESCRIPTOR.full_name}", "")) from error
    except RecursionError as error:
        raise ValueError("expected JSON, got too many levels") from error
    values = {key: value for key, value in _read_config(config, model).items() if value != []}
    if {"max_batch_size", "maxBatchSize"} & given.keys():
        values["max_batch_size"] = config.max_batch_size or 1
    return values


def _read_config(config: ModelConfig, model: str) -> _Values:
    """Return the values of a configuration under the keys of `model.toml`.

    Raises:
        ValueError: with each fault on a line of its own, by field.
    """
    values: _Values = {}
    faults = [] if not model or config.name in ("", model) else [_wrong("name", model, config.name)]
    for field, value in config.ListFields():
        read = _READERS.get(field.name)
        try:
            if read is None:
                raise ValueError(f"{field.name}: has no counterpart")
            values.update(read(value))
        except ValueError as error:
            faults.append(str(error))
    try:
        values |= {
            "inputs": [_read_tensor("input", each, config.max_batch_size) for each in config.input],
            "outputs": [
                _read_tensor("output", each, config.max_batch_size) for each in config.output
            ],
        }
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return values


def _wrong(field: str, expected: object, got: object) -> str:
    return f"{field}: expected {expected}, got {got}"


def _nothing(_: Any) -> Iterator[tuple[str, Any]]:
    """Accept a field that changes no answer, or that is read elsewhere."""
    yield from ()


def _only(field: str, *expected: object) -> _Reader:
    def read(value: Any) -> Iterator[tuple[str, Any]]:
        if value not in expected:
            raise ValueError(_wrong(field, " or ".join(map(str, expected)), value))
        yield from ()

    return read


def _require_defaults(where: str, message: Message, *known: str) -> None:
    """Refuse the fields of a message that are set and have no counterpart."""
    for field, _ in message.ListFields():
        if field.name not in known:
            raise ValueError(f"{where}.{field.name}: has no counterpart")


# --- inputs and outputs ------------------------------------------------------------------------


def _read_tensor(kind: str, tensor: ModelInput | ModelOutput, max_batch_size: int) -> _Values:
    """Return a tensor as `inputs` and `outputs` of `model.toml` have it, with its batch dimension.

    Raises:
        ValueError: one of its fields has no counterpart, or it has no datatype.
    """
    where = f"{kind} {tensor.name!r}"
    _require_defaults(where, tensor, "name", "data_type", "format", "dims", "label_filename")
    name = DataType.Name(tensor.data_type).removeprefix("TYPE_")
    if name == "INVALID":
        raise ValueError(f"{where}: data_type: expected one, got none")
    batch = [-1] if max_batch_size else []
    return {
        "name": tensor.name,
        "datatype": "BYTES" if name == "STRING" else name,
        "shape": [*batch, *tensor.dims],
    }


def _read_inputs(inputs: list[ModelInput]) -> Iterator[tuple[str, Any]]:
    for each in inputs:
        if each.format != ModelInput.FORMAT_NONE:
            expected = "FORMAT_NONE, with [preprocess] in model.toml for images"
            got = ModelInput.Format.Name(each.format)
            raise ValueError(_wrong(f"input {each.name!r}: format", expected, got))
    yield from ()


def _read_outputs(outputs: list[ModelOutput]) -> Iterator[tuple[str, Any]]:
    labels = {each.name: each.label_filename for each in outputs if each.label_filename}
    if labels:
        yield "output_labels", labels


# --- instances, versions, batching -------------------------------------------------------------


def _read_instance_groups(groups: list[ModelInstanceGroup]) -> Iterator[tuple[str, Any]]:
    kinds = {ModelInstanceGroup.Kind.Name(each.kind) for each in groups}
    if len(kinds) > 1:
        raise ValueError(_wrong("instance_group: kind", "the same in all", ", ".join(kinds)))
    for each in groups:
        _require_defaults("instance_group", each, "name", "count", "gpus", "kind")
    (kind,) = kinds
    gpus = sorted({gpu for each in groups for gpu in each.gpus})
    if kind == "KIND_MODEL":
        raise ValueError(_wrong("instance_group: kind", "KIND_AUTO, KIND_CPU or KIND_GPU", kind))
    if len(gpus) > 1:
        raise ValueError(_wrong("instance_group: gpus", "at most one", gpus))
    if kind == "KIND_GPU" or gpus:
        yield "device", f"cuda:{gpus[0] if gpus else 0}"
    yield "instances", sum(each.count or 1 for each in groups)


def _read_version_policy(policy: ModelVersionPolicy) -> Iterator[tuple[str, Any]]:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        yield "versions", "all"
    elif choice == "specific":
        yield "versions", list(policy.specific.versions)
    else:
        count = policy.latest.num_versions or 1
        yield "versions", "latest" if count == 1 else f"latest:{count}"


def _read_dynamic_batching(batching: ModelDynamicBatching) -> Iterator[tuple[str, Any]]:
    # Sizes are chosen by measured run times. Answers of one partition or key keep their order only
    # by `delivery.order`, which is a setting of the deployment.
    known = ("preferred_batch_size", "max_queue_delay_microseconds")
    _require_defaults("dynamic_batching", batching, *known)
    for size in batching.preferred_batch_size:
        if size < 1:
            raise ValueError(_wrong("dynamic_batching.preferred_batch_size", "1 or more", size))
    yield "max_queue_delay_ms", batching.max_queue_delay_microseconds / 1000


# --- the rest ----------------------------------------------------------------------------------


def _read_optimization(policy: ModelOptimizationPolicy) -> Iterator[tuple[str, Any]]:
    known = ("input_pinned_memory", "output_pinned_memory", "gather_kernel_buffer_threshold")
    _require_defaults("optimization", policy, *known)
    yield from ()


def _read_parameters(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(parameters.items()):
        if name != _INTRA_OP_THREADS:
            raise ValueError(f"parameters {name!r}: has no counterpart")
        text = value.string_value
        if not re.fullmatch(r"[0-9]{1,6}", text):
            raise ValueError(_wrong(f"parameters {name!r}", "a number of threads", repr(text)))
        yield "intra_op_threads", int(text)


def _read_warm_up(samples: list[ModelWarmup]) -> Iterator[tuple[str, Any]]:
    for sample in samples:
        for name, given in sorted(sample.inputs.items()):
            if given.WhichOneof("input_data_type") == "input_data_file":
                expected = "zero_data or random_data, or the inputs in VERSION/warmup/*.npz"
                raise ValueError(
                    _wrong(
                        f"model_warmup {sample.name!r}: {name}",
                        expected,
                        f"input_data_file {given.input_data_file!r}",
                    )
                )
    yield from ()


_READERS: Final[Mapping[str, _Reader]] = {
    "name": _nothing,
    "platform": _only("platform", _PLATFORM),
    "backend": _only("backend", _BACKEND),
    "default_model_filename": _only("default_model_filename", MODEL_FILE),
    "max_batch_size": _nothing,
    "input": _read_inputs,
    "output": _read_outputs,
    "instance_group": _read_instance_groups,
    "version_policy": _read_version_policy,
    "dynamic_batching": _read_dynamic_batching,
    "optimization": _read_optimization,
    "parameters": _read_parameters,
    "model_warmup": _read_warm_up,
    "metric_tags": _nothing,
    "response_cache": lambda cache: _only("response_cache.enable", False)(cache.enable),
    "model_transaction_policy": lambda policy: _only("model_transaction_policy.decoupled", False)(
        policy.decoupled
    ),
}
"""Readers of the fields of Triton's `ModelConfig`, by field."""
