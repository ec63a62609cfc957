"""Which bodies are converted on a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from headrace.client import Response
from headrace.gateway.codec import InferCall, decode_call
from headrace.gateway.conversions import Conversions
from headrace.gateway.grpc_codec import is_decoded_by_element
from headrace.gateway.open_inference_pb2 import InferTensorContents, ModelInferRequest
from headrace.tuning import TUNING

LARGE = TUNING.gateway.converted_inline_bytes + 1
MANY = TUNING.gateway.encoded_inline_elements + 1


@pytest.fixture
def conversions() -> Iterator[Conversions]:
    """Those of a gateway without shared memory."""
    opened = Conversions(TUNING.gateway, use_regions=False)
    yield opened
    opened.close()


def with_binary(datatype: str) -> tuple[bytes, int]:
    """A large body with a tensor behind its JSON, and the size of that."""
    shape = [1, LARGE]
    parameters = {"binary_data_size": LARGE}
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": parameters}
    head = msgspec.json.encode({"inputs": [tensor]})
    return head + bytes(LARGE), len(head)


def answer_of(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Response:
    return Response("m", "1", "", {"y": array}, {}, ())


def call_for(*, binary: bool) -> InferCall:
    return decode_call(
        msgspec.json.encode({"inputs": [], "parameters": {"binary_data_output": binary}})
    )


@pytest.mark.parametrize("takes_long", [True, False])
async def test_only_long_conversion_leaves_thread_of_loop(
    conversions: Conversions, takes_long: bool
) -> None:
    """A short one is not worth a thread."""
    thread = await conversions.run(threading.get_ident, takes_long=takes_long)

    assert (thread != threading.get_ident()) == takes_long


def test_json_takes_long_by_its_size(conversions: Conversions) -> None:
    """Elements are made one by one."""
    assert conversions.decoding_takes_long(b" " * LARGE)
    assert not conversions.decoding_takes_long(b" " * (LARGE - 1))


def test_binary_tensor_takes_long_only_if_it_has_elements_of_bytes(
    conversions: Conversions,
) -> None:
    """A tensor of numbers is a view of the body; an escape in the JSON may hide BYTES."""
    escaped, size = with_binary("BYTES")
    escaped = escaped.replace(b"BYTES", rb"\u0042YTES")

    assert conversions.decoding_takes_long(*with_binary("BYTES"))
    assert conversions.decoding_takes_long(escaped, size + 5)
    assert not conversions.decoding_takes_long(*with_binary("UINT8"))


def test_message_takes_long_unless_its_contents_are_raw_numbers(conversions: Conversions) -> None:
    """Typed contents, and BYTES."""
    numbers = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
    typed = ModelInferRequest.InferInputTensor(
        name="x", datatype="FP32", shape=[1], contents=InferTensorContents(fp32_contents=[1.0])
    )
    texts = ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1])
    by_element = {
        "raw": is_decoded_by_element(ModelInferRequest(inputs=[numbers], raw_input_contents=[b""])),
        "typed": is_decoded_by_element(ModelInferRequest(inputs=[typed])),
        "texts": is_decoded_by_element(ModelInferRequest(inputs=[texts], raw_input_contents=[b""])),
    }

    assert by_element == {"raw": False, "typed": True, "texts": True}
    assert conversions.parsing_takes_long(bytes(LARGE), by_element=True)
    assert not conversions.parsing_takes_long(bytes(LARGE - 1), by_element=True)


def test_answer_takes_long_unless_it_is_binary_numbers(conversions: Conversions) -> None:
    """The number of elements decides."""
    numbers, texts = answer_of(np.zeros(MANY)), answer_of(np.full(MANY, b"", dtype=object))
    binary, json = call_for(binary=True), call_for(binary=False)

    assert conversions.encoding_takes_long(numbers, json)
    assert conversions.encoding_takes_long(texts, binary)
    assert not conversions.encoding_takes_long(numbers, binary)
    assert not conversions.encoding_takes_long(answer_of(np.zeros(MANY - 1)), json)


def test_nothing_that_touches_regions_leaves_thread_of_loop() -> None:
    """They are unregistered there, which closes their files."""
    conversions = Conversions(TUNING.gateway, use_regions=True)

    assert not conversions.decoding_takes_long(b" " * LARGE)
    assert not conversions.parsing_takes_long(bytes(LARGE), by_element=True)
    assert not conversions.encoding_takes_long(answer_of(np.zeros(MANY)), None)
    conversions.close()
