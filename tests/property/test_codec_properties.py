"""Properties of the codec for all tensors, and for all bytes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import msgspec
import numpy as np
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray

from headrace.config import LimitSettings
from headrace.errors import Rejected
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import (
    Answer,
    callers_id,
    decode_batch,
    decode_items,
    decode_request,
    decode_response,
    decode_results,
    encode_batch,
    encode_items,
    encode_request,
    encode_response,
    encode_results,
)
from headrace.protocol.codec.json_data import bytes_to_data, data_to_bytes, text_to_bytes
from headrace.protocol.headers import JSON, MSGPACK, answer_headers, parse_envelope
from headrace.protocol.messages import Batch, Envelope, Request, Tensor
from headrace.protocol.tensors import DATATYPES, from_array, split_rows, to_array
from tests.support.bad_records.building import packed

LIMITS = LimitSettings(max_request_bytes=65_536)
CONTENT_TYPES = st.sampled_from([MSGPACK, JSON])

# JSON costs most: a list of one-digit numbers becomes pointers, an array of float64 and its bytes.
MEMORY_FACTOR = 100
MEMORY_ALLOWANCE = 65_536

shapes = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
relaxed = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@st.composite
def arrays(draw: st.DrawFn, datatypes: tuple[str, ...] = tuple(DATATYPES)) -> NDArray[Any]:
    """An array of any datatype and shape."""
    datatype = draw(st.sampled_from(datatypes))
    shape = draw(shapes)
    if datatype == "BYTES":
        size = int(np.prod(shape))
        array = np.empty(size, dtype=object)
        array[:] = draw(st.lists(st.binary(max_size=8), min_size=size, max_size=size))
        return array.reshape(shape)
    if datatype == "BF16":
        wide: NDArray[Any] = draw(st_numpy.arrays(np.uint16, shape))
        return wide.view(DATATYPES[datatype].dtype)
    return draw(st_numpy.arrays(DATATYPES[datatype].dtype, shape))


def assert_same(left: NDArray[Any], right: NDArray[Any]) -> None:
    """Equal in dtype, shape and values, whatever the bits of a NaN."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    if left.dtype == object or left.dtype.kind in "biu":
        assert left.tolist() == right.tolist()
    else:
        # Some not-a-numbers of bfloat16 set the processor's flag when they are widened.
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(left.astype(np.float64), right.astype(np.float64))


def tensors_of(value: bytes, content_type: str) -> dict[str, NDArray[Any]]:
    """A request's inputs as arrays."""
    request = decode_request(value, Envelope(content_type=content_type), LIMITS)
    return {
        tensor.name: to_array(
            Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data)
        )
        for tensor in request.inputs
    }


# --- tensors ----------------------------------------------------------------------------------


@given(arrays())
def test_array_survives_its_bytes(array: NDArray[Any]) -> None:
    """Arrays of every datatype and shape come back bit by bit."""
    tensor = from_array("x", array)

    back = to_array(tensor)

    assert back.shape == array.shape
    assert back.dtype == array.dtype
    assert from_array("x", back).data == tensor.data


@given(arrays(), st.data())
def test_array_view_has_bytes_of_its_copy(array: NDArray[Any], data: Any) -> None:
    """Transposed, reversed and stepped arrays are not taken for contiguous ones."""
    view = (
        array.T[data.draw(st.sampled_from([slice(None), slice(None, None, -1)]))]
        if array.ndim
        else array
    )

    assert bytes(from_array("x", view).data) == bytes(from_array("x", view.copy()).data)


@given(arrays().filter(lambda array: array.ndim > 0), st.data())
def test_split_tensors_equal_rows_of_batch(array: NDArray[Any], data: Any) -> None:
    """A batch split in any way gives each request its own rows."""
    counts: list[int] = []
    while (left := array.shape[0] - sum(counts)) and len(counts) < 4:
        counts.append(data.draw(st.integers(1, left)))

    parts = split_rows("y", array, counts)

    start = 0
    for part, count in zip(parts, counts, strict=True):
        assert bytes(part) == bytes(from_array("y", array[start : start + count]).data)
        start += count


# --- round trips ------------------------------------------------------------------------------


@relaxed
@given(CONTENT_TYPES, st.lists(arrays(), min_size=1, max_size=3))
def test_request_survives_encoding(content_type: str, given_arrays: list[NDArray[Any]]) -> None:
    """A request of all datatypes comes back from MessagePack and from JSON."""
    inputs = {f"x{number}": array for number, array in enumerate(given_arrays)}

    read = tensors_of(encode_request(content_type, "m", inputs), content_type)

    assert read.keys() == inputs.keys()
    for name, array in inputs.items():
        assert_same(read[name], array)


