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

from headrace.errors import ConfigurationError, Rejected
from headrace.models.answers import BoxAnswers, ClassAnswers, MaskAnswers, suppress
from headrace.models.config import BoxesAnswer, ClassesAnswer, MaskAnswer, ModelConfig
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
    """A value that JSON cannot hold is null."""
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


def test_box_with_nan_among_its_scores_is_of_its_best_class() -> None:
    """NaN comes last, as in classes and masks; a box with nothing else is left out."""
    outputs = [TensorSpec("boxes", "FP32", (-1, -1, 4)), TensorSpec("scores", "FP32", (-1, -1, 2))]
    signature = make_signature([TensorSpec("x", "UINT8", (-1, 8, 8, 3))], outputs)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    answers = BoxAnswers(BoxesAnswer(), signature, {}, Images(ImageTransform(), signature))
    boxes = np.array([[[0, 0, 2, 2], [4, 4, 6, 6]]], np.float32)
    scores = np.array([[[np.nan, 0.5], [np.nan, np.nan]]], np.float32)

    written = answers.write({"boxes": boxes, "scores": scores}, file.getvalue(), "image/png")

    (row,) = json.loads(written)
    assert row["boxes"] == [{"index": 1, "score": 0.5, "box": [0, 0, 2, 2]}]


def test_outputs_that_are_no_boxes_are_refused() -> None:
    """Names, datatypes and shapes of the outputs are checked when the version is loaded."""
    images = Images(
        ImageTransform(),
        make_signature([TensorSpec("x", "UINT8", (-1, 8, 8, 3))], [TensorSpec("y", "FP32", (-1,))]),
    )
    with pytest.raises(ConfigurationError, match=r"boxes: expected boxes of floats, .* got y FP32"):
        BoxAnswers(BoxesAnswer(), signature_of(("y", "FP32")), {}, images)


def mask_signature(datatype: str, *shape: int) -> Signature:
    """The signature of a model that gives each pixel a class."""
    inputs = [TensorSpec("x", "UINT8", (-1, 100, 100, 3))]
    return make_signature(inputs, [TensorSpec("y", datatype, (-1, *shape))])


def mask_of(output: np.ndarray[Any, Any], datatype: str, image: bytes, fit: str) -> Any:
    """The mask that answers an image, as pixels."""
    signature = mask_signature(datatype, *([-1] * (output.ndim - 1)))
    images = Images(ImageTransform(fit=fit, resize="nearest"), signature)
    answers = MaskAnswers(MaskAnswer(), signature, images)
    file = io.BytesIO(answers.write({"y": output}, image, "image/png"))
    with Image.open(file, formats=["PNG"]) as mask:
        assert mask.mode == "L"
        return np.asarray(mask)


def as_png(pixels: np.ndarray[Any, Any], orientation: int = 1) -> bytes:
    """A PNG that viewers turn as its EXIF orientation says."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("fit", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("size", [(400, 800), (90, 33), (101, 100)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_mask_has_the_classes_of_the_image(
    fit: str, size: tuple[int, int], orientation: int
) -> None:
    """A model whose classes are the colours that it sees gives the image back, to a pixel of the
    input at the edges of a colour; where a crop saw nothing, the class is 255.
    """
    height, width = size
    upright = np.zeros((height, width, 3), np.uint8)
    upright[height // 3 : 2 * height // 3, width // 4 : width // 2] = 7
    turned = np.rot90(upright) if orientation == 6 else upright
    payload = as_png(np.ascontiguousarray(turned), orientation)
    images = Images(ImageTransform(fit=fit, resize="nearest"), mask_signature("UINT8", 100, 100))
    (tensor,) = images(payload, "image/png")
    seen = np.frombuffer(tensor.data, np.uint8).reshape(1, 100, 100, 3)[..., 0]

    found = mask_of(seen, "UINT8", payload, fit)

    assert found.shape == (height, width)
    inside = found != 255
    differing = (found != upright[..., 0]) & inside
    placement = images.place(width, height)
    edge = 2 * (height + width) * max(1, width / placement.width, height / placement.height)
    assert differing.sum() <= edge
    assert {7, 0} <= set(np.unique(found).tolist()) <= {0, 7, 255}
    seen_share = min(1, 100 / placement.width) * min(1, 100 / placement.height)
    assert inside.mean() == pytest.approx(seen_share, abs=0.03)


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("FP32", np.float32), ("BF16", ml_dtypes.bfloat16), ("INT8", np.int8), ("FP16", np.float16)],
)
def test_class_of_a_pixel_has_the_largest_score(datatype: str, dtype: Any) -> None:
    """In a mask smaller than the input; the first of equal ones counts, and NaN last."""
    scores = np.array([[[1, 5], [0, 2]], [[1, 6], [3, 2]], [[0, 7], [1, 2]]], np.float32)
    expected = [[0, 2], [1, 0]]
    if datatype != "INT8":
        scores[0, 1, 0] = np.nan

    found = mask_of(
        scores[np.newaxis].astype(dtype), datatype, as_png(np.zeros((4, 4, 3), np.uint8)), "stretch"
    )

    assert found.tolist() == np.repeat(np.repeat(expected, 2, axis=0), 2, axis=1).tolist()


def test_classes_with_one_channel_are_the_mask() -> None:
    """One channel, of any datatype including BOOL, holds the classes themselves."""
    payload = as_png(np.zeros((2, 2, 3), np.uint8))
    classes = np.array([[[[1, 0], [0, 1]]]])

    assert mask_of(classes, "INT64", payload, "stretch").tolist() == [[1, 0], [0, 1]]
    assert mask_of(classes[0] == 1, "BOOL", payload, "stretch").tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.array([[[0, 256]]]), "expected classes from 0 to 255, got 0 to 256"),
        (np.array([[[-1, 3]]]), "expected classes from 0 to 255, got -1 to 3"),
        (np.zeros((1, 0, 4), np.int64), r"of one row, got int64 \[1, 0, 4\]"),
        (np.zeros((2, 4, 4), np.int64), r"of one row, got int64 \[2, 4, 4\]"),
    ],
)
def test_output_that_is_no_mask_fails_its_request(
    output: np.ndarray[Any, Any], message: str
) -> None:
    """An output is checked at run time where its signature does not show whether it is a mask."""
    with pytest.raises(Rejected, match=message):
        mask_of(output, "INT64", as_png(np.zeros((4, 4, 3), np.uint8)), "stretch")


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [
        ("FP32", (8, 8)),
        ("FP32", (1, 8, 8)),
        ("FP32", (257, 8, 8)),
        ("BYTES", (8, 8)),
        ("INT64", (8,)),
    ],
)
def test_output_that_cannot_be_a_mask_is_refused(datatype: str, shape: tuple[int, ...]) -> None:
    """Name, datatype and shape of the output are checked when the version is loaded."""
    signature = mask_signature(datatype, *shape)
    images = Images(ImageTransform(), mask_signature("UINT8", 8, 8))

    with pytest.raises(ConfigurationError, match=f"expected integers .*, got y {datatype}"):
        MaskAnswers(MaskAnswer(), signature, images)


def test_masks_of_several_images_are_refused() -> None:
    """In the configuration, by the key to change."""
    with pytest.raises(ValidationError, match=r"expected transform\.image with max_images = 1"):
        ModelConfig.model_validate({"answer": {"mask": {}}, "transform": {"image": {}}})
