"""Sounds as requests: by Kafka, over HTTP and on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from headrace.cli.outcome import Exit
from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.topics import STAGES
from tests.support.command_line import Call
from tests.support.gateways import gateway_of
from tests.support.models import add_version, identity
from tests.support.pipelines import Grouping, log_for, serving

TRANSFORM = "[transform.sound]\nsample_rate = 8000\nframes = { length = 400, hop = 400 }\n"


def sound(kind: str = "WAV") -> bytes:
    """A tenth of a second at 16 kHz, in two channels."""
    file = io.BytesIO()
    samples = np.random.default_rng(6).uniform(-0.5, 0.5, (1600, 2))
    soundfile.write(file, samples, 16_000, format=kind)
    return file.getvalue()


def expected(kind: str = "WAV") -> list[float]:
    """Return the samples that the libraries alone make of the sound."""
    samples, _ = soundfile.read(io.BytesIO(sound(kind)), dtype="float32")
    made: list[float] = soxr.resample(samples.mean(axis=1), 16_000, 8000, "HQ").tolist()
    return made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model that answers with the samples it gets."""
    models = tmp_path / "models"
    add_version(models, "sounds", 1, identity("FP32", ("batch", 400)), TRANSFORM)
    return models


@pytest.mark.parametrize(
    "grouping", [[STAGES], [[stage] for stage in STAGES]], ids=["together", "apart"]
)
async def test_sound_in_a_record_gets_an_answer(repository: Path, grouping: Grouping) -> None:
    """A truncated one is refused with the byte where it ends."""
    settings = make_settings({"models": {"repository": str(repository)}})
    log = await log_for(settings)
    async with serving(settings, log, grouping), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("sounds", sound(), "audio/wav")
        with pytest.raises(InferenceError, match="a file that ends at byte 700"):
            await client.infer_raw("sounds", sound()[:700], "audio/wav")

    assert answer.outputs["y"].shape == (2, 400)
    assert answer.outputs["y"].ravel().tolist() == expected()


async def test_sound_over_http_gets_an_answer(repository: Path) -> None:
    """The content type selects the decoder; bytes of another format are refused."""
    async with gateway_of(repository) as served:
        url = "/v2/models/sounds/infer"
        answer = await served.post(url, sound("FLAC"), headers={"Content-Type": "audio/flac"})
        refused = await served.post(url, sound(), headers={"Content-Type": "audio/flac"})

    np.testing.assert_array_equal(
        np.array(answer.json["outputs"][0]["data"], np.float32),
        np.array(expected("FLAC"), np.float32),
    )
    assert refused.status == 400
    assert "expected FLAC, as content-type audio/flac says, got WAV" in refused.json["error"]


def test_sound_in_a_file_is_explained_and_checked(
    call: Call, repository: Path, tmp_path: Path
) -> None:
    """The commands take the same way as requests."""
    (tmp_path / "sound.flac").write_bytes(sound("FLAC"))
    samples = repository / "sounds" / "1" / "samples"
    samples.mkdir()
    (samples / "sound.ogg").write_bytes(sound("OGG"))

    explained = call("infer", "sounds", "--file", "sound.flac", "--explain", "--json")
    checked = call("models", "check")
    (samples / "cut.wav").write_bytes(sound()[:100])
    damaged = call("models", "check")

    shown = json.loads(explained.stdout)["inputs"][0]["data"]
    np.testing.assert_array_equal(
        np.array(shown, np.float32), np.array(expected("FLAC"), np.float32)
    )
    assert checked.exit_code == Exit.DONE, checked.stdout
    assert damaged.exit_code == Exit.FAILED
    assert "samples/cut.wav: INVALID_REQUEST: payload: WAV" in damaged.stdout
