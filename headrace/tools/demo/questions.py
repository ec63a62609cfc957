"""Questions of the demo, and their expected answers.

The records are made from plain maps, as a producer in another language would do. Their form is
defined by `headrace.protocol.messages.InferenceRequest` and the headers in
`headrace.protocol.headers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import count, cycle
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import Code
from headrace.log.port import NewRecord
from headrace.tools.demo.samples import Sample

MSGPACK = "application/msgpack"
JSON = "application/json"
RAW = "application/octet-stream"
CORRELATION_ID = "kafka_correlationId"

DIGITS_MSGPACK = "digits, MessagePack"
DIGITS_JSON = "digits, JSON"
FILES = "files"
WRONG = "wrong on purpose"

LATE_MS = 1000


class Question(NamedTuple):
    """A request and its expected answer.

    Attributes:
        correlation_id: identifies its answer.
        group: its category in the totals.
        model: the requested model.
        subject: description for people.
        labels: the true label of each row, as text; empty if `code` is set.
        code: the expected error; empty for a good request.
    """

    correlation_id: bytes
    group: str
    model: str
    subject: str
    record: NewRecord
    labels: tuple[str, ...] = ()
    code: str = ""

    @property
    def dead_letter(self) -> bool:
        """Whether a dead letter is expected too."""
        return bool(self.code) and Code(self.code).is_dead_letter


class Digits(NamedTuple):
    """Held-out images: `pixels` uint8 [n, 64] with values 0 to 16, `labels` uint8 [n]."""

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


def load_digits() -> Digits:
    """Load the images that come with the demo."""
    source = files("headrace.tools.demo") / "digits_test.npz"
    with source.open("rb") as file, np.load(file) as images:
        return Digits(images["pixels"], images["labels"])


class Questions:
    """Generates questions without end, each with its own correlation id."""

    def __init__(self, digits: Digits, samples: Sequence[Sample]) -> None:
        self._numbers = count(1)
        self._digits = digits
        self._images = cycle(range(len(digits.labels)))
        self._samples = cycle(samples)

    def digits_msgpack(self, rows: int = 1) -> Question:
        """Return images as raw bytes, with only the label requested."""
        pixels, labels = self._next_images(rows)
        body = _digits_body(pixels.tobytes(), [rows, 64]) | {"outputs": [{"name": "label"}]}
        subject = f"{rows} images in MessagePack" if rows > 1 else "an image in MessagePack"
        value = msgspec.msgpack.encode(body)
        return self._make(DIGITS_MSGPACK, "digits", subject, value, MSGPACK, labels=labels)

    def digits_json(self) -> Question:
        """Return one image as a list of numbers."""
        pixels, labels = self._next_images(1)
        value = msgspec.json.encode(_digits_body(pixels.tolist(), [1, 64]))
        return self._make(DIGITS_JSON, "digits", "an image in JSON", value, JSON, labels=labels)

    def file(self) -> Question:
        """Return a file as it is."""
        sample = next(self._samples)
        subject = f"a file of {len(sample.content):,} bytes ({sample.label})"
        labels = (sample.label,)
        return self._make(FILES, "magika", subject, sample.content, RAW, labels=labels)

    def wrong(self) -> Iterator[Question]:
        """Yield one request of each kind that must be answered with an error."""
        pixels = self._next_images(1)[0]
        good = msgspec.msgpack.encode(_digits_body(pixels.tobytes(), [1, 64]))
        short = msgspec.msgpack.encode(_digits_body(pixels[:, 1:].tobytes(), [1, 63]))
        unknown = msgspec.msgpack.encode(
            _digits_body(pixels.tobytes(), [1, 64], model="no-such-model")
        )
        just_gone = b"%d" % (time.time_ns() // 1_000_000 - LATE_MS)
        cases: tuple[tuple[str, bytes, Code, dict[str, bytes]], ...] = (
            ("an image with a pixel missing", short, Code.INVALID_TENSOR, {}),
            ("a request cut off in the middle", good[: len(good) // 2], Code.INVALID_REQUEST, {}),
            ("a model that is not there", unknown, Code.UNKNOWN_MODEL, {}),
            (
                "a deadline that has passed",
                good,
                Code.DEADLINE_EXCEEDED,
                {"x-deadline-ms": just_gone},
            ),
        )
        for subject, value, code, headers in cases:
            yield self._make(
                WRONG, "digits", subject, value, MSGPACK, code=code.value, headers=headers
            )

    def _next_images(self, rows: int) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
        chosen = [next(self._images) for _ in range(rows)]
        labels = tuple(str(label) for label in self._digits.labels[chosen])
        return self._digits.pixels[chosen].astype("<f4"), labels

    def _make(
        self,
        group: str,
        model: str,
        subject: str,
        value: bytes,
        content_type: str,
        *,
        labels: tuple[str, ...] = (),
        code: str = "",
        headers: dict[str, bytes] | None = None,
    ) -> Question:
        correlation_id = b"demo-%d" % next(self._numbers)
        about = {"content-type": content_type.encode(), CORRELATION_ID: correlation_id}
        if content_type == RAW:
            about["x-model"] = model.encode()
        about |= headers or {}
        record = NewRecord(None, value, tuple(about.items()))
        return Question(correlation_id, group, model, subject, record, labels, code)


MakeQuestion = Callable[[], Question]


def _digits_body(pixels: Any, shape: list[int], model: str = "digits") -> dict[str, Any]:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": shape, "data": pixels}
    return {"model_name": model, "inputs": [tensor]}
