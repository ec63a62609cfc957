"""The check of a request against a signature."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.inputs.binding import Binder
from headrace.models.signature import make_signature
from headrace.protocol.messages import RequestedOutput
from headrace.tuning import TUNING
from tests.support.traced_memory import held_bytes_of
from tests.unit.models.requests import refusal, spec, tensor, zeros

SCORES = spec("scores", "FP32", [-1, 10])
LABEL = spec("label", "INT64", [-1])
DIGITS = make_signature([spec("pixels", "FP32", [-1, 64], ["batch", ""])], [SCORES, LABEL])
TOKENS = make_signature(
    [spec(name, "INT64", [-1, -1], ["batch", "sequence"]) for name in ("ids", "mask")], [SCORES]
)
FIXED = make_signature([spec("x", "FP32", [4, -1])], [spec("y", "FP32", [4, -1])])


def words(datatype: str = "BYTES", *, utf8: bool = True) -> Binder:
    """A binder for a model of one column."""
    return Binder(make_signature([spec("words", datatype, [-1, 1])], [SCORES], utf8=utf8))


def ids(*shape: int) -> Any:
    return zeros("ids", *shape, dtype=np.int64)


def mask(*shape: int) -> Any:
    return zeros("mask", *shape, dtype=np.int64)


def test_request_fitting_signature_is_bound() -> None:
    """Rows, bytes and tensors of a request that fits; its bytes are not copied."""
    given = zeros("pixels", 3, 64)
    bound = Binder(DIGITS).bind([given])
    assert bound[1:] == (3, (), 768, None)
    assert bound.tensors[0][:3] == ("pixels", "FP32", (3, 64))
    assert bound.tensors[0].data is given.data


def test_inputs_are_put_in_signatures_order() -> None:
    """The order of a request's inputs is free."""
    bound = Binder(TOKENS).bind([mask(1, 7), ids(1, 7)])
    assert [each.name for each in bound.tensors] == ["ids", "mask"]


def test_shape_class_is_free_sizes_without_rows() -> None:
    """Requests of equal length have equal classes, however many rows they have."""
    binder = Binder(TOKENS)
    assert binder.bind([ids(1, 7), mask(1, 7)]).shape_class == (7, 7)
    assert binder.bind([ids(5, 7), mask(5, 7)]).shape_class == (7, 7)
    assert binder.bind([ids(1, 8), mask(1, 8)]).shape_class == (8, 8)


def test_request_of_unbatched_model_is_one_row() -> None:
    """Without a batch dimension a request is one row, and all free sizes are its class."""
    bound = Binder(FIXED).bind([zeros("x", 4, 9)])
    assert (bound.rows, bound.shape_class, bound.size_bytes) == (1, (9,), 144)


def test_empty_free_dimension_is_allowed_where_it_is_no_batch() -> None:
    """A sequence of no elements is the model's affair."""
    assert Binder(FIXED).bind([zeros("x", 4, 0)]).size_bytes == 0


def test_wanted_outputs_are_kept_in_order_asked() -> None:
    """The answer will have the outputs that were asked for."""
    wanted = [RequestedOutput(name="label"), RequestedOutput(name="scores")]
    assert Binder(DIGITS).bind([zeros("pixels", 1, 64)], wanted).wanted == ("label", "scores")


