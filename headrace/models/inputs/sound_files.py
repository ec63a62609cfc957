"""Structure of sound files: how long a sound is, and whether its file is whole.

Nothing is decoded here. A file says how many samples it has before any are made, and one that ends
early is refused with the byte where it ends: decoders return what is there.

Formats: WAV (Microsoft, Multimedia Programming Interface and Data Specifications 1.0, with
WAVE_FORMAT_EXTENSIBLE), FLAC (RFC 9639), Ogg (RFC 3533) with Vorbis, Opus (RFC 7845) or FLAC, and
MP3 (ISO 11172-3 and 13818-3, layer III), with the counts that Xing's header has.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import Code, Rejected
from headrace.models.inputs.media_files import MediaFile
from headrace.tuning import TUNING, ModelTuning

CONTENT_TYPES = {
    "audio/wav": "WAV",
    "audio/x-wav": "WAV",
    "audio/wave": "WAV",
    "audio/vnd.wave": "WAV",
    "audio/flac": "FLAC",
    "audio/x-flac": "FLAC",
    "audio/ogg": "OGG",
    "application/ogg": "OGG",
    "audio/opus": "OGG",
    "audio/mpeg": "MP3",
    "audio/mp3": "MP3",
}
"""Formats by content type."""

MIN_RATE, MAX_RATE = 1000, 384_000
MAX_CHANNELS = 32


class SoundHeader(NamedTuple):
    """Properties of a sound, read from its file without decoding it.

    Attributes:
        format: `WAV`, `FLAC`, `OGG` or `MP3`.
        rate: samples a second of one channel.
        channels: number of channels.
        samples: number of samples of one channel; -1 if a FLAC file does not contain it. For MP3 it
            includes the samples that the encoder added.
        is_exact: True if decoding gives exactly this number of samples.
    """

    format: str
    rate: int
    channels: int
    samples: int
    is_exact: bool = False


class SoundLimits(NamedTuple):
    """Limits that are checked as soon as they can be.

    Attributes:
        seconds: of a sound, and the setting that says so in messages.
        samples: of all channels.
        truncate: longer sounds are decoded up to the limit of seconds.
    """

    seconds: float
    samples: int
    truncate: bool
    setting: str = "max_seconds"


def read_sound_header(
    content: bytes, where: str, limits: SoundLimits, tuning: ModelTuning = TUNING.models
) -> SoundHeader:
    """Check the structure of a sound file, and return what it says of its sound.

    Raises:
        Rejected: `TOO_LARGE` over a limit, `INVALID_REQUEST` for another format or a damaged file.
    """
    for name, magic, read in _READERS:
        if magic.match(content):
            return read(SoundFile(content, where, name, limits, tuning))
    got = f"{content[:12]!r}" if content else "no bytes"
    raise Rejected.mismatch(
        Code.INVALID_REQUEST, where, expected="a sound in WAV, FLAC, OGG or MP3", got=got
    )


class SoundFile(MediaFile):
    """A sound file, and the limits of its sound."""

    def __init__(
        self, content: bytes, where: str, name: str, limits: SoundLimits, tuning: ModelTuning
    ) -> None:
        super().__init__(content, where, name, tuning.sound_parts)
        self.limits = limits

    def checked(
        self, rate: int, channels: int, samples: int, *, is_exact: bool = False
    ) -> SoundHeader:
        """Return a header that is within the limits."""
        if not (MIN_RATE <= rate <= MAX_RATE and 1 <= channels <= MAX_CHANNELS):
            raise self.damaged(
                f"1 to {MAX_CHANNELS} channels of {MIN_RATE} to {MAX_RATE} Hz",
                f"{channels} of {rate} Hz",
            )
        if samples == 0:
            raise self.damaged("at least one sample", "none")
        self.check_samples(rate, channels, samples)
        return SoundHeader(self.name, rate, channels, samples, is_exact)

    def check_samples(self, rate: int, channels: int, samples: int) -> None:
        """Refuse a sound with too many samples, of which these are those of one channel."""
        limits = self.limits
        longest = limits.seconds * rate
        if samples > longest + 1:
            if not limits.truncate:
                raise self.too_large(
                    f"at most {limits.setting} = {limits.seconds:g}", f"{samples / rate:.3f} s"
                )
            samples = int(longest)
        if samples * channels > limits.samples:
            raise self.too_large(
                f"at most max_samples = {limits.samples}",
                f"{samples} in each of {channels} channels",
            )


# --- WAV ----------------------------------------------------------------------------------------

_EXTENSIBLE = 0xFFFE
_WAV_BITS = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
"""Bits of a sample, by coding: PCM, floats, A-law and mu-law."""
_OPEN_END = 0x7FFF0000
"""Programs that write to a pipe cannot know the length, and give one from here on: ffmpeg 2^32 - 1,
sox and espeak 2^31 less some bytes. The sound goes to the end of the file then.
"""


def _read_wav(file: SoundFile) -> SoundHeader:
    place, block, rate, channels = 12, 0, 0, 0
    while True:
        file.count("chunks")
        if place + 8 > file.size:
            expected = "chunk data" if block else "chunk fmt, and chunk data"
            raise file.damaged(expected, f"a file that ends at byte {file.size}")
        kind, length = struct.unpack_from("<4sI", file.content, place)
        start = place + 8
        if kind == b"fmt ":
            file.need("chunk fmt", start, start + length)
            coding, channels, rate, _, block, bits = file.unpack("<HHIIHH", start, "chunk fmt")
            if coding == _EXTENSIBLE:
                (coding,) = file.unpack("<H", start + 24, "chunk fmt")
            if bits not in _WAV_BITS.get(coding, ()) or block != channels * bits // 8 or not block:
                raise file.damaged(
                    "PCM of 8 to 32 bits, floats, A-law or mu-law",
                    f"coding {coding} of {bits} bits, {block} bytes for {channels} channels",
                )
        elif kind == b"data":
            break
        place = start + length + length % 2
    if not block:
        raise file.damaged("chunk fmt before chunk data", f"chunk data at byte {place}")
    if length >= _OPEN_END:
        length = file.size - start
    header = file.checked(rate, channels, length // block, is_exact=True)
    file.need("chunk data", start, start + length)
    return header


# --- FLAC ---------------------------------------------------------------------------------------


def _read_flac(file: SoundFile) -> SoundHeader:
    header = _read_stream_info(file, 4)
    if header.samples < 0:  # written to a pipe; nothing says how much decoding would make
        raise file.damaged("the number of samples in block STREAMINFO", "none")
    place, is_last = 4, False
    while not is_last:
        file.count("metadata blocks")
        (head,) = file.unpack(">I", place, "a metadata block")
        is_last, length = bool(head >> 31), head & 0xFFFFFF
        file.need("a metadata block", place, place + 4 + length)
        place += 4 + length
    (sync,) = file.unpack(">H", place, "the first frame")
    if sync & 0xFFFC != 0xFFF8:
        raise file.damaged(f"a frame at byte {place}", f"{file.content[place : place + 4]!r}")
    return header


def _read_stream_info(file: SoundFile, place: int) -> SoundHeader:
    (head,) = file.unpack(">I", place, "block STREAMINFO")
    (packed,) = file.unpack(">Q", place + 14, "block STREAMINFO")
    if head & 0x7FFFFFFF != 34:
        raise file.damaged(f"block STREAMINFO at byte {place}", f"{head:#010x}")
    rate, channels, samples = packed >> 44, (packed >> 41 & 7) + 1, packed & 0xFFFFFFFFF
    return file.checked(rate, channels, samples or -1, is_exact=True)


# --- Ogg ----------------------------------------------------------------------------------------

_CONTINUED, _FIRST, _LAST = 1, 2, 4
_OPUS_RATE = 48_000


def _read_ogg(file: SoundFile) -> SoundHeader:
    rate, channels, skipped, unit = _read_codec(file)
    place, serial, granule, flags = 0, -1, 0, 0
    while place < file.size:
        file.count("pages")
        file.need("a page", place, place + 27)
        magic, version, flags, granule_here, serial_here, segments = struct.unpack_from(
            "<4sBBqI8xB", file.content, place
        )
        if magic != b"OggS" or version:
            raise file.damaged(f"a page at byte {place}", f"{file.content[place : place + 4]!r}")
        if serial not in (-1, serial_here) or (flags & _FIRST and place):
            raise file.damaged("a single stream", f"a further one at byte {place}")
        serial = serial_here
        body = place + 27 + segments
        file.need("a page", place, body)
        stop = body + sum(file.content[place + 27 : body])
        file.need("a page", place, stop)
        if granule_here >= 0:
            granule = max(granule, granule_here)
            file.check_samples(unit, channels, granule - skipped)
        place = stop
        if flags & _LAST and not file.content.startswith(b"OggS", place):
            break
    if not flags & _LAST:
        raise file.damaged("a last page", f"a file that ends at byte {file.size}")
    samples = max(0, granule - skipped) * rate // unit
    return file.checked(rate, channels, samples)


def _read_codec(file: SoundFile) -> tuple[int, int, int, int]:
    """Return rate, channels, samples to be skipped, and the rate in which pages count."""
    (segments,) = file.unpack("<B", 26, "the first page")
    at = 27 + segments
    if file.content.startswith(b"\x01vorbis", at):
        channels, rate = file.unpack("<BI", at + 11, "Vorbis' header")
        return rate, channels, 0, max(rate, 1)
    if file.content.startswith(b"OpusHead", at):
        channels, skipped, rate = file.unpack("<BHI", at + 9, "Opus' header")
        known = rate if rate in (8000, 12_000, 16_000, 24_000) else _OPUS_RATE
        return known, channels, skipped, _OPUS_RATE
    if file.content.startswith(b"\x7fFLAC", at):
        info = _read_stream_info(file, at + 13)
        return info.rate, info.channels, 0, info.rate
    raise file.damaged("Vorbis, Opus or FLAC", f"{file.content[at : at + 8]!r}")


# --- MP3 ----------------------------------------------------------------------------------------

_KBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Kilobits a second by index, of MPEG 1, and of 2 and 2.5."""
_MP3_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8000)}
_TAGS_AT_END = re.compile(rb"TAG|APETAGEX|LYRICSBEGIN|\0+\Z|\Z", re.DOTALL)


