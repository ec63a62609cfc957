"""The demo's entry for the magika model sees files as the package magika does."""

from __future__ import annotations

import io
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


def _features(reference: Any, content: bytes) -> list[int]:
    """Return the input that the package itself gives its model."""
    result, features = reference._get_result_or_features_from_seekable(
        magika.types.Seekable(io.BytesIO(content))
    )
    assert result is None
    return [*features.beg, *features.end]


@pytest.mark.parametrize("content", EDGES, ids=range(len(EDGES)))
def test_magika_features_of_edge_cases_equal_package(
    content: bytes, transform: Transform, reference: Any
) -> None:
    """Stripping, cutting and padding are the package's, byte by byte."""
    assert _row(transform, content)[0].tolist() == _features(reference, content)


def test_magika_features_of_sample_files_equal_package(
    transform: Transform, reference: Any
) -> None:
    """Files of every kind come out as the package has them."""
    for sample in load_samples():
        row = _row(transform, sample.content)[0].tolist()
        assert row == _features(reference, sample.content), sample.label


def test_magika_labels_of_sample_files_equal_package(
    entry: FoundModel, model: MagikaModel, transform: Transform, reference: Any
) -> None:
    """The best score's label is the package's own prediction, before its thresholds."""
    session = onnxruntime.InferenceSession(entry.versions[0].directory / "model.onnx")
    for sample in load_samples():
        scores = session.run([OUTPUT], {"bytes": _row(transform, sample.content)})[0]
        expected = reference.identify_bytes(sample.content).prediction.dl.label
        assert model.labels[int(scores.argmax())] == expected, sample.label


@pytest.mark.parametrize("content", [b"", b"seven b", b"   \n  short  ", b" " * 5000 + b"x" * 90])
def test_file_decided_without_magika_model_is_refused(
    content: bytes, transform: Transform, reference: Any
) -> None:
    """Where magika asks no model, there is nothing to batch: the request is refused by name."""
    assert reference.identify_bytes(content).prediction.dl.label == "undefined"
    with pytest.raises(Rejected, match="at least 8 bytes") as refused:
        transform(content, "application/octet-stream")
    assert refused.value.code is Code.INVALID_REQUEST