def test_request_without_wanted_outputs_gets_all() -> None:
    """An empty list asks for nothing in particular."""
    assert Binder(DIGITS).bind([zeros("pixels", 1, 64)], []).wanted is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nope"], 'outputs[0].name: expected one of label, scores, got "nope"'),
        (["label", "label"], 'outputs[1].name: expected each output once, got "label" again'),
    ],
)
def test_wrong_wanted_outputs_are_refused(names: list[str], message: str) -> None:
    """An output must exist and be asked for once."""
    wanted = [RequestedOutput(name=name) for name in names]
    with pytest.raises(Rejected) as caught:
        Binder(DIGITS).bind([zeros("pixels", 1, 64)], wanted)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_REQUEST, message)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs: expected ids, mask, got none; missing ids, mask"),
        ([ids(1, 7)], "inputs: expected ids, mask, got ids; missing mask"),
        ([ids(1, 7), ids(1, 7)], 'inputs[1].name: expected each input once, got "ids" again'),
        ([zeros("x", 1)], 'inputs[0].name: expected one of ids, mask, got "x"'),
        (
            [ids(1, 7), mask(1, 7), zeros("x", 1)],
            'inputs[2].name: expected one of ids, mask, got "x"',
        ),
    ],
    ids=["none", "missing", "twice", "unknown", "one more"],
)
def test_wrong_input_names_are_invalid_request(inputs: list[Any], message: str) -> None:
    """Each input of the signature has to be there, once, and no other."""
    assert refusal(Binder(TOKENS), *inputs) == (Code.INVALID_REQUEST, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            zeros("pixels", 1, 64, dtype=np.float64),
            'inputs[0].datatype (pixels): expected FP32, got "FP64"',
        ),
        (zeros("pixels", 1, 63), "inputs[0].shape (pixels): expected [-1, 64], got [1, 63]"),
        (zeros("pixels", 64), "inputs[0].shape (pixels): expected [-1, 64], got [64]"),
        (zeros("pixels", 1, 1, 64), "inputs[0].shape (pixels): expected [-1, 64], got [1, 1, 64]"),
        (
            zeros("pixels", 0, 64),
            "inputs[0].shape (pixels): expected at least one row, got [0, 64]",
        ),
        (
            tensor("pixels", np.zeros(64, np.float32), shape=[-1, 64]),
            "inputs[0].shape: expected no negative dimension, got [-1, 64]",
        ),
        (
            tensor("pixels", np.zeros(64, np.float32), shape=[2, 64]),
            "inputs[0].data: expected 512 bytes for FP32 [2, 64], got 256 bytes",
        ),
        (
            tensor("pixels", np.zeros(64, np.float32), shape=[2**62, 64]),
            f"inputs[0].shape: expected less than 2^63 bytes, got FP32 [{2**62}, 64]",
        ),
    ],
    ids=["datatype", "size", "rank low", "rank high", "no rows", "negative", "bytes", "huge"],
)
def test_wrong_tensor_is_refused_with_expected_form(given: Any, message: str) -> None:
    """Datatype, rank, sizes and bytes are checked; the message says where, what and how."""
    assert refusal(Binder(DIGITS), given) == (Code.INVALID_TENSOR, message)


def test_binding_error_names_place_in_request() -> None:
    """The index is that of the request as sent, not of the signature."""
    code, message = refusal(Binder(TOKENS), mask(1, 7), ids(1, 7, 1))
    assert code == Code.INVALID_TENSOR
    assert message == "inputs[1].shape (ids): expected [-1, -1], got [1, 7, 1]"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            mask(1, 8),
            "inputs[1].shape (mask): expected 7 sequence, as in inputs[0].shape (ids), "
            "got 8 in [1, 8]",
        ),
        (
            mask(2, 7),
            "inputs[1].shape (mask): expected 1 rows, as in inputs[0].shape (ids), got 2 in [2, 7]",
        ),
    ],
    ids=["named dimension", "rows"],
)
def test_inputs_must_agree_on_their_dimensions(second: Any, message: str) -> None:
    """A dimension of one name has one size in a request."""
    assert refusal(Binder(TOKENS), ids(1, 7), second) == (Code.INVALID_TENSOR, message)


def test_cached_shape_does_not_accept_wrong_bytes() -> None:
    """A shape that fitted once is remembered; the bytes are counted every time."""
    binder = Binder(DIGITS)
    binder.bind([zeros("pixels", 1, 64)])
    code, _ = refusal(binder, tensor("pixels", np.zeros(63, np.float32), shape=[1, 64]))
    assert code == Code.INVALID_TENSOR


def test_cache_of_shapes_is_bounded() -> None:
    """Callers cannot fill the memory with ever new shapes."""
    binder = Binder(FIXED, tuning=replace(TUNING.models, cached_layouts=4))

    def bind_ever_new_shapes() -> None:
        for length in range(1000):
            binder.bind([zeros("x", 4, length)])

    assert held_bytes_of(bind_ever_new_shapes) < 20_000


def test_utf8_strings_are_bound() -> None:
    """Elements of `BYTES` are counted with their lengths."""
    bound = words().bind([tensor("words", np.array([["é"], ["b"]], dtype=object))])
    assert (bound.rows, bound.size_bytes) == (2, 11)


