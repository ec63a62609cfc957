"""Gathering for a version whose files are not those that the requests were checked against."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.errors import Code, Rejected
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.messages import Request
from headrace.services.executor.buffers import HostBlock, gather, scatter
from tests.support.work import make_request

SIGNATURE = make_signature(
    [TensorSpec("a", "FP32", (-1, -1)), TensorSpec("b", "FP32", (-1, -1))],
    [TensorSpec("y", "FP32", (-1, 1))],
)
BLOCK = HostBlock(SIGNATURE, rows=8, limit_bytes=1024)


def row(value: float, width: int = 2, rows: int = 1) -> NDArray[np.float32]:
    """Rows of one value."""
    return np.full((rows, width), value, np.float32)


@pytest.mark.parametrize("block", [BLOCK, None], ids=["block", "joined"])
@pytest.mark.parametrize("count", [1, 3])
def test_inputs_in_another_order_are_found_by_name(block: HostBlock | None, count: int) -> None:
    """A file may have the same inputs as the one before, in another order."""
    requests = [make_request(inputs={"b": row(2), "a": row(1)}) for _ in range(count)]
    arrays = gather(requests, SIGNATURE, block)
    assert (arrays["a"].tolist(), arrays["b"].tolist()) == ([[1, 1]] * count, [[2, 2]] * count)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            make_request(inputs={"a": row(1), "c": row(2)}),
            "inputs: expected a FP32, b FP32, got a FP32, c FP32",
        ),
        (
            make_request(inputs={"a": row(1), "b": row(2).astype(np.int32)}),
            "inputs: expected a FP32, b FP32, got a FP32, b INT32",
        ),
    ],
    ids=["name", "datatype"],
)
@pytest.mark.parametrize("block", [BLOCK, None], ids=["block", "joined"])
def test_request_of_other_inputs_is_refused(
    request_: Request, message: str, block: HostBlock | None
) -> None:
    """The version of its number may be another one by the time it runs; it can be sent again."""
    assert refusal([request_], SIGNATURE, block) == message


def test_request_that_was_bound_without_batch_is_refused() -> None:
    """All of its rows are one row then, and the others would be cut off its answer."""
    request = make_request(rows=1, inputs={"a": row(1, rows=2), "b": row(2, rows=2)})
    assert refusal([request], SIGNATURE, None) == "inputs: expected 1 rows, got shape [2, 2]"


@pytest.mark.parametrize("block", [BLOCK, None], ids=["block", "joined"])
def test_requests_of_different_lengths_are_not_joined(block: HostBlock | None) -> None:
    """They share a shape class if the former files had buckets. Together they have as many bytes
    as three of the first length.
    """
    requests = [
        make_request(inputs={"a": row(width, width), "b": row(width, width)}) for width in (4, 3, 5)
    ]
    assert refusal(requests, SIGNATURE, block) == (
        "inputs: expected the same size of a row in all requests of a batch, got others"
    )


def test_requests_keep_their_inputs_when_outputs_cannot_be_divided() -> None:
    """The run has failed then, and each half of the batch is run again."""
    padded = SIGNATURE._replace(outputs=(TensorSpec("y", "FP32", (-1, -1)),), buckets=(4,))
    requests = [make_request(inputs={"a": row(1), "b": row(2)}) for _ in range(2)]
    gather(requests, padded)
    with pytest.raises(IndexError):
        scatter(requests, padded, {"y": np.zeros(2, np.float32)})
    assert [len(request.inputs) for request in requests] == [2, 2]


def refusal(requests: list[Request], signature: Signature, block: HostBlock | None) -> str:
    """What is wrong with them."""
    with pytest.raises(Rejected) as caught:
        gather(requests, signature, block)
    assert caught.value.code == Code.MODEL_NOT_READY
    assert caught.value.retry_after_ms
    return caught.value.message
