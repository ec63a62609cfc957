"""Payloads answered with classes and boxes: by Kafka, over HTTP and on the command line."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.protocol.headers import HeaderName
from headrace.topics import STAGES, Stage
from tests.support.command_line import Call
from tests.support.gateways import gateway_of
from tests.support.models import add_version, identity, make_model, segmenter
from tests.support.pipelines import log_for, serving

CONFIG = """
[output_labels]
y = "labels.txt"
[transform.record]
max_rows = 1000
[transform.record.inputs]
x = [{ path = "cat" }, { path = "dog" }, { path = "owl" }]
[answer.classes]
top = 1
"""
CSV = b"cat,dog,owl\n1,2,0.5\n4,3,1\n"
EXPECTED = [
    {"classes": [{"label": "dog", "index": 1, "value": 2.0}]},
    {"classes": [{"label": "cat", "index": 0, "value": 4.0}]},
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model whose classes are the columns of its records."""
    models = tmp_path / "models"
    add_version(models, "animals", 1, identity("FP32", ("batch", 3)), CONFIG)
    (models / "animals" / "labels.txt").write_text("cat\ndog\nowl\n")
    return models


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_payload_gets_its_classes_and_tensors_get_tensors(
    repository: Path, groups: list[list[Stage]]
) -> None:
    """Requests that run together each have their own rows; errors stay errors. Many rows are
    written on a thread.
    """
    settings = make_settings({"models": {"repository": str(repository)}})
    many = b"cat,dog,owl\n" + b"1,2,3\n" * 900
    log = await log_for(settings)
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:
        few = await client.infer_raw("animals", CSV, "text/csv")
        long = await client.infer_raw("animals", many, "text/csv")
        tensors = await client.infer("animals", {"x": np.ones((1, 3), np.float32)})
        with pytest.raises(InferenceError, match="expected a number"):
            await client.infer_raw("animals", CSV + b"1,x,2\n", "text/csv")

    headers = dict(few.headers)
    assert (few.model_name, few.model_version) == ("animals", "1")
    assert headers[HeaderName.CONTENT_TYPE] == b"application/json"
    assert headers[HeaderName.RECORD_OF] == b"animals/1"
    assert json.loads(few.outputs["record"].item()) == EXPECTED
    rows = json.loads(long.outputs["record"].item())
    assert rows == [{"classes": [{"label": "owl", "index": 2, "value": 3.0}]}] * 900
    assert tensors.outputs["y"].tolist() == [[1, 1, 1]]


