"""Arrivals from recorded requests: times, sizes and deadlines, without the tensors."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from headrace.tools.simulate.arrivals import read_arrivals
from headrace.tools.simulate.events import NO_TIMEOUT, Kind
from tests.support.recordings import START_MS, GivenRecording, recorded


def body(*shapes: list[int], **fields: Any) -> dict[str, Any]:
    """A request with an FP32 input for each shape."""
    inputs = [
        {
            "name": f"x{place}",
            "datatype": "FP32",
            "shape": shape,
            "data": bytes(4 * abs(int(np.prod(shape)))),
        }
        for place, shape in enumerate(shapes)
    ]
    return {"model_name": "m", "inputs": inputs} | fields


def shaped(*shape: int) -> dict[str, Any]:
    """A request whose only input claims this shape, and has no data."""
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": b""}
    return {"model_name": "m", "inputs": [tensor]}


async def test_arrivals_within_one_millisecond_are_spread() -> None:
    """All timestamps are whole milliseconds; a step back counts as none."""
    stamps = [0, 0, 0, 0, 2, 1, 3]
    records = [recorded(number, timestamp=START_MS + stamp) for number, stamp in enumerate(stamps)]
    found = await read_arrivals(GivenRecording(records), 0)

    after_us = found.arrivals.at_us - START_MS * 1000
    assert after_us.tolist() == [0, 250, 500, 750, 2000, 2500, 3000]


async def test_arrivals_have_rows_bytes_and_shapes_of_inputs() -> None:
    """In MessagePack and JSON, whatever the order of the inputs."""
    packed = msgpack.packb(body([3, 8], [3]))
    as_json = body([2, 8], [2], model_version="7")
    for tensor in as_json["inputs"]:
        tensor["data"] = [0.0] * int(np.prod(tensor["shape"]))
    as_json["inputs"].reverse()
    records = [
        recorded(0, value=packed),
        recorded(
            1,
            value=json.dumps(as_json).encode(),
            headers=(("content-type", b"application/json; charset=utf-8"),),
        ),
    ]
    found = (await read_arrivals(GivenRecording(records), 0)).arrivals

    assert found.kinds == (Kind("m", "", (8,)), Kind("m", "7", (8,)))
    assert found.rows.tolist() == [3, 2]
    assert found.size_bytes.tolist() == [3 * 9 * 4, 2 * 9 * 4]


async def test_arrival_of_payload_has_one_row() -> None:
    """The rows that the transform makes of a payload are not known."""
    headers = (("content-type", b"image/png"), ("x-model", b"magika/2"))
    record = recorded(0, value=b"x" * 70, headers=headers)
    found = (await read_arrivals(GivenRecording([record]), 0)).arrivals

    assert found.kinds == (Kind("magika", "2", ()),)
    assert (found.rows.tolist(), found.size_bytes.tolist()) == ([1], [70])


async def test_arrival_deadlines_count_from_arrival() -> None:
    """Both deadline headers count, or else the default; a deadline before the arrival leaves 0."""
    headers: list[tuple[tuple[str, bytes], ...]] = [
        (("x-timeout-ms", b"250"),),
        (("x-deadline-ms", b"%d" % (START_MS + 40)),),
        (("x-deadline-ms", b"%d" % (START_MS - 40)),),
        (),
    ]
    records = [
        recorded(number, timestamp=START_MS, headers=each) for number, each in enumerate(headers)
    ]
    with_default = await read_arrivals(GivenRecording(records), 900)
    without = await read_arrivals(GivenRecording(records), 0)

    assert with_default.arrivals.timeout_us.tolist() == [250_000, 40_000, 0, 900_000]
    assert without.arrivals.timeout_us.tolist()[-1] == NO_TIMEOUT


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"\xc1",
        msgpack.packb(body()),
        msgpack.packb(body([0, 8])),
        msgpack.packb(body([])),
        msgpack.packb(body([2, 8], [3, 8])),
        msgpack.packb(body([1, -8])),
        msgpack.packb(body([1, 8], model_name="")),
        msgpack.packb(shaped(2**62, 4)),
        msgpack.packb(shaped(2**63, 0)),
    ],
    ids=[
        *("null", "junk", "no-inputs", "no-rows", "scalar", "rows", "negative", "no-model"),
        *("bytes-beyond-64-bits", "rows-beyond-64-bits"),
    ],
)
async def test_records_that_are_not_requests_are_left_out_and_counted(value: bytes | None) -> None:
    """The others are read."""
    found = await read_arrivals(GivenRecording([recorded(0, value=value), recorded(1)]), 0)

    assert (len(found.arrivals.at_us), found.left_out) == (1, 1)


@pytest.mark.parametrize("timestamp", [START_MS * 1_000_000, -1], ids=["nanoseconds", "none"])
async def test_record_whose_timestamp_is_no_time_is_left_out(timestamp: int) -> None:
    """There is no time at which it could arrive, in the microseconds of arrivals."""
    records = [recorded(0, timestamp=timestamp), recorded(1)]
    found = await read_arrivals(GivenRecording(records), 0)

    assert (len(found.arrivals.at_us), found.left_out) == (1, 1)
