"""Requests read by their layout are the requests that decoding gives, or refused alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import LimitSettings
from headrace.errors import Rejected
from headrace.models.inputs.binding import Binder, Bound
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.codec import decode_request, encode_request
from headrace.protocol.messages import Envelope, Tensor
from headrace.services.ingest.decode_cache import DecodeCache, DecodeTemplate

LIMITS = LimitSettings()
SIGNATURE: Signature = make_signature(
    [TensorSpec("x", "FP32", (-1, -1), ("batch", ""))], [TensorSpec("y", "FP32", (-1, 2))]
)


@st.composite
def values(draw: st.DrawFn) -> bytes:
    """Requests that resemble each other, and one in a few with a byte changed."""
    shape = draw(st.sampled_from([(1, 3), (3, 1), (1, 4), (2, 2), (1, 1)]))
    numbers = draw(st.lists(st.integers(0, 255), min_size=4 * 4, max_size=4 * 4))
    array = np.array(numbers, np.uint8).view(np.float32)[: shape[0] * shape[1]].reshape(shape)
    value = bytearray(
        encode_request(
            "application/msgpack",
            draw(st.sampled_from(["one", "two"])),
            {draw(st.sampled_from(["x", "z"])): array},
            version=draw(st.sampled_from([None, "1"])),
            id=draw(st.sampled_from([None, None, "a", "b"])),
            parameters=draw(st.sampled_from([None, {"p": 1}, {"p": 2}])),
            outputs=draw(st.sampled_from([None, ["y"], ["q"]])),
        )
    )
    if draw(st.booleans()):
        value[draw(st.integers(0, len(value) - 1))] = draw(st.integers(0, 255))
    return bytes(value)


class Version:
    """The part of a model's version that decoding reads."""

    name, version = "model", "1"

    def __init__(self, *, finite: bool) -> None:
        self.bind = Binder(SIGNATURE, finite=finite).bind
        self.depends_on_values = finite


def plainly(value: bytes, version: Version) -> Any:
    """Return the request that decoding gives, or the text of its refusal."""
    try:
        message = decode_request(value, Envelope(), LIMITS)
        bound = version.bind(message.inputs, message.outputs)
    except Rejected as error:
        return str(error)
    return message.model_name, message.model_version, message.id, told(bound)


def by_layout(value: bytes, layouts: DecodeCache, version: Version) -> Any:
    """The same by its layout, where it has one that is known; learned otherwise."""
    try:
        layout = layouts.find(value)
        template = layouts.template(len(value), lambda *_: version)
        if layout is not None:
            message = layout.message
            bound = (
                layout.bind(value, version)
                if template is None
                else bound_by_template(value, template)
            )
        else:
            message = decode_request(value, Envelope(), LIMITS)
            bound = version.bind(message.inputs, message.outputs)
            layouts.learn(value, message)
    except Rejected as error:
        return str(error)
    return message.model_name, message.model_version, message.id, told(bound)


def bound_by_template(value: bytes, template: DecodeTemplate) -> Bound:
    """Return what ingest makes of a value whose layout is bound."""
    content = memoryview(value)[template.start : template.stop]
    return Bound(
        (Tensor(template.name, template.datatype, template.shape, content),), *template.bound
    )


def told(bound: Any) -> Any:
    """A bound request, with its bytes instead of views of them."""
    return [(*each[:3], bytes(each.data)) for each in bound.tensors], *bound[1:]


@given(st.lists(values(), min_size=2, max_size=20), st.booleans())
def test_decoding_by_layout_equals_decoding_without(requests: list[bytes], finite: bool) -> None:
    """Values alike and unlike, in any order, decode the same with a layout and without."""
    version = Version(finite=finite)
    layouts = DecodeCache()

    for value in requests:
        assert by_layout(value, layouts, version) == plainly(value, version)
