"""Recorded requests for the demo's digits, and versions of that model with planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from headrace.log.port import Record
from headrace.protocol.codec import encode_request
from headrace.tools.replay.capture import CaptureWriter

DEMO = Path(__file__).parents[2] / "headrace" / "tools" / "demo"
MODEL = DEMO / "models" / "digits" / "1" / "model.onnx"
REQUESTS = 120
START_MS = 1_700_000_000_000

Change = Callable[[NDArray[Any]], NDArray[Any]]


def digit_requests(count: int = REQUESTS, version: str | None = None) -> list[Record]:
    """Images of the test set, one a request, on two partitions, with a deadline long past."""
    images = np.load(DEMO / "digits_test.npz")["pixels"].astype(np.float32)
    return [
        Record(
            "t.requests",
            number % 2,
            number // 2,
            START_MS + number,
            None,
            encode_request(
                "application/msgpack",
                "digits",
                {"pixels": images[number % len(images)].reshape(1, 64)},
                version=version,
            ),
            [("x-deadline-ms", b"%d" % (START_MS + 1000))],
        )
        for number in range(count)
    ]


def capture(path: Path, records: Sequence[Record]) -> Path:
    """Write a capture file."""
    with CaptureWriter(path, "t.requests") as writer:
        writer.add(records)
    return path


def plant(repository: Path, version: int = 1, **changes: Change) -> Path:
    """Write a version of the digits whose weights, by their names with `_` for `.`, are changed;
    returns the repository.
    """
    model = onnx.load(MODEL)
    for tensor in model.graph.initializer:
        change = changes.pop(tensor.name.replace(".", "_"), None)
        if change is not None:
            weights = change(numpy_helper.to_array(tensor).copy())
            tensor.CopyFrom(numpy_helper.from_array(weights, tensor.name))
    assert not changes, changes
    directory = repository / "digits" / str(version)
    directory.mkdir(parents=True)
    onnx.save(model, directory / "model.onnx")
    return repository


def one_weight_by_one_percent(weights: NDArray[Any]) -> NDArray[Any]:
    """The largest of them."""
    place = np.unravel_index(np.abs(weights).argmax(), weights.shape)
    weights[place] *= 1.01
    return weights


def swapped(weights: NDArray[Any]) -> NDArray[Any]:
    """The last dimension's 3 and 8 in each other's place."""
    weights[..., [3, 8]] = weights[..., [8, 3]]
    return weights


def slowed(repository: Path, seconds: float) -> Path:
    """The same digits, in Python, with a wait before each run; returns the repository."""
    directory = repository / "digits" / "1"
    directory.mkdir(parents=True)
    (repository / "digits" / "model.toml").write_text('backend = "python"\n', encoding="utf-8")
    (directory / "model.py").write_text(
        f"""
import time
import onnxruntime

class Model:
    inputs = [("pixels", "FP32", (-1, 64))]
    outputs = [("probabilities", "FP32", (-1, 10)), ("label", "INT64", (-1,))]

    def load(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession({str(MODEL)!r}, options)

    def run(self, inputs):
        time.sleep({seconds})
        names = ["probabilities", "label"]
        return dict(zip(names, self.session.run(names, inputs)))
""",
        encoding="utf-8",
    )
    return repository