def test_other_than_utf8_strings_are_refused_where_required() -> None:
    """A model of ONNX could not take them."""
    given = tensor("words", np.array([[b"a"], [b"b\xff"]], dtype=object))
    assert refusal(words(), given) == (
        Code.INVALID_TENSOR,
        "inputs[0].data (words): expected UTF-8 in each element, got byte 0xff at 1 of element 1",
    )


def test_other_than_utf8_strings_are_accepted_elsewhere() -> None:
    """A model in Python takes any bytes."""
    given = tensor("words", np.array([[b"\xff"]], dtype=object))
    assert words(utf8=False).bind([given]).rows == 1


def test_lengths_of_bytes_elements_are_checked() -> None:
    """An element may not reach past the end."""
    given = tensor("words", np.array([[b"abc"]], dtype=object))
    given.data = given.data[:-1]
    assert refusal(words(), given)[0] == Code.INVALID_TENSOR


def test_bool_input_other_than_zero_or_one_is_refused() -> None:
    """Another byte is no truth value, and models do what they like with it."""
    given = tensor("words", np.array([[2]], dtype=np.uint8), datatype="BOOL")
    assert refusal(words("BOOL"), given)[0] == Code.INVALID_TENSOR


@pytest.mark.parametrize(
    ("values", "got"),
    [
        (np.array([[0, 4]], np.int64), "4 at index [0, 1]"),
        (np.array([[1, 2], [-1, 9]], np.int64), "-1 at index [1, 0]"),
        (np.array([[2**64 - 1]], np.uint64), f"{2**64 - 1} at index [0, 0]"),
        (np.array([[np.nan]], np.float32), "nan at index [0, 0]"),
        (np.array([[0, np.inf]], np.float16), "inf at index [0, 1]"),
        (np.array([[3.5]], ml_dtypes.bfloat16), "3.5 at index [0, 0]"),
    ],
    ids=["above", "below", "unsigned", "nan", "infinite", "bfloat16"],
)
def test_input_value_out_of_range_is_refused(values: NDArray[Any], got: str) -> None:
    """The first value outside is named, with its index."""
    given = tensor("x", values)
    signature = make_signature([spec("x", given.datatype, [-1, -1])], [SCORES])
    assert refusal(Binder(signature, {"x": (0, 3)}), given) == (
        Code.INVALID_TENSOR,
        f"inputs[0].data (x): expected values in [0, 3], got {got}",
    )


def test_input_values_at_limits_are_in_range() -> None:
    """Both limits are inclusive."""
    given = tensor("ids", np.array([[0, 30521]]))
    assert Binder(TOKENS, {"ids": (0, 30521)}).bind([given, mask(1, 2)]).rows == 1


def test_empty_input_is_in_every_range() -> None:
    """There is no value that could be outside."""
    bound = Binder(TOKENS, {"ids": (0, 3)}).bind([ids(1, 0), mask(1, 0)])
    assert bound.size_bytes == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "range.nope: expected one of the inputs words"),
        ("words", "range.words: expected an input of numbers, got BYTES"),
    ],
)
def test_range_of_unknown_input_is_refused(name: str, message: str) -> None:
    """A range is of an input that has numbers."""
    signature = make_signature([spec("words", "BYTES", [-1])], [SCORES])
    with pytest.raises(ConfigurationError, match=message):
        Binder(signature, {name: (0, 1)})


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_inputs_are_refused_where_model_wants_finite(datatype: str, value: float) -> None:
    """The message says which value, and where."""
    dtype = ml_dtypes.bfloat16 if datatype == "BF16" else f"f{int(datatype[2:]) // 8}"
    array = np.zeros((2, 3), dtype)
    array[1, 2] = value
    signature = make_signature([spec("x", datatype, [-1, 3])], [SCORES])
    assert refusal(Binder(signature, finite=True), tensor("x", array)) == (
        Code.INVALID_TENSOR,
        f"inputs[0].data (x): expected finite values, got {value} at index [1, 2]",
    )


def test_nonfinite_inputs_are_accepted_otherwise() -> None:
    """NaN may be a legitimate input."""
    signature = make_signature([spec("x", "FP32", [-1, 3])], [SCORES])
    given = tensor("x", np.full((1, 3), np.nan, np.float32))
    assert Binder(signature).bind([given]).rows == 1
