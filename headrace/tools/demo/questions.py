"""Questions of the demo with their expected answers, and the parsing of the actual answers.

Records are made from plain maps and parsed into them, as a program in another language would do.
Their form is defined by `headrace.protocol.messages` and the headers in
`headrace.protocol.headers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import Code
from headrace.log.port import NewRecord, Record
from headrace.protocol.headers import HeaderName

MSGPACK = "application/msgpack"
JSON = "application/json"
RAW = "application/octet-stream"

DIGITS_MSGPACK = "digits, MessagePack"
DIGITS_JSON = "digits, JSON"
FILES = "files"
INVALID = "invalid requests"

OK = "ok"
LATE_MS = 1000
SEED = 1


class Question(NamedTuple):
    """A request and its expected answer.

    Attributes:
        group: its category in the totals.
        model: the requested model.
        subject: description for people.
        labels: the true label of each row, as text; empty if `code` is set.
        code: the expected error; empty for a good request.
    """

    group: str
    model: str
    subject: str
    record: NewRecord
    labels: tuple[str, ...] = ()
    code: str = ""

    @property
    def dead_letter(self) -> bool:
        """True if a dead letter is expected too."""
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


class SampleFile(NamedTuple):
    """A file: its true `label`, by magika's name for it, and its bytes `content`."""

    label: str
    content: bytes


def load_samples() -> list[SampleFile]:
    """Load the files that come with the demo, in an order that mixes their kinds."""
    folder = files("headrace.tools.demo") / "samples"
    found = sorted(file.name for file in folder.iterdir() if file.name != "README.md")
    samples = [SampleFile(name.rpartition("-")[0], (folder / name).read_bytes()) for name in found]
    Random(SEED).shuffle(samples)  # noqa: S311 - an order, no secret
    return samples


class Questions:
    """Generate questions without end."""

    def __init__(self, digits: Digits, samples: Sequence[SampleFile]) -> None:
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

    def invalid(self) -> Iterator[Question]:
        """Yield one invalid request of each kind, which must be answered with an error."""
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
                {HeaderName.DEADLINE_MS: just_gone},
            ),
        )
        for subject, value, code, headers in cases:
            yield self._make(
                INVALID, "digits", subject, value, MSGPACK, code=code.value, headers=headers
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
        about = {HeaderName.CONTENT_TYPE: content_type.encode()}
        if content_type == RAW:
            about[HeaderName.MODEL] = model.encode()
        about |= headers or {}
        record = NewRecord(None, value, tuple(about.items()))
        return Question(group, model, subject, record, labels, code)


MakeQuestion = Callable[[], Question]


def _digits_body(pixels: Any, shape: list[int], model: str = "digits") -> dict[str, Any]:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": shape, "data": pixels}
    return {"model_name": model, "inputs": [tensor]}


# --- answers ----------------------------------------------------------------------------------


class DemoAnswer(NamedTuple):
    """An answer.

    Attributes:
        status: `ok`, or the error's code.
        message: error message for people.
        labels: one per row.
        queue_us, batch_size: the response's parameters of these names.
    """

    status: str
    message: str = ""
    labels: tuple[str, ...] = ()
    queue_us: int = 0
    batch_size: int = 0


def read_answer(record: Record, file_labels: Sequence[str]) -> DemoAnswer:
    """Parse a response record.

    `file_labels` are the names of the magika model's outputs, in their order.

    Raises:
        KeyError, ValueError: the record violates the protocol.
    """
    headers = {name: value for name, value in record.headers if value is not None}
    body = _body(record.value or b"", headers.get(HeaderName.CONTENT_TYPE, b"").decode())
    status = headers[HeaderName.STATUS].decode()
    if "error" in body:
        return DemoAnswer(status, message=body["error"])
    timings = body["parameters"]
    return DemoAnswer(
        status,
        labels=_labels(body["outputs"], file_labels),
        queue_us=timings["queue_us"],
        batch_size=timings["batch_size"],
    )


def _body(value: bytes, content_type: str) -> dict[str, Any]:
    decode = msgspec.json.decode if content_type == JSON else msgspec.msgpack.decode
    return decode(value, type=dict[str, Any])


def _labels(outputs: Sequence[Mapping[str, Any]], file_labels: Sequence[str]) -> tuple[str, ...]:
    by_name = {output["name"]: output for output in outputs}
    if "label" in by_name:
        return tuple(str(label) for label in _array(by_name["label"]))
    scores = _array(by_name["target_label"])
    return tuple(file_labels[best] for best in scores.argmax(axis=1))


def _array(output: Mapping[str, Any]) -> Any:
    values = output["data"]
    if isinstance(values, bytes):
        dtypes = {"FP32": "<f4", "INT64": "<i8"}
        return np.frombuffer(values, dtypes[output["datatype"]]).reshape(output["shape"])
    return np.asarray(values).reshape(output["shape"])
