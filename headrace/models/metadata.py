"""Descriptions of models for clients: the protocol's metadata, and Triton's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict

from headrace.models.signature import TensorSpec
from headrace.models.version import ModelVersion

_PLATFORMS = {"onnx": "onnxruntime_onnx", "python": "headrace_python"}
_BACKENDS = {"onnx": "onnxruntime", "python": "python"}


class TensorMetadata(TypedDict):
    """An input or output; -1 stands for a free dimension."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model as the Open Inference Protocol describes it.

    `batching` is not the protocol's: batch limits, and what was found about batch safety.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    batching: dict[str, Any]


class ConfiguredTensor(TypedDict):
    """An input or output in Triton's configuration; `dims` have no batch dimension."""

    name: str
    data_type: str
    dims: list[int]
    label_filename: NotRequired[str]


class ModelConfiguration(TypedDict):
    """The part of Triton's `ModelConfig` that is described here."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]


def describe_model(version: ModelVersion, ready: Iterable[ModelVersion]) -> ModelMetadata:
    """Return the metadata of a model (Open Inference Protocol, REST) as one version has it.

    Args:
        version: describes the tensors.
        ready: the ready versions of all models.
    """
    found = version.verdict.to_dict() if version.verdict else {}
    return {
        "name": version.name,
        "versions": [each.version for each in ready if each.name == version.name],
        "platform": _PLATFORMS[version.config.backend],
        "inputs": [_describe_tensor(spec) for spec in version.signature.inputs],
        "outputs": [_describe_tensor(spec) for spec in version.signature.outputs],
        "batching": {"max_batch_size": version.max_batch_size, **found},
    }


def _describe_tensor(spec: TensorSpec) -> TensorMetadata:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def describe_config(version: ModelVersion) -> ModelConfiguration:
    """Return the configuration of a model in the form of Triton's `ModelConfig`, in part.

    As there, `max_batch_size` is 0 for a model without a batch dimension, and `dims` leave the
    batch dimension out. Source: `model_config.proto` of
    https://github.com/triton-inference-server/common.
    """
    signature, labels = version.signature, version.config.output_labels
    outputs = [_configure_tensor(spec, signature.batched) for spec in signature.outputs]
    for output in outputs:
        if output["name"] in labels:
            output["label_filename"] = labels[output["name"]]
    return {
        "name": version.name,
        "platform": _PLATFORMS[version.config.backend],
        "backend": _BACKENDS[version.config.backend],
        "max_batch_size": version.max_batch_size if signature.batched else 0,
        "input": [_configure_tensor(spec, signature.batched) for spec in signature.inputs],
        "output": outputs,
    }


def _configure_tensor(spec: TensorSpec, batched: bool) -> ConfiguredTensor:
    name = "STRING" if spec.datatype == "BYTES" else spec.datatype
    dims = list(spec.shape[1:] if batched else spec.shape)
    return {"name": spec.name, "data_type": f"TYPE_{name}", "dims": dims}
