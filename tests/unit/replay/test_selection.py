"""Which records are meant."""

from __future__ import annotations

import json
import re

import msgpack
import pytest

from headrace.log.port import Record, TopicPartition
from headrace.protocol.compression import compress
from headrace.tools.replay.recording import Filters, Selection, Span, Window, model_of
from tests.support.recordings import START_MS, recorded

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
ZSTD = compress(msgpack.packb({"model_name": "m", "model_version": "7"}), "zstd")
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01".encode()


def with_headers(*headers: tuple[str, bytes | None], value: bytes | None = b"") -> Record:
    """A record with these headers alone."""
    return recorded(0, headers=headers, value=value)


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        (Filters(), True),
        (Filters(key=b"key-0"), True),
        (Filters(key=b"key"), False),
        (Filters(key_pattern=re.compile(rb"-\d$")), True),
        (Filters(key_pattern=re.compile(rb"^\d")), False),
        (Filters(headers=(("a", b"2"),)), True),
        (Filters(headers=(("a", b"1"),)), False),
        (Filters(headers=(("a", b"2"), ("missing", b""))), False),
        (Filters(status="ok"), True),
        (Filters(status="TOO_LARGE"), False),
        (Filters(trace_id=TRACE_ID.upper()), True),
        (Filters(trace_id="f" * 32), False),
        (Filters(model="digits"), True),
        (Filters(model="digits/3"), False),
        (Filters(key=b"key-0", status="TOO_LARGE"), False),
    ],
)
def test_selection_joins_filters_by_and(filters: Filters, fits: bool) -> None:
    """Filters are joined by and; the last value of a repeated header counts."""
    headers = (("a", b"1"), ("a", b"2"), ("x-status", b"ok"), ("traceparent", TRACEPARENT))
    assert filters.fits(recorded(0, headers=headers)) is fits


def test_selection_by_key_leaves_out_record_without_key() -> None:
    """Its key is empty to a regular expression, and equal to no key."""
    keyless = recorded(0, key=None)
    assert Filters(key_pattern=re.compile(b"^$")).fits(keyless)
    assert not Filters(key=b"").fits(keyless)


@pytest.mark.parametrize(
    ("record", "model"),
    [
        (recorded(0), ("digits", "")),
        (with_headers(("x-model", b"a/2")), ("a", "2")),
        (with_headers(("x-model", b"a"), ("content-type", b"image/png")), ("a", "")),
        (with_headers(("x-model", b"a"), value=b"\xc1"), ("a", "")),
        (with_headers(("x-model", b"a"), value=None), ("a", "")),
        (
            with_headers(
                ("content-type", b"Application/JSON; charset=utf-8"),
                value=json.dumps({"model_name": "m", "model_version": "7"}).encode(),
            ),
            ("m", "7"),
        ),
        (with_headers(value=None), ("", "")),
        (with_headers(("content-encoding", b"zstd"), value=ZSTD), ("m", "7")),
        (with_headers(("content-encoding", b"ZSTD"), ("x-model", b"a"), value=ZSTD), ("m", "7")),
        (with_headers(("content-encoding", b"zstd"), ("x-model", b"a"), value=ZSTD[:9]), ("a", "")),
        (with_headers(("content-encoding", b"pack"), ("x-model", b"a"), value=ZSTD), ("a", "")),
        (with_headers(("x-model", b"a@canary"), value=None), ("a", "")),
    ],
)
def test_selection_finds_model_in_body_or_header(record: Record, model: tuple[str, str]) -> None:
    """The body counts first; what cannot be read names no model, and harms nobody."""
    assert model_of(record) == model


@pytest.mark.parametrize(
    ("window", "span"),
    [
        (Window(), (10, 20)),
        (Window(from_offsets={None: 12}, until_offsets={None: 15}), (12, 15)),
        (Window(from_offsets={None: 12, 0: 13}), (13, 20)),
        (Window(from_offsets={1: 15}), (10, 20)),
        (Window(from_offsets={0: 3}, until_offsets={0: 99}), (10, 20)),
        (Window(from_offsets={0: 30}), (20, 20)),
        (Window(until_offsets={0: 5}), (5, 5)),
        (Window(fixed={P0: (14, 16)}), (14, 16)),
        (Window(from_offsets={0: 15}, fixed={P0: (14, 16)}), (15, 16)),
        (Window(fixed={P1: (14, 16)}), (0, 0)),
    ],
)
def test_selection_offsets_bound_existing_records(window: Window, span: tuple[int, int]) -> None:
    """A partition's own bounds count before those for all, and never widen what there is."""
    assert window.span(P0, 10, 20) == Span(P0, *span)


def test_selection_leaves_out_records_before_time() -> None:
    """A late timestamp behind the window's first record does not come in by its offset."""
    selection = Selection(Window(from_ms=START_MS + 5))
    assert [selection.fits(recorded(number)) for number in (4, 5, 6)] == [False, True, True]
