"""Host blocks: where the rows of a batch are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.messages import Request
from headrace.services.executor.buffers import HostBlock
from tests.support.work import make_request

SIGNATURE = make_signature(
    [TensorSpec("x", "FP32", (-1, 4)), TensorSpec("n", "INT64", (-1, -1))],
    [TensorSpec("y", "FP32", (-1, 4))],
)


def request(first: float, rows: int = 1, width: int = 2) -> Request:
    """Rows of `x`, counted up from `first`, and zeros of `n`."""
    x = np.arange(first, first + 4 * rows, dtype=np.float32).reshape(rows, 4)
    return make_request(rows=rows, inputs={"x": x, "n": np.zeros((rows, width), np.int64)})


def rows_of(requests: Sequence[Request]) -> NDArray[Any]:
    """Return the expected values of `x`."""
    return np.concatenate(
        [np.frombuffer(one.inputs[0].data, np.float32).reshape(-1, 4) for one in requests]
    )


@pytest.fixture
def block() -> HostBlock:
    """Room for 8 rows."""
    return HostBlock(SIGNATURE, rows=8, limit_bytes=1024)


def test_gathered_rows_follow_each_other(block: HostBlock) -> None:
    """In the order of the requests, of which one has two rows."""
    requests = [request(0), request(10, rows=2), request(30)]
    arrays = block.gather(requests)
    assert arrays is not None
    np.testing.assert_array_equal(arrays["x"], rows_of(requests))


def test_large_tensors_are_copied_one_by_one() -> None:
    """The result equals that of small tensors, which are joined first."""
    wide = make_signature([TensorSpec("x", "UINT8", (-1, 5000))], [TensorSpec("y", "FP32", (-1,))])
    rows = [np.full((1, 5000), value, np.uint8) for value in range(3)]
    arrays = HostBlock(wide, rows=3, limit_bytes=20_000).gather(
        [make_request(inputs={"x": row}) for row in rows]
    )
    assert arrays is not None
    np.testing.assert_array_equal(arrays["x"], np.concatenate(rows))


def test_host_block_of_same_shapes_returns_same_arrays(block: HostBlock) -> None:
    """A backend can bind their addresses once."""
    first = block.gather([request(0), request(5)])
    second = block.gather([request(7), request(9)])
    assert second is first


def test_host_block_of_other_shapes_returns_other_arrays(block: HostBlock) -> None:
    """They lie in the same memory."""
    narrow, wide = block.gather([request(0)]), block.gather([request(0, width=3)])
    assert narrow is not None
    assert wide is not None
    assert wide is not narrow
    assert wide["x"].ctypes.data == narrow["x"].ctypes.data


def test_block_is_not_allocated_again_for_largest_batch() -> None:
    """It has room from the beginning where the model says how large a row is."""
    fixed = make_signature([TensorSpec("x", "FP32", (-1, 4))], [TensorSpec("y", "FP32", (-1,))])
    block = HostBlock(fixed, rows=8, limit_bytes=1024)
    small, large = (
        block.gather([make_request(rows=rows, inputs={"x": np.zeros((rows, 4), np.float32)})])
        for rows in (1, 8)
    )
    assert small is not None
    assert large is not None
    assert large["x"].ctypes.data == small["x"].ctypes.data


def test_block_with_free_dimensions_grows(block: HostBlock) -> None:
    """To what came, so that the next of that size finds room."""
    arrays = block.gather([request(0, width=100)])
    assert arrays is not None
    assert arrays["n"].shape == (1, 100)


def test_batch_over_limit_is_not_gathered(block: HostBlock) -> None:
    """A block takes no more memory than a batch may have."""
    assert block.gather([request(0, width=1000)]) is None


def test_inputs_are_aligned_to_cache_lines(block: HostBlock) -> None:
    """Vector instructions are quicker there."""
    arrays = block.gather([request(0)])
    assert arrays is not None
    assert {array.ctypes.data % 64 for array in arrays.values()} == {0}


@pytest.mark.parametrize(("datatype", "fits"), [("FP32", True), ("BYTES", False)])
def test_strings_are_not_gathered_into_host_block(datatype: str, fits: bool) -> None:
    """Strings are objects, each of its own size."""
    signature: Signature = make_signature(
        [TensorSpec("x", datatype, (-1, 4))], [TensorSpec("y", "FP32", (-1,))]
    )
    assert HostBlock.fits(signature) is fits
