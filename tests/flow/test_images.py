"""Images as requests: by Kafka, over HTTP and on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.outcome import Exit
from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.topics import STAGES
from tests.support.command_line import Call
from tests.support.gateways import gateway_of
from tests.support.models import add_version, identity
from tests.support.pipelines import Grouping, log_for, serving

TRANSFORM = '[transform.image]\nresize = "area"\n'


def photo(kind: str = "JPEG") -> bytes:
    """A picture of 64 x 32 pixels."""
    file = io.BytesIO()
    pixels = np.random.default_rng(6).integers(0, 256, (32, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def expected() -> list[int]:
    """Return the pixels that Pillow alone makes of the photo."""
    image = Image.open(io.BytesIO(photo())).convert("RGB")
    return np.asarray(image.resize((8, 4), Image.Resampling.BOX)).ravel().tolist()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model that answers with the pixels it gets."""
    models = tmp_path / "models"
    add_version(models, "photos", 1, identity("UINT8", ("batch", 4, 8, 3)), TRANSFORM)
    return models


@pytest.mark.parametrize("inline_bytes", [8192, 0], ids=["in topics", "by reference"])
@pytest.mark.parametrize(
    "grouping", [[STAGES], [[stage] for stage in STAGES]], ids=["together", "apart"]
)
async def test_image_in_a_record_gets_an_answer(
    repository: Path, grouping: Grouping, inline_bytes: int
) -> None:
    """A truncated one is refused with the byte where it ends."""
    settings = make_settings(
        {
            "models": {"repository": str(repository)},
            "limits": {"inline_payload_bytes": inline_bytes},
        }
    )
    log = await log_for(settings)
    async with serving(settings, log, grouping), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("photos", photo(), "image/jpeg")
        with pytest.raises(InferenceError, match="a file that ends at byte 700"):
            await client.infer_raw("photos", photo()[:700], "image/jpeg")

    assert answer.outputs["y"].ravel().tolist() == expected()


async def test_image_over_http_gets_an_answer(repository: Path) -> None:
    """With the content type that browsers send, or several in a form; another one is refused."""
    part = b"--f1\r\nContent-Disposition: form-data; name=a; filename=a.jpg\r\n\r\n" + photo()
    form = part + b"\r\n" + part + b"\r\n--f1--\r\n"
    async with gateway_of(repository) as served:
        url = "/v2/models/photos/infer"
        answer = await served.post(url, photo(), headers={"Content-Type": "image/jpeg"})
        content_type = {"Content-Type": "multipart/form-data; boundary=f1"}
        both = await served.post(url, form, headers=content_type)
        refused = await served.post(url, photo("PNG"), headers={"Content-Type": "image/jpeg"})

    assert answer.json["outputs"][0]["data"] == expected()
    assert both.json["outputs"][0]["data"] == expected() * 2
    assert refused.status == 400
    assert "expected JPEG, as content-type image/jpeg says, got PNG" in refused.json["error"]


def test_image_in_a_file_is_sent_explained_and_checked(
    call: Call, repository: Path, tmp_path: Path
) -> None:
    """The commands take the same way as requests."""
    (tmp_path / "photo.jpg").write_bytes(photo())
    samples = repository / "photos" / "1" / "samples"
    samples.mkdir()
    (samples / "photo.webp").write_bytes(photo("WEBP"))

    sent = call("infer", "photos", "--file", "photo.jpg", "--json")
    explained = call("infer", "photos", "--file", "photo.jpg", "--explain", "--json")
    checked = call("models", "check")
    (samples / "cut.png").write_bytes(photo("PNG")[:100])
    damaged = call("models", "check")

    assert json.loads(sent.stdout)["outputs"][0]["data"] == expected()
    assert json.loads(explained.stdout)["inputs"][0]["data"] == expected()
    assert checked.exit_code == Exit.DONE, checked.stdout
    assert damaged.exit_code == Exit.FAILED
    assert "samples/cut.png: INVALID_REQUEST: payload: PNG" in damaged.stdout
