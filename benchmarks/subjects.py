"""The models under measurement: their repositories, requests and sizes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.models import IMAGE, write_resnet50
from headrace.protocol.codec import encode_request
from headrace.tools.demo.magika_model import find_magika

DISTINCT_REQUESTS = 64
MOST_ROWS = 64
"""Maximum batch size if the best one is to be learned."""


class SubjectMissing(Exception):
    """A model is not available on this machine."""


class BenchmarkModel(NamedTuple):
    """A model, and requests of one row each.

    Attributes:
        kind: what binds it.
        repository: with this model alone.
        onnx: the file.
        batch: rows at most in a run, for every contestant.
        threads: of a run; 0: as many as there are cores.
        values: of the request records.
        fastest_per_s: more than any contestant answers; sizes what is written in advance.
        slow: a run takes milliseconds.
    """

    name: str
    kind: str
    repository: Path
    onnx: Path
    batch: int
    values: list[bytes]
    fastest_per_s: int
    slow: bool
    threads: int = 0

    def with_batch(self, batch: int) -> BenchmarkModel:
        """Return the model with another batch size, which is also written to its repository."""
        path = self.repository / self.name / "model.toml"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"max_batch_size = \d+", f"max_batch_size = {batch}", text)
        path.write_text(text, encoding="utf-8")
        return self._replace(batch=batch)

    def with_all_cores(self) -> BenchmarkModel:
        """Return the model with as many threads as there are cores, including the broker's."""
        return self._replace(threads=0)

    def learning(self) -> BenchmarkModel:
        """Return the model in a separate repository that allows more rows than the best size."""
        repository = self.repository.with_name(f"{self.repository.name}-learning")
        shutil.copytree(self.repository, repository, dirs_exist_ok=True)
        return self._replace(repository=repository).with_batch(MOST_ROWS)

    def array(self) -> NDArray[Any]:
        """Return one batch for the bare model."""
        return _ROWS[self.name](np.random.default_rng(0), self.batch)


def _digits_rows(random: np.random.Generator, rows: int) -> NDArray[Any]:
    return random.integers(0, 17, (rows, 64)).astype(np.float32)


def _magika_rows(random: np.random.Generator, rows: int) -> NDArray[Any]:
    return random.integers(0, 257, (rows, 2048)).astype(np.int32)


def _resnet_rows(random: np.random.Generator, rows: int) -> NDArray[Any]:
    return random.integers(0, 256, (rows, 3, IMAGE, IMAGE), dtype=np.uint8)


_ROWS: dict[str, Callable[[np.random.Generator, int], NDArray[Any]]] = {
    "digits": _digits_rows,
    "magika": _magika_rows,
    "resnet50": _resnet_rows,
}


def _values(name: str, input_name: str) -> list[bytes]:
    rows = _ROWS[name](np.random.default_rng(1), DISTINCT_REQUESTS)
    return [
        encode_request("application/msgpack", name, {input_name: row[np.newaxis]}) for row in rows
    ]


def digits(scratch: Path) -> BenchmarkModel:
    """Return a model of 64 inputs and two small layers, whose runs cost very little."""
    repository = scratch / "digits-repository"
    with as_file(files("headrace.tools.demo") / "models" / "digits") as model:
        shutil.copytree(model, repository / "digits", dirs_exist_ok=True)
    onnx = repository / "digits" / "1" / "model.onnx"
    values = _values("digits", "pixels")
    return BenchmarkModel(
        "digits", "bound by overhead", repository, onnx, 32, values, 150_000, False
    )


def magika(scratch: Path) -> BenchmarkModel:
    """Return magika, which finds file types by content, at a few milliseconds per batch."""
    model = find_magika()
    if model is None:
        raise SubjectMissing("expected the package magika (extra demo) to be installed")
    repository = scratch / "magika-repository"
    model.add_to(repository)
    onnx = repository / "magika" / "1" / "model.onnx"
    values = _values("magika", "bytes")
    return BenchmarkModel("magika", "mixed", repository, onnx, 8, values, 1_500, True, _spare_one())


def resnet50(scratch: Path) -> BenchmarkModel:
    """Return ResNet-50 on images of 224 by 224 bytes, where computing is nearly all of the cost."""
    repository = scratch / "resnet50-repository"
    onnx = repository / "resnet50" / "1" / "model.onnx"
    if not onnx.exists():
        write_resnet50(onnx)
    (repository / "resnet50" / "model.toml").write_text("max_batch_size = 8\n", encoding="utf-8")
    values = _values("resnet50", "image")
    kind = "bound by computing"
    return BenchmarkModel("resnet50", kind, repository, onnx, 8, values, 100, True, _spare_one())


def _spare_one() -> int:
    """Return the number of threads that leaves one core to the broker and to the process that reads
    and writes; the bare model has no broker, so this is no cost of serving.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)


WAITING_ROWS = 8
_WAITING = """
import time

class Model:
    inputs = [("x", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def warm_up(self):
        pass

    def run(self, inputs):
        time.sleep({run_s} + {row_s} * len(inputs["x"]))
        return {{"y": inputs["x"]}}
"""


def waiting(name: str, scratch: Path, *, run_s: float, row_s: float) -> BenchmarkModel:
    """Return a model whose runs wait for the given times, as for a device, without using the CPU;
    at most `WAITING_ROWS` rows per batch.
    """
    repository = scratch / f"{name}-repository"
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(_WAITING.format(run_s=run_s, row_s=row_s), encoding="utf-8")
    config = f'backend = "python"\nprobe = false\nmax_batch_size = {WAITING_ROWS}\n'
    (version.parent / "model.toml").write_text(config, encoding="utf-8")
    value = encode_request("application/msgpack", name, {"x": np.zeros((1, 4), np.float32)})
    fastest_per_s = round(WAITING_ROWS / (run_s + WAITING_ROWS * row_s))
    kind = "bound by waiting"
    return BenchmarkModel(
        name, kind, repository, version, WAITING_ROWS, [value], fastest_per_s, slow=True
    )


SUBJECTS: dict[str, Callable[[Path], BenchmarkModel]] = {
    "digits": digits,
    "magika": magika,
    "resnet50": resnet50,
}
