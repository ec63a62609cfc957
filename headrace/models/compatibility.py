"""Comparison of a new version's signature with that of the version in service.

The new version must accept every request that the version in service accepts, and callers who know
only the outputs of the version in service must be able to read its answers. So the shapes of
inputs may become wider and those of outputs narrower, but not the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from headrace.models.signature import Signature, TensorSpec


def find_breaking_changes(served: Signature, new: Signature) -> list[str]:
    """Return what of a new signature breaks callers of the one in service; empty: nothing does.

    Breaking are an input that is added, removed or renamed; an output that is removed or renamed;
    another datatype or rank; an input's dimension that is fixed, or tied to another one, where it
    was free; an output's dimension that differs from the fixed size that it had; and text where any
    bytes were accepted. Order, names of dimensions, and more outputs do not matter.

    Args:
        served: of the version in service.
        new: of the version that may take its requests.
    """
    changes = [
        *_compare_names(served.inputs, new.inputs),
        *_compare_tensors("input", served.inputs, new.inputs),
        *_compare_ties(served, new),
        *_compare_tensors("output", served.outputs, new.outputs),
    ]
    if new.utf8 and not served.utf8:
        changes += [
            f"input {spec.name}: expected BYTES of any content, got BYTES in UTF-8"
            for spec in new.inputs
            if spec.datatype == "BYTES"
        ]
    return changes


def _compare_names(served: Sequence[TensorSpec], new: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield the added inputs: requests do not have them."""
    known = {spec.name for spec in served}
    for spec in new:
        if spec.name not in known:
            yield f"input {spec.name}: expected none of this name, got {_describe(spec)}"


def _compare_tensors(
    kind: str, served: Sequence[TensorSpec], new: Sequence[TensorSpec]
) -> Iterator[str]:
    found = {spec.name: spec for spec in new}
    for spec in served:
        got = found.get(spec.name)
        if got is None:
            yield f"{kind} {spec.name}: expected {_describe(spec)}, got none of this name"
        elif got.datatype != spec.datatype or not _may_replace(kind, spec.shape, got.shape):
            yield f"{kind} {spec.name}: expected {_describe(spec)}, got {_describe(got)}"


def _may_replace(kind: str, served: Sequence[int], new: Sequence[int]) -> bool:
    """Return True if `new` covers all of `served` (inputs), or `served` all of `new` (outputs)."""
    wide, narrow = (new, served) if kind == "input" else (served, new)
    return len(wide) == len(narrow) and all(
        allowed in (-1, size) for allowed, size in zip(wide, narrow, strict=True)
    )


def _compare_ties(served: Signature, new: Signature) -> Iterator[str]:
    """Yield pairs of free dimensions that must be equal now, and need not have been."""
    before = {spec.name: spec for spec in served.inputs}
    free = [
        (name, spec.name, axis)
        for spec in new.inputs
        for axis, size in enumerate(spec.shape)
        if size == -1 and (name := _name_dimension(new, spec, axis))
    ]
    for (name, first, axis), (other, second, other_axis) in combinations(free, 2):
        if name != other or first not in before or second not in before:
            continue
        if not _are_tied(before[first], axis, before[second], other_axis):
            yield (
                f"input {second}: expected any size of dimension {other_axis}, "
                f"got the size of dimension {axis} of {first} ({name})"
            )


def _name_dimension(signature: Signature, spec: TensorSpec, axis: int) -> str:
    """Return what free dimensions of equal size have in common; empty: nothing."""
    return "rows" if signature.batched and axis == 0 else spec.dimension(axis)


def _are_tied(one: TensorSpec, axis: int, other: TensorSpec, other_axis: int) -> bool:
    """Return True if two dimensions always have the same size.

    Dimensions 0 count as the batch unless their names differ: only probing a version shows whether
    they are. Also true if a tensor lacks the dimension: another check reports a difference in rank.
    """
    if axis >= len(one.shape) or other_axis >= len(other.shape):
        return True
    sizes = one.shape[axis], other.shape[other_axis]
    if sizes != (-1, -1):
        return sizes[0] == sizes[1]
    names = one.dimension(axis), other.dimension(other_axis)
    if axis == other_axis == 0:
        return names[0] == names[1] or "" in names
    return names[0] == names[1] != ""


def _describe(spec: TensorSpec) -> str:
    return f"{spec.datatype} {list(spec.shape)}"
