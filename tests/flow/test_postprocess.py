"""A user's code behind the model: by Kafka and over HTTP, on a thread and in a child process."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.log.port import NewRecord, TopicPartition
from headrace.topics import STAGES, Stage, Topic
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S
from tests.support.dying import FUSED, outcomes, restart_until
from tests.support.gateways import gateway_of
from tests.support.models import add_numbers, add_version, identity
from tests.support.pipelines import PARTITIONS, log_for, serving
from tests.support.python_models import shut_gate

CALLS = "headrace_postprocess_duration_seconds_count"
GROUPS = [[list(STAGES)], [[stage] for stage in STAGES]]
DOUBLE = """
import ctypes
import os
import time

def postprocess(outputs, request):
    number = float(outputs["y"][0, 0])
    if number == 13:
        os._exit(3)
    if number == 14:
        ctypes.string_at(0)
    if number == 15:
        while True:
            time.sleep(0.01)
    if number == 16:
        raise SystemExit
    if number == 17:
        raise ValueError("seventeen")
    return {"y": outputs["y"] * 2}
"""


def settings_of(repository: Path) -> Settings:
    """Settings of a process with these models."""
    return make_settings({"models": {"repository": str(repository)}})


def record(number: int) -> bytes:
    """A payload."""
    return b'{"number": %d}' % number


async def ask(client: Client, number: int, accept: str = "", model: str = "numbers") -> list[float]:
    """The numbers of an answer with tensors."""
    payload = record(number)
    answer = await client.infer_raw(model, payload, "application/json", accept=accept)
    found: list[float] = answer.outputs["y"].ravel().tolist()
    return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("groups", GROUPS)
async def test_payloads_are_answered_with_what_code_makes_of_outputs(
    tmp_path: Path, groups: list[list[Stage]], isolation: str
) -> None:
    """In each encoding of tensors; requests with tensors get the outputs of the model."""
    add_numbers(tmp_path, DOUBLE, answer=f'isolation = "{isolation}"\n')
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(settings, log, groups) as pipelines,
        Client(log=log, settings=settings, compression="gzip") as client,
    ):
        answers = await asyncio.gather(*[ask(client, number) for number in range(12)])
        packed = await ask(client, 4, "application/msgpack")
        tensors = await client.infer("numbers", {"x": np.ones((1, 2), np.float32)})

    assert [
        count
        for pipeline in pipelines
        if (count := pipeline.metrics.registry.get_sample_value(CALLS, {"model": "numbers"}))
    ] == [13]
    assert answers == [[2 * number] * 2 for number in range(12)]
    assert packed == [8, 8]
    assert tensors.outputs["y"].tolist() == [[1, 1]]


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_code_that_raises_or_hangs_fails_its_own_request(
    tmp_path: Path, isolation: str
) -> None:
    """Requests of the same run are answered."""
    add_numbers(tmp_path, DOUBLE, answer=f'isolation = "{isolation}"\n')
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    numbers = [1, 15, 2, 16, 3, 17, 4]
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(settings, log, [list(STAGES)]),
        Client(log=log, settings=settings) as client,
    ):
        answers = await asyncio.gather(
            *[ask(client, number) for number in numbers], return_exceptions=True
        )

    failed = {
        number: str(each)
        for number, each in zip(numbers, answers, strict=True)
        if isinstance(each, InferenceError)
    }
    assert [each for each in answers if isinstance(each, list)] == [
        [2] * 2,
        [4] * 2,
        [6] * 2,
        [8] * 2,
    ]
    assert failed == {
        15: "MODEL_FAILED: postprocess: expected it to end within max_execution_s = 2 s",
        16: "MODEL_FAILED: postprocess: SystemExit",
        17: "MODEL_FAILED: postprocess: ValueError: seventeen",
    }


async def test_code_that_crashes_in_a_child_fails_its_own_request(tmp_path: Path) -> None:
    """The child is replaced, and the process goes on."""
    add_numbers(tmp_path, DOUBLE, answer='isolation = "process"\n')
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with (
        asyncio.timeout(DEADLINE_S),
        serving(settings, log, [list(STAGES)]),
        Client(log=log, settings=settings) as client,
    ):
        answers = await asyncio.gather(
            *[ask(client, number) for number in (1, 13, 2, 14, 3)], return_exceptions=True
        )

    failed = [str(each) for each in answers if isinstance(each, InferenceError)]
    assert [each for each in answers if isinstance(each, list)] == [[2] * 2, [4] * 2, [6] * 2]
    begin = "MODEL_FAILED: postprocess: each time that it ran for this payload"
    assert [each.startswith(begin) for each in failed] == [True, True]
    assert ["exit code 3" in failed[0], "SIGSEGV" in failed[1]] == [True, True]


NATIVE = """
from tests.support.python_models import GATE

