"""A user's code behind the model: `postprocess` in `<model>/postprocess.py`.

    def postprocess(outputs, request):
        boxes, scores = decode(outputs["raw"])
        return {"boxes": boxes, "scores": scores}

It is called for each payload, with the outputs of that request alone. What it returns are arrays,
from which the answer is made as from the model's own outputs, or the bytes of the answer itself.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.backends.port import ModelFailed, check_outputs, check_shapes, check_texts
from headrace.models.config import PythonAnswer
from headrace.models.signature import Signature, make_signature
from headrace.models.user_code import load_attribute, run_bounded, take_refusal
from headrace.protocol.messages import InputTensor, OutputTensor, Tensor, whole_answer
from headrace.protocol.tensors import from_array, to_array

_LENGTH = struct.Struct("<I")


class PayloadRequest(NamedTuple):
    """The request whose outputs are postprocessed, as the user's function gets it.

    Attributes:
        payload: the request's value, without its content encoding.
        content_type: of the payload, in lower case, without parameters.
        answer_type: content type of the bytes to return, one of `content_types`; empty if arrays
            are to be returned.
    """

    payload: bytes
    content_type: str
    answer_type: str


class PackedOutputs(msgspec.Struct, array_like=True):
    """The arguments of a call, as a child process gets them.

    Attributes:
        rows: number of rows; None if dimension 0 of the outputs has no rows.
    """

    outputs: list[OutputTensor]
    payload: memoryview
    content_type: str
    answer_type: str
    rows: int | None


_decode_packed = msgspec.msgpack.Decoder(PackedOutputs).decode


class PostprocessSource(NamedTuple):
    """All that a `Postprocess` is made of; it can be pickled.

    Attributes:
        directory: of the model.
        returned: has the outputs that the function returns.
        max_load_s: time limit of the import.
    """

    directory: Path
    returned: Signature
    max_load_s: float

    def make(self) -> Postprocess:
        """Import the file. Raises `ConfigurationError`."""
        return Postprocess(self)


class Postprocess:
    """The function of a model, and the checks of what it returns.

    Args:
        source: of the function.

    Raises:
        ConfigurationError: the file cannot be imported, or has no such function.
    """

    def __init__(self, source: PostprocessSource) -> None:
        path = source.directory / "postprocess.py"
        self._returned = source.returned
        self._function: Any = run_bounded(
            lambda: load_attribute(path, "postprocess"), path, source.max_load_s
        )

    def __call__(self, packed: bytes, _content_type: str, /) -> list[InputTensor]:
        """Do the same as `apply`, with arguments that `pack` has packed."""
        call = _decode_packed(packed)
        outputs = {
            each.name: to_array(Tensor(each.name, each.datatype, tuple(each.shape), each.data))
            for each in call.outputs
        }
        request = PayloadRequest(bytes(call.payload), call.content_type, call.answer_type)
        return self.apply(outputs, request, call.rows)

    def apply(
        self, outputs: Mapping[str, NDArray[Any]], request: PayloadRequest, rows: int | None
    ) -> list[InputTensor]:
        """Return the outputs that the function makes of those of one request; their data is copied.

        Args:
            outputs: of the request, by name; they become read-only.
            request: the request.
            rows: number of rows of the request; None if dimension 0 has no rows.

        Raises:
            Rejected: `MODEL_FAILED`: the function raised, or has returned something else than it
                should; or what it raised itself.
        """
        for array in outputs.values():
            array.flags.writeable = False  # as in a child process, where it is a view of bytes
        try:
            returned = self._function(dict(outputs), request)
        except Rejected as error:
            raise take_refusal(error, Code.MODEL_FAILED) from error
        except Exception as error:  # a user's code may raise anything; it becomes the answer
            raise Rejected(Code.MODEL_FAILED, f"postprocess: {describe_error(error)}") from error
        if request.answer_type:
            return [_take_answer(returned, request.answer_type)]
        return self._take_arrays(returned, rows)

    def _take_arrays(self, returned: object, rows: int | None) -> list[InputTensor]:
        if not isinstance(returned, Mapping) or not all(
            isinstance(name, str) and isinstance(array, np.ndarray)
            for name, array in returned.items()
        ):
            raise _mismatch("a dict of arrays by name", returned)
        signature = self._returned._replace(batched=rows is not None)
        try:
            check_outputs(signature, returned, rows or 0)
            check_shapes(signature, returned)
            check_texts(signature, returned)
        except ModelFailed as error:
            raise Rejected(Code.MODEL_FAILED, f"postprocess: {error}") from error
        tensors = [from_array(spec.name, returned[spec.name]) for spec in signature.outputs]
        # Copied, since the function may reuse its arrays before these are written.
        return [_as_input(name, datatype, shape, data) for name, datatype, shape, data in tensors]


def _take_answer(returned: object, content_type: str) -> InputTensor:
    if not isinstance(returned, bytes | bytearray | memoryview):
        raise _mismatch(f"bytes of {content_type}", returned)
    content = bytes(returned)
    return _as_input(*whole_answer(content_type)[0], _LENGTH.pack(len(content)) + content)


def _as_input(
    name: str, datatype: str, shape: tuple[int, ...], data: bytes | memoryview
) -> InputTensor:
    content = memoryview(bytes(data))
    return InputTensor(name=name, datatype=datatype, shape=list(shape), data=content)


def _mismatch(expected: str, returned: object) -> Rejected:
    got = type(returned).__name__
    return Rejected.mismatch(Code.MODEL_FAILED, "postprocess", expected=expected, got=got)


def pack(outputs: tuple[Tensor, ...], request: PayloadRequest, rows: int | None) -> bytes:
    """Pack the arguments of `Postprocess.apply` for a child process."""
    return msgspec.msgpack.encode(
        PackedOutputs(
            [
                OutputTensor(name=name, datatype=datatype, shape=list(shape), data=memoryview(data))
                for name, datatype, shape, data in outputs
            ],
            memoryview(request.payload),
            request.content_type,
            request.answer_type,
            rows,
        )
    )


def plan_returned(signature: Signature, config: PythonAnswer | None) -> Signature:
    """Return the signature with the outputs from which answers to payloads are made.

    Args:
        signature: of the version.
        config: of its postprocess; None if it has none.

    Raises:
        ConfigurationError: an output has no rows, though those of the model have.
    """
    if config is None or not config.outputs:
        return signature
    returned = make_signature(
        signature.inputs,
        [each.spec() for each in config.outputs],
        utf8=signature.utf8,
        precision=signature.precision,
    )
    if signature.batched and not returned.batched:
        raise ConfigurationError(
            f"answer.python.outputs: expected -1 as the first dimension of each, as the model has "
            f"rows: {returned.unbatched_reason}"
        )
    return returned._replace(batched=signature.batched)
