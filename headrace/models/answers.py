"""Answers to payloads in the words of the caller: `[answer]` in `model.toml`.

Callers who send images or records need not know tensors: the answer is a JSON array with an object
for each row instead, or a PNG with the class of each pixel.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import BoxesAnswer, ClassesAnswer, MaskAnswer
from headrace.models.inputs.images import Images, Placement
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.headers import JSON, PNG

_encode_json = msgspec.json.Encoder().encode


class ClassAnswers:
    """Writes the classes with the largest values of each row.

    Args:
        config: which output, and how many classes.
        signature: of the version.
        labels: by output and index; an index beyond them has none.

    Raises:
        ConfigurationError: there is no such output of numbers.
    """

    content_type = JSON

    def __init__(
        self, config: ClassesAnswer, signature: Signature, labels: Mapping[str, Sequence[bytes]]
    ) -> None:
        self._output = _find_numbers(signature, config.output).name
        self._top = config.top
        self._labels = [label.decode() for label in labels.get(self._output, ())]

    def write(self, outputs: Mapping[str, NDArray[Any]], *, batched: bool) -> bytes:
        """Return the answer in JSON: `[{"classes": [{"label", "index", "value"}, ...]}, ...]`.

        The elements of a row count as one list, whatever its dimensions. Values are the shortest
        numbers that give those of the datatype back; NaN and infinities are null.

        Args:
            outputs: of one request, by name.
            batched: whether dimension 0 has the rows; otherwise there is one row.
        """
        array = outputs[self._output]
        rows = array if batched else array[np.newaxis]
        return _encode_json([{"classes": self._name_classes(row.ravel())} for row in rows])

    def _name_classes(self, row: NDArray[Any]) -> list[dict[str, object]]:
        classes: list[dict[str, object]] = []
        for index in find_largest(row, self._top).tolist():
            label = {"label": self._labels[index]} if index < len(self._labels) else {}
            # Through its text: 0.9 in FP32 would be 0.8999999761581421 in FP64.
            number = int(row[index]) if row.dtype.kind in "iu" else float(str(row[index]))
            classes.append({**label, "index": index, "value": number})
        return classes


class BoxAnswers:
    """Writes the objects that a model found in each image.

    Args:
        config: which outputs, and which boxes stay.
        signature: of the version.
        labels: by output and index; an index beyond them has none.
        images: made the input.

    Raises:
        ConfigurationError: the outputs do not fit.
    """

    content_type = JSON

    def __init__(
        self,
        config: BoxesAnswer,
        signature: Signature,
        labels: Mapping[str, Sequence[bytes]],
        images: Images,
    ) -> None:
        specs = {spec.name: spec for spec in signature.outputs}
        for key, name, last in (("boxes", config.boxes, (-1, 4)), ("scores", config.scores, ())):
            spec = specs.get(name)
            if (
                spec is None
                or spec.datatype not in ("FP16", "BF16", "FP32", "FP64")
                or len(spec.shape) != 3
                or (last and spec.shape[-1] not in last)
            ):
                got = ", ".join(f"{s.name} {s.datatype} {list(s.shape)}" for s in specs.values())
                raise ConfigurationError(
                    f"answer.boxes.{key}: expected {name} of floats, [batch, boxes, "
                    f"{'4' if last else 'classes'}], got {got}"
                )
        if not signature.batched:
            raise ConfigurationError("answer.boxes: expected a row of outputs for each image")
        self._config = config
        self._labels = [label.decode() for label in labels.get(config.scores, ())]
        self._images = images

    def write(
        self, outputs: Mapping[str, NDArray[Any]], payload: bytes, content_type: str
    ) -> bytes:
        """Return the answer in JSON: `[{"width", "height", "boxes": [{"label", "index", "score",
        "box": [left, top, right, bottom]}, ...]}, ...]`, the best score first.

        Args:
            outputs: of one request, by name.
            payload: of the request, without its content encoding.
            content_type: of the payload.

        Raises:
            Rejected: `MODEL_FAILED`: an output has another shape than it should.
        """
        measured = self._images.measure(payload, content_type)
        boxes, scores = outputs[self._config.boxes], outputs[self._config.scores]
        count = boxes.shape[1]
        wanted = [len(measured), count]
        if boxes.shape[2] != 4 or list(boxes.shape[:2]) != wanted or [*scores.shape[:2]] != wanted:
            raise Rejected.mismatch(
                Code.MODEL_FAILED,
                "answer.boxes",
                expected=f"boxes {[*wanted, 4]} and scores {[*wanted, 'classes']}",
                got=f"{list(boxes.shape)} and {list(scores.shape)}",
            )
        return _encode_json(
            [
                {
                    "width": width,
                    "height": height,
                    "boxes": self._find(boxes[row], scores[row], width, height, placement),
                }
                for row, (width, height, placement) in enumerate(measured)
            ]
        )

    def _find(
        self,
        boxes: NDArray[Any],
        scores: NDArray[Any],
        width: int,
        height: int,
        placement: Placement,
    ) -> list[dict[str, object]]:
        config = self._config
        if not scores.size:
            return []
        exact = scores.astype(np.float64)
        exact[np.isnan(exact)] = -np.inf  # as in the other answers, NaN comes last
        classes = exact.argmax(axis=1)
        best = exact.max(axis=1)
        corners = _as_corners(boxes.astype(np.float64), config.format)
        usable = np.flatnonzero((best >= config.min_score) & np.isfinite(corners).all(axis=1))
        usable = usable[find_largest(best[usable], config.max_candidates)]
        kept = usable[
            suppress(corners[usable], classes[usable], config.max_overlap, limit=config.top)
        ]
        scale = np.array([width / placement.width, height / placement.height] * 2)
        shift = np.array([placement.left, placement.top] * 2)
        corners = np.clip((corners[kept] - shift) * scale, 0, [width, height] * 2)
        return [
            {
                **({"label": self._labels[index]} if index < len(self._labels) else {}),
                "index": index,
                "score": float(str(scores[place, index])),
                "box": box,
            }
            for place, index, box in zip(
                kept.tolist(), classes[kept].tolist(), corners.tolist(), strict=True
            )
        ]


def _as_corners(boxes: NDArray[np.float64], form: str) -> NDArray[np.float64]:
    if form == "xyxy":
        return boxes
    middle, half = boxes[:, :2], boxes[:, 2:] / 2
    return np.concatenate([middle - half, middle + half], axis=1)


def suppress(
    boxes: NDArray[np.float64], classes: NDArray[np.intp], max_overlap: float, *, limit: int
) -> NDArray[np.intp]:
    """Return the places of the boxes that no better box of their class overlaps too much.

    Greedy non-maximum suppression, as in the operator NonMaxSuppression
    (https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html): the best box stays, and those
    whose intersection over union with it is more than `max_overlap` go; then the next. That takes
    `limit` steps at most, each over all boxes.

    Args:
        boxes: left, top, right, bottom; the best one first.
        classes: of the boxes.
        max_overlap: from 0 to 1.
        limit: most boxes to return.
    """
    left, top, right, bottom = boxes.T
    areas = (right - left) * (bottom - top)
    remaining = np.arange(len(boxes))
    kept: list[int] = []
    while len(remaining) and len(kept) < limit:
        best, remaining = int(remaining[0]), remaining[1:]
        kept.append(best)
        widths = np.minimum(right[best], right[remaining]) - np.maximum(left[best], left[remaining])
        heights = np.minimum(bottom[best], bottom[remaining]) - np.maximum(
            top[best], top[remaining]
        )
        shared = np.maximum(widths, 0) * np.maximum(heights, 0)
        # Multiplied, because boxes without an area would divide by 0.
        overlaps = shared > max_overlap * (areas[best] + areas[remaining] - shared)
        remaining = remaining[~(overlaps & (classes[remaining] == classes[best]))]
    return np.array(kept, np.intp)


class MaskAnswers:
    """Writes the class of each pixel of an image.

    Args:
        config: which output.
        signature: of the version.
        images: made the input.

    Raises:
        ConfigurationError: the output does not fit.
    """

    content_type = PNG

    def __init__(self, config: MaskAnswer, signature: Signature, images: Images) -> None:
        spec = _find_output(signature, config.output, "answer.mask.output")
        if not _can_be_mask(spec) or not signature.batched:
            raise ConfigurationError(
                f"answer.mask.output: expected {_MASKS}, got {spec.name} {spec.datatype} "
                f"{list(spec.shape)}"
            )
        from PIL import Image

        self._make_image = Image.fromarray
        self._output = spec.name
        self._outside = config.outside
        self._images = images

    def write(
        self, outputs: Mapping[str, NDArray[Any]], payload: bytes, content_type: str
    ) -> bytes:
        """Return a PNG of 8 bits gray with the class of each pixel of the upright image.

        Each pixel has the class of the mask's pixel in which its middle was in the input.

        Args:
            outputs: of one request, by name.
            payload: of the request, one image, without its content encoding.
            content_type: of the payload.

        Raises:
            Rejected: `MODEL_FAILED`: the output has another shape or other classes than it should.
        """
        ((width, height, placement),) = self._images.measure(payload, content_type)
        classes = self._find_classes(outputs[self._output])
        input_height, input_width = self._images.input_size(placement)
        across = (np.arange(width) + 0.5) * (placement.width / width) + placement.left
        down = (np.arange(height) + 0.5) * (placement.height / height) + placement.top
        columns = np.floor(across * (classes.shape[1] / input_width)).astype(np.intp)
        rows = np.floor(down * (classes.shape[0] / input_height)).astype(np.intp)
        seen_columns = np.flatnonzero((columns >= 0) & (columns < classes.shape[1]))
        seen_rows = np.flatnonzero((rows >= 0) & (rows < classes.shape[0]))
        mask = np.full((height, width), self._outside, np.uint8)
        # What a crop left is one rectangle, so that it is copied at once.
        mask[_as_slice(seen_rows), _as_slice(seen_columns)] = classes[rows[seen_rows]][
            :, columns[seen_columns]
        ]
        file = io.BytesIO()
        self._make_image(mask).save(file, "PNG")
        return file.getvalue()

    def _find_classes(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the class of each pixel of the output. Raises `Rejected`."""
        is_integer = array.dtype.kind in "biu"
        channels = array.shape[1] if array.ndim == 4 else 1
        is_scores = channels > 1
        if (
            len(array) != 1
            or not array.size
            or array.ndim not in (3, 4)
            or not (is_scores or is_integer)
        ):
            raise Rejected.mismatch(
                Code.MODEL_FAILED,
                f"answer.mask: output {self._output}",
                expected=f"{_MASKS}, of one row",
                got=f"{array.dtype} {list(array.shape)}",
            )
        row = array[0]
        if is_scores:
            row = _find_best(row)
        elif array.ndim == 4:
            row = row[0]
        lowest, highest = int(row.min()), int(row.max())
        if lowest < 0 or highest > 255:
            raise Rejected.mismatch(
                Code.MODEL_FAILED,
                f"answer.mask: output {self._output}",
                expected="classes from 0 to 255",
                got=f"{lowest} to {highest}",
            )
        classes: NDArray[np.uint8] = row.astype(np.uint8)
        return classes


