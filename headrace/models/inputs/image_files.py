"""Structure of image files: what an image is, and whether its file is whole.

Nothing is decoded here. A header says how large an image is before a library allocates its pixels,
and a file that ends early is refused with the byte where it ends: decoders fill the rest of such
images with grey, or name no place.

Formats: PNG (https://www.w3.org/TR/png-3), JPEG (ITU-T T.81, Annex B), WebP (RFC 9649), BMP
(Windows bitmaps, BITMAPCOREHEADER and later), TIFF 6.0 with BigTIFF, and Exif 2.3 for orientation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace.errors import Code, Rejected
from headrace.models.inputs.media_files import MediaFile
from headrace.tuning import TUNING, ModelTuning

CONTENT_TYPES = {
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/pjpeg": "JPEG",
    "image/png": "PNG",
    "image/apng": "PNG",
    "image/webp": "WebP",
    "image/bmp": "BMP",
    "image/x-bmp": "BMP",
    "image/x-ms-bmp": "BMP",
    "image/tiff": "TIFF",
}
"""Formats by content type."""

_COMPRESSED_CHUNKS = (b"zTXt", b"iTXt", b"iCCP")
_FORMATS = "JPEG, PNG, WebP, BMP or TIFF"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Next marker of a JPEG behind entropy-coded data, but for those that restart the coder."""
_CODE = re.compile(rb"\xff+[^\xff]")
"""Next marker between segments."""
_EXIF = b"Exif\0\0"
_ORIENTATION = 274


class ImageHeader(NamedTuple):
    """Properties of an image, read from its file without decoding it.

    Attributes:
        format: `JPEG`, `PNG`, `WebP`, `BMP` or `TIFF`.
        width, height: size in pixels, before the orientation is applied.
        orientation: Exif orientation, 1 to 8; 1 is upright.
        components: number of components of a JPEG: 3 for colours, 1 for grey; 0 for other formats.
        unread: byte ranges (start, end) of a PNG that hold no pixels and that a decoder would
            decompress.
    """

    format: str
    width: int
    height: int
    orientation: int = 1
    components: int = 0
    unread: tuple[tuple[int, int], ...] = ()


class ImageLimits(NamedTuple):
    """Limits that are checked as soon as a header has been read.

    Attributes:
        pixels: of one image.
        several: allow further frames or pages, which are not read.
    """

    pixels: int
    several: bool = False


def read_image_header(
    content: bytes,
    where: str,
    limits: ImageLimits,
    tuning: ModelTuning = TUNING.models,
) -> ImageHeader:
    """Check the structure of an image file, and return what it says of its image.

    Args:
        content: the file.
        where: the file in messages, such as `payload`.
        limits: of the image.
        tuning: bounds of segments and scans.

    Raises:
        Rejected: `TOO_LARGE` over a limit, `INVALID_REQUEST` for another format or a damaged file.
    """
    for name, magic, read in _READERS:
        if magic.match(content):
            return read(_File(content, where, name, limits, tuning))
    got = f"{content[:12]!r}" if content else "no bytes"
    raise Rejected.mismatch(
        Code.INVALID_REQUEST, where, expected=f"an image in {_FORMATS}", got=got
    )


class _File(MediaFile):
    """An image file, and the limits of its image."""

    def __init__(
        self, content: bytes, where: str, name: str, limits: ImageLimits, tuning: ModelTuning
    ) -> None:
        super().__init__(content, where, name, tuning.image_parts)
        self.tuning = tuning
        self._limits = limits

    def checked(
        self, width: int, height: int, *, orientation: int = 1, is_single: bool = True
    ) -> ImageHeader:
        """Return a header that is within the limits; `is_single` is False with further frames."""
        self.check_pixels(width, height)
        if not (is_single or self._limits.several):
            raise self.too_large('one image, as frames = "refuse" says', "several frames or pages")
        return ImageHeader(self.name, width, height, orientation)

    def check_pixels(self, width: int, height: int) -> None:
        """Refuse an image without pixels, or with too many."""
        if width < 1 or height < 1:
            raise self.damaged("at least one pixel", f"{width} x {height}")
        if width * height > self._limits.pixels:
            raise self.too_large(
                f"at most max_pixels = {self._limits.pixels}",
                f"{width} x {height} = {width * height}",
            )


