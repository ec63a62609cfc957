"""Conversion of images to a model's input: JPEG, PNG, WebP, BMP and TIFF.

A payload is one image, or several in the parts of a MIME multipart body
(`headrace.models.inputs.multipart`), which become rows. The header of a file is checked before its
pixels are decoded, see `headrace.models.inputs.image_files`. Pillow decodes and resizes;
simplejpeg, if it is installed, decodes JPEGs, to the same values.

Images are turned upright, converted to 8 bits a channel without transparency, resized by Pillow's
filters (which average over all source pixels when they make an image smaller), and normalized.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.inputs.image_files import (
    CONTENT_TYPES,
    ImageHeader,
    ImageLimits,
    read_image_header,
)
from headrace.models.inputs.media_files import other_content_type, other_format
from headrace.models.inputs.multipart import split_parts
from headrace.models.media_config import ImageTransform
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import DATATYPES, from_array
from headrace.tuning import TUNING, ModelTuning

if TYPE_CHECKING:
    from PIL.Image import Image

INSTALL = "pip install 'headrace[image]'"
_ANY_IMAGE = frozenset({"", "application/octet-stream", "image/*"})
_DATATYPES = ("UINT8", "FP16", "BF16", "FP32")
_LEVELS = 256


class Placement(NamedTuple):
    """Position of the resized, upright image in the input, in pixels.

    A point (x, y) of the resized image is at (x + left, y + top) of the input.

    Attributes:
        width, height: size of the resized image.
        left, top: place of its upper left corner in the input; negative if the image is cropped.
    """

    width: int
    height: int
    left: int = 0
    top: int = 0


class Images:
    """Converts payloads to the input of one version.

    Raises:
        ConfigurationError: the settings do not fit the input, or Pillow is missing.
    """

    def __init__(
        self, config: ImageTransform, signature: Signature, tuning: ModelTuning = TUNING.models
    ) -> None:
        self._config = config
        self._input = _ImageInput(config, signature)
        self._limits = ImageLimits(config.max_pixels, several=config.frames == "first")
        self._decoder = _Decoder(config)
        self._tuning = tuning

    def __call__(self, payload: bytes, content_type: str) -> list[InputTensor]:
        """Return the input that a payload becomes.

        Raises:
            Rejected: `TOO_LARGE` over a limit, `INVALID_REQUEST` for what is no whole image.
        """
        headers = [
            (content, where, self._read_header(content, named_type, where))
            for content, named_type, where in self._split(payload, content_type)
        ]
        self._check_all_pixels([header for _, _, header in headers])
        rows: NDArray[Any] | None = None
        for row, (content, where, header) in enumerate(headers):
            try:
                pixels = self._decode(content, header)
            except Rejected:
                raise
            except Exception as error:  # whatever bytes may make the library raise is the caller's
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST,
                    where,
                    expected=f"a {header.format} without damage",
                    got=describe_error(error),
                ) from error
            if rows is None:
                rows = self._input.make_rows(len(headers), pixels)
            elif pixels.shape != (got := self._input.size_of(rows)):
                raise Rejected.mismatch(
                    Code.INVALID_TENSOR,
                    where,
                    expected=f"{got[1]} x {got[0]} pixels, as the first image has",
                    got=f"{pixels.shape[1]} x {pixels.shape[0]}",
                )
            self._input.fill(rows[row], pixels)
        assert rows is not None
        tensor = from_array(self._input.name, rows)
        return [
            InputTensor(
                name=tensor.name,
                datatype=tensor.datatype,
                shape=list(tensor.shape),
                data=memoryview(tensor.data),
            )
        ]

    def measure(self, payload: bytes, content_type: str) -> list[tuple[int, int, Placement]]:
        """Return width and height of each upright image of a payload, and where it is in the input.

        Raises:
            Rejected: see `__call__`; the pixels are not decoded.
        """
        measured = []
        for content, named_type, where in self._split(payload, content_type):
            header = self._read_header(content, named_type, where)
            width, height = header.width, header.height
            if header.orientation >= 5:
                width, height = height, width
            measured.append((width, height, self.place(width, height)))
        return measured

    def input_size(self, placement: Placement) -> tuple[int, int]:
        """Return height and width of the input that an image of this placement becomes."""
        return self._input.height or placement.height, self._input.width or placement.width

    def is_slow(self, _payload: bytes, _content_type: str, _inline_bytes: int) -> bool:
        """See `headrace.models.inputs.transforms.Transform`: decoding takes milliseconds."""
        return True

    def _split(self, payload: bytes, content_type: str) -> Iterator[tuple[bytes, str, str]]:
        """Yield content, content type and place of each image."""
        if not content_type.startswith("multipart/"):
            yield payload, content_type, "payload"
            return
        parts = split_parts(payload, self._config.max_images, "max_images")
        for number, (named_type, content) in enumerate(parts):
            yield content, named_type, f"payload: part {number}"

    def _read_header(self, content: bytes, content_type: str, where: str) -> ImageHeader:
        named = CONTENT_TYPES.get(content_type)
        if named is None and content_type not in _ANY_IMAGE:
            raise other_content_type(content_type, where, CONTENT_TYPES)
        header = read_image_header(content, where, self._limits, self._tuning)
        if named not in (None, header.format):
            raise other_format(named, content_type, where, header.format)
        return header

    def _check_all_pixels(self, headers: Sequence[ImageHeader]) -> None:
        """Refuse images that keep their own size and have too many pixels in all."""
        pixels = sum(header.width * header.height for header in headers)
        if not self._input.height and pixels > self._config.max_pixels:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                "payload",
                expected=f"at most max_pixels = {self._config.max_pixels} in all images",
                got=str(pixels),
            )

    def _decode(self, content: bytes, header: ImageHeader) -> NDArray[np.uint8]:
        """Return the pixels of an image as the input has them: [height, width] or with channels."""
        width, height = header.width, header.height
        if header.orientation >= 5:
            width, height = height, width
        placement = self.place(width, height)
        self._check_resized(width, height, placement)
        image = self._decoder.decode(content, header, (placement.width, placement.height))
        return self._decoder.fit(image, placement, self.input_size(placement))

    def _check_resized(self, width: int, height: int, placement: Placement) -> None:
        """Refuse an image so narrow that resizing would make millions of pixels of few."""
        limit = max(self._config.max_pixels, self._tuning.image_resized_pixels)
        # Pillow changes the width of all rows first, then the height.
        pixels = placement.width * max(height, placement.height)
        if (width, height) != placement[:2] and pixels > limit:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                "payload",
                expected=f"at most {limit} pixels while an image is resized",
                got=f"{pixels}, of an image of {width} x {height}",
            )

    def place(self, width: int, height: int) -> Placement:
        """Return where an upright image of this size is in the input."""
        target_height, target_width = self._input.height, self._input.width
        if not (target_height and target_width):
            return Placement(width, height)
        if self._config.fit == "stretch":
            return Placement(target_width, target_height)
        new_width, new_height = _scaled(width, height, target_width, target_height, self._config)
        return Placement(
            new_width,
            new_height,
            _middle(target_width - new_width),
            _middle(target_height - new_height),
        )


def _scaled(
    width: int, height: int, target_width: int, target_height: int, config: ImageTransform
) -> tuple[int, int]:
    """Return the size of an image that keeps its proportions."""
    if config.fit == "letterbox":
        if width * target_height >= height * target_width:
            return target_width, max(1, round(height * target_width / width))
        return max(1, round(width * target_height / height)), target_height
    if config.shortest_side is not None:
        side = config.shortest_side
        if width <= height:
            return side, side * height // width
        return side * width // height, side
    if width * target_height <= height * target_width:
        return target_width, max(target_height, target_width * height // width)
    return max(target_width, target_height * width // height), target_height


def _middle(left_over: int) -> int:
    """Return the border before what is centred; negative if it is cropped."""
    return left_over // 2 if left_over >= 0 else -round(-left_over / 2)


# --- the input ----------------------------------------------------------------------------------


class _ImageInput:
    """The input of a model that takes images.

    Attributes:
        name: of the input.
        height, width: of its images; 0 if they keep their own.
    """

    def __init__(self, config: ImageTransform, signature: Signature) -> None:
        spec = signature.inputs[0]
        if len(signature.inputs) > 1 or len(spec.shape) != 4 or spec.datatype not in _DATATYPES:
            got = ", ".join(
                f"{each.name} {each.datatype} {list(each.shape)}" for each in signature.inputs
            )
            raise _unfit(f"a single input of 4 dimensions in {', '.join(_DATATYPES)}", got)
        channels = 1 if config.color == "gray" else 3
        self._is_first = _find_layout(config, spec, channels) == "NCHW"
        axes = (2, 3) if self._is_first else (1, 2)
        self._dtype = DATATYPES[spec.datatype].dtype
        self._channels = channels
        self._rows = spec.shape[0]
        self.name = spec.name
        self.height, self.width = _find_size(config, spec, axes)
        self._table = (
            None if spec.datatype == "UINT8" else _make_table(config, channels, self._dtype)
        )
        if self._table is None and (
            config.scale is not None or set(config.mean) != {0.0} or set(config.deviation) != {1.0}
        ):
            raise _unfit("scale, mean and deviation only for an input of floats", spec.datatype)
        self._is_reversed = config.color == "BGR"

    def make_rows(self, rows: int, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Return an empty input for images like this one. Raises `Rejected`."""
        if self._rows not in (-1, rows):
            raise Rejected.mismatch(
                Code.INVALID_TENSOR, "payload", expected=f"{self._rows} images", got=str(rows)
            )
        height, width = pixels.shape[:2]
        shape = (
            (self._channels, height, width) if self._is_first else (height, width, self._channels)
        )
        return np.empty((rows, *shape), self._dtype)

    def size_of(self, rows: NDArray[Any]) -> tuple[int, ...]:
        """Return the shape of the pixels of an image in the input."""
        height, width = rows.shape[2:] if self._is_first else rows.shape[1:3]
        return (height, width) if self._channels == 1 else (height, width, self._channels)

    def fill(self, row: NDArray[Any], pixels: NDArray[np.uint8]) -> None:
        """Write an image into its row of the input, normalized."""
        if pixels.ndim == 2:
            pixels = pixels[:, :, np.newaxis]
        if self._is_reversed:
            pixels = pixels[:, :, ::-1]
        target = np.moveaxis(row, 0, -1) if self._is_first else row
        if self._table is None:
            np.copyto(target, pixels)
            return
        for channel in range(self._channels):
            target[:, :, channel] = self._table[channel][pixels[:, :, channel]]