def _find_best(scores: NDArray[Any]) -> NDArray[np.intp]:
    """Return the class with the largest score of each pixel; NaN counts as the smallest."""
    # bfloat16 is no number to NumPy's own functions.
    exact = scores.astype(np.float32) if scores.dtype == ml_dtypes.bfloat16 else scores
    if exact.dtype.kind == "f" and np.isnan(exact).any():
        exact = np.where(np.isnan(exact), -np.inf, exact)
    best: NDArray[np.intp] = exact.argmax(axis=0)
    return best


_MASKS = (
    "integers [batch, height, width] or [batch, 1, height, width], or scores [batch, 2 to 256 "
    "classes, height, width]"
)


def _can_be_mask(spec: TensorSpec) -> bool:
    is_integer = spec.datatype == "BOOL" or "INT" in spec.datatype
    if spec.datatype == "BYTES" or len(spec.shape) not in (3, 4):
        return False
    if len(spec.shape) == 3 or spec.shape[1] == 1:
        return is_integer
    return spec.shape[1] <= 256


def _as_slice(places: NDArray[np.intp]) -> slice:
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0)


def _find_output(signature: Signature, name: str, key: str) -> TensorSpec:
    specs = {spec.name: spec for spec in signature.outputs}
    if not name and len(specs) == 1:
        name = signature.outputs[0].name
    if name not in specs:
        raise ConfigurationError(f"{key}: expected one of {', '.join(specs)}, got {name or 'none'}")
    return specs[name]


def _find_numbers(signature: Signature, name: str) -> TensorSpec:
    spec = _find_output(signature, name, "answer.classes.output")
    if spec.datatype in ("BOOL", "BYTES"):
        raise ConfigurationError(
            f"answer.classes.output: expected an output of numbers, got {spec.name} of "
            f"{spec.datatype}"
        )
    return spec


def find_largest(values: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest numbers, largest first, or of all if there are
    fewer. Equal numbers are in the order of their indices, and NaN come after all others.
    """
    if values.dtype.kind in "iu":
        keys = ~values  # reverses the order without an overflow, which -values could have
        last = np.zeros(len(values), dtype=bool)
    else:
        # bfloat16 is no number to NumPy's own functions.
        exact = values.astype(np.float32) if values.dtype == ml_dtypes.bfloat16 else values
        last = np.isnan(exact)
        keys = np.where(last, np.inf, -exact)
    candidates = np.arange(len(keys))
    if count < len(keys):
        candidates = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
    # A stable sort: what is equal stays in the order of the indices.
    order = np.lexsort((last[candidates], keys[candidates]))
    return candidates[order][:count]