@given(arrays(tuple(set(DATATYPES) - {"BYTES"})))
def test_nested_json_equals_flat_json(array: NDArray[Any]) -> None:
    """Nested data gives the tensor of flat data, for several dimensions and elements."""
    flat = json.loads(encode_request(JSON, "m", {"x": array}))
    tensor = flat["inputs"][0]
    shaped = np.array(tensor["data"], dtype=object).reshape(array.shape).tolist()
    nested = json.dumps({**flat, "inputs": [{**tensor, "data": shaped}]}).encode()
    if array.ndim == 0:
        return

    assert_same(tensors_of(nested, JSON)["x"], array)


@relaxed
@given(CONTENT_TYPES, arrays())
def test_response_survives_encoding(content_type: str, array: NDArray[Any]) -> None:
    """The caller gets the array that the model gave."""
    request = Request(NULL_ACK, 0, 0, 0, 0, None, b"", (), Envelope(content_type=content_type))
    request.outputs = (from_array("y", array),)

    answer = decode_response(answer_headers(request, "ok", "t"), encode_response(request, 1))

    assert isinstance(answer, Answer)
    assert_same(answer.outputs["y"], array)


@given(arrays(), st.booleans())
def test_tensors_survive_wire(array: NDArray[Any], inside: bool) -> None:
    """Tensors survive as places in the value and as bytes of their own, in items, batches and
    results.
    """
    tensor = from_array("x", array)
    value = b"before" + bytes(tensor.data) + b"after"
    if inside:
        view = memoryview(value)[6 : 6 + len(tensor.data)]
        tensor = tensor._replace(data=view)
    request = Request(NULL_ACK, 0, 1, 0, 5, None, value, (), Envelope())
    request.inputs = request.outputs = (tensor,)

    item = decode_items(encode_items([request]), NULL_ACK)[0]
    batch = decode_batch(encode_batch(Batch("b", [item, request], "idle")), NULL_ACK)
    result = decode_results(encode_results([request]), NULL_ACK)[0]
    for each in batch.requests:
        each.restore()

    for received in (item.inputs, *(each.inputs for each in batch.requests), result.outputs):
        assert received is not None
        assert received[0][:3] == tensor[:3]
        assert bytes(received[0].data) == bytes(tensor.data)


@given(arrays(), st.text(max_size=20), st.none() | st.text(max_size=20))
def test_encoded_tensors_are_read_by_msgpack(
    array: NDArray[Any], model: str, given_id: str | None
) -> None:
    """`msgpack` finds the protocol's fields, with the raw bytes as `bin`."""
    value = encode_request(MSGPACK, model, {"x": array}, id=given_id)

    read = msgpack.unpackb(value)

    tensor = from_array("x", array)
    assert read.get("model_name", "") == model
    assert read.get("id") == given_id
    assert read["inputs"] == [
        {
            "name": "x",
            "datatype": tensor.datatype,
            "shape": list(array.shape),
            "data": bytes(tensor.data),
        }
    ]


