"""Answers with the top classes: their order, their numbers, and settings that do not fit."""

from __future__ import annotations

import io
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from PIL import Image
from pydantic import ValidationError

from headrace.errors import ConfigurationError
from headrace.models.answers import BoxAnswers, ClassAnswers, suppress
from headrace.models.config import BoxesAnswer, ClassesAnswer, ModelConfig
from headrace.models.inputs.images import Images
from headrace.models.media_config import ImageTransform
from headrace.models.signature import Signature, TensorSpec, make_signature

LABELS = {"y": (b"a", "schön".encode())}


def signature_of(*outputs: tuple[str, str]) -> Signature:
    """A signature with these outputs (name, datatype) of three columns."""
    inputs = [TensorSpec("x", "FP32", (-1, 3))]
    return make_signature(inputs, [TensorSpec(*each, (-1, 3)) for each in outputs])


def written(array: np.ndarray[Any, Any], top: int = 2, *, batched: bool = True) -> Any:
    """The answer for an output, parsed."""
    answers = ClassAnswers(ClassesAnswer(top=top), signature_of(("y", "FP32")), LABELS)
    return json.loads(answers.write({"y": array}, batched=batched))


def test_rows_have_their_largest_values_with_labels() -> None:
    """A class beyond the labels has none; numbers are as short as their datatype allows."""
    rows = written(np.array([[0.1, 0.9, 0.2], [0.7, 0.7, 0.8]], np.float32))

    assert rows == [
        {
            "classes": [
                {"label": "schön", "index": 1, "value": 0.9},
                {"index": 2, "value": 0.2},
            ]
        },
        {"classes": [{"index": 2, "value": 0.8}, {"label": "a", "index": 0, "value": 0.7}]},
    ]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (np.uint64, [2**64 - 1, 0], [2**64 - 1, 0]),
        (np.int8, [-128, 127], [127, -128]),
        (np.float16, [0.1, 0.2], [0.2, 0.1]),
        (ml_dtypes.bfloat16, [-2, 0.5], [0.5, -2]),
        (np.float64, [np.nan, 1 / 3], [1 / 3, None]),
        (np.float32, [np.inf, -np.inf], [None, None]),
    ],
)
def test_values_are_those_of_each_datatype(
    dtype: Any, values: list[float], expected: list[float | None]
) -> None:
    """What JSON cannot hold is null."""
    (row,) = written(np.array([values], dtype))

    assert [each["value"] for each in row["classes"]] == expected


def test_top_classes_of_random_rows_are_those_of_sorting() -> None:
    """One thousand rows, with more classes wanted than some have."""
    generator = np.random.default_rng(19)
    for _ in range(1000):
        array = generator.integers(0, 50, (1, generator.integers(1, 40))).astype(np.float32)
        top = int(generator.integers(1, 45))

        (row,) = written(array, top)

        values = array[0].tolist()
        order = sorted(range(len(values)), key=lambda index: (-values[index], index))[:top]
        found = [(each["index"], each["value"]) for each in row["classes"]]
        assert found == [(index, values[index]) for index in order]


def test_output_without_batch_is_one_row() -> None:
    """Its dimensions count as one list."""
    rows = written(np.array([[1, 2], [4, 3]], np.float32), batched=False)

    assert [each["index"] for each in rows[0]["classes"]] == [2, 3]


def test_empty_row_has_no_classes() -> None:
    """A request without rows has an empty array."""
    assert written(np.zeros((1, 0), np.float32)) == [{"classes": []}]
    assert written(np.zeros((0, 3), np.float32)) == []


@pytest.mark.parametrize(
    ("outputs", "output", "message"),
    [
        ([("y", "FP32"), ("z", "FP32")], "", "expected one of y, z, got none"),
        ([("y", "FP32")], "w", "expected one of y, got w"),
        ([("y", "BOOL")], "", "expected an output of numbers, got y of BOOL"),
    ],
)
def test_output_that_cannot_have_classes_is_refused(
    outputs: list[tuple[str, str]], output: str, message: str
) -> None:
    """When the version is loaded."""
    with pytest.raises(ConfigurationError, match=message):
        ClassAnswers(ClassesAnswer(output=output), signature_of(*outputs), {})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({}, "expected transform beside it"),
        (
            {"transform": {"record": {"inputs": {"x": [{"path": "a"}]}, "pass_through": True}}},
            "expected no transform.record.pass_through",
        ),
    ],
)
def test_answer_that_no_payload_could_get_is_refused(others: dict[str, Any], message: str) -> None:
    """In the configuration."""
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate({"answer": {"classes": {}}, **others})


