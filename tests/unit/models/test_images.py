"""Images on their way to a model's input, against the same done by Pillow directly."""

from __future__ import annotations

import io
import itertools
import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import TransformTable, make_model_config
from headrace.models.inputs.image_files import ImageLimits, read_image_header
from headrace.models.inputs.images import Images
from headrace.models.signature import make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.support.multipart import multipart
from tests.unit.models.requests import spec

FORMATS = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"),
}
"""Modes that Pillow writes, by format."""
ORIENTATION = 0x0112


def images_of(shape: list[int], datatype: str = "UINT8", **settings: Any) -> Images:
    """The transform of a model with an input of this shape."""
    config = make_model_config({"transform": {"image": settings}}, make_settings({}))
    assert isinstance(config.transform, TransformTable)
    assert config.transform.image is not None
    signature = make_signature([spec("images", datatype, shape)], [spec("y", "FP32", [-1])])
    return Images(config.transform.image, signature)


def convert(images: Images, payload: bytes, content_type: str = "") -> NDArray[Any]:
    """The input that a payload becomes."""
    [given] = images(payload, content_type)
    return to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))


def refusal(payload: bytes, content_type: str = "", **settings: Any) -> Rejected:
    """The error with which a payload is refused."""
    images = images_of([-1, 8, 8, 3], **settings)
    with pytest.raises(Rejected) as caught:
        images(payload, content_type)
    return caught.value


def picture(mode: str, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """A picture of noise on waves."""
    bands = {"P": 3, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}.get(mode, 1)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 2**16, (height, width), np.uint16))
    pixels = rng.integers(0, 256, (height, width, bands), np.uint8)
    if mode == "1":
        return Image.fromarray(pixels[:, :, 0]).convert("1")
    if mode == "P":
        return Image.fromarray(pixels).quantize(16)
    return Image.fromarray(pixels[:, :, 0] if bands == 1 else pixels, mode=mode)


