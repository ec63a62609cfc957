"""A thousand images, texts and sounds: their answers are those of a script without Headrace."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from headrace.client import Client
from headrace.config import make_settings
from headrace.topics import STAGES
from tests.support.models import add_version, identity
from tests.support.pipelines import log_for, serving

COUNT = 1000
PATIENT_S = 3600.0
"""No request is refused because a busy machine would answer it too late."""
WORDS = ["[UNK]", "good", "bad", "old", "new", "big"]
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")

Payload = tuple[bytes, str, NDArray[Any]]
"""Content, content type, and the answer of a script: the model answers with its input."""


def images(repository: Path) -> Iterator[Payload]:
    """Pictures of four formats and many sizes, scaled with Pillow."""
    transform = '[transform.image]\nresize = "area"\n'
    add_version(repository, "model", 1, identity("UINT8", ("batch", 4, 8, 3)), transform)
    random = np.random.default_rng(1)
    for number in range(COUNT):
        size = (int(random.integers(8, 40)), int(random.integers(16, 40)), 3)
        kind = FORMATS[number % len(FORMATS)]
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, size, np.uint8)).save(file, kind)
        scaled = Image.open(file).convert("RGB").resize((8, 4), Image.Resampling.BOX)
        yield file.getvalue(), f"image/{kind.lower()}", np.asarray(scaled)[np.newaxis]


def texts(repository: Path) -> Iterator[Payload]:
    """Texts of one to eight words, whose ids are those of the tokenizer."""
    transform = '[transform.tokens]\nids = "x"\nmax_tokens = 8\n'
    add_version(repository, "model", 1, identity("INT64", ("batch", "sequence")), transform)
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(repository / "model" / "1" / "tokenizer.json"))
    random = np.random.default_rng(2)
    for _ in range(COUNT):
        text = " ".join(random.choice([*WORDS[1:], "other"], int(random.integers(1, 9))))
        yield text.encode(), "text/plain", np.array([tokenizer.encode(text).ids])


def sounds(repository: Path) -> Iterator[Payload]:
    """Sounds of two formats and three rates, resampled with soxr."""
    transform = "[transform.sound]\nsample_rate = 8000\nframes = { length = 100, hop = 100 }\n"
    add_version(repository, "model", 1, identity("FP32", ("batch", 100)), transform)
    random = np.random.default_rng(3)
    for number in range(COUNT):
        rate = (8000, 16_000, 24_000)[number % 3]
        kind = ("WAV", "FLAC")[number % 2]
        file = io.BytesIO()
        soundfile.write(file, random.uniform(-0.5, 0.5, rate // 40), rate, format=kind)
        file.seek(0)
        samples, _ = soundfile.read(file, dtype="float32")
        if rate != 8000:
            samples = soxr.resample(samples, rate, 8000, "HQ")
        yield file.getvalue(), f"audio/{kind.lower()}", samples.reshape(-1, 100)


@pytest.mark.parametrize("payloads", [images, texts, sounds])
async def test_thousand_payloads_get_answers_of_script(
    tmp_path: Path, payloads: Callable[[Path], Iterator[Payload]]
) -> None:
    """All payloads are sent at once, so that they share batches."""
    sent = list(payloads(tmp_path))
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    log = await log_for(settings)
    async with serving(settings, log, [STAGES]), Client(log=log, settings=settings) as client:
        answers = await asyncio.gather(
            *[
                client.infer_raw("model", content, kind, timeout_s=PATIENT_S)
                for content, kind, _ in sent
            ]
        )

    for answer, (_, _, expected) in zip(answers, sent, strict=True):
        np.testing.assert_array_equal(answer.outputs["y"], expected)
