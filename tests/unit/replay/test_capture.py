"""Capture files: round trips, cut off and damaged ones, foreign ones."""

from __future__ import annotations

import asyncio
import io
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgpack
import pytest

from headrace.errors import ConfigurationError
from headrace.log.port import Record
from headrace.tools.replay.capture import (
    CaptureError,
    CaptureWriter,
    open_capture,
    read_contents,
    read_frame,
)
from headrace.tools.replay.recording import Filters, Selection, Window
from tests.support.recordings import START_MS, recorded

ODD = [
    recorded(0, key=None, value=None, headers=()),
    recorded(1, key=b"", value=b"", headers=(("", None), ("ü", b"\xff"), ("ü", b""))),
    recorded(2, timestamp=-1, offset=2**62),
]
RECORDS = [*ODD, *(recorded(number) for number in range(3, 40))]


def write(path: Path, records: Sequence[Record] = RECORDS, frame_bytes: int = 2000) -> Path:
    """A whole capture file."""
    with CaptureWriter(path, "recorded", frame_bytes=frame_bytes) as writer:
        writer.add(records)
    return path


def read(path: Path) -> list[Record]:
    """All records of a file."""
    contents = read_contents(path)
    return [
        record
        for frame in contents.frames
        for record in read_frame(path, frame, complete=contents.complete)
    ]


async def select(path: Path, selection: Selection) -> list[int]:
    """The numbers of the records that a selection of a file has."""
    async with open_capture(path, selection) as recording:
        return [record.timestamp - START_MS async for record in recording]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A small file of several frames."""
    return write(tmp_path / "capture")


def test_capture_file_is_readable_by_its_owner_alone(capture: Path) -> None:
    """It holds what callers sent."""
    assert stat.S_IMODE(capture.stat().st_mode) == 0o600


def test_capture_file_survives_round_trip(capture: Path) -> None:
    """Keys, values, headers and numbers come back as they were, nulls and odd ones included."""
    assert read(capture) == RECORDS


def test_capture_index_counts_partitions_offsets_and_bytes(capture: Path) -> None:
    """Without reading a frame: partitions, offsets, bytes and times."""
    contents = read_contents(capture)
    assert contents.complete
    assert (contents.source, contents.records, contents.notice) == ("recorded", len(RECORDS), "")
    assert len(contents.frames) > 3
    second = contents.partitions[1]
    assert (second.partition, second.records) == (("recorded", 1), len(RECORDS) // 2)
    assert (second.first_offset, second.last_offset) == (0, len(RECORDS) // 2 - 1)
    assert (second.first_ms, second.last_ms) == (START_MS + 1, START_MS + len(RECORDS) - 1)


def test_capture_file_is_stream_of_messagepack(capture: Path) -> None:
    """It is a stream of MessagePack objects: header, heads and frames in turn, index, footer."""
    objects = list(msgpack.Unpacker(io.BytesIO(capture.read_bytes())))
    assert objects[0]["version"] == 1
    assert sum(each["records"] for each in objects[1:-2:2]) == len(RECORDS)
    assert set(objects[-2]) == {"frames", "partitions"}
    assert isinstance(objects[-1], msgpack.ExtType)


def test_truncated_capture_file_is_read_to_last_whole_record(tmp_path: Path) -> None:
    """At every length the records are the first ones, never fewer than at the length before, and
    the loss is told.
    """
    whole = write(tmp_path / "whole", RECORDS[:12], frame_bytes=1000).read_bytes()
    cut = tmp_path / "cut"
    first_frame = whole.index(b"\x86\xa7records") + 1
    before = 0
    for length in range(first_frame, len(whole)):
        cut.write_bytes(whole[:length])
        contents = read_contents(cut)
        records = read(cut)
        assert records == RECORDS[: len(records)], length
        assert len(records) == contents.records >= before
        assert not contents.complete
        assert f"{len(records)} whole records" in contents.notice
        before = len(records)
    assert before == 12


def test_records_of_truncated_frame_are_read(tmp_path: Path) -> None:
    """Nearly all records are read of one large frame that lacks its second half."""
    path = write(tmp_path / "capture", frame_bytes=10**6)
    frame = read_contents(path).frames[0]
    path.write_bytes(path.read_bytes()[: frame.at + frame.stored_bytes // 2])
    assert 0 < read_contents(path).records < len(RECORDS)


def test_failed_capture_writer_keeps_written_frames(tmp_path: Path) -> None:
    """Without an index, the frames that were closed are read."""
    path = tmp_path / "capture"
    writer = CaptureWriter(path, "t").__enter__()
    writer.add(RECORDS[:5])
    writer.flush()
    writer.add(RECORDS[5:])
    writer.__exit__(KeyError, KeyError(), None)
    assert read(path) == RECORDS[:5]


def test_damaged_frame_is_refused_with_its_position(capture: Path) -> None:
    """A changed byte in a frame's content is met by its CRC-32."""
    frame = read_contents(capture).frames[1]
    content = bytearray(capture.read_bytes())
    content[frame.at + 100] ^= 1
    capture.write_bytes(content)
    with pytest.raises(CaptureError, match=rf"capture: frame at byte {frame.at}: expected CRC-32"):
        read(capture)


