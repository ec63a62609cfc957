"""The steps before and behind a model: `preprocess`, `postprocess` and `labels`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import ConfigurationError
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.backends.port import ReusedInputs
from headrace.models.config import make_model_config
from headrace.models.processing import plan_processing, read_output_labels
from headrace.models.repository import FoundVersion, read_signature
from headrace.models.signature import read_onnx_signature
from tests.support import models

LABELS = "\n".join(f"class {number}" for number in range(10))
SCORES = np.array([[0, 3, 1, 9, 2, 5, 4, 8, 7, 6], [9, 0, 1, 2, 3, 4, 5, 6, 7, 8]], np.float32)


def scores(opset: int = 17) -> onnx.ModelProto:
    """`x` FP32 [batch, 10] to `scores`, unchanged."""
    model = models.make_model(
        [helper.make_node("Identity", ["x"], ["scores"])],
        [("x", TensorProto.FLOAT, ["batch", 10])],
        [("scores", TensorProto.FLOAT, ["batch", 10])],
    )
    model.opset_import[0].version = opset
    return model


def two_outputs() -> onnx.ModelProto:
    """`x` to `scores`, and to `double`, twice of it."""
    shape: models.Shape = ("batch", 10)
    return models.make_model(
        [
            helper.make_node("Identity", ["x"], ["scores"]),
            helper.make_node("Add", ["x", "x"], ["double"]),
        ],
        [("x", TensorProto.FLOAT, shape)],
        [("scores", TensorProto.FLOAT, shape), ("double", TensorProto.FLOAT, shape)],
    )


def pictures() -> onnx.ModelProto:
    """`image` FP32 [batch, 3, 2, 2] to `out`, unchanged."""
    return models.identity("FP32", ("batch", 3, 2, 2))


def load(tmp_path: Path, model: onnx.ModelProto, **config: Any) -> OnnxBackend:
    """A backend as a version makes it; keywords are lines of `model.toml`."""
    directory = models.add_version(tmp_path, "model", 1, model)
    (tmp_path / "model" / "labels.txt").write_text(LABELS, encoding="utf-8")
    made = make_model_config(config, models.settings_for(tmp_path))
    signature = read_signature(FoundVersion("1", directory, ""), made)
    backend = OnnxBackend(directory, made, signature)
    backend.load()
    return backend


def runs(backend: OnnxBackend, **arrays: NDArray[Any]) -> list[dict[str, NDArray[Any]]]:
    """The outputs of a run alone, and of two where the inputs are bound."""
    inputs = ReusedInputs()
    inputs.update(arrays)
    return [dict(backend.run(each)) for each in (arrays, inputs, inputs)]


def softmax(values: NDArray[Any]) -> NDArray[Any]:
    """Return the softmax by its definition."""
    powers: NDArray[Any] = np.exp(values - values.max(axis=-1, keepdims=True))
    shares: NDArray[Any] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def test_softmax_replaces_output(tmp_path: Path) -> None:
    """The signature says so too."""
    backend = load(tmp_path, scores(), postprocess="softmax")
    [spec] = backend.signature.outputs
    assert (spec.name, spec.datatype, spec.shape) == ("scores_softmax", "FP32", (-1, 10))
    for outputs in runs(backend, x=SCORES):
        np.testing.assert_allclose(outputs["scores_softmax"], softmax(SCORES), rtol=1e-6)


def test_argmax_gives_index_of_highest_value(tmp_path: Path) -> None:
    """The output is one index for each row."""
    backend = load(tmp_path, scores(), postprocess="argmax")
    assert [spec.shape for spec in backend.signature.outputs] == [(-1,)]
    for outputs in runs(backend, x=SCORES):
        assert outputs["scores_argmax"].tolist() == [3, 0]


def test_best_classes_come_with_their_labels(tmp_path: Path) -> None:
    """The best first; softmax may come before."""
    backend = load(tmp_path, scores(), postprocess=["softmax", "top_k:2"], labels="labels.txt")
    told = [(spec.name, spec.datatype, spec.shape) for spec in backend.signature.outputs]
    assert told == [
        ("scores_top_k", "FP32", (-1, 2)),
        ("scores_indices", "INT64", (-1, 2)),
        ("scores_labels", "BYTES", (-1, 2)),
    ]
    for outputs in runs(backend, x=SCORES):
        assert outputs["scores_indices"].tolist() == [[3, 7], [0, 9]]
        assert outputs["scores_labels"].tolist() == [
            [b"class 3", b"class 7"],
            [b"class 0", b"class 9"],
        ]
        np.testing.assert_allclose(
            outputs["scores_top_k"], np.sort(softmax(SCORES))[:, :-3:-1], rtol=1e-6
        )


def test_postprocessing_keeps_other_outputs(tmp_path: Path) -> None:
    """The other outputs keep their order."""
    backend = load(tmp_path, two_outputs(), postprocess="argmax", postprocess_output="scores")
    assert [spec.name for spec in backend.signature.outputs] == ["scores_argmax", "double"]
    for outputs in runs(backend, x=SCORES):
        assert outputs["scores_argmax"].tolist() == [3, 0]
        np.testing.assert_array_equal(outputs["double"], 2 * SCORES)


def test_external_tensor_files_are_found(tmp_path: Path) -> None:
    """A model with something appended is not read from its file by ONNX Runtime."""
    directory = tmp_path / "model" / "1"
    directory.mkdir(parents=True)
    weights = numpy_helper.from_array(np.eye(10, dtype=np.float32)[::-1].copy(), "weights")
    model = models.make_model(
        [helper.make_node("MatMul", ["x", "weights"], ["scores"])],
        [("x", TensorProto.FLOAT, ["batch", 10])],
        [("scores", TensorProto.FLOAT, ["batch", 10])],
        [weights],
    )
    onnx.save(
        model,
        directory / "model.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    config = make_model_config({"postprocess": "argmax"}, models.settings_for(tmp_path))
    backend = OnnxBackend(
        directory, config, read_signature(FoundVersion("1", directory, ""), config)
    )
    backend.load()
    assert (directory / "w.bin").is_file()
    assert backend.run({"x": SCORES})["scores_argmax"].tolist() == [6, 9]


def test_widened_input_accepts_bytes(tmp_path: Path) -> None:
    """The model gets its floats, its channels where it has them, and values in its range."""
    backend = load(
        tmp_path,
        pictures(),
        preprocess={
            "x": {
                "datatype": "UINT8",
                "layout": "NHWC",
                "model_layout": "NCHW",
                "scale": [1, 2, 3],
                "offset": [0, 0.5, -1],
            }
        },
    )
    [spec] = backend.signature.inputs
    assert (spec.datatype, spec.shape) == ("UINT8", (-1, 2, 2, 3))
    photo = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    wanted = photo.astype(np.float32) * [1, 2, 3] + [0, 0.5, -1]
    for outputs in runs(backend, x=photo):
        np.testing.assert_array_equal(outputs["y"], np.moveaxis(wanted, 3, 1))


def test_bound_widened_run_reads_current_values(tmp_path: Path) -> None:
    """The place of the inputs is bound, not their values."""
    backend = load(tmp_path, pictures(), preprocess={"x": {"datatype": "UINT8"}})
    inputs = ReusedInputs()
    inputs["x"] = np.zeros((1, 3, 2, 2), np.uint8)
    for _ in range(2):
        backend.run(inputs)
    inputs["x"][:] = 7
    assert set(backend.run(inputs)["y"].ravel().tolist()) == {7.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"postprocess": "top_k:11"}, "top_k: expected at most 10, got top_k:11"),
        (
            {"postprocess": "argmax", "postprocess_output": "other"},
            "postprocess_output: expected one of scores, got other",
        ),
        (
            {"postprocess": "softmax", "labels": "labels.txt"},
            "labels: expected argmax or top_k last, got softmax",
        ),
        ({"postprocess": "argmax", "labels": "none.txt"}, "labels: expected a file .*none.txt"),
        ({"postprocess": "argmax", "labels": "few.txt"}, "labels: expected 10 lines, got 2"),
        ({"preprocess": {"y": {"datatype": "UINT8"}}}, "preprocess: expected some of x, got y"),
        (
            {"preprocess": {"x": {"datatype": "UINT8", "layout": "NHWC"}}},
            r"preprocess.x.layout: expected 4 dimensions, got \[-1, 10\]",
        ),
        (
            {"preprocess": {"x": {"datatype": "UINT8", "scale": [1, 2]}}},
            "preprocess.x.scale: expected 1 value or one for each of 1 channels, got 2",
        ),
    ],
)
def test_configuration_that_does_not_fit_model_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """The error has the key, the expected value and the given one."""
    directory = models.add_version(tmp_path, "model", 1, scores())
    (directory / "labels.txt").write_text(LABELS, encoding="utf-8")
    (directory / "few.txt").write_text("one\ntwo\n", encoding="utf-8")
    made = make_model_config(config, models.settings_for(tmp_path))
    with pytest.raises(ConfigurationError, match=message):
        plan_processing(read_onnx_signature(directory / "model.onnx"), made, directory)


def test_widening_to_integers_is_refused(tmp_path: Path) -> None:
    """A table's indices are not scaled."""
    directory = models.add_version(tmp_path, "model", 1, models.embedding())
    made = make_model_config(
        {"preprocess": {"index": {"datatype": "UINT8"}}}, models.settings_for(tmp_path)
    )
    with pytest.raises(ConfigurationError, match="expected an input of FP32, FP16, BF16, got INT"):
        plan_processing(read_onnx_signature(directory / "model.onnx"), made, directory)


