"""Which changes of a signature break callers of the version in service."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from headrace.models.compatibility import find_breaking_changes
from headrace.models.signature import Signature, TensorSpec, make_signature, without_batching
from tests.unit.models.requests import spec

PIXELS = spec("pixels", "FP32", [-1, 64], ["batch", ""])
MASK = spec("mask", "INT64", [-1, -1], ["batch", "length"])
IDS = spec("ids", "INT64", [-1, -1], ["batch", "length"])
SCORES = spec("scores", "FP32", [-1, 10], ["batch", ""])
NAMES = spec("names", "BYTES", [-1, 1])


class Case(NamedTuple):
    """Inputs and outputs of two versions, and the change that is found."""

    served: Signature
    new: Signature
    change: str = ""


def signature(
    *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (SCORES,), utf8: bool = False
) -> Signature:
    """A signature of these inputs and outputs."""
    return make_signature(inputs, outputs, utf8=utf8)


def taking(*shape: int, names: tuple[str, ...] = ()) -> Signature:
    """A signature with one input of this shape."""
    return signature(spec("pixels", "FP32", shape, names))


def giving(*shape: int) -> Signature:
    """A signature with one output of this shape."""
    return signature(PIXELS, outputs=(spec("scores", "FP32", shape),))


BREAKING = {
    "input-added": Case(
        signature(PIXELS),
        signature(PIXELS, MASK),
        "input mask: expected none of this name, got INT64 [-1, -1]",
    ),
    "input-removed": Case(
        signature(PIXELS, MASK),
        signature(PIXELS),
        "input mask: expected INT64 [-1, -1], got none of this name",
    ),
    "input-datatype": Case(
        signature(PIXELS),
        signature(spec("pixels", "FP16", [-1, 64])),
        "input pixels: expected FP32 [-1, 64], got FP16 [-1, 64]",
    ),
    "input-wider-datatype": Case(
        signature(PIXELS),
        signature(spec("pixels", "FP64", [-1, 64])),
        "input pixels: expected FP32 [-1, 64], got FP64 [-1, 64]",
    ),
    "input-fixed": Case(
        taking(-1, -1), taking(-1, 64), "input pixels: expected FP32 [-1, -1], got FP32 [-1, 64]"
    ),
    "input-other-size": Case(
        taking(-1, 64), taking(-1, 32), "input pixels: expected FP32 [-1, 64], got FP32 [-1, 32]"
    ),
    "input-rank": Case(
        taking(-1, 64),
        taking(-1, 8, 8),
        "input pixels: expected FP32 [-1, 64], got FP32 [-1, 8, 8]",
    ),
    "input-no-rows": Case(
        taking(-1, 64), taking(1, 64), "input pixels: expected FP32 [-1, 64], got FP32 [1, 64]"
    ),
    "dimensions-tied": Case(
        signature(IDS, spec("mask", "INT64", [-1, -1], ["batch", "width"])),
        signature(IDS, MASK),
        "input mask: expected any size of dimension 1, got the size of dimension 1 of ids (length)",
    ),
    "dimensions-of-one-input-tied": Case(
        taking(-1, -1, -1),
        taking(-1, -1, -1, names=("", "side", "side")),
        "input pixels: expected any size of dimension 2, "
        "got the size of dimension 1 of pixels (side)",
    ),
    "rows-tied": Case(
        signature(PIXELS, spec("table", "FP32", [-1, 4], ["entries", ""])),
        signature(PIXELS, spec("table", "FP32", [-1, 4], ["batch", ""])),
        "input table: expected any size of dimension 0, "
        "got the size of dimension 0 of pixels (rows)",
    ),
    "text-only": Case(
        signature(NAMES),
        signature(NAMES, utf8=True),
        "input names: expected BYTES of any content, got BYTES in UTF-8",
    ),
    "output-removed": Case(
        signature(PIXELS, outputs=(SCORES, NAMES)),
        signature(PIXELS),
        "output names: expected BYTES [-1, 1], got none of this name",
    ),
    "output-datatype": Case(
        signature(PIXELS),
        signature(PIXELS, outputs=(spec("scores", "FP64", [-1, 10]),)),
        "output scores: expected FP32 [-1, 10], got FP64 [-1, 10]",
    ),
    "output-other-size": Case(
        giving(-1, 10), giving(-1, 12), "output scores: expected FP32 [-1, 10], got FP32 [-1, 12]"
    ),
    "output-free": Case(
        giving(-1, 10), giving(-1, -1), "output scores: expected FP32 [-1, 10], got FP32 [-1, -1]"
    ),
    "output-rank": Case(
        giving(-1, 10), giving(-1), "output scores: expected FP32 [-1, 10], got FP32 [-1]"
    ),
}

COMPATIBLE = {
    "same": Case(signature(PIXELS, MASK), signature(PIXELS, MASK)),
    "order": Case(signature(PIXELS, MASK), signature(MASK, PIXELS)),
    "dimension-names": Case(
        taking(-1, -1, names=("batch", "n")), taking(-1, -1, names=("rows", "m"))
    ),
    "still-tied": Case(
        signature(IDS, MASK),
        signature(*(each._replace(dimensions=("batch", "tokens")) for each in (IDS, MASK))),
    ),
    "dimensions-untied": Case(
        signature(IDS, MASK), signature(IDS, MASK._replace(dimensions=("batch", "other")))
    ),
    "input-free": Case(taking(-1, 64), taking(-1, -1)),
    "fixed-sizes-tied": Case(taking(-1, 8, 8), taking(-1, -1, -1, names=("batch", "side", "side"))),
    "any-bytes": Case(signature(NAMES, utf8=True), signature(NAMES)),
    "output-added": Case(signature(PIXELS), signature(PIXELS, outputs=(SCORES, NAMES))),
    "output-fixed": Case(giving(-1, -1), giving(-1, 10)),
    "found-unbatched": Case(
        without_batching(signature(PIXELS, MASK), "rows leak"), signature(PIXELS, MASK)
    ),
}


@pytest.mark.parametrize("case", BREAKING.values(), ids=BREAKING)
def test_breaking_change_is_found_with_expected_and_got(case: Case) -> None:
    """Callers of the version in service would get errors, or what they cannot read."""
    assert find_breaking_changes(case.served, case.new) == [case.change]


@pytest.mark.parametrize("case", COMPATIBLE.values(), ids=COMPATIBLE)
def test_compatible_change_is_allowed(case: Case) -> None:
    """Each request that was accepted still is, and its answer has the form that it had."""
    assert find_breaking_changes(case.served, case.new) == []


def test_all_breaking_changes_are_listed() -> None:
    """A renamed input is one that is missing and one that is new."""
    renamed = signature(PIXELS._replace(name="image"), outputs=(SCORES._replace(datatype="FP16"),))
    assert find_breaking_changes(signature(PIXELS), renamed) == [
        "input image: expected none of this name, got FP32 [-1, 64]",
        "input pixels: expected FP32 [-1, 64], got none of this name",
        "output scores: expected FP32 [-1, 10], got FP16 [-1, 10]",
    ]