class _Mp3Frame(NamedTuple):
    size: int
    rate: int
    channels: int
    samples: int
    side_bytes: int


def _read_mp3(file: SoundFile) -> SoundHeader:
    place = _skip_id3(file)
    first = _read_mp3_frame(file, place)
    frames, wanted = 0, _read_xing(file, place, first)
    if wanted:
        file.check_samples(first.rate, first.channels, wanted * first.samples)
    frame, head = first, b""
    enough = (file.limits.seconds * first.rate + 2 * 1152) if file.limits.truncate else None
    while place < file.size:
        if frames and _TAGS_AT_END.match(file.content, place):
            break
        file.count("frames")
        if file.content[place : place + 4] != head:  # most frames have that of the one before
            frame, head = _read_mp3_frame(file, place), file.content[place : place + 4]
        if (frame.rate, frame.channels) != (first.rate, first.channels):
            raise file.damaged(
                f"{first.channels} channels of {first.rate} Hz",
                f"{frame.channels} of {frame.rate} Hz at byte {place}",
            )
        file.need(f"frame {frames}", place, place + frame.size)
        frames += 1
        place += frame.size
        file.check_samples(frame.rate, frame.channels, frames * frame.samples)
        if enough is not None and frames * frame.samples > enough:
            break
    else:
        if frames - 1 < wanted:  # the frame with the header does not count
            raise file.damaged(
                f"{wanted} frames, as its header says",
                f"{frames - 1} in a file that ends at byte {file.size}",
            )
    # Decoders end where the header says, so the rest would be lost. The first frame does not count,
    # and some programs do not count the last one.
    if wanted and frames - 2 > wanted:
        raise file.damaged(
            f"{wanted} frames, as its header says", "more, as in files that were joined"
        )
    return file.checked(first.rate, first.channels, frames * first.samples)