def written(image: Image.Image, kind: str, orientation: int | None = None, **options: Any) -> bytes:
    """A file of a picture."""
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def options_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """Options of Pillow's writer of a format."""
    match kind:
        case "JPEG":
            return {"quality": rng.choice([50, 90]), "progressive": rng.random() < 0.3}
        case "WEBP":
            return {"lossless": rng.random() < 0.5, "method": 0}
        case "TIFF":
            return {"compression": rng.choice([None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    return {}


def directly(payload: bytes, mode: str) -> Image.Image:
    """The upright picture by Pillow alone."""
    image: Image.Image = Image.open(io.BytesIO(payload))
    image.load()  # which turns TIFF files upright
    exif = image.getexif()
    if image.mode == "I;16":
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
        image.getexif().update(exif)
    return ImageOps.exif_transpose(image).convert(mode)


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """A thousand pictures in all formats, modes and orientations."""
    rng, noise = random.Random(19), np.random.default_rng(19)
    made = []
    kinds = itertools.cycle([(kind, mode) for kind, modes in FORMATS.items() for mode in modes])
    for kind, mode in itertools.islice(kinds, 1000):
        image = picture(mode, rng.randint(1, 40), rng.randint(1, 40), noise)
        orientation = None if kind == "BMP" else rng.choice([None, *range(1, 9)])
        made.append(written(image, kind, orientation, **options_of(kind, rng)))
    return made


def test_thousand_images_are_those_that_pillow_gives(files: list[bytes]) -> None:
    """Stretched by each filter, in each order of colours."""
    filters = {
        "nearest": Image.Resampling.NEAREST,
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "area": Image.Resampling.BOX,
    }
    ways = [
        (images_of([-1, 12, 9, 1 if color == "gray" else 3], resize=name, color=color), name, color)
        for name in filters
        for color in ("RGB", "BGR", "gray")
    ]
    for number, payload in enumerate(files):
        images, name, color = ways[number % len(ways)]
        image = directly(payload, "L" if color == "gray" else "RGB").resize((9, 12), filters[name])
        expected = np.atleast_3d(np.asarray(image))
        if color == "BGR":
            expected = expected[:, :, ::-1]

        np.testing.assert_array_equal(convert(images, payload), expected[np.newaxis])


def test_normalized_values_are_those_of_the_formula(files: list[bytes]) -> None:
    """The nearest FP32 of (value * scale - mean) / deviation, by channel, with channels first."""
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    images = images_of([-1, 3, 7, 5], "FP32", mean=mean, deviation=deviation)
    for payload in files[::25]:
        values = np.asarray(directly(payload, "RGB").resize((5, 7), Image.Resampling.BILINEAR))
        expected = ((values / 255 - mean) / deviation).transpose(2, 0, 1)[np.newaxis]

        got = convert(images, payload)

        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_crop_takes_middle_of_covering_image(files: list[bytes]) -> None:
    """The shorter side becomes 16 and the middle is taken, which is what torchvision does."""
    images = images_of([-1, 12, 12, 3], fit="crop", shortest_side=16)
    for payload in files[::10]:
        image = directly(payload, "RGB")
        width, height = image.size
        size = (16, int(16 * height / width)) if width <= height else (int(16 * width / height), 16)
        image = image.resize(size, Image.Resampling.BILINEAR)
        left, top = round((size[0] - 12) / 2), round((size[1] - 12) / 2)

        expected = np.asarray(image.crop((left, top, left + 12, top + 12)))

        np.testing.assert_array_equal(convert(images, payload)[0], expected)


@pytest.mark.parametrize(("width", "height"), [(40, 10), (10, 40), (7, 7), (1, 30)])
def test_crop_without_shortest_side_covers_size(width: int, height: int) -> None:
    """No border is left, whichever side is the shorter one."""
    payload = written(Image.new("RGB", (width, height), (9, 8, 7)), "PNG")
    got = convert(images_of([-1, 8, 12, 3], fit="crop"), payload)
    assert got.shape == (1, 8, 12, 3)
    assert (got == (9, 8, 7)).all()


def test_letterbox_leaves_borders_of_fill() -> None:
    """A wide image has borders above and below, of equal height."""
    payload = written(Image.new("RGB", (40, 20), (9, 8, 7)), "PNG")
    got = convert(images_of([-1, 16, 16, 3], fit="letterbox", fill=114), payload)[0]
    assert (got[4:12] == (9, 8, 7)).all()
    assert (got[:4] == 114).all()
    assert (got[12:] == 114).all()


def test_image_keeps_its_size_where_input_is_free() -> None:
    """Nothing is resized, and images of one request must agree."""
    noise = np.random.default_rng(1)
    images = images_of([-1, -1, -1, 3])
    first, second = (written(picture("RGB", width, 5, noise), "PNG") for width in (6, 7))
    assert convert(images, first).shape == (1, 5, 6, 3)
    with pytest.raises(Rejected, match=r"part 1: expected 6 x 5 pixels, .* got 7 x 5"):
        images(multipart(first, second), "multipart/mixed")


@pytest.mark.parametrize("orientation", [1, 6, 8])
@pytest.mark.parametrize("color", ["RGB", "gray"])
def test_draft_is_that_of_pillow(orientation: int, color: str) -> None:
    """A JPEG is decoded at an eighth if that still covers the input, by either library."""
    noise = np.random.default_rng(2)
    payload = written(picture("RGB", 300, 200, noise), "JPEG", orientation)
    channels = 1 if color == "gray" else 3
    images = images_of([-1, 20, 20, channels], draft=True, color=color)
    image = Image.open(io.BytesIO(payload))
    image.draft(None, (20, 20))
    assert image.size == (38, 25)
    upright = ImageOps.exif_transpose(image).convert("L" if color == "gray" else "RGB")

    expected = np.atleast_3d(np.asarray(upright.resize((20, 20), Image.Resampling.BILINEAR)))

    np.testing.assert_array_equal(convert(images, payload)[0], expected)


@pytest.mark.parametrize("draft", [False, True])
def test_jpeg_is_the_same_without_simplejpeg(
    monkeypatch: pytest.MonkeyPatch, files: list[bytes], draft: bool
) -> None:
    """Pillow decodes it then."""
    fast = images_of([-1, 9, 9, 3], draft=draft)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    plain = images_of([-1, 9, 9, 3], draft=draft)
    for payload in files[::17]:
        np.testing.assert_array_equal(convert(fast, payload), convert(plain, payload))


def test_missing_pillow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version cannot be served, and the reason says what to install."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ConfigurationError, match=r"package Pillow: pip install 'headrace\[image\]'"
    ):
        images_of([-1, 9, 9, 3])


# --- several images -----------------------------------------------------------------------------


def test_parts_become_rows() -> None:
    """In their order, whatever bytes are in them."""
    noise = np.random.default_rng(3)
    pictures = [picture("RGB", 8, 8, noise) for _ in range(5)]
    payload = multipart(*[written(each, "PNG") for each in pictures])
    got = convert(images_of([-1, 8, 8, 3]), payload, "multipart/mixed")
    np.testing.assert_array_equal(got, np.stack([np.asarray(each) for each in pictures]))


def test_part_without_headers_is_known_by_its_bytes() -> None:
    """An empty line begins it all the same."""
    payload = written(Image.new("RGB", (8, 8)), "WEBP")
    images = images_of([-1, 8, 8, 3])
    assert convert(images, multipart(payload, head=b""), "multipart/form-data").shape[0] == 1


@pytest.mark.parametrize(
    ("payload", "code", "message"),
    [
        (b"", Code.INVALID_REQUEST, "a line with a boundary, --..., and CRLF at byte 0, got b''"),
        (
            b"--x\n\n\x89PNG\r\n\n--x--",
            Code.INVALID_REQUEST,
            r"CRLF at byte 0, got b'--x\n\n\x89PNG",
        ),
        (multipart(), Code.INVALID_REQUEST, "expected"),
        (multipart(b"x")[:-4], Code.INVALID_REQUEST, "--x7-- at the end, got a body that ends at"),
        (multipart(*[b"x"] * 33), Code.TOO_LARGE, "expected at most max_images = 32, got more"),
        (multipart(b"x"), Code.INVALID_REQUEST, "part 0: expected an image in JPEG, PNG"),
        (multipart(b"x", head=b"Content-Type: text/csv\r\n"), Code.INVALID_REQUEST, "text/csv"),
    ],
)
def test_wrong_parts_are_refused(payload: bytes, code: Code, message: str) -> None:
    """The part or the byte is named."""
    error = refusal(payload, "multipart/mixed")
    assert error.code == code
    assert message in error.message


# --- what is refused ----------------------------------------------------------------------------


def test_content_type_that_is_not_that_of_the_bytes_is_refused() -> None:
    """A JPEG called PNG is a mistake somewhere."""
    error = refusal(written(Image.new("RGB", (8, 8)), "JPEG"), "image/png")
    assert error.code == Code.INVALID_REQUEST
    assert error.message == "payload: expected PNG, as content-type image/png says, got JPEG"


def test_other_content_type_is_refused_before_the_bytes_are_read() -> None:
    """Text is no image, whatever it begins with."""
    error = refusal(written(Image.new("RGB", (8, 8)), "JPEG"), "text/plain")
    assert error.message.startswith("header content-type: expected one of image/jpeg,")


def test_other_bytes_are_refused() -> None:
    """The first of them are shown."""
    error = refusal(b"GIF89a" + bytes(20))
    assert error.message.startswith("payload: expected an image in JPEG, PNG, WebP, BMP or TIFF")
    assert "b'GIF89a" in error.message


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_file_is_refused_with_the_byte_where_it_ends(kind: str) -> None:
    """Wherever it ends, even where a decoder would fill the rest with grey."""
    images, noise = images_of([-1, 8, 8, 3]), np.random.default_rng(4)
    for compressed in ({}, {"progressive": True, "compression": "tiff_lzw", "lossless": True}):
        payload = written(picture("RGB", 24, 24, noise), kind, None, **compressed)
        for end in {*range(16), *range(16, len(payload), 7), len(payload) - 1}:
            with pytest.raises(Rejected) as caught:
                images(payload[:end], "")

            assert caught.value.code == Code.INVALID_REQUEST
            begins = 12 if kind in ("WEBP", "PNG") else 4
            assert end < begins or f"a file that ends at byte {end}" in caught.value.message


def test_file_with_other_bytes_behind_its_end_is_read() -> None:
    """Cameras append videos and thumbnails to their JPEGs."""
    payload = written(Image.new("RGB", (8, 8)), "JPEG")
    assert convert(images_of([-1, 8, 8, 3]), payload + b"\xff\xd8 and more").shape[0] == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes_are_refused_or_read_and_nothing_else(kind: str) -> None:
    """Any exception of the image libraries becomes a refusal of the request."""
    rng, noise = random.Random(5), np.random.default_rng(5)
    images = images_of([-1, 8, 8, 3])
    payload = written(picture("RGB", 24, 24, noise), kind)
    for _ in range(100):
        damaged = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(12, len(damaged))] = rng.randrange(256)
        with suppress(Rejected):
            assert convert(images, bytes(damaged)).shape == (1, 8, 8, 3)


def test_image_of_32_bits_a_channel_is_refused() -> None:
    """There is no range of values that all such files share."""
    payload = written(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF")
    assert "got ValueError: 32 bits a channel" in refusal(payload).message


# --- bombs --------------------------------------------------------------------------------------


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG in bits, whose pixels are zeros."""
    rows = zlib.compress(bytes(1000))
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", head, *chunks, png_chunk(b"IDAT", rows), png_chunk(b"IEND", b"")]
    )


def tiff_of_pages(pages: int, width: int = 8, height: int = 8) -> bytes:
    """A TIFF whose pages share a strip of zeros."""
    fields = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (279, 64)]
    begins, length = 8 + 64, 2 + 12 * len(fields) + 4
    made = [struct.pack("<2sHI", b"II", 42, begins), bytes(64)]
    for page in range(pages):
        following = begins + length * (page + 1) if page + 1 < pages else 0
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields)
        made += [struct.pack("<H", len(fields)), entries, struct.pack("<I", following)]
    return b"".join(made)


def jpeg_of_scans(scans: int) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    payload = written(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    last = payload.rindex(b"\xff\xda")
    return payload[:last] + payload[last:-2] * scans + payload[-2:]


def jpeg_with(*between: bytes) -> bytes:
    """A JPEG with bytes between its first two markers."""
    payload = written(Image.new("RGB", (8, 8)), "JPEG")
    return payload[:2] + b"".join(between) + payload[2:]


def tiff_with(*fields: tuple[int, int, int, int], more: bytes = b"") -> bytes:
    """A TIFF of 8 x 8 with further fields: tag, type, number of values and their place."""
    own = [(256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 8), (279, 64)]
    entries = sorted([*((tag, 4, 1, value) for tag, value in own), *fields])
    return b"".join(
        [
            struct.pack("<2sHI64xH", b"II", 42, 72, len(entries)),
            *(struct.pack("<HHII", *entry) for entry in entries),
            bytes(4),
            more,
        ]
    )


def large_jpeg() -> bytes:
    """A JPEG whose header says 60,000 x 60,000."""
    jpeg = bytearray(written(Image.new("RGB", (8, 8)), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    return bytes(jpeg)


def large_webp() -> bytes:
    """A WebP whose header says 16,000 x 16,000."""
    image = Image.new("RGBA", (8, 8), (1, 2, 3, 4))
    webp = bytearray(written(image, "WEBP", exif=b"Exif\0\0"))
    place = webp.index(b"VP8X") + 12
    webp[place : place + 6] = (16_000 - 1).to_bytes(3, "little") * 2
    return bytes(webp)


def large_bmp() -> bytes:
    """A BMP whose header says 60,000 x 60,000, from the top to the bottom."""
    bmp = bytearray(written(Image.new("RGB", (8, 8)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, -60_000)
    return bytes(bmp)


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "png": (lambda: png_of(60_000, 60_000), "got 60000 x 60000 = 3600000000"),
    "jpeg": (large_jpeg, "got 60000 x 60000 = 3600000000"),
    "webp": (large_webp, "got 16000 x 16000 = 256000000"),
    "bmp": (large_bmp, "got 60000 x 60000 = 3600000000"),
    "tiff": (lambda: tiff_of_pages(1, 60_000, 60_000), "got 60000 x 60000 = 3600000000"),
    "pages": (
        lambda: tiff_of_pages(100_000),
        'expected one image, as frames = "refuse" says',
    ),
    "scans": (lambda: jpeg_of_scans(100), "expected at most 64 scans, got more"),
    "chunks": (
        lambda: png_of(8, 8, *[png_chunk(b"tEXt", b"")] * 20_000),
        "expected at most 16384 chunks, got more",
    ),
    "numbers": (
        lambda: tiff_with((282, 5, 20_000, 200), more=bytes(160_100)),
        "expected at most 16384 values in a field, got 20000",
    ),
}
"""Makers of small files of large images, and what is said of them."""


@pytest.mark.parametrize(("make", "message"), BOMBS.values(), ids=BOMBS)
def test_bomb_is_too_large_and_takes_no_memory(make: Callable[[], bytes], message: str) -> None:
    """It is refused by its header, before a pixel is made."""
    payload = make()
    images = images_of([-1, 8, 8, 3])
    tracemalloc.start()
    try:
        with pytest.raises(Rejected) as caught:
            images(payload, "")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == Code.TOO_LARGE
    assert message in caught.value.message
    assert peak_bytes < 100_000


@pytest.mark.parametrize(("width", "height"), [(1, 65_000), (65_000, 1)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP"])
def test_narrow_image_that_crop_would_enlarge_is_too_large(
    kind: str, width: int, height: int
) -> None:
    """A few hundred bytes would become 12 GB: 224 x 14,560,000 pixels."""
    payload = written(Image.new("L", (width, height)), kind)
    images = images_of([-1, 224, 224, 3], fit="crop")
    with pytest.raises(Rejected) as caught:
        images(payload, "")
    assert caught.value.code == Code.TOO_LARGE
    assert f"got 3261440000, of an image of {width} x {height}" in caught.value.message


def test_narrow_image_whose_rows_would_be_widened_is_too_large() -> None:
    """All rows of 1 pixel become rows of 224 before their number changes."""
    payload = written(Image.new("1", (1, 1_000_000)), "PNG")
    images = images_of([-1, 224, 224, 3])
    with pytest.raises(Rejected, match=r"at most 16777216 pixels .* got 224000000") as caught:
        images(payload, "")
    assert caught.value.code == Code.TOO_LARGE
    assert convert(images, written(Image.new("1", (1, 60_000)), "PNG")).shape == (1, 224, 224, 3)


def test_fields_of_a_tiff_that_overlap_are_refused() -> None:
    """Pillow would read the same bytes for each of them, and warn of each."""
    error = refusal(tiff_with(*[(30_000 + i, 2, 600, 8) for i in range(100)], more=bytes(600)))
    assert error.code == Code.INVALID_REQUEST
    assert error.message.endswith("got fields that overlap")


def test_first_exif_block_of_a_jpeg_counts() -> None:
    """Others are not read: hundreds of them would take a second."""
    blocks = [
        b"Exif\0\0" + tiff_with((ORIENTATION, 3, 1, orientation)) for orientation in (6, 3, 8)
    ]
    segments = [b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block for block in blocks]
    header = read_image_header(jpeg_with(*segments), "payload", ImageLimits(64))
    assert header.orientation == 6


@pytest.mark.parametrize("filler", [b"", b"\xff", b"\xff" * 1000])
def test_fill_bytes_between_segments_of_a_jpeg_are_passed_over(filler: bytes) -> None:
    """Any number of 0xff may stand before a marker."""
    comment = b"\xff\xfe\0\x04hi"
    payload = jpeg_with(comment, filler, comment)
    assert convert(images_of([-1, 8, 8, 3]), payload).shape == (1, 8, 8, 3)


def test_compressed_texts_of_a_png_are_not_read() -> None:
    """Thousands of profiles of a megabyte each would take seconds; a broken one shows it."""
    picture_of_8 = picture("RGB", 8, 8, np.random.default_rng(7))
    payload = written(picture_of_8, "PNG")
    broken = [png_chunk(kind, b"no text at all") for kind in (b"iCCP", b"zTXt", b"iTXt")]
    images = images_of([-1, 8, 8, 3])
    got = convert(images, payload[:33] + b"".join(broken) + payload[33:])
    np.testing.assert_array_equal(got[0], np.asarray(picture_of_8))


def test_first_of_many_pages_is_read_where_configured() -> None:
    """The others are not looked at."""
    images = images_of([-1, 8, 8, 3], frames="first")
    assert not convert(images, tiff_of_pages(100_000)).any()
    animation = io.BytesIO()
    first, second = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    first.save(animation, "WEBP", save_all=True, append_images=[second], lossless=True)
    assert (convert(images, animation.getvalue()) == (255, 0, 0)).all()
    assert refusal(animation.getvalue()).code == Code.TOO_LARGE


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "datatype", "settings", "message"),
    [
        ([-1, 8, 8], "UINT8", {}, "a single input of 4 dimensions"),
        ([-1, 8, 8, 3], "INT64", {}, "a single input of 4 dimensions"),
        ([-1, 3, 8, 3], "UINT8", {}, "expected layout"),
        ([-1, 8, 8, 4], "UINT8", {}, "an input with 3 channels for RGB"),
        ([-1, 8, 8, 3], "UINT8", {"size": [9, 9]}, r"size as the input has it, \[8, 8\]"),
        ([-1, -1, -1, 3], "UINT8", {"fit": "crop"}, "expected size, as the input leaves it open"),
        ([-1, 8, 8, 3], "UINT8", {"mean": 0.5}, "only for an input of floats"),
        ([-1, 8, 8, 3], "UINT8", {"fit": "crop", "shortest_side": 7}, "of at least 8, got 7"),
    ],
)
def test_settings_that_do_not_fit_the_input_are_refused(
    shape: list[int], datatype: str, settings: dict[str, Any], message: str
) -> None:
    """The version cannot be served, and the reason says what was expected."""
    with pytest.raises(ConfigurationError, match=message):
        images_of(shape, datatype, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shortest_side": 8}, 'transform.image: shortest_side: expected fit = "crop" beside it'),
        ({"mean": [1, 2]}, "transform.image: mean: expected one number or 3, one for each channel"),
        ({"fit": "squash"}, "transform.image.fit: Input should be"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    """The key is named as it stands in the file."""
    with pytest.raises(ConfigurationError) as caught:
        images_of([-1, 8, 8, 3], **settings)
    assert message in str(caught.value)


def test_two_transforms_are_refused() -> None:
    """A table has one of them."""
    with pytest.raises(ConfigurationError, match=r"expected one of transform.record or"):
        make_model_config({"transform": {}}, make_settings({}))
