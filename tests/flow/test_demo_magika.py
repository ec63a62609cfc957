"""The demo's entry for the magika model sees files as the package magika does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from headrace.config import Settings
from headrace.errors import Code, Rejected
from headrace.models.inputs.transforms import Transform, make_transform
from headrace.models.repository import FoundModel, Repository, read_signature
from headrace.tools.demo.magika_model import OUTPUT, MagikaModel, find_magika
from headrace.tools.demo.questions import load_samples

magika = pytest.importorskip("magika")

# Blanks around, blanks within, shorter and longer than one and two blocks of 4,096 bytes.
EDGES = (
    b"eight by",
    b"  \n\t eight by \r\n  ",
    b"a" * 1023,
    b"a" * 1024 + b"\n",
    b"\n" * 100 + b"b" * 2047,
    b" " * 4000 + b"c" * 96 + b"d" * 4000 + b" " * 4000,
    bytes(range(256)) * 16,
    bytes(range(256)) * 40 + b"\0\n",
    b"e" * 4096 + b" " * 4096,
)


@pytest.fixture(scope="module")
def model() -> MagikaModel:
    found = find_magika()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def entry(model: MagikaModel, tmp_path_factory: pytest.TempPathFactory) -> FoundModel:
    repository = tmp_path_factory.mktemp("repository")
    model.add_to(repository)
    (found,) = Repository(repository, Settings()).scan()
    return found


@pytest.fixture(scope="module")
def transform(entry: FoundModel) -> Transform:
    assert entry.config is not None
    return make_transform(
        entry.directory, entry.config, read_signature(entry.versions[0], entry.config)
    )


@pytest.fixture(scope="module")
def reference() -> Any:
    return magika.Magika()


def _row(transform: Transform, content: bytes) -> npt.NDArray[np.int32]:
    """Return the input that the transform gives the model."""
    (tensor,) = transform(content, "application/octet-stream")
    assert (tensor.name, tensor.datatype, tensor.shape) == ("bytes", "INT32", [1, 2048])
    return np.frombuffer(tensor.data, "<i4").reshape(tensor.shape)


@pytest.fixture(scope="module")
def session(entry: FoundModel) -> Any:
    return onnxruntime.InferenceSession(entry.versions[0].directory / "model.onnx")


Predict = Callable[[bytes], tuple[str, float]]


@pytest.fixture(scope="module")
def predict(session: Any, model: MagikaModel, transform: Transform) -> Predict:
    """Predict with our transform's input: the best label and its score."""

    def predict_one(content: bytes) -> tuple[str, float]:
        (scores,) = session.run([OUTPUT], {"bytes": _row(transform, content)})[0]
        best = int(scores.argmax())
        return model.labels[best], float(scores[best])

    return predict_one


def _package_predicts(reference: Any, content: bytes) -> tuple[str, Any]:
    """Return what the package itself predicts, before its thresholds.

    The tolerance of the score is far below what one other byte of input changes.
    """
    prediction = reference.identify_bytes(content).prediction
    return prediction.dl.label, pytest.approx(prediction.score, abs=1e-6)


@pytest.mark.parametrize("content", EDGES, ids=range(len(EDGES)))
def test_magika_scores_of_edge_cases_equal_package(
    content: bytes, predict: Predict, reference: Any
) -> None:
    """Stripping, cutting and padding are the package's."""
    assert predict(content) == _package_predicts(reference, content)


@pytest.mark.parametrize("place", [0, 1023, 1024, 2047])
def test_magika_score_of_other_byte_differs(place: int, session: Any, transform: Transform) -> None:
    """One other byte of input, of the beginning or the end, shows in the best score."""
    row = _row(transform, EDGES[6]).copy()
    expected = session.run([OUTPUT], {"bytes": row})[0].max()
    row[0, place] ^= 1

    assert session.run([OUTPUT], {"bytes": row})[0].max() != pytest.approx(expected, abs=1e-6)


def test_magika_predictions_of_sample_files_equal_package(predict: Predict, reference: Any) -> None:
    """Files of every kind are given to the model as the package gives them."""
    for sample in load_samples():
        assert predict(sample.content) == _package_predicts(reference, sample.content), sample.label


@pytest.mark.parametrize("content", [b"", b"seven b", b"   \n  short  ", b" " * 5000 + b"x" * 90])
def test_file_decided_without_magika_model_is_refused(
    content: bytes, transform: Transform, reference: Any
) -> None:
    """A file for which magika runs no model has no tensor to batch; the request is refused."""
    assert reference.identify_bytes(content).prediction.dl.label == "undefined"
    with pytest.raises(Rejected, match="at least 8 bytes") as refused:
        transform(content, "application/octet-stream")
    assert refused.value.code is Code.INVALID_REQUEST