def postprocess(outputs, request):
    if outputs["y"][0, 0] == 13:
        GATE.wait()
    return {"y": outputs["y"] * 2}
"""


async def test_code_that_hangs_in_native_code_on_a_thread_is_found_by_restarts(
    tmp_path: Path,
) -> None:
    """It cannot be interrupted, so it ends its process; all other requests are answered."""
    add_numbers(tmp_path, NATIVE, max_execution_s=0.5)
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": str(tmp_path)},
            "delivery": {"max_attempts": 1},
        }
    )
    log = await log_for(settings)
    requests = [(number, b"%d" % place) for place, number in enumerate((1, 2, 13, 3, 4))]
    async with log.producer() as producer:
        for number, name in requests:
            headers = [
                ("x-model", b"numbers"),
                ("content-type", b"application/json"),
                ("kafka_correlationId", name),
            ]
            target = TopicPartition(settings.topic(Topic.REQUESTS), 0)
            for sent in await producer.send(target, [NewRecord(None, record(number), headers)]):
                await sent.acknowledged

    async def all_answered() -> bool:
        return len(await outcomes(settings, log)) == len(requests)

    quick = replace(TUNING, transforms=replace(TUNING.transforms, interrupt_grace_s=0.2))
    with shut_gate():
        restarts = await restart_until(all_answered, settings, log, [FUSED], tuning=quick)

    found = await outcomes(settings, log)
    assert found == {0: {2}, 1: {4}, 2: {"MODEL_FAILED"}, 3: {6}, 4: {8}}
    assert 1 <= restarts <= 6


SORTED = """
import numpy as np

def postprocess(outputs, request):
    values = outputs["y"]
    return {"scores": np.concatenate([values, values + 1], axis=1)}
"""
CLASSES = """
outputs = [{ name = "scores", datatype = "FP32", shape = [-1, 4] }]
[answer.classes]
top = 1
[output_labels]
scores = "labels.txt"
"""


async def test_classes_are_those_of_what_code_returns(tmp_path: Path) -> None:
    """Its outputs have other names and shapes than those of the model, and labels."""
    add_numbers(tmp_path, SORTED, answer=CLASSES)
    (tmp_path / "numbers" / "labels.txt").write_text("a\nb\nc\nd\n")
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with serving(settings, log, [list(STAGES)]), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("numbers", b'[{"number": 3}]', "application/json")
        tensors = await client.infer_raw(
            "numbers", record(3), "application/json", accept="application/msgpack"
        )

    assert answer.payload is not None
    (row,) = json.loads(answer.payload.content)
    assert row == {"classes": [{"label": "c", "index": 2, "value": 4.0}]}
    assert tensors.outputs["scores"].tolist() == [[3, 3, 4, 4]]


DETECTING = """
import numpy as np

def postprocess(outputs, request):
    rows = len(outputs["y"])
    corners = np.array([[2, 2, 4, 6], [2, 2, 4, 5]], np.float32)
    scores = np.array([[0.25, 0.75], [0, 0.5]], np.float32)
    return {"boxes": np.stack([corners] * rows), "scores": np.stack([scores] * rows)}