def _skip_id3(file: SoundFile) -> int:
    """Return the place behind the tags at the begin (ID3v2, section 3.1)."""
    place = 0
    while file.content.startswith(b"ID3", place):
        file.count("tags")
        a, b, c, d = file.unpack("4B", place + 6, "tag ID3")
        flags = file.content[place + 5]
        stop = place + 10 + (a << 21 | b << 14 | c << 7 | d) + (10 if flags & 0x10 else 0)
        file.need("tag ID3", place, stop)
        place = stop
    return place


def _read_mp3_frame(file: SoundFile, place: int) -> _Mp3Frame:
    (head,) = file.unpack(">I", place, "a frame")
    version, layer = head >> 19 & 3, head >> 17 & 3
    bits, rate, padding, mode = head >> 12 & 15, head >> 10 & 3, head >> 9 & 1, head >> 6 & 3
    if head >> 21 != 0x7FF or version == 1 or layer != 1 or bits in (0, 15) or rate == 3:
        got = f"{file.content[place : place + 4]!r}"
        raise file.damaged(f"a frame of layer III with a bit rate at byte {place}", got)
    is_first, is_mono = version == 3, mode == 3
    hertz = _MP3_RATES[version][rate]
    size = (144 if is_first else 72) * _KBITS[is_first][bits] * 1000 // hertz + padding
    side = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
    return _Mp3Frame(size, hertz, 1 if is_mono else 2, 1152 if is_first else 576, side)


def _read_xing(file: SoundFile, place: int, frame: _Mp3Frame) -> int:
    """Return the number of frames in Xing's header; 0 if the first frame has none."""
    at = place + 4 + frame.side_bytes
    if file.content[at : at + 4] not in (b"Xing", b"Info"):
        return 0
    (flags,) = file.unpack(">I", at + 4, "Xing's header")
    return file.unpack(">I", at + 8, "Xing's header")[0] if flags & 1 else 0


_READERS: tuple[tuple[str, re.Pattern[bytes], Callable[[SoundFile], SoundHeader]], ...] = (
    ("WAV", re.compile(rb"RIFF.{4}WAVE", re.DOTALL), _read_wav),
    ("FLAC", re.compile(rb"fLaC"), _read_flac),
    ("OGG", re.compile(rb"OggS"), _read_ogg),
    ("MP3", re.compile(rb"ID3|\xff[\xe2-\xff]"), _read_mp3),
)