# --- any bytes --------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
trees = st.recursive(
    scalars | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@st.composite
def requests_like(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Something with the fields of a request, and anything in some of them."""
    tensor = draw(
        st.fixed_dictionaries(
            {
                "name": inner | st.just("pixels"),
                "datatype": inner | st.sampled_from([*DATATYPES]),
                "shape": inner | st.lists(st.integers(-2, 2**64 - 1), max_size=18),
                "data": inner,
            },
            optional={"parameters": inner},
        )
    )
    return draw(
        st.fixed_dictionaries(
            {"model_name": inner | st.just("digits"), "inputs": inner | st.just([tensor])},
            optional={"id": inner, "outputs": inner, "parameters": inner, "model_version": inner},
        )
    )


def mutated(draw: st.DrawFn) -> bytes:
    """A good request with some bytes changed, cut off or added."""
    content = bytearray(packed())
    for position in draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
        content[position] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))]) + draw(st.binary(max_size=8))


values = (
    st.binary(max_size=512)
    | st.composite(mutated)()
    | requests_like(trees).map(msgpack.packb)
    | requests_like(json_trees).map(lambda tree: json.dumps(tree).encode())
)


def cost(value: bytes, content_type: str) -> tuple[int, int]:
    """Bytes of the tensors of a value, none if it is refused, and the peak of memory for it."""
    envelope = Envelope(content_type=content_type)
    size = 0
    tracemalloc.start()
    try:
        with suppress(Rejected):
            request = decode_request(value, envelope, LIMITS)
            size = sum(len(tensor.data) for tensor in request.inputs)
        callers_id(value, envelope)
        return size, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@relaxed
@given(CONTENT_TYPES, values)
def test_arbitrary_value_is_decoded_or_refused_within_memory(
    content_type: str, value: bytes
) -> None:
    """Any bytes are a sound request or are refused, within a bound of memory."""
    size, peak = cost(value, content_type)

    assert size <= 8 * len(value)
    assert peak <= MEMORY_FACTOR * len(value) + MEMORY_ALLOWANCE


@relaxed
@given(
    st.sampled_from([decode_items, decode_batch, decode_results]),
    st.binary() | trees.map(msgpack.packb),
)
def test_arbitrary_internal_record_is_decoded_or_refused(decode: Any, value: bytes) -> None:
    """A topic may hold records of others."""
    with suppress(Rejected):
        decode(value, NULL_ACK)


@relaxed
@given(CONTENT_TYPES, values)
def test_arbitrary_answer_is_decoded_or_refused(content_type: str, value: bytes) -> None:
    """A client reads what it is sent."""
    with suppress(Rejected):
        decode_response([("content-type", content_type.encode())], value)


HEADER_NAMES = st.sampled_from(
    ["content-type", "kafka_correlationId", "kafka_replyTopic", "kafka_replyPartition",
     "x-deadline-ms", "x-timeout-ms", "x-priority", "x-tenant", "x-model", "traceparent"]
) | st.text(max_size=10)  # fmt: skip
HEADER_VALUES = st.none() | st.binary(max_size=600) | st.integers().map(lambda n: b"%d" % n)


@given(
    st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=8),
    st.integers(-1, 2**62),
    st.integers(0, 10**9),
)
def test_arbitrary_headers_make_envelope(
    headers: list[tuple[str, bytes | None]], timestamp_ms: int, default_timeout_ms: int
) -> None:
    """Any headers make an envelope that names its faults; its fields keep their types."""
    envelope = parse_envelope(headers, timestamp_ms, default_timeout_ms)

    assert envelope.fault is None or envelope.fault.startswith("header ")
    assert envelope.deadline_ms >= 0
    assert envelope.reply_partition is None or envelope.reply_partition >= 0
    assert isinstance(envelope.model, str)
    request = Request(NULL_ACK, 0, 0, 0, 0, None, b"", headers, envelope)
    assert all(value is not None for _, value in answer_headers(request, "ok", "t"))


@relaxed
@given(array=arrays(), is_flat=st.booleans(), part_bytes=st.integers(1, 40), data=st.data())
def test_json_text_in_parts_is_converted_or_refused_as_whole(
    array: NDArray[Any], *, is_flat: bool, part_bytes: int, data: st.DataObject
) -> None:
    """Data may be flat or nested, shapes right or wrong, and elements wrong."""
    tensor = from_array("x", array)
    elements: Any = bytes_to_data(tensor)[0]
    if not is_flat:
        nested = np.empty(len(elements), object)
        nested[:] = elements
        elements = nested.reshape(array.shape).tolist()
    shape = data.draw(st.sampled_from([list(tensor.shape), [*tensor.shape, 1], [3]]))
    if tensor.datatype == "BYTES" and data.draw(st.booleans()):
        elements = [
            data.draw(st.sampled_from(['"', "\\", ",", '\\",', "]["])) + each
            if isinstance(each, str)
            else each
            for each in elements
        ]
    spaces = data.draw(st.sampled_from(["", " ", "\n  "]))
    text = json.dumps(elements, separators=(f"{spaces},", ":")).encode()
    text = b"[%b%b]" % (text[1:-1], spaces.encode())
    if data.draw(st.booleans()):
        text = text.replace(b"1", data.draw(st.sampled_from([b"1e400", b"[1]", b'"1"', b"-1"])), 1)

    def outcome(convert: Callable[..., bytes], given: Any, *more: int) -> bytes | str:
        try:
            return convert(tensor.datatype, shape, given, None, "inputs[0]", *more)
        except Rejected as error:
            return str(error)

    try:
        whole = msgspec.json.decode(text)
    except msgspec.DecodeError:
        reject()  # no valid JSON any more
    assert outcome(text_to_bytes, text, part_bytes) == outcome(data_to_bytes, whole)