def test_old_operators_are_refused_at_load(tmp_path: Path) -> None:
    """Before opset 11 they had another form."""
    with pytest.raises(ConfigurationError, match="expected opset 11 or newer, got 9"):
        load(tmp_path, scores(opset=9), postprocess="argmax")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"postprocess": ["argmax", "softmax"]}, "expected only softmax before the last"),
        ({"labels": "labels.txt"}, "labels, postprocess_output: expected postprocess beside them"),
        ({"backend": "python", "postprocess": "softmax"}, "expected only with backend = onnx"),
        ({"postprocess": "top_k:0"}, "postprocess"),
        ({"preprocess": {"x": {"datatype": "UINT8", "model_layout": "NCHW"}}}, "expected layout"),
    ],
)
def test_contradicting_processing_keys_are_refused(values: dict[str, Any], fault: str) -> None:
    """The error comes before any model is read."""
    with pytest.raises(ConfigurationError, match=fault):
        make_model_config(values, models.settings_for(Path()))


@pytest.mark.parametrize(
    ("name", "file", "fault"),
    [
        ("other", "labels.txt", "output_labels.other: expected one of scores"),
        ("scores", "few.txt", "output_labels.scores: expected 10 lines, got 2"),
        ("scores", "../../secret.txt", "expected a file in the model's directory"),
        ("scores", "none.txt", "expected a file .*none.txt"),
    ],
)
def test_output_labels_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, file: str, fault: str
) -> None:
    """The error names the output."""
    directory = models.add_version(tmp_path, "model", 1, scores())
    (directory / "few.txt").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "secret.txt").write_text(LABELS, encoding="utf-8")
    (directory / "labels.txt").write_text(LABELS, encoding="utf-8")
    signature = read_onnx_signature(directory / "model.onnx")
    with pytest.raises(ConfigurationError, match=fault):
        read_output_labels(directory, {name: file}, signature)


def test_labels_of_another_directory_are_refused(tmp_path: Path) -> None:
    """A path that leads out of the model's directory is not read, whatever it holds."""
    (tmp_path / "secret.txt").write_text(LABELS, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="expected a file in the model's directory"):
        load(tmp_path, scores(), postprocess="argmax", labels="../secret.txt")


def test_labels_behind_link_to_another_directory_are_refused(tmp_path: Path) -> None:
    """A symbolic link leads out as ".." does."""
    (tmp_path / "secret.txt").write_text(LABELS, encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "linked.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigurationError, match="expected a file in the model's directory"):
        load(tmp_path, scores(), postprocess="argmax", labels="linked.txt")
