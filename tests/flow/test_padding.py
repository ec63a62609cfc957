"""A text model with a mask: requests of any length share batches, and nobody sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from headrace.client import Client
from headrace.config import make_settings
from headrace.topics import STAGES
from tests.support.models import add_version
from tests.support.pipelines import Grouping, log_for, name_of, serving
from tests.support.transformer import VOCABULARY, transformer

TOML = """
max_batch_size = 16
sequence_buckets = [16, 32]
pad.input_ids = 0
pad.attention_mask = 0
mask = "attention_mask"
"""
UNHURRIED_S = 600.0
"""A first run on a busy machine says that a backlog takes long; none is refused for that."""
GROUPINGS: list[Grouping] = [[STAGES], [(stage,) for stage in STAGES]]


def text(choice: np.random.Generator, length: int) -> dict[str, NDArray[Any]]:
    """Tokens of a text."""
    return {
        "input_ids": choice.integers(0, VOCABULARY, (1, length)),
        "attention_mask": np.ones((1, length), np.int64),
        "shift": choice.standard_normal((1, 1)).astype(np.float32),
        "rounds": np.zeros((1, 1), np.int64),
    }


@pytest.mark.parametrize("grouping", GROUPINGS, ids=name_of)
async def test_padded_texts_of_all_lengths_share_batches(
    tmp_path: Path, grouping: Grouping
) -> None:
    """150 texts of 1 to 40 tokens: every answer has the text's own length, and is that of a run
    of its own without any padding.
    """
    directory = add_version(tmp_path, "encoder", 1, transformer(), TOML)
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    choice = np.random.default_rng(3)
    texts = [text(choice, 1 + number % 40) for number in range(150)]
    log = await log_for(settings)
    async with serving(settings, log, grouping), Client(log=log, settings=settings) as client:
        answers = await asyncio.gather(
            *(client.infer("encoder", each, timeout_s=UNHURRIED_S) for each in texts)
        )

    session = onnxruntime.InferenceSession(directory / "model.onnx")
    for inputs, answer in zip(texts, answers, strict=True):
        for name, alone in zip(("hidden", "summary"), session.run(None, inputs), strict=True):
            np.testing.assert_allclose(answer.outputs[name], alone, rtol=1e-3, atol=1e-4)
    sizes = [int(answer.parameters["batch_size"]) for answer in answers]
    assert np.mean(sizes) > 4, "there are 40 lengths, and texts of one length are four at most"
