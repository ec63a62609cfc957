"""Bodies of `:predict` before they are sent on."""

from __future__ import annotations

import pytest

from headrace.errors import Code, Rejected
from headrace.gateway.predict import decode_predict
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.messages import Tensor

SIGNATURE = make_signature([TensorSpec("x", "FP32", (-1, 2))], [TensorSpec("y", "FP32", (-1, 2))])
MANY = 1000


def refusal(body: bytes) -> Rejected:
    """The error for a body, of which a few values are allowed."""
    with pytest.raises(Rejected) as refused:
        decode_predict(body, SIGNATURE, most_values=20)
    return refused.value


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'"a"', b'{"a":[1]}', b'["],[",1]'])
@pytest.mark.parametrize("form", [b'{"instances":[%b]}', b'{"inputs":[%b],"inputs":[[1,2]]}'])
def test_many_values_are_refused_without_being_made(form: bytes, item: bytes) -> None:
    """Each would be a Python object; of a key that is there twice, the first one as well."""
    error = refusal(form % b",".join([item] * MANY))

    assert error.code is Code.TOO_LARGE
    assert error.message.startswith("body: expected at most 20 values (commas and opening")


@pytest.mark.parametrize("body", [b"\\", b'{"instances":[["', b"[" * MANY, b"[" * 20 + b"\\"])
def test_long_body_that_is_no_json_is_refused(body: bytes) -> None:
    """Its values cannot be counted."""
    assert refusal(b" " * 20 + body).code is Code.INVALID_REQUEST


def test_body_of_as_many_values_as_allowed_is_decoded() -> None:
    """What is in strings and between values is not counted."""
    rows = b",".join([b"[ 1.25 ,  2.5 ]"] * 6)
    body = b'{"signature_name":"[,[,[,[,[,[,","instances":[%b]}' % rows
    found = decode_predict(body, SIGNATURE, most_values=20)

    assert found.call.inputs["x"].shape == (6, 2)
    assert refusal(body.replace(b"2.5", b"2,5", 1)).code is Code.TOO_LARGE


@pytest.mark.parametrize(
    ("datatype", "value", "content"),
    [
        ("INT64", b"16000", (16000).to_bytes(8, "little")),
        ("BYTES", b'"a"', b"\1\0\0\0a"),
        ("BYTES", b'{"b64":"YQ=="}', b"\1\0\0\0a"),
    ],
)
def test_value_outside_of_list_is_scalar_for_input_without_dimensions(
    datatype: str, value: bytes, content: bytes
) -> None:
    """Such as a rate beside the samples; a list has a dimension, which the input has not."""
    rate = TensorSpec("rate", datatype, ())
    signature = make_signature([*SIGNATURE.inputs, rate], SIGNATURE.outputs)
    body = b'{"inputs":{"x":[[1,2]],"rate":%b}}'

    bare, listed = (
        decode_predict(body % each, signature).call.inputs["rate"]
        for each in (value, b"[%b]" % value)
    )

    assert bare == Tensor("rate", datatype, (), content)
    assert listed.shape == (1,)
