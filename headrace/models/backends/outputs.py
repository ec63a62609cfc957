"""Check of a run's outputs against the signature, before they are split into answers."""

from __future__ import annotations

from headrace.errors import Rejected
from headrace.models.backends.port import Arrays, ModelFailed
from headrace.models.signature import Signature
from headrace.protocol.tensors import datatype_of


class RowsMismatch(ModelFailed):
    """An output does not have one row for each row of the run."""


def check_outputs(signature: Signature, outputs: Arrays, rows: int) -> None:
    """Check that every output is present, with its datatype and one row for each row of the run.

    Raises:
        RowsMismatch: an output has another number of rows.
        ModelFailed: any other fault; names the output, the expected value and the actual one.
    """
    for spec in signature.outputs:
        array = outputs.get(spec.name)
        if array is None:
            got = ", ".join(outputs) or "none"
            raise ModelFailed(f"outputs: expected {spec.name}, got {got}")
        try:
            datatype = datatype_of(array.dtype).name
        except Rejected:
            datatype = array.dtype.name
        if datatype != spec.datatype:
            raise ModelFailed(f"output {spec.name}: expected {spec.datatype}, got {datatype}")
        if signature.batched and (not array.ndim or array.shape[0] != rows):
            raise RowsMismatch(
                f"output {spec.name}: expected {rows} rows in dimension 0, "
                f"got shape {list(array.shape)}"
            )


def check_shapes(signature: Signature, outputs: Arrays) -> None:
    """Check that all outputs have the shapes that the signature declares.

    Raises:
        ModelFailed: with the output, its declared shape and its actual one.
    """
    for spec in signature.outputs:
        shape = outputs[spec.name].shape
        fits = len(shape) == len(spec.shape) and all(
            size in (-1, given) for size, given in zip(spec.shape, shape, strict=True)
        )
        if not fits:
            raise ModelFailed(
                f"output {spec.name}: expected shape {list(spec.shape)}, got {list(shape)}"
            )


def check_texts(signature: Signature, outputs: Arrays) -> None:
    """Check that `BYTES` outputs hold bytes or str; an object array may hold anything.

    Raises:
        ModelFailed: with the first other element and its index.
    """
    for spec in signature.outputs:
        array = outputs[spec.name]
        if array.dtype != object:
            continue
        for index, element in enumerate(array.flat):
            if not isinstance(element, bytes | str):
                raise ModelFailed(
                    f"output {spec.name}: expected bytes or str, "
                    f"got {type(element).__name__} at element {index}"
                )
