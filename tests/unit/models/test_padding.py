"""Padding to a few lengths: which requests share a batch, what is added, and what is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.config import LimitSettings, make_settings
from headrace.errors import ConfigurationError
from headrace.models.config import ModelConfig, make_model_config
from headrace.models.inputs.binding import Binder
from headrace.models.inputs.padding import add_padding, find_bucket
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.codec import encode_request
from headrace.protocol.codec.requests import decode_request
from headrace.protocol.headers import parse_envelope
from headrace.protocol.messages import Request
from headrace.protocol.tensors import to_array
from headrace.services.executor.buffers import gather, scatter
from headrace.services.executor.safety import refuse_nonfinite
from tests.support.work import make_request

NAMED = ("batch", "sequence")
TEXT = make_signature(
    [
        TensorSpec("ids", "INT64", (-1, -1), NAMED),
        TensorSpec("mask", "INT64", (-1, -1), NAMED),
        TensorSpec("shift", "FP32", (-1, 1), ("batch", "")),
    ],
    [
        TensorSpec("hidden", "FP32", (-1, -1, 2), (*NAMED, "")),
        TensorSpec("summary", "FP32", (-1, 8), ("batch", "")),
    ],
)
PADDED: dict[str, Any] = {
    "sequence_buckets": [8, 4],
    "pad": {"ids": 9, "mask": 0},
    "mask": "mask",
}


def config_of(**values: Any) -> ModelConfig:
    """Return the configuration that a `model.toml` with these keys gives."""
    return make_model_config(values, make_settings({}))


def padded(signature: Signature = TEXT, **values: Any) -> Signature:
    """With the usual lengths, unless others are given."""
    return add_padding(signature, config_of(**(PADDED | values)))


def request_of(length: int, first: int = 1, rows: int = 1) -> Request:
    """Tokens counted up, all of them masked in."""
    ids = np.arange(first, first + rows * length, dtype=np.int64).reshape(rows, length)
    shift = np.zeros((rows, 1), np.float32)
    return make_request(rows=rows, inputs={"ids": ids, "mask": np.ones_like(ids), "shift": shift})


@pytest.mark.parametrize(("size", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_padded_size_is_next_length(size: int, bucket: int) -> None:
    """One beyond the largest stays as it is."""
    assert find_bucket(size, (4, 8)) == bucket


def test_requests_padded_to_one_length_share_shape_class() -> None:
    """Requests of different sizes share batches if they are padded to the same length."""
    binder = Binder(padded())

    def shape_class(length: int) -> tuple[int, ...]:
        ids = np.ones((1, length), np.int64)
        inputs: dict[str, Any] = {"ids": ids, "mask": ids, "shift": np.zeros((1, 1), "f4")}
        value = encode_request("application/msgpack", "m", inputs)
        message = decode_request(value, parse_envelope([], 0, 0), LimitSettings())
        return binder.bind(message.inputs).shape_class

    assert shape_class(2) == shape_class(4) == (4, 4)
    assert shape_class(5) == shape_class(8) == (8, 8)
    assert shape_class(9) == (9, 9)


def test_padding_has_configured_values() -> None:
    """Values are added behind each row of inputs with a free dimension, and nowhere else."""
    arrays = gather([request_of(2, first=1), request_of(3, first=5, rows=2)], padded())

    assert arrays["ids"].tolist() == [[1, 2, 9, 9], [5, 6, 7, 9], [8, 9, 10, 9]]
    assert arrays["mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert arrays["shift"].shape == (3, 1)


def test_mask_without_padding_value_is_padded_with_zeros() -> None:
    """No other value would mask anything."""
    arrays = gather([request_of(2), request_of(3)], padded(pad={"ids": 9}))

    assert arrays["mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_outputs_are_cut_to_sizes_of_request() -> None:
    """Free dimensions of the name of an input's are cut back; a fixed size that happens to be
    the same as a length is not.
    """
    requests, signature = [request_of(2), request_of(3, rows=2), request_of(8)], padded()
    gather(requests[:2], signature)
    hidden = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    summary = np.arange(24, dtype=np.float32).reshape(3, 8)

    scatter(requests[:2], signature, {"hidden": hidden, "summary": summary})

    outputs = [[to_array(one) for one in request.outputs or ()] for request in requests[:2]]
    np.testing.assert_array_equal(outputs[0][0], hidden[:1, :2])
    np.testing.assert_array_equal(outputs[1][0], hidden[1:, :3])
    np.testing.assert_array_equal(outputs[1][1], summary[1:])


def test_nonfinite_outputs_of_padding_fail_no_request() -> None:
    """Models may give minus infinity where the mask is 0; it is cut off before any answer."""
    fine, bad, signature = request_of(2), request_of(3), padded()
    gather([fine, bad], signature)
    hidden = np.zeros((2, 4, 2), np.float32)
    hidden[0, 2:], hidden[1, 2] = -np.inf, np.nan
    outputs = {"hidden": hidden, "summary": np.zeros((2, 8), np.float32)}

    scatter([fine, bad], signature, outputs)
    refuse_nonfinite([fine, bad], signature, outputs, max_listed_rows=10)

    assert fine.failure is None
    assert bad.failure is not None
    assert bad.failure.message.startswith("output hidden: expected finite values")


def test_repeated_gathering_pads_once() -> None:
    """A run that is repeated, or a part of a batch that failed, starts from what is there."""
    request, signature = request_of(3), padded()
    first = gather([request], signature)

    again = gather([request], signature)

    np.testing.assert_array_equal(first["ids"], again["ids"])
    assert request.own_sizes == {"sequence": (4, 3)}


def test_unnamed_dimensions_are_padded_together_only_if_equal() -> None:
    """With two lengths nothing says to which of them an output belongs; it stays as it is."""
    signature = make_signature(
        [TensorSpec("a", "FP32", (-1, -1)), TensorSpec("b", "FP32", (-1, -1))],
        [TensorSpec("y", "FP32", (-1, -1))],
    )
    signature = padded(signature, pad={"a": 0.5, "b": 0}, mask="b")
    equal, different = (
        make_request(inputs={"a": np.ones((1, 3), "f4"), "b": np.ones((1, length), "f4")})
        for length in (3, 2)
    )
    for request in (equal, different):
        gather([request], signature)
        scatter([request], signature, {"y": np.ones((1, 4), np.float32)})

    assert [request.outputs[0].shape for request in (equal, different) if request.outputs] == [
        (1, 3),
        (1, 4),
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"pad": {"mask": 0}}, "pad.ids: expected a value, since ids is padded"),
        ({"pad": {"ids": 0, "mask": 0, "x": 1}}, "pad.x: expected one of ids, mask"),
        ({"pad": {"ids": 0.5, "mask": 0}}, "pad.ids: expected a value of INT64, got 0.5"),
        ({"mask": "shift"}, "mask: expected one of ids, mask, got 'shift'"),
    ],
)
def test_configuration_that_does_not_fit_model_is_refused(
    values: dict[str, Any], told: str
) -> None:
    """Loading fails with the key and the expected value."""
    with pytest.raises(ConfigurationError, match=told.replace("[", r"\[")):
        padded(**values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"sequence_buckets": [8]}, "sequence_buckets: expected mask beside it"),
        ({"mask": "mask"}, "pad, mask: expected sequence_buckets beside them"),
        (PADDED | {"pad": {"mask": 1}}, "pad.mask: expected 0, since it is the mask, got 1"),
    ],
)
def test_contradicting_padding_keys_are_refused(values: dict[str, Any], told: str) -> None:
    """The error comes before any model is read."""
    with pytest.raises(ConfigurationError, match=told):
        config_of(**values)


def test_model_without_lengths_is_not_padded() -> None:
    """The signature is the model's own, and requests of different sizes do not meet."""
    assert add_padding(TEXT, config_of()) == TEXT