# --- PNG ----------------------------------------------------------------------------------------


def _read_png(file: _File) -> ImageHeader:
    width, height = file.unpack(">II", 16, "chunk IHDR")
    if not file.content.startswith(b"\0\0\0\x0dIHDR", 8):
        raise file.damaged("chunk IHDR at byte 8", f"{file.content[8:16]!r}")
    file.check_pixels(width, height)
    orientation, is_single, unread = 1, True, []
    for chunk, start, stop in _chunks(file):
        if chunk in _COMPRESSED_CHUNKS:
            unread.append((start - 8, stop + 4))
        if chunk == b"eXIf":
            orientation = read_orientation(file.content[start:stop])
        elif chunk == b"acTL" and stop - start >= 4:
            is_single = struct.unpack_from(">I", file.content, start)[0] <= 1
    header = file.checked(width, height, orientation=orientation, is_single=is_single)
    return header._replace(unread=tuple(unread))


def _chunks(file: _File) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and end of the content of each chunk, up to IEND."""
    place = 8
    while True:
        if place + 8 > file.size:
            raise file.damaged(
                f"a chunk at byte {place}, up to IEND", f"a file that ends at byte {file.size}"
            )
        length, kind = struct.unpack_from(">I4s", file.content, place)
        stop = place + 8 + length
        file.need(f"chunk {_shown(kind)}", place, stop + 4)
        yield kind, place + 8, stop
        if kind == b"IEND":
            return
        file.count("chunks")
        place = stop + 4


def _shown(kind: bytes) -> str:
    return kind.decode() if kind.isalnum() else repr(kind)


# --- JPEG ---------------------------------------------------------------------------------------

_SOI, _EOI, _SOS, _APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})


def _read_jpeg(file: _File) -> ImageHeader:
    content, place, scans, components = file.content, 2, 0, 0
    orientation: int | None = None
    size: tuple[int, int] | None = None
    while True:
        marker, place = _next_marker(file, place)
        if marker == _EOI:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        (length,) = file.unpack(">H", place, f"segment {_hex(marker)}")
        if length < 2:
            raise file.damaged(f"at least 2 bytes at byte {place}", str(length))
        stop = place + length
        file.need(f"segment {_hex(marker)}", place - 2, stop)
        if marker in _FRAME_HEADERS:
            height, width, components = file.unpack(">HHB", place + 3, "frame header")
            file.check_pixels(width, height)
            size = width, height
        elif orientation is None and marker == _APP1 and content.startswith(_EXIF, place + 2):
            # Further blocks continue the first one, or are nothing to readers; each costs a look.
            orientation = read_orientation(content[place + 2 + len(_EXIF) : stop])
        elif marker == _SOS:
            scans += 1
            stop = _skip_scan(file, stop, scans)
        place = stop
    if size is None or not scans:
        raise file.damaged("a frame header and a scan", f"none before byte {place}")
    return file.checked(*size, orientation=orientation or 1)._replace(components=components)


def _skip_scan(file: _File, place: int, scans: int) -> int:
    """Return the place of the marker behind the entropy-coded data of a scan."""
    if scans > file.tuning.image_scans:
        raise file.too_large(f"at most {file.tuning.image_scans} scans", "more")
    found = _MARKER.search(file.content, place)
    if found is None:
        raise _without_end(file)
    return found.start()


def _next_marker(file: _File, place: int) -> tuple[int, int]:
    """Return the marker at a place, and the place behind it."""
    file.count("segments")
    content = file.content
    # Other bytes between segments are passed over, and any number of 0xff may fill.
    found = _CODE.search(content, place)
    if found is None:
        raise _without_end(file)
    return content[found.end() - 1], found.end()


def _without_end(file: _File) -> Rejected:
    return file.damaged("the marker EOI at the end", f"a file that ends at byte {file.size}")


def _hex(marker: int) -> str:
    return f"0xff{marker:02x}"


# --- WebP ---------------------------------------------------------------------------------------


def _read_webp(file: _File) -> ImageHeader:
    (length,) = file.unpack("<I", 4, "header RIFF")
    end = 8 + length
    file.need("RIFF", 0, end)
    size: tuple[int, int] | None = None
    place, orientation, is_single = 12, 1, True
    while place + 8 <= end:
        file.count("chunks")
        kind, length = struct.unpack_from("<4sI", file.content, place)
        start, stop = place + 8, place + 8 + length
        if stop > end:
            raise file.damaged(f"chunk {_shown(kind)} up to byte {end}", f"one up to byte {stop}")
        if kind == b"VP8X" and length >= 10:
            flags, width, height = _read_vp8x(file.content, start)
            size = width, height
            is_single = not flags & 0x02
        elif kind in (b"VP8 ", b"VP8L"):
            inner = _read_vp8(file, kind, start, length)
            size = size or inner
            file.check_pixels(*inner)
        elif kind == b"EXIF":
            orientation = read_orientation(file.content[start:stop].removeprefix(_EXIF))
        if size is not None:
            file.check_pixels(*size)
        place = stop + length % 2
    if size is None:
        raise file.damaged("chunk VP8, VP8L or VP8X", f"none up to byte {end}")
    return file.checked(*size, orientation=orientation, is_single=is_single)


def _read_vp8x(content: bytes, start: int) -> tuple[int, int, int]:
    """Return flags, width and height of a canvas."""
    width = int.from_bytes(content[start + 4 : start + 7], "little")
    height = int.from_bytes(content[start + 7 : start + 10], "little")
    return content[start], width + 1, height + 1


def _read_vp8(file: _File, kind: bytes, start: int, length: int) -> tuple[int, int]:
    """Return width and height of a bit stream, lossy or lossless."""
    if kind == b"VP8L" and length >= 5 and file.content[start] == 0x2F:
        (bits,) = struct.unpack_from("<I", file.content, start + 1)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and length >= 10:
        code, width, height = struct.unpack_from("<3sHH", file.content, start + 3)
        if code == b"\x9d\x01\x2a":
            return width & 0x3FFF, height & 0x3FFF
    raise file.damaged(f"a frame header in {_shown(kind)}", f"none at byte {start}")


# --- BMP ----------------------------------------------------------------------------------------

_CORE_HEADER_BYTES = 12
_UNCOMPRESSED = (0, 3, 6)  # BI_RGB, BI_BITFIELDS, BI_ALPHABITFIELDS


def _read_bmp(file: _File) -> ImageHeader:
    pixels_at, header_bytes = file.unpack("<II", 10, "file header")
    if header_bytes == _CORE_HEADER_BYTES:
        width, height, _, bits = file.unpack("<HHHH", 18, "image header")
        compression = image_bytes = 0
    else:
        width, height, _, bits, compression, image_bytes = file.unpack(
            "<iiHHII", 18, "image header"
        )
    height = abs(height)  # negative: the rows begin at the top
    header = file.checked(width, height)
    if compression in _UNCOMPRESSED:
        image_bytes = (width * bits + 31) // 32 * 4 * height
    file.need("pixels", pixels_at, pixels_at + image_bytes)
    return header


# --- TIFF ---------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 322, 323
_PARTS = ((273, 279, "strip"), (324, 325, "tile"))  # offsets, sizes
_INTEGERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}
_OTHER_TYPES = {2: 1, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 17: 8, 18: 8}
"""Bytes of a value of the types that are no integers of use here."""
_BYTES = frozenset({1, 2, 6, 7})
"""Types whose values are single bytes: texts, profiles, and whatever a program keeps there."""


class _Directory(NamedTuple):
    """Fields of a directory of a TIFF file.

    Attributes:
        fields: layout of one value, number and place of the values of each integer field, by tag.
        next: place of the next directory; 0 if it is the last.
    """

    order: str
    fields: dict[int, tuple[str, int, int]]
    next: int


def _read_tiff(file: _File) -> ImageHeader:
    directory = _read_directory(file)
    width, height = (_first_value(file, directory, tag) for tag in (_WIDTH, _HEIGHT))
    if width is None or height is None:
        raise file.damaged("ImageWidth and ImageLength in the first directory", "none")
    header = file.checked(
        width,
        height,
        orientation=_upright(_first_value(file, directory, _ORIENTATION)),
        is_single=not directory.next,
    )
    tile = [_first_value(file, directory, tag) or 1 for tag in (_TILE_WIDTH, _TILE_HEIGHT)]
    file.check_pixels(*tile)
    kinds = [each for each in _PARTS if each[0] in directory.fields]
    if not kinds:
        raise file.damaged("StripOffsets or TileOffsets in the first directory", "none")
    for offsets_tag, sizes_tag, what in kinds:
        offsets = _values(file, directory, offsets_tag)
        for offset, size in zip(offsets, _values(file, directory, sizes_tag), strict=False):
            file.need(what, offset, offset + size)
    return header


def _read_directory(file: _File) -> _Directory:
    """Return the first directory."""
    order = "<" if file.content[:2] == b"II" else ">"
    (version,) = file.unpack(f"{order}H", 2, "header")
    is_big = version == 43
    place_layout, count_layout = ("Q", "Q") if is_big else ("I", "H")
    entry_layout, entry_bytes = (f"{order}HHQ", 20) if is_big else (f"{order}HHI", 12)
    (place,) = file.unpack(order + place_layout, 8 if is_big else 4, "header")
    (count,) = file.unpack(order + count_layout, place, "the first directory")
    place += struct.calcsize(count_layout)
    stop = place + count * entry_bytes
    file.need(f"the first directory, of {count} fields,", place, stop)
    fields: dict[int, tuple[str, int, int]] = {}
    value_bytes, total = 8 if is_big else 4, 0
    for entry in range(place, stop, entry_bytes):
        file.count("fields")
        tag, kind, number = struct.unpack_from(entry_layout, file.content, entry)
        layout = _INTEGERS.get(kind, "")
        size = number * (struct.calcsize(layout) or _OTHER_TYPES.get(kind, 0))
        at = entry + entry_bytes - value_bytes
        if size > value_bytes:
            (at,) = struct.unpack_from(order + place_layout, file.content, at)
            file.need(f"field {tag}", at, at + size)
            # Pillow reads the values of all fields, and makes objects of some numbers.
            total += size
            if total > file.size:
                raise file.damaged(
                    f"fields of at most {file.size} bytes, as the file has", "fields that overlap"
                )
            if kind not in _BYTES and number > file.tuning.image_parts:
                raise file.too_large(
                    f"at most {file.tuning.image_parts} values in a field", str(number)
                )
        if layout:
            fields[tag] = layout, number, at
    (following,) = file.unpack(order + place_layout, stop, "the place of the next directory")
    return _Directory(order, fields, following)


def _values(file: _File, directory: _Directory, tag: int) -> tuple[int, ...]:
    """Return the values of a field; none if it is not there."""
    if tag not in directory.fields:
        return ()
    layout, number, at = directory.fields[tag]
    if number > file.tuning.image_parts:  # bytes, since others are refused with their directory
        raise file.too_large(f"at most {file.tuning.image_parts} values in a field", str(number))
    return file.unpack(f"{directory.order}{number}{layout}", at, f"field {tag}")


def _first_value(file: _File, directory: _Directory, tag: int) -> int | None:
    values = _values(file, directory, tag)
    return values[0] if values else None


# --- orientation --------------------------------------------------------------------------------


def read_orientation(exif: bytes) -> int:
    """Return the orientation in a block of Exif; 1 if it has none, or cannot be read."""
    if not _TIFF.match(exif):
        return 1
    file = _File(exif, "", "Exif", ImageLimits(1), TUNING.models)
    try:
        directory = _read_directory(file)
        return _upright(_first_value(file, directory, _ORIENTATION))
    except Rejected:
        return 1


def _upright(orientation: int | None) -> int:
    return orientation if orientation is not None and 1 <= orientation <= 8 else 1


_TIFF = re.compile(rb"II[\x2a\x2b]\0|MM\0[\x2a\x2b]")
_READERS: tuple[tuple[str, re.Pattern[bytes], Callable[[_File], ImageHeader]], ...] = (
    ("JPEG", re.compile(rb"\xff\xd8\xff"), _read_jpeg),
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n"), _read_png),
    ("WebP", re.compile(rb"RIFF.{4}WEBP", re.DOTALL), _read_webp),
    ("BMP", re.compile(rb"BM"), _read_bmp),
    ("TIFF", _TIFF, _read_tiff),
)
