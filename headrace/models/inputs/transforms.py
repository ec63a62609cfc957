"""Conversion of payloads that are neither MessagePack nor JSON to a model's inputs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.config import ModelConfig, TransformTable
from headrace.models.inputs.images import Images
from headrace.models.inputs.records import Records
from headrace.models.inputs.sounds import Sounds
from headrace.models.inputs.tokens import Tokens
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.signature import Signature, TensorSpec
from headrace.models.user_code import load_attribute, run_bounded, take_refusal
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import from_array


class Transform(Protocol):
    """Conversion of payloads to the inputs of requests."""

    def __call__(self, payload: bytes, content_type: str, /) -> list[InputTensor]:
        """Return the inputs that a payload becomes. Raises `Rejected`."""
        ...

    def is_slow(self, payload: bytes, content_type: str, inline_bytes: int, /) -> bool:
        """Return True if a payload must be converted on a thread: user code, or work that would
        hold the event loop. `inline_bytes` is the largest payload to be parsed on the loop.
        """
        ...


class TransformSource(NamedTuple):
    """All that a transform without a schema registry is made of; it can be pickled.

    Attributes:
        model_directory, config, signature, version_directory: see `make_transform`.
    """

    model_directory: Path
    config: ModelConfig
    signature: Signature
    version_directory: Path

    def make(self) -> Transform:
        """Return the transform. Raises `ConfigurationError`, see `make_transform`."""
        return make_transform(*self)


def make_transform(
    model_directory: Path,
    config: ModelConfig,
    signature: Signature,
    version_directory: Path | None = None,
    registry: SchemaRegistry | None = None,
) -> Transform:
    """Return the transform that a model's configuration names.

    - none: every payload is refused.
    - `text`: the payload, UTF-8, is the only element of the model's single `BYTES` input.
    - `octets`: the payload is that element, or the only row of the model's single `UINT8` input,
      [1, n].
    - `python`: `transform(payload: bytes, content_type: str) -> dict[str, np.ndarray]` in
      `<model>/transform.py`.
    - a table `record`: see `headrace.models.inputs.records`; its files are in the version's
      directory or beside it.
    - a table `image`, `tokens` or `sound`: see `headrace.models.inputs.images`, `tokens` and
      `sounds`.

    Raises:
        ConfigurationError: the transform does not fit the signature, or the file cannot be run.
    """
    if config.transform is None:
        return _Function(_refuse_payload)
    if isinstance(config.transform, TransformTable):
        directory = version_directory or model_directory
        return _make_table_transform(config.transform, signature, directory, registry)
    if config.transform == "python":
        return _load_python_transform(model_directory / "transform.py", config.max_load_s)
    spec = _find_single_input(config.transform, signature)
    if config.transform == "text":
        return _Function(lambda payload, _: [_make_text_input(spec, payload)])
    if spec.datatype == "BYTES":
        return _Function(lambda payload, _: [_make_element_input(spec, payload)])
    return _Function(lambda payload, _: [_make_octets_input(spec, payload)])


def _make_table_transform(
    table: TransformTable, signature: Signature, directory: Path, registry: SchemaRegistry | None
) -> Transform:
    if table.image is not None:
        return Images(table.image, signature)
    if table.tokens is not None:
        return Tokens(table.tokens, signature, directory)
    if table.sound is not None:
        return Sounds(table.sound, signature)
    assert table.record is not None
    return Records(table.record, signature, directory, registry)


class _Function(NamedTuple):
    """A transform that is one function: quick, or a user's, which may take any time."""

    convert: Callable[[bytes, str], list[InputTensor]]
    is_users: bool = False

    def __call__(self, payload: bytes, content_type: str, /) -> list[InputTensor]:
        return self.convert(payload, content_type)

    def is_slow(self, _payload: bytes, _content_type: str, _inline_bytes: int, /) -> bool:
        return self.is_users


def _find_single_input(transform: str, signature: Signature) -> TensorSpec:
    datatypes = ("BYTES",) if transform == "text" else ("BYTES", "UINT8")
    spec = signature.inputs[0]
    if len(signature.inputs) > 1 or spec.datatype not in datatypes:
        got = ", ".join(f"{each.name} {each.datatype}" for each in signature.inputs)
        raise ConfigurationError(
            f"transform: {transform}: expected a single input of {' or '.join(datatypes)}, "
            f"got {got}"
        )
    return spec


def _refuse_payload(payload: bytes, content_type: str) -> list[InputTensor]:
    raise Rejected.mismatch(
        Code.INVALID_REQUEST,
        "content-type",
        expected="application/msgpack or application/json, as the model has no transform",
        got=content_type or "none",
    )


def _make_text_input(spec: TensorSpec, payload: bytes) -> InputTensor:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            "payload",
            expected="UTF-8",
            got=f"byte {payload[error.start]:#04x} at {error.start}",
        ) from error
    return _make_element_input(spec, payload)


def _make_element_input(spec: TensorSpec, payload: bytes) -> InputTensor:
    data = memoryview(struct.pack("<I", len(payload)) + payload)
    return InputTensor(name=spec.name, datatype="BYTES", shape=[1] * len(spec.shape), data=data)


def _make_octets_input(spec: TensorSpec, payload: bytes) -> InputTensor:
    shape = [1, len(payload)]
    return InputTensor(name=spec.name, datatype="UINT8", shape=shape, data=memoryview(payload))


def _load_python_transform(path: Path, max_load_s: float) -> Transform:
    transform = run_bounded(lambda: load_attribute(path, "transform"), path, max_load_s)

    def apply(payload: bytes, content_type: str) -> list[InputTensor]:
        try:
            made = transform(payload, content_type)
        except Rejected as error:
            raise take_refusal(error, Code.INVALID_REQUEST) from error
        except Exception as error:  # a user's code may raise anything; it becomes the answer
            raise Rejected(Code.INVALID_REQUEST, f"transform: {describe_error(error)}") from error
        if not isinstance(made, Mapping):
            got = type(made).__name__
            raise Rejected.mismatch(
                Code.INVALID_REQUEST, "transform", expected="a dict of arrays", got=got
            )
        return [_make_input(name, value) for name, value in made.items()]

    return _Function(apply, is_users=True)


def _make_input(name: object, value: object) -> InputTensor:
    if not isinstance(name, str) or not isinstance(value, np.ndarray):
        raise Rejected.mismatch(
            Code.INVALID_REQUEST,
            "transform",
            expected="a dict of arrays by name",
            got=f"{name!r}: {type(value).__name__}",
        )
    tensor = from_array(name, value)
    # Copied, since the function may reuse its arrays while the request waits for its batch.
    return InputTensor(
        name=name,
        datatype=tensor.datatype,
        shape=list(tensor.shape),
        data=memoryview(bytes(tensor.data)),
    )
