"""Layouts: which requests have one, when it is known, and when another takes its place."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.config import LimitSettings
from headrace.protocol.codec import decode_request, encode_request
from headrace.protocol.messages import Envelope
from headrace.services.ingest.decode_cache import DecodeCache
from headrace.tuning import TUNING

TUNED = TUNING.ingest


def request(
    fill: float = 0.0, model: str = "digits", size: int = 8, id: str | None = None
) -> bytes:
    """A request of one input, whose bytes `fill` decides."""
    pixels = np.full((1, size), fill, np.float32)
    return encode_request("application/msgpack", model, {"pixels": pixels}, id=id)


def learn(layouts: DecodeCache, value: bytes) -> None:
    """Decode a value, as one has to whose layout is not known, and have its layout learned."""
    layouts.learn(value, decode_request(value, Envelope(), LimitSettings()))


def test_request_with_other_tensor_bytes_has_known_layout() -> None:
    """Once one was learned, others of its layout are found, and no others."""
    layouts = DecodeCache()
    learn(layouts, request(1.0))

    assert layouts.find(request(2.0)) is not None
    assert layouts.find(request(2.0, model="digitz")) is None
    assert layouts.find(request(2.0, size=9)) is None


@pytest.mark.parametrize(
    "value",
    [
        request(id="mine"),
        encode_request("", "two", {name: np.zeros((1, 2), np.float32) for name in ("a", "b")}),
        encode_request("", "text", {"words": np.array([["a"]], object)}),
        encode_request("", "flags", {"flags": np.array([[True]])}),
        encode_request("", "empty", {"x": np.zeros((1, 0), np.float32)}),
        encode_request(
            "",
            "wordy",
            {"x": np.zeros((1, 2), np.float32)},
            parameters={
                f"p{number}": "x" * 200 for number in range(TUNED.max_layout_bytes // 200 + 1)
            },
        ),
    ],
    ids=["an id", "two inputs", "BYTES", "BOOL", "no bytes", "much around it"],
)
def test_value_without_layout_is_not_cached(value: bytes) -> None:
    """It is decoded each time."""
    layouts = DecodeCache()
    learn(layouts, value)

    assert layouts.find(value) is None


def test_unused_layout_is_evicted() -> None:
    """A layout that keeps coming replaces an unused layout of the same length."""
    layouts = DecodeCache()
    first, second = request(model="first-"), request(model="second")
    learn(layouts, first)
    for _ in range(TUNED.layout_mismatches):
        assert layouts.find(second) is None
        learn(layouts, second)

    assert layouts.find(second) is not None
    assert layouts.find(first) is None


def test_number_of_layouts_is_bounded() -> None:
    """However many lengths come, no more than a number of layouts is kept."""
    layouts = DecodeCache()
    sizes = range(1, TUNED.max_cached_layouts + 2)
    for size in sizes:
        learn(layouts, request(size=size))

    known = sum(
        layouts.find(request(size=size)) is not None
        for size in range(1, TUNED.max_cached_layouts + 2)
    )
    assert known <= TUNED.max_cached_layouts