def test_changed_byte_never_gives_other_records(tmp_path: Path) -> None:
    """Whichever byte is changed, what is read are the records, the first of them, or an error."""
    whole = write(tmp_path / "whole", RECORDS[:6], frame_bytes=800).read_bytes()
    damaged = tmp_path / "damaged"
    for position in range(len(whole)):
        damaged.write_bytes(
            whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :]
        )
        try:
            records = read(damaged)
        except (CaptureError, ConfigurationError):
            continue
        assert records == RECORDS[: len(records)], position


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"format": "headrace-capture", "version": 2}, "expected version 1 .*, got 2"),
        (
            {"format": "headrace-capture", "version": 1, "codec": "lzma"},
            "expected codec zlib, got lzma",
        ),
        ({"format": "other"}, "expected a capture file"),
        ([1, 2], "expected a capture file"),
    ],
)
def test_foreign_capture_files_are_refused(tmp_path: Path, header: object, said: str) -> None:
    """The header of a file is checked before anything else of it is read."""
    path = tmp_path / "file"
    path.write_bytes(msgpack.packb(header))
    with pytest.raises(ConfigurationError, match=said):
        read_contents(path)


def test_empty_or_missing_capture_file_is_refused(tmp_path: Path) -> None:
    """Nothing is no capture file, and neither is a file that is not there."""
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigurationError, match="expected a capture file"):
        read_contents(tmp_path / "empty")
    with pytest.raises(ConfigurationError, match="No such file"):
        read_contents(tmp_path / "missing")


@pytest.mark.parametrize("ends_with_error", [False, True])
def test_capture_that_no_disk_takes_fails_with_its_path(
    tmp_path: Path, ends_with_error: bool
) -> None:
    """What closing the file cannot write either must not hide the reason."""
    child = """
import resource, sys
from pathlib import Path
from headrace.tools.replay.capture import CaptureError, CaptureWriter
from tests.support.recordings import recorded

resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    with CaptureWriter(Path(sys.argv[1]), "recorded") as writer:
        writer.add([recorded(0)])
        if sys.argv[2] == "True":
            writer.flush()
except CaptureError as error:
    print(error)
"""
    path = tmp_path / "requests.capture"
    command = [sys.executable, "-c", child, str(path), str(ends_with_error)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == f"{path}: File too large\n", ended.stderr


def test_existing_capture_file_is_not_overwritten(capture: Path) -> None:
    """A capture goes into a new file."""
    with pytest.raises(ConfigurationError, match="File exists"), CaptureWriter(capture, "t"):
        pass
    assert read(capture) == RECORDS


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        (Selection(Window(from_ms=START_MS + 30)), range(30, 40)),
        (Selection(Window(START_MS + 1, START_MS + 6)), [1, 3, 4, 5]),
        (Selection(Window(from_ms=START_MS, partitions=frozenset({1}))), range(1, 40, 2)),
        (Selection(Window(from_ms=START_MS + 3), limit=4), range(3, 7)),
        (Selection(Window(from_offsets={0: 2**62, 1: 19})), [-1 - START_MS, 39]),
        (Selection(Window(until_offsets={0: 0, 1: 3})), [1, 3, 5]),
        (Selection(filters=Filters(key=b"key-7")), [7]),
    ],
)
async def test_capture_file_is_read_by_selection(
    capture: Path, selection: Selection, numbers: Sequence[int]
) -> None:
    """Bounds, filters and limit mean for a file what they mean for a topic."""
    assert await select(capture, selection) == list(numbers)


async def test_capture_file_can_be_read_again(capture: Path) -> None:
    """Each reading gives all of it."""
    async with open_capture(capture, Selection()) as recording:
        first = [record async for record in recording]
        second = [record async for record in recording]
    assert first == second == RECORDS


async def test_truncated_recording_is_reported(capture: Path) -> None:
    """Its notice has the file's name and how much was read."""
    content = await asyncio.to_thread(capture.read_bytes)
    await asyncio.to_thread(capture.write_bytes, content[:-20])
    async with open_capture(capture, Selection()) as recording:
        assert recording.notice.startswith(f"{capture}: its end is missing")
