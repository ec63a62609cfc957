"""Any record goes into a capture file and comes out as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.log.port import Record
from headrace.tools.replay.capture import CaptureWriter, read_contents, read_frame

content = st.none() | st.binary(max_size=200)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
records = st.builds(
    Record,
    topic=names,
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
    timestamp=st.integers(-1, 2**63 - 1),
    key=content,
    value=content,
    headers=st.lists(st.tuples(names, content), max_size=4).map(tuple),
)


@settings(max_examples=50)
@given(written=st.lists(records, max_size=20), frame_bytes=st.integers(1, 2000))
def test_captured_records_survive_round_trip(written: list[Record], frame_bytes: int) -> None:
    """Records survive frames of any size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "capture")
        with CaptureWriter(path, "any", frame_bytes=frame_bytes) as writer:
            writer.add(written)
        contents = read_contents(path)
        read = [
            each for frame in contents.frames for each in read_frame(path, frame, complete=True)
        ]

    assert read == written
    assert sum(each.records for each in contents.partitions) == len(written)
