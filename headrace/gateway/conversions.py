"""Conversion of bodies: on the event loop if that is quick, otherwise on a thread.

Compressing takes up to 40 ms for 1 MiB, elements of BYTES 0.6 µs each and JSON up to 0.9 µs an
element, and everything else waits for the event loop meanwhile. zlib and zstd release the
interpreter, so that a thread takes all of that off the loop. JSON holds it while msgspec reads or
writes, a third to two thirds of the time, but a large tensor is read in parts. Beside requests with
2.3 MiB of JSON in gzip, the slowest answer to another caller comes after 11 to 16 ms instead of 38,
and beside one with 15 MiB after 30 to 55 ms; see `GatewayTuning` for the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from headrace.client import Response
from headrace.gateway.codec import InferCall, may_name_places
from headrace.gateway.shared_memory import Places, RegionAccess, StagedAccess
from headrace.primitives.executor_calls import call_by
from headrace.protocol.compression import BROTLI, ZSTD
from headrace.tuning import GatewayTuning

T = TypeVar("T")


class Conversions:
    """Converts bodies, large ones on a few threads of its own.

    What a body decompresses to is counted once it is there, so that the number of threads also
    bounds what is not counted yet.

    Args:
        tuning: what is large.
        use_regions: tensors may be in shared memory. Regions are read, written, counted and
            unregistered on the event loop alone, before a request is decoded on a thread and after
            an answer is encoded there.
    """

    def __init__(self, tuning: GatewayTuning, *, use_regions: bool) -> None:
        self._tuning = tuning
        self._use_regions = use_regions
        self._threads = ThreadPoolExecutor(tuning.conversion_threads, "gateway-conversion")

    @property
    def threads(self) -> Executor:
        """The threads, for what converts beside this."""
        return self._threads

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, convert: Callable[[], T], *, takes_long: bool) -> T:
        """Return what a function makes, which runs on a thread if it takes long.

        If this is cancelled before the thread comes to it, the body is dropped: see `call_by`.
        """
        if not takes_long:
            return convert()
        return await call_by(self._threads, convert)

    async def decode(
        self,
        decode: Callable[[RegionAccess], InferCall],
        find_places: Callable[[], Places],
        regions: RegionAccess,
        *,
        takes_long: bool,
    ) -> InferCall:
        """Return what a function makes of a request, which runs on a thread if it takes long.

        Args:
            decode: makes the call, of inputs that may be in shared memory.
            find_places: returns where they are, also on the thread.
            regions: touched on the event loop only.
            takes_long: whether decoding does.

        Raises:
            Rejected: see the functions, and `RegionAccess`.
            Unavailable: the inputs are too large together with what is under way.
        """
        if not takes_long:
            return decode(regions)
        if self._use_regions:
            staged = StagedAccess(regions)
            staged.load(await self.run(find_places, takes_long=True))
            regions = staged
        return await self.run(partial(decode, regions), takes_long=True)

    async def encode(
        self, encode: Callable[[RegionAccess], T], regions: RegionAccess, *, takes_long: bool
    ) -> T:
        """Return what a function makes of an answer, which runs on a thread if it takes long.

        Outputs are written to their places in shared memory on the event loop.

        Raises:
            Rejected: see the function, and `RegionAccess.write`.
        """
        if not takes_long:
            return encode(regions)
        staged = StagedAccess(regions)
        encoded = await self.run(partial(encode, staged), takes_long=True)
        staged.store()
        return encoded

    def inflating_takes_long(self, compressed: bytes, coding: str) -> bool:
        """Return True for more than a bomb needs to hold up the event loop, which in br and zstd
        are a few bytes.
        """
        return coding in (BROTLI, ZSTD) or len(compressed) > self._tuning.inflated_inline_bytes

    def deflating_takes_long(self, plain: bytes) -> bool:
        """Return whether compressing takes long."""
        return len(plain) > self._tuning.converted_inline_bytes

    def decoding_takes_long(self, body: bytes, json_bytes: int | None = None) -> bool:
        """Return whether decoding an inference request over HTTP takes long.

        Args:
            body: JSON, and the tensors after it.
            json_bytes: the size of the JSON; None if it is all of the body.
        """
        inline_bytes = self._tuning.converted_inline_bytes
        if len(body) <= inline_bytes:
            return self._use_regions and may_name_places(body) and _may_have_texts(body)
        if json_bytes is None or json_bytes > inline_bytes:
            return True
        return _may_have_texts(body[:json_bytes])  # tensors of fixed sizes are not looked at

    def parsing_takes_long(
        self, message: bytes, *, by_element: bool, texts_in_regions: bool = False
    ) -> bool:
        """Return whether decoding an inference request over gRPC takes long.

        Args:
            message: the request.
            by_element: see `headrace.gateway.grpc_codec.is_decoded_by_element`.
            texts_in_regions: see `headrace.gateway.grpc_codec.has_texts_in_regions`.
        """
        is_large = len(message) > self._tuning.converted_inline_bytes
        return (is_large and by_element) or (self._use_regions and texts_in_regions)

    def encoding_takes_long(self, answer: Response, call: InferCall | None) -> bool:
        """Return whether encoding an answer takes long; without a call all of it is JSON."""
        elements = sum(
            array.size
            for name, array in answer.outputs.items()
            if call is None
            or array.dtype.hasobject
            or not (name in call.places or call.binary.get(name, call.binary_by_default))
        )
        return elements > self._tuning.encoded_inline_elements


def _may_have_texts(head: bytes) -> bool:
    """Return whether a tensor may have BYTES; JSON can write any name with a backslash."""
    return b"BYTES" in head or b"\\" in head
