"""Models that are unusual, and sound: each loads, and its requests are answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import Code
from headrace.log.port import NewRecord, TopicPartition
from headrace.models.profiling.batch_safety import Batching
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.logs import read, write_to
from tests.support.models import (
    add_version,
    digits,
    linear_classifier,
    make_model,
    tree_classifier,
)
from tests.support.pipelines import log_for, serving, settings_of

Inputs = dict[str, NDArray[Any]]

LABELLING = """
import numpy as np


class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("label", "BYTES", (-1,))]

    def run(self, inputs):
        names = np.array(["a", "b", "c", "d"], dtype=object)
        return {"label": names[inputs["X"].argmax(axis=1)]}
"""


NUMBERS_AS_TEXTS = """
import numpy as np


class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("label", "BYTES", (-1,))]

    def run(self, inputs):
        return {"label": np.array(list(range(len(inputs["X"]))), dtype=object)}
"""

WRONG_SHAPE = """
class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 2))]

    def run(self, inputs):
        return {"y": inputs["X"]}
"""


DEADLINE_PASSED = """
from headrace.services.executor.instance import DeadlinePassed


class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def run(self, inputs):
        raise DeadlinePassed
"""

REFUSAL_WITHOUT_CODE = """
from headrace.errors import Rejected


class Unfit(Rejected):
    def __init__(self):
        self.reason = "unfit"


class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def run(self, inputs):
        raise Unfit
"""


def halves() -> onnx.ModelProto:
    """`x` FP32 [n, k] and `y` FP32 [n, m], both of 10 columns, to the halves of their sum."""
    shape = numpy_helper.from_array(np.array([-1, 2, 5]), "shape")
    return make_model(
        [
            helper.make_node("Add", ["x", "y"], ["sum"]),
            helper.make_node("Reshape", ["sum", "shape"], ["halves"]),
        ],
        [("x", TensorProto.FLOAT, ["n", "k"]), ("y", TensorProto.FLOAT, ["n", "m"])],
        [("halves", TensorProto.FLOAT, ["n", 2, 5])],
        [shape],
    )


UNSPEAKABLE = """
class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(3)


class Model:
    inputs = [("X", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 2))]

    def run(self, inputs):
        raise Unspeakable
"""


class Served(dict[str, Any]):
    """Answers or refusals by the request's id, and the verdict before them."""

    verdict: Batching | None = None


async def serve(repository: Path, name: str, requests: Sequence[Inputs]) -> Served:
    """Have a model answer requests that wait when it begins."""
    settings = settings_of(repository)
    log = await log_for(settings)
    for number, inputs in enumerate(requests):
        value = encode_request("application/msgpack", name, inputs, id=str(number))
        await write_to(log, TopicPartition("headrace.requests", 0), NewRecord(None, value))
    topic = TopicPartition("headrace.responses", 0)
    served = Served()
    async with log.reader([topic]) as reader, serving(settings, log, [STAGES]) as [pipeline]:
        verdict = pipeline.models.catalog.lookup(name).verdict
        served.verdict = verdict and verdict.batching
        for record in await read(reader, len(requests)):
            answer = decode_response(record.headers, record.value)
            served[answer.id or ""] = answer
    return served


def add_python(repository: Path, name: str, code: str, config: str = "") -> None:
    """Add a model in Python by its `model.py`."""
    directory = repository / name / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(code, encoding="utf-8")
    config = f'backend = "python"\n{config}'
    (repository / name / "model.toml").write_text(config, encoding="utf-8")


@pytest.mark.parametrize("model", [linear_classifier(), tree_classifier()], ids=["linear", "tree"])
async def test_classifier_with_string_labels_is_served(
    tmp_path: Path, model: onnx.ModelProto
) -> None:
    """Its labels are a one-dimensional output of texts."""
    add_version(tmp_path, "model", 1, model)
    rows = [{"X": np.eye(4, dtype=np.float32)[place : place + 1]} for place in (0, 1)]

    served = await serve(tmp_path, "model", rows)

    labels = [served[str(number)].outputs["label"].tolist() for number in range(2)]
    assert labels == [[b"setosa"], [b"versicolor"]]


async def test_label_of_best_class_is_served(tmp_path: Path) -> None:
    """`argmax` with `labels` leaves one label for each row."""
    config = 'postprocess = "argmax"\nlabels = "labels.txt"'
    add_version(tmp_path, "model", 1, digits(), config)
    labels = "\n".join(f"class {number}" for number in range(10))
    (tmp_path / "model" / "labels.txt").write_text(labels, encoding="utf-8")

    served = await serve(tmp_path, "model", [{"pixels": np.ones((2, 64), np.float32)}])

    assert served["0"].outputs["scores_labels"].tolist() == [b"class 9"] * 2


async def test_python_model_with_one_label_for_each_row_is_served(tmp_path: Path) -> None:
    """A model may return `str` as well as `bytes`."""
    add_python(tmp_path, "model", LABELLING)

    served = await serve(tmp_path, "model", [{"X": np.eye(4, dtype=np.float32)}])

    assert served.verdict is Batching.BATCHABLE
    assert isinstance(served["0"], Answer)
    assert served["0"].outputs["label"].tolist() == [b"a", b"b", b"c", b"d"]


async def test_model_that_fails_with_made_up_rows_is_served(tmp_path: Path) -> None:
    """No size of the free dimensions that is made up is one that it accepts; requests decide."""
    add_version(tmp_path, "model", 1, halves())
    rows = {"x": np.ones((1, 10), np.float32), "y": np.ones((1, 10), np.float32)}

    served = await serve(tmp_path, "model", [rows])

    assert served.verdict is Batching.UNDECIDED
    assert served["0"].outputs["halves"].tolist() == [[[2.0] * 5] * 2]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NUMBERS_AS_TEXTS, "output label: expected bytes or str, got int at element 0"),
        (WRONG_SHAPE, "output y: expected shape [-1, 2], got [1, 4]"),
        (UNSPEAKABLE, "Unspeakable"),
        (DEADLINE_PASSED, "DeadlinePassed"),
        (REFUSAL_WITHOUT_CODE, "Unfit: AttributeError"),
    ],
    ids=["element", "shape", "error", "error of ours", "unfit refusal"],
)
async def test_fault_of_python_model_is_model_failure(
    tmp_path: Path, code: str, message: str
) -> None:
    """A wrong return value or an exception is blamed on the model, not on the request."""
    add_python(tmp_path, "model", code)

    served = await serve(tmp_path, "model", [{"X": np.ones((1, 4), np.float32)}])

    assert served["0"].error_details.code == Code.MODEL_FAILED
    assert message in served["0"].error