"""
DETECTOR = """
[transform.image]
fit = "letterbox"
[answer.python]
outputs = [
  { name = "boxes", datatype = "FP32", shape = [-1, 2, 4] },
  { name = "scores", datatype = "FP32", shape = [-1, 2, 2] },
]
[answer.boxes]
"""


async def test_boxes_are_those_that_code_returns(tmp_path: Path) -> None:
    """In pixels of the image that was sent, without the one that overlaps."""
    model = identity("UINT8", ("batch", 8, 8, 3))
    directory = add_version(tmp_path, "found", 1, model, DETECTOR)
    (directory.parent / "postprocess.py").write_text(DETECTING)
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with serving(settings, log, [list(STAGES)]), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("found", picture(0), "image/png")

    assert answer.payload is not None
    (image,) = json.loads(answer.payload.content)
    assert (image["width"], image["height"]) == (12, 6)
    assert image["boxes"] == [{"index": 1, "score": 0.75, "box": [3.0, 0.0, 6.0, 6.0]}]


async def test_record_has_outputs_that_code_returns(tmp_path: Path) -> None:
    """With `pass_through`."""
    more = 'outputs = [{ name = "sum", datatype = "FP32", shape = [-1] }]\n'
    code = 'def postprocess(outputs, request):\n    return {"sum": outputs["y"].sum(axis=1)}\n'
    add_numbers(tmp_path, code, answer=more)
    path = tmp_path / "numbers" / "model.toml"
    path.write_text(
        path.read_text().replace(
            "[transform.record]\n", "[transform.record]\npass_through = true\n"
        )
    )
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with serving(settings, log, [list(STAGES)]), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("numbers", record(5), "application/json")

    assert json.loads(answer.outputs["record"].item()) == {"number": 5, "sum": 10.0}


DRAWING = """
import io

import numpy as np
from PIL import Image

def postprocess(outputs, request):
    image = Image.open(io.BytesIO(request.payload)).convert("L")
    light = int(outputs["y"].mean())
    drawn = Image.fromarray(np.full((image.height, image.width), light, np.uint8))
    file = io.BytesIO()
    drawn.save(file, {"image/png": "PNG", "image/bmp": "BMP"}[request.answer_type])
    return file.getvalue()
"""
IMAGES = """
[transform.image]
max_images = 1
[answer.python]
content_types = ["image/png", "image/bmp"]
"""


def picture(light: int) -> bytes:
    """An image of 12 x 6 pixels."""
    file = io.BytesIO()
    Image.fromarray(np.full((6, 12), light, np.uint8)).save(file, "PNG")
    return file.getvalue()


def add_drawing(repository: Path) -> None:
    """Add a model that answers an image with one of its size, whose light is the mean."""
    model = identity("UINT8", ("batch", 4, 8, 3))
    directory = add_version(repository, "drawn", 1, model, IMAGES)
    (directory.parent / "postprocess.py").write_text(DRAWING)


@pytest.mark.parametrize("groups", GROUPS)
async def test_code_answers_with_bytes_of_an_accepted_content_type(
    tmp_path: Path, groups: list[list[Stage]]
) -> None:
    """The first one by default; tensors are those of the model."""
    add_drawing(tmp_path)
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with serving(settings, log, groups), Client(log=log, settings=settings) as client:
        usual = await client.infer_raw("drawn", picture(9), "image/png")
        other = await client.infer_raw("drawn", picture(9), "image/png", accept="image/bmp")
        tensors = await client.infer_raw("drawn", picture(9), "image/png", accept="application/*")
        with pytest.raises(InferenceError, match="at least one of image/png, image/bmp, app"):
            await client.infer_raw("drawn", picture(9), "image/png", accept="image/jpeg")

    for answer, kind in ((usual, "PNG"), (other, "BMP")):
        assert answer.payload is not None
        assert answer.payload.content_type == f"image/{kind.lower()}"
        with Image.open(io.BytesIO(answer.payload.content), formats=[kind]) as image:
            assert (image.size, image.getextrema()) == ((12, 6), (9, 9))
    assert tensors.payload is None
    assert tensors.outputs["y"].shape == (1, 4, 8, 3)


async def test_answer_of_code_over_http_is_the_body(tmp_path: Path) -> None:
    """If the caller accepts it; otherwise it is in the output `record`."""
    add_drawing(tmp_path)
    async with gateway_of(tmp_path) as served:
        sent = {"Content-Type": "image/png"}
        url = "/v2/models/drawn/infer"
        drawn = await served.post(url, picture(7), headers={**sent, "Accept": "image/bmp"})
        usual = await served.post(url, picture(7), headers=sent)
        refused = await served.post(url, picture(7), headers={**sent, "Accept": "image/gif"})

    assert (drawn.status, drawn.headers["Content-Type"]) == (200, "image/bmp")
    with Image.open(io.BytesIO(drawn.body), formats=["BMP"]) as image:
        assert (image.size, image.getextrema()) == ((12, 6), (7, 7))
    assert usual.json["outputs"][0]["name"] == "record"
    assert refused.status == 406
