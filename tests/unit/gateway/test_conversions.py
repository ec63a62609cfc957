"""Which bodies are converted on a thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headrace.client import Response
from headrace.errors import Code, Rejected
from headrace.gateway import grpc_codec
from headrace.gateway.codec import (
    EncodedAnswer,
    InferCall,
    decode_call,
    encode_answer,
    find_places,
)
from headrace.gateway.conversions import Conversions
from headrace.gateway.grpc_codec import is_decoded_by_element
from headrace.gateway.open_inference_pb2 import InferTensorContents, ModelInferRequest
from headrace.gateway.shared_memory import Place, Places, RegionAccess
from headrace.tuning import TUNING
from tests.support.conditions import eventually

LARGE = TUNING.gateway.converted_inline_bytes + 1
MANY = TUNING.gateway.encoded_inline_elements + 1


@pytest.fixture
def conversions() -> Iterator[Conversions]:
    """The conversions of a gateway without shared memory."""
    opened = Conversions(TUNING.gateway, use_regions=False)
    yield opened
    opened.close()


@pytest.fixture
def regional() -> Iterator[Conversions]:
    """The conversions of a gateway with shared memory."""
    opened = Conversions(TUNING.gateway, use_regions=True)
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


@pytest.mark.parametrize(
    ("coding", "size", "takes_long"),
    [
        ("br", 18, True),
        ("zstd", 18, True),
        ("gzip", TUNING.gateway.inflated_inline_bytes, False),
        ("gzip", TUNING.gateway.inflated_inline_bytes + 1, True),
        ("deflate", TUNING.gateway.inflated_inline_bytes, False),
        ("deflate", TUNING.gateway.inflated_inline_bytes + 1, True),
    ],
)
def test_compressed_body_takes_long_by_what_it_may_become(
    conversions: Conversions, coding: str, size: int, takes_long: bool
) -> None:
    """A few bytes of br or zstd may become 16 MiB; those of gzip become 1,000 times as many."""
    assert conversions.inflating_takes_long(bytes(size), coding) == takes_long


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


class NotedAccess(RegionAccess):
    """Zeros at each place; notes what is done, and whether on the thread of the test."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, bool]] = []
        self._thread = threading.get_ident()

    def _note(self, what: str, where: str) -> None:
        self.done.append((what, where, threading.get_ident() == self._thread))

    def check(self, place: Place, where: str) -> None:
        self._note("check", where)

    def read(self, place: Place, where: str) -> bytes:
        self._note("read", where)
        return bytes(place.byte_size)

    def write(self, place: Place, content: bytes | memoryview, where: str) -> None:
        self._note("write", where)


def place_of(size: int) -> dict[str, str | int]:
    """Parameters of a tensor in shared memory."""
    return {"shared_memory_region": "r", "shared_memory_byte_size": size}


