"""Answers of a broker, however the network has cut them."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from headrace.log.kafka._aiokafka import Frames

frames_of = st.lists(st.binary(max_size=40), max_size=8)


@given(frames_of, st.lists(st.integers(1, 30), min_size=1))
def test_kafka_frames_survive_any_split(frames: list[bytes], sizes: list[int]) -> None:
    """Each frame is complete with the piece that ends it, for pieces of any sizes."""
    stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
    cutting, found, at, turn = Frames(), [], 0, 0
    while at < len(stream):
        end = at + sizes[turn % len(sizes)]
        found += cutting.cut(stream[at:end])
        at, turn = end, turn + 1
        assert found == frames[: len(found)]
        assert len(found) == _ended(frames, min(at, len(stream)))
    assert found == frames


def _ended(frames: list[bytes], at: int) -> int:
    """How many frames end before this place of the stream."""
    end, count = 0, 0
    for frame in frames:
        end += 4 + len(frame)
        count += end <= at
    return count
