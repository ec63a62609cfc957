"""Answers to payloads in the words of the caller: `[answer]` in `model.toml`.

Callers who send images or records need not know tensors: the answer is a JSON array with an object
for each row instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import BoxesAnswer, ClassesAnswer
from headrace.models.inputs.images import Images, Placement
from headrace.models.signature import Signature, TensorSpec

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
        classes = exact.argmax(axis=1)
        best = exact.max(axis=1)
        corners = _as_corners(boxes.astype(np.float64), config.format)
        # A comparison with NaN is false.
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


def _find_numbers(signature: Signature, name: str) -> TensorSpec:
    specs = {spec.name: spec for spec in signature.outputs}
    if not name and len(specs) == 1:
        name = signature.outputs[0].name
    if name not in specs:
        raise ConfigurationError(
            f"answer.classes.output: expected one of {', '.join(specs)}, got {name or 'none'}"
        )
    if specs[name].datatype in ("BOOL", "BYTES"):
        raise ConfigurationError(
            f"answer.classes.output: expected an output of numbers, got {name} of "
            f"{specs[name].datatype}"
        )
    return specs[name]


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