def test_kept_boxes_are_those_of_onnx_runtime() -> None:
    """Random boxes, many of which overlap, with all limits of overlap."""
    boxes, scores, limit, overlap = (
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("boxes", TensorProto.FLOAT, [1, None, 4]),
            ("scores", TensorProto.FLOAT, [1, 1, None]),
            ("limit", TensorProto.INT64, [1]),
            ("overlap", TensorProto.FLOAT, [1]),
        )
    )
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit", "overlap"], ["kept"])
    kept = helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3])
    graph = helper.make_graph([node], "nms", [boxes, scores, limit, overlap], [kept])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(9)
    for _ in range(300):
        count = int(generator.integers(1, 60))
        corners = generator.uniform(0, 50, (count, 2)).astype(np.float32)
        sizes = generator.uniform(1, 40, (count, 2)).astype(np.float32)
        rows = np.concatenate([corners, corners + sizes], axis=1)
        top, most = int(generator.integers(1, 30)), np.float32(generator.uniform())
        inputs = {
            "boxes": rows[np.newaxis],
            "scores": np.linspace(1, 0.1, count, dtype=np.float32)[np.newaxis, np.newaxis],
            "limit": np.array([top]),
            "overlap": np.array([most]),
        }

        found = suppress(rows.astype(np.float64), np.zeros(count, np.intp), float(most), limit=top)

        assert found.tolist() == session.run(None, inputs)[0][:, 2].tolist()


def test_boxes_of_other_classes_stay() -> None:
    """Though they are the same; so do boxes without an area, which overlap nothing."""
    boxes = np.array([[0, 0, 9, 9], [0, 0, 9, 9], [0, 0, 9, 9], [3, 3, 3, 3], [3, 3, 3, 3]], float)

    found = suppress(boxes, np.array([0, 1, 0, 2, 2]), 0.5, limit=9)

    assert found.tolist() == [0, 1, 3, 4]


def test_most_boxes_take_as_many_steps_as_stay() -> None:
    """The limit holds for boxes that do not overlap."""
    corners = np.arange(5000, dtype=np.float64)[:, np.newaxis] * 10
    boxes = np.concatenate([corners, corners, corners + 5, corners + 5], axis=1)

    found = suppress(boxes, np.zeros(5000, np.intp), 0.5, limit=7)

    assert found.tolist() == list(range(7))


@pytest.mark.parametrize(
    ("fit", "form"), [("letterbox", "xyxy"), ("stretch", "cxcywh"), ("crop", "xyxy")]
)
def test_boxes_are_in_pixels_of_the_image(fit: str, form: str) -> None:
    """A marked rectangle of a large image is found where it was, not where the input has it."""
    image = np.zeros((400, 800, 3), np.uint8)
    image[120:280, 320:480] = 255
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    outputs = [TensorSpec("boxes", "FP32", (-1, -1, 4)), TensorSpec("scores", "FP32", (-1, -1, 2))]
    signature = make_signature([TensorSpec("x", "UINT8", (-1, 100, 100, 3))], outputs)
    config = ImageTransform(fit=fit, resize="nearest")
    images = Images(config, signature)
    (tensor,) = images(file.getvalue(), "image/png")
    seen = np.frombuffer(tensor.data, np.uint8).reshape(100, 100, 3)
    down, across = np.nonzero(seen[:, :, 0])
    left, top, right, bottom = across.min(), down.min(), across.max() + 1, down.max() + 1
    box = [left, top, right, bottom]
    if form == "cxcywh":
        box = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    boxes = np.array([[box, box, [1, 1, 2, 2], [np.nan] * 4]], np.float32)
    scores = np.array([[[0, 0.9], [0.1, 0.8], [0.2, 0.1], [1, 1]]], np.float32)

    written = BoxAnswers(
        BoxesAnswer(format=form),
        signature,
        {"scores": (b"cat", b"dog")},
        images,
    ).write({"boxes": boxes, "scores": scores}, file.getvalue(), "image/png")

    (row,) = json.loads(written)
    (found,) = row["boxes"]
    assert (row["width"], row["height"]) == (800, 400)
    assert (found["label"], found["index"], found["score"]) == ("dog", 1, 0.9)
    assert found["box"] == pytest.approx([320, 120, 480, 280], abs=8)


def test_outputs_that_are_no_boxes_are_refused() -> None:
    """By their names, datatypes and shapes, when the version is loaded."""
    images = Images(
        ImageTransform(),
        make_signature([TensorSpec("x", "UINT8", (-1, 8, 8, 3))], [TensorSpec("y", "FP32", (-1,))]),
    )
    with pytest.raises(ConfigurationError, match=r"boxes: expected boxes of floats, .* got y FP32"):
        BoxAnswers(BoxesAnswer(), signature_of(("y", "FP32")), {}, images)
