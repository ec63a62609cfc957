"""The requests of a trial, and how an answer tells which request it belongs to.

Requests are numbered. Two models do with a number what the reader can undo, so that outputs that
went to another request are seen: one is quick and runs on ONNX Runtime, one sleeps a little, so
that batches overtake each other and much is in flight when something happens. Some requests are
wrong, and must be told so.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tests.chaos.history import NO_NUMBER
from tests.support.models import add_version, digits

PARTITIONS = 4
KEYS = 40
REPLIES = "replies"
DECOMPRESSED_BYTES = 4 * 1024 * 1024
"""The bound of a compressed batch."""
SHARED_BYTES = 1024 * 1024
"""Shared memory for values: much less than the requests of a trial have."""
INLINE_BYTES = 200
"""More than a request of the slow model has, and less than the others: values of both kinds."""
FOREIGN = -2
QUICK, SLOW = "digits", "slow"
SLOW_MODEL = '''"""Gives back a number, after a sleep that depends on it."""

import time

import numpy as np


class Model:
    inputs = [("x", "FP64", (-1, 1))]
    outputs = [("y", "FP64", (-1, 1))]

    def run(self, inputs):
        x = inputs["x"]
        time.sleep((5 + np.max(x) % 25) / 1000)
        return {"y": x * 2.0}
'''


class Question(NamedTuple):
    """One request as it will be sent.

    Attributes:
        value: None if it is in a store.
        statuses: what its answer may say.
        replies: its answer goes to a topic that it names.
        headers: those that it has besides; names that are not UTF-8 only a raw batch can hold.
    """

    number: int
    partition: int
    key: str
    value: bytes | None
    statuses: tuple[str, ...]
    replies: bool
    headers: tuple[tuple[bytes, bytes], ...] = ()


def add_models(repository: Path) -> None:
    """Write both models."""
    add_version(repository, QUICK, 1, digits())
    directory = repository / SLOW / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(SLOW_MODEL)
    config = 'backend = "python"\nmax_batch_size = 8\nmax_queue_delay_ms = 20\n'
    (repository / SLOW / "model.toml").write_text(config)


def ask(number: int, rng: random.Random) -> Question:
    """A question, of one kind or another."""
    kind = rng.random()
    statuses = ("ok",)
    if kind < 0.3:
        value = _slow_request(number)
    elif kind < 0.95:
        pixels = np.zeros((1, 64), np.float32)
        pixels[0, 0] = number
        value = request_of(QUICK, "pixels", pixels)
    elif kind < 0.98:
        value = request_of(QUICK, "pixels", np.zeros((1, 63), np.float32))
        statuses = ("INVALID_TENSOR",)
    else:
        value = request_of("unheard-of", "pixels", np.zeros((1, 64), np.float32))
        statuses = ("UNKNOWN_MODEL",)
    key = f"key-{rng.randrange(KEYS)}"
    partition = rng.randrange(PARTITIONS)
    return Question(number, partition, key, value, statuses, rng.random() < 0.1)


def ask_slow(number: int, partition: int) -> Question:
    """A question to the slow model."""
    key = f"key-{number % KEYS}"
    return Question(number, partition, key, _slow_request(number), ("ok",), replies=False)


def ask_slow_and_large(number: int, partition: int) -> Question:
    """A question to the slow model with an unknown field: its value travels by reference."""
    question = ask_slow(number, partition)
    packed = msgpack.unpackb(question.value) | {"remark": "x" * INLINE_BYTES}
    return question._replace(value=msgpack.packb(packed))


def _slow_request(number: int) -> bytes:
    return request_of(SLOW, "x", np.array([[number]], np.float64))


def request_of(model: str, name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Return a request in MessagePack with one input."""
    datatype = {"float32": "FP32", "float64": "FP64"}[array.dtype.name]
    tensor = {
        "name": name,
        "datatype": datatype,
        "shape": list(array.shape),
        "data": array.tobytes(),
    }
    packed: bytes = msgpack.packb({"model_name": model, "inputs": [tensor]})
    return packed


def number_told(value: bytes | None, content_type: bytes) -> int:
    """The number of the question whose outputs an answer carries; `NO_NUMBER` for an error, and
    -2 for outputs that no number leads to, or that are not where the answer says.
    """
    if value is None:
        return FOREIGN
    is_json = content_type == b"application/json"
    answer = json.loads(value) if is_json else msgpack.unpackb(value)
    if "outputs" not in answer:
        return NO_NUMBER
    output = answer["outputs"][0]
    if output["name"] == "y":
        data = output["data"]
        doubled = np.array(data) if is_json else np.frombuffer(data, np.float64)
        return int(doubled[0]) // 2 if np.all(doubled == doubled[0]) else FOREIGN
    scores = np.frombuffer(output["data"], np.float32)
    number = int(scores[1])
    return number if np.array_equal(scores, np.arange(10, dtype=np.float32) * number) else FOREIGN