def http_request(size: int) -> tuple[Callable[..., InferCall], Callable[[], Places]]:
    """How a body is decoded whose second input is of so many bytes in shared memory."""
    given = {"name": "a", "datatype": "BYTES", "shape": [1], "data": ["a" * LARGE]}
    read = {"name": "b", "datatype": "FP32", "shape": [size // 4], "parameters": place_of(size)}
    written = {"name": "y", "parameters": place_of(4)}
    body = msgspec.json.encode({"inputs": [given, read], "outputs": [written]})
    return partial(decode_call, body, None), partial(find_places, body)


def grpc_request(size: int) -> tuple[Callable[..., InferCall], Callable[[], Places]]:
    """The same of a message."""
    parameters = {
        "shared_memory_region": {"string_param": "r"},
        "shared_memory_byte_size": {"int64_param": size},
    }
    contents = {"bytes_contents": [b"a" * LARGE]}
    request = ModelInferRequest(
        inputs=[
            {"name": "a", "datatype": "BYTES", "shape": [1], "contents": contents},
            {"name": "b", "datatype": "FP32", "shape": [size // 4], "parameters": parameters},
        ],
        outputs=[{"name": "y", "parameters": parameters}],
    )
    return partial(grpc_codec.decode_call, request), partial(grpc_codec.find_places, request)


@pytest.mark.parametrize("request_", [http_request, grpc_request], ids=["http", "grpc"])
async def test_large_request_is_decoded_on_thread_and_its_regions_read_on_loop(
    regional: Conversions, request_: Callable[[int], Any]
) -> None:
    """Regions are unregistered on the event loop, which closes their files."""
    decode, places = request_(8)
    regions = NotedAccess()
    threads: list[int] = []

    def noted(given: RegionAccess) -> InferCall:
        threads.append(threading.get_ident())
        made: InferCall = decode(given)
        return made

    call = await regional.decode(noted, places, regions, takes_long=True)

    assert regions.done == [("read", "inputs[1]", True), ("check", "outputs[0]", True)]
    assert threads != [threading.get_ident()]
    assert bytes(call.inputs["b"].data) == bytes(8)
    assert list(call.places) == ["y"]


@pytest.mark.parametrize("request_", [http_request, grpc_request], ids=["http", "grpc"])
async def test_region_of_wrong_size_is_refused_from_thread(
    regional: Conversions, request_: Callable[[int], Any]
) -> None:
    """The error is that of a decoding on the event loop."""
    decode, places = request_(9)
    with pytest.raises(Rejected) as expected:
        decode(NotedAccess())
    with pytest.raises(Rejected) as refused:
        await regional.decode(decode, places, NotedAccess(), takes_long=True)

    assert refused.value.message == expected.value.message
    assert "8 bytes for FP32 [2], got 9 bytes" in refused.value.message


class RefusingAccess(NotedAccess):
    """Refuses each place."""

    def check(self, place: Place, where: str) -> None:
        raise Rejected(Code.INVALID_REQUEST, f"{where} refused")

    def read(self, place: Place, where: str) -> bytes:
        raise Rejected(Code.INVALID_REQUEST, f"{where} refused")


@pytest.mark.parametrize("place", [place_of(4), {"shared_memory_region": "r"}])
async def test_fault_before_that_of_region_is_told_first(
    regional: Conversions, place: dict[str, str | int]
) -> None:
    """Whether the region or its description is at fault, as in a decoding on the event loop."""
    wrong = {"name": "a", "datatype": "FP32", "shape": [1], "data": ["a" * LARGE]}
    tensor = {"name": "b", "datatype": "FP32", "shape": [1], "parameters": place}
    body = msgspec.json.encode({"inputs": [wrong, tensor], "outputs": [tensor | {"name": "y"}]})
    message = ModelInferRequest(
        inputs=[
            {"name": "a", "datatype": "FP32", "shape": [2]},
            {
                "name": "b",
                "parameters": {
                    key: {"string_param": value} if type(value) is str else {"int64_param": value}
                    for key, value in place.items()
                },
            },
        ]
    )
    for decode, places, told in (
        (partial(decode_call, body, None), partial(find_places, body), "a number for FP32"),
        (
            partial(grpc_codec.decode_call, message),
            partial(grpc_codec.find_places, message),
            "2 elements for FP32",
        ),
    ):
        with pytest.raises(Rejected, match=told):
            await regional.decode(decode, places, RefusingAccess(), takes_long=True)


@pytest.mark.parametrize("request_", [http_request, grpc_request], ids=["http", "grpc"])
async def test_refusal_of_region_is_raised_from_thread(
    regional: Conversions, request_: Callable[[int], Any]
) -> None:
    """For an input, and for an output if only that is refused."""

    class RefusingOutputs(RefusingAccess):
        read = NotedAccess.read

    decode, places = request_(8)
    for regions, told in ((RefusingAccess(), "inputs.1"), (RefusingOutputs(), "outputs.0")):
        with pytest.raises(Rejected, match=f"{told}. refused"):
            await regional.decode(decode, places, regions, takes_long=True)


async def test_large_answer_is_encoded_on_thread_and_written_to_regions_on_loop(
    regional: Conversions,
) -> None:
    """The answer says where its outputs are."""
    call = call_for(binary=False)._replace(places={"y": Place("r", 0, 4 * MANY)})
    answer = answer_of(np.full(MANY, b"", dtype=object))
    regions = NotedAccess()
    threads: list[int] = []

    def encode(given: RegionAccess) -> EncodedAnswer:
        threads.append(threading.get_ident())
        return encode_answer(answer, call, given)

    assert regional.encoding_takes_long(answer, call)
    encoded = await regional.encode(encode, regions, takes_long=True)

    (output,) = msgspec.json.decode(encoded.body)["outputs"]
    assert output["parameters"] == place_of(4 * MANY)
    assert regions.done == [("write", "output y", True)]
    assert threads != [threading.get_ident()]


def test_what_takes_long_does_not_depend_on_shared_memory(
    conversions: Conversions, regional: Conversions
) -> None:
    """Callers send large bodies to a gateway with shared memory as well."""
    for each in (conversions, regional):
        assert each.decoding_takes_long(b" " * LARGE)
        assert each.parsing_takes_long(bytes(LARGE), by_element=True)
        assert each.encoding_takes_long(answer_of(np.zeros(MANY)), None)


def test_small_request_takes_long_if_texts_may_be_in_region(
    conversions: Conversions, regional: Conversions
) -> None:
    """Its size does not show theirs; numbers are not looked at."""
    place = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": place_of(8)}
    texts = msgspec.json.encode({"inputs": [place]})
    numbers = texts.replace(b"BYTES", b"FP32")
    escaped = texts.replace(b"_", rb"\u005f").replace(b"B", rb"\u0042")

    assert [regional.decoding_takes_long(each) for each in (texts, numbers, escaped)] == [
        True,
        False,
        True,
    ]
    assert regional.parsing_takes_long(b"", by_element=True, texts_in_regions=True)
    assert not conversions.decoding_takes_long(texts)
    assert not conversions.parsing_takes_long(b"", by_element=True, texts_in_regions=True)


def test_output_of_numbers_in_region_is_not_encoded_by_element(regional: Conversions) -> None:
    """Its bytes are written as they are."""
    call = call_for(binary=False)._replace(places={"y": Place("r", 0, 8 * MANY)})

    assert not regional.encoding_takes_long(answer_of(np.zeros(MANY)), call)


class Body:
    """A body to which there can be a weak reference."""

    size = 3


async def test_cancelled_conversion_holds_nothing_while_threads_are_busy() -> None:
    """Its caller has gone; another one that waits as long is converted."""
    conversions = Conversions(replace(TUNING.gateway, conversion_threads=1), use_regions=False)
    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait()

    async def convert() -> int:
        body = Body()
        known.append(weakref.ref(body))
        return await conversions.run(lambda: body.size, takes_long=True)

    known: list[weakref.ref[Body]] = []
    busy = asyncio.create_task(conversions.run(block, takes_long=True))
    await eventually(begun.is_set)
    waiting = [asyncio.create_task(convert()) for _ in range(2)]
    await eventually(lambda: len(known) == 2)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    del waiting[0]  # it knows its frames by the error
    left = [each() is not None for each in known]
    release.set()

    assert left == [False, True]
    assert await waiting[0] == Body.size
    await busy
    conversions.close()