def detector() -> onnx.ModelProto:
    """Finds two boxes that overlap in each image of 8 x 8 pixels, wherever it looks."""
    boxes = np.array([[[2, 2, 4, 6], [2, 2, 4, 5]]], np.float32)
    scores = np.array([[[0.25, 0.75], [0, 0.5]]], np.float32)
    constants = {"b": boxes, "s": scores, "at": [0], "bs": [2, 4], "ss": [2, 2]}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "at"], ["rows"]),
    ]
    for name, source, shape in (("boxes", "b", "bs"), ("scores", "s", "ss")):
        nodes += [
            helper.make_node("Concat", ["rows", shape], [f"{name}_shape"], axis=0),
            helper.make_node("Expand", [source, f"{name}_shape"], [name]),
        ]
    return make_model(
        nodes,
        [("x", TensorProto.UINT8, ["batch", 8, 8, 3])],
        [
            ("boxes", TensorProto.FLOAT, ["batch", 2, 4]),
            ("scores", TensorProto.FLOAT, ["batch", 2, 2]),
        ],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_image_gets_its_boxes(tmp_path: Path, groups: list[list[Stage]]) -> None:
    """In its own pixels, also where it came compressed; images of other sizes share the run."""
    config = '[transform.image]\nfit = "letterbox"\n[answer.boxes]\n'
    add_version(tmp_path, "found", 1, detector(), config)
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    log = await log_for(settings)
    async with (
        serving(settings, log, groups),
        Client(log=log, settings=settings) as client,
        Client(log=log, settings=settings, compression="gzip") as compressing,
    ):
        answers = [
            await caller.infer_raw("found", png(width, height), "image/png")
            for caller, width, height in ((client, 80, 40), (compressing, 16, 16))
        ]

    found = [json.loads(answer.outputs["record"].item()) for answer in answers]
    assert found == [
        [{"width": 80, "height": 40, "boxes": [box_of([20, 0, 40, 40])]}],
        [{"width": 16, "height": 16, "boxes": [box_of([4, 4, 8, 12])]}],
    ]


def box_of(corners: list[float]) -> dict[str, object]:
    """The better one of both boxes."""
    return {"index": 1, "score": 0.75, "box": corners}


MASK_CONFIG = """
[transform.image]
fit = "letterbox"
max_images = 1
[answer.mask]
"""


@pytest.mark.parametrize("groups", [[list(STAGES)], [[stage] for stage in STAGES]])
async def test_image_gets_its_mask(tmp_path: Path, groups: list[list[Stage]]) -> None:
    """The mask is a PNG of the image's size; requests of several images are refused unrun."""
    add_version(tmp_path, "parts", 1, segmenter(), MASK_CONFIG)
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    log = await log_for(settings)
    image = b"--b\r\ncontent-type: image/png\r\n\r\n" + png(8, 8) + b"\r\n"
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("parts", png(16, 32), "image/png")
        with pytest.raises(InferenceError, match="at most max_images = 1"):
            await client.infer_raw("parts", image * 2 + b"--b--", "multipart/mixed")

    headers = dict(answer.headers)
    assert headers[HeaderName.CONTENT_TYPE] == b"image/png"
    assert headers[HeaderName.RECORD_OF] == b"parts/1"
    with Image.open(io.BytesIO(answer.outputs["record"].item()), formats=["PNG"]) as mask:
        pixels = np.asarray(mask)
    # The image has the four columns in the middle of the input.
    assert pixels.tolist() == [np.repeat([2, 3, 4, 5], 4).tolist()] * 32


def test_mask_is_written_to_a_file_on_the_command_line(call: Call, tmp_path: Path) -> None:
    """Its size is shown otherwise."""
    add_version(tmp_path / "models", "parts", 1, segmenter(), MASK_CONFIG)
    (tmp_path / "image.png").write_bytes(png(16, 32))

    shown = call("infer", "parts", "--file", "image.png").stdout
    call("infer", "parts", "--file", "image.png", "--output", "mask.png")

    content = (tmp_path / "mask.png").read_bytes()
    assert shown.startswith(f"image/png, {len(content)} bytes")
    with Image.open(io.BytesIO(content), formats=["PNG"]) as mask:
        assert mask.size == (16, 32)


def png(width: int, height: int) -> bytes:
    """A black image."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


async def test_payload_over_http_gets_its_classes(repository: Path) -> None:
    """In the output `record`."""
    async with gateway_of(repository) as served:
        answer = await served.post(
            "/v2/models/animals/infer", CSV, headers={"Content-Type": "text/csv"}
        )

    (output,) = answer.json["outputs"]
    assert output["name"] == "record"
    assert json.loads(output["data"][0]) == EXPECTED


def test_classes_are_shown_on_the_command_line(call: Call, repository: Path) -> None:
    """`headrace infer` prints the JSON that a caller gets."""
    path = repository.parent / "animals.csv"
    path.write_bytes(CSV)

    assert json.loads(call("infer", "animals", "--file", "animals.csv").stdout) == EXPECTED


async def test_mask_over_http_is_base64(tmp_path: Path) -> None:
    """In the output `record`."""
    add_version(tmp_path, "parts", 1, segmenter(), MASK_CONFIG)
    async with gateway_of(tmp_path) as served:
        answer = await served.post(
            "/v2/models/parts/infer", png(16, 32), headers={"Content-Type": "image/png"}
        )

    (output,) = answer.json["outputs"]
    with Image.open(io.BytesIO(base64.b64decode(output["data"][0])), formats=["PNG"]) as mask:
        assert mask.size == (16, 32)