def _find_layout(config: ImageTransform, spec: TensorSpec, channels: int) -> str:
    found = [
        layout
        for layout, axis in (("NCHW", 1), ("NHWC", 3))
        if spec.shape[axis] == channels and config.layout in (None, layout)
    ]
    if not found and config.layout is not None and spec.shape[config.layout.index("C")] == -1:
        return config.layout
    if len(found) != 1:
        raise _unfit(
            f"layout, and an input with {channels} channels for {config.color}",
            f"{spec.name} {list(spec.shape)}",
        )
    return found[0]


def _find_size(config: ImageTransform, spec: TensorSpec, axes: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the images; 0 if they keep their own."""
    own = tuple(spec.shape[axis] for axis in axes)
    size = config.size or own
    if any(free not in (-1, side) for free, side in zip(own, size, strict=True)):
        raise _unfit(f"size as the input has it, {list(own)}", str(list(size)))
    if -1 in size and (max(size) > 0 or config.fit != "stretch"):
        raise _unfit("size, as the input leaves it open", f"{spec.name} {list(spec.shape)}")
    if config.shortest_side is not None and config.shortest_side < max(size):
        raise _unfit(f"shortest_side of at least {max(size)}", str(config.shortest_side))
    height, width = (max(0, side) for side in size)
    return height, width


def _make_table(config: ImageTransform, channels: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return what each value of each channel becomes: (value * scale - mean) / deviation."""
    scale = 1 / 255 if config.scale is None else config.scale
    mean, deviation = (
        np.broadcast_to(np.array(values, np.float64), channels)[:, np.newaxis]
        for values in (config.mean, config.deviation)
    )
    table: NDArray[Any] = ((np.arange(_LEVELS) * scale - mean) / deviation).astype(dtype)
    return table


def _unfit(expected: str, got: str) -> ConfigurationError:
    return ConfigurationError(f"transform.image: expected {expected}, got {got}")


# --- decoding -----------------------------------------------------------------------------------


class _Decoder:
    """Decodes and resizes images by Pillow, and JPEGs by simplejpeg where it is installed."""

    def __init__(self, config: ImageTransform) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise ConfigurationError(
                f"transform.image: images need the package Pillow: {INSTALL}"
            ) from error
        try:
            self._simplejpeg: Any = importlib.import_module("simplejpeg")
        except ImportError:
            self._simplejpeg = None
        self._pillow = Image
        self._mode = "L" if config.color == "gray" else "RGB"
        self._draft = config.draft
        self._fill = config.fill
        self._filter = {
            "nearest": Image.Resampling.NEAREST,
            "bilinear": Image.Resampling.BILINEAR,
            "bicubic": Image.Resampling.BICUBIC,
            "area": Image.Resampling.BOX,
        }[config.resize]
        transpose = Image.Transpose
        self._upright = {
            2: transpose.FLIP_LEFT_RIGHT,
            3: transpose.ROTATE_180,
            4: transpose.FLIP_TOP_BOTTOM,
            5: transpose.TRANSPOSE,
            6: transpose.ROTATE_270,
            7: transpose.TRANSVERSE,
            8: transpose.ROTATE_90,
        }

    def decode(self, content: bytes, header: ImageHeader, wanted: tuple[int, int]) -> Image:
        """Return an image upright in RGB or gray, of at least the wanted width and height if it is
        decoded smaller than it is.
        """
        image = self._open(content, header, wanted)
        image = _to_8_bits(image, self._pillow)
        if image.mode != self._mode:
            image = image.convert(self._mode)
        # Pillow turns TIFF files upright itself.
        turned = self._upright.get(header.orientation) if header.format != "TIFF" else None
        return image if turned is None else image.transpose(turned)

    def _open(self, content: bytes, header: ImageHeader, wanted: tuple[int, int]) -> Image:
        """Return an image as it is in its file, or a JPEG smaller where that is wanted."""
        simplejpeg = self._simplejpeg if header.components == 3 else None
        size = header.width, header.height
        if header.unread:
            # Each takes milliseconds, and a file may have thousands.
            ends = (0, *(stop for _, stop in header.unread))
            starts = (*(start for start, _ in header.unread), len(content))
            content = b"".join(content[a:b] for a, b in zip(ends, starts, strict=True))
        if simplejpeg is None or self._draft:
            image: Image = self._pillow.open(io.BytesIO(content), formats=[header.format.upper()])
            if size not in (image.size, image.size[::-1]):  # Pillow turns TIFF files upright
                raise ValueError(f"{image.width} x {image.height} pixels in another header")
            if self._draft and header.format == "JPEG":
                image.draft(None, wanted if header.orientation < 5 else wanted[::-1])
            if simplejpeg is None:
                return image
            size = image.size
        pixels = simplejpeg.decode_jpeg(
            content, "RGB", min_width=size[0], min_height=size[1], strict=False
        )
        if pixels.shape[1::-1] != size:
            raise ValueError(f"{pixels.shape[1]} x {pixels.shape[0]} pixels in another header")
        return self._pillow.fromarray(pixels)

    def fit(self, image: Image, placement: Placement, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the pixels of an image, resized and placed in an input of this height, width."""
        if image.size != (placement.width, placement.height):
            image = image.resize((placement.width, placement.height), self._filter)
        pixels = np.asarray(image)
        height, width = size
        if pixels.shape[:2] == size:
            return pixels
        left, top = placement.left, placement.top
        if left < 0 or top < 0 or placement.width > width or placement.height > height:
            return pixels[-top : height - top, -left : width - left]
        boxed = np.full((height, width, *pixels.shape[2:]), self._fill, np.uint8)
        boxed[top : top + placement.height, left : left + placement.width] = pixels
        return boxed


def _to_8_bits(image: Image, pillow: Any) -> Image:
    """Return an image with at most 8 bits a channel: the upper 8 of 16."""
    if image.mode.startswith("I;16"):
        return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # type: ignore[no-any-return]
    if image.mode in ("I", "F"):
        raise ValueError("32 bits a channel, of which images for models have 8 or 16")
    return image
