"""A batched run gives each request what a run of its own would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.models.backends.port import ReusedInputs
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import decode_items, encode_items
from headrace.protocol.messages import Request
from headrace.protocol.tensors import DATATYPES, to_array
from headrace.services.executor.buffers import HostBlock, gather, scatter
from tests.support.work import make_request


def signature_of(datatype: str) -> Signature:
    """Two inputs, `a` of vectors and `b` of one element a row, and two outputs alike."""
    tensors = [TensorSpec("a", datatype, (-1, -1)), TensorSpec("b", datatype, (-1,))]
    return make_signature(tensors, tensors)


def run(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A model that looks at each row by itself: it turns the rows' elements round."""
    return {"a": inputs["a"][:, ::-1], "b": inputs["b"]}


@st.composite
def arrays(draw: st.DrawFn, datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of any bytes."""
    dtype = DATATYPES[datatype].dtype
    count = int(np.prod(shape))
    if datatype == "BYTES":
        elements = draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count))
        array = np.empty(count, dtype=object)
        array[:] = elements
        return array.reshape(shape)
    if datatype == "BOOL":
        bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return np.array(bits, dtype=dtype).reshape(shape)
    size = count * DATATYPES[datatype].itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    return np.frombuffer(content, dtype=dtype).reshape(shape)


@st.composite
def batches(draw: st.DrawFn, datatype: str) -> list[Request]:
    """Requests of one shape class, of one row or several."""
    width = draw(st.integers(1, 4))
    requests = []
    for rows in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)):
        inputs = {
            "a": draw(arrays(datatype, (rows, width))),
            "b": draw(arrays(datatype, (rows,))),
        }
        requests.append(make_request(rows=rows, inputs=inputs))
    return requests


def outputs_of(request: Request) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shapes and bytes by name."""
    assert request.outputs is not None
    return {one.name: (one.shape, bytes(one.data)) for one in request.outputs}


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
@settings(max_examples=30)  # of each datatype
@given(data=st.data())
def test_batched_outputs_equal_single_outputs(datatype: str, data: st.DataObject) -> None:
    """Outputs equal those of single runs to the bit, for any datatype and numbers of rows."""
    requests = data.draw(batches(datatype))
    signature = signature_of(datatype)
    alone = []
    for request in requests:
        twin = make_request(rows=request.rows)
        twin.inputs = request.inputs
        scatter([twin], signature, run(gather([twin], signature)))
        alone.append(outputs_of(twin))

    scatter(requests, signature, run(gather(requests, signature)))

    assert [outputs_of(request) for request in requests] == alone
    assert all(request.inputs == () for request in requests)


@pytest.mark.parametrize("datatype", sorted(set(DATATYPES) - {"BYTES"}))
@settings(max_examples=30)
@given(data=st.data())
def test_host_block_holds_same_rows_as_new_memory(datatype: str, data: st.DataObject) -> None:
    """Successive batches in a reused block equal, to the bit, batches in new memory."""
    signature = signature_of(datatype)
    block = HostBlock(signature, rows=4, limit_bytes=65536)
    for requests in data.draw(st.lists(batches(datatype), min_size=1, max_size=4)):
        expected = gather(requests, signature)
        placed = gather(requests, signature, block)

        assert isinstance(placed, ReusedInputs)
        assert {name: (array.shape, array.tobytes()) for name, array in placed.items()} == {
            name: (array.shape, array.tobytes()) for name, array in expected.items()
        }


@given(st.lists(batches("FP32"), min_size=1, max_size=4), st.data())
def test_inputs_that_records_hold_are_gathered_as_those_that_are_set(
    sent: list[list[Request]], data: st.DataObject
) -> None:
    """A batch may mix requests of several records with requests that were restored."""
    shared = sent[0][0].inputs[0].shape[1:]
    sent = [each for each in sent if each[0].inputs[0].shape[1:] == shared]
    held = [one for each in sent for one in decode_items(encode_items(each), NULL_ACK)]
    order = data.draw(st.permutations(range(len(held))))
    for request in data.draw(st.lists(st.sampled_from(held), unique_by=id)):
        request.restore()
    signature = signature_of("FP32")
    block = HostBlock(signature, rows=4, limit_bytes=65536)

    placed = gather([held[place] for place in order], signature, block)

    flat = [request for each in sent for request in each]
    expected = gather([flat[place] for place in order], signature)
    assert {name: array.tobytes() for name, array in placed.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_equal_outputs_of_different_runs_share_their_metadata() -> None:
    """The stages behind look for that, and then compare nothing."""
    signature = signature_of("FP32")
    requests = [
        make_request(inputs={"a": np.ones((1, 2), np.float32), "b": np.ones(1, np.float32)})
        for _ in range(2)
    ]

    for request in requests:
        scatter([request], signature, run(gather([request], signature)))

    assert requests[0].output_metadata is requests[1].output_metadata


@given(batches("FP32"))
def test_gathered_run_keeps_only_requested_outputs(requests: list[Request]) -> None:
    """Each request gets its own choice of outputs."""
    signature = signature_of("FP32")
    for place, request in enumerate(requests):
        request.wanted = (None, ("b",), ("a", "b"))[place % 3]

    scatter(requests, signature, run(gather(requests, signature)))

    names = [tuple(one.name for one in request.outputs or ()) for request in requests]
    assert names == [(("a", "b"), ("b",), ("a", "b"))[place % 3] for place in range(len(requests))]


@given(batches("INT64"))
def test_gathered_arrays_are_read_only(requests: list[Request]) -> None:
    """A model that works in place would change the value that a dead letter is made of."""
    gathered = gather(requests, signature_of("INT64"))

    assert not any(array.flags.writeable for array in gathered.values())


def test_unbatched_model_runs_one_request() -> None:
    """Its tensors are as they are; dimension 0 means nothing."""
    spec = TensorSpec("a", "FP32", (4, -1))
    signature = make_signature([spec], [spec])
    request = make_request(inputs={"a": np.arange(8, dtype=np.float32).reshape(4, 2)})

    scatter([request], signature, gather([request], signature))

    assert request.outputs is not None
    assert to_array(request.outputs[0]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
