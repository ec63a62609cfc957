"""Compressed requests and answers through all stages, together and apart."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from headrace.client import Client
from headrace.protocol.compression import CODINGS
from headrace.protocol.headers import JSON, MSGPACK
from headrace.topics import STAGES
from tests.support.pipelines import log_for, serving, settings_of

TOGETHER, APART = [STAGES], [[stage] for stage in STAGES]
ROWS = 200


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
async def test_client_compresses_requests_and_gets_compressed_answers(
    tmp_path: Path,
    coding: str,
    content_type: str,
    guarantee: Literal["at_least_once", "exactly_once"],
) -> None:
    """The outputs are those of a plain request, and the answer names its coding."""
    settings = settings_of(tmp_path)
    delivery = settings.delivery.model_copy(update={"guarantee": guarantee})
    settings = settings.model_copy(update={"delivery": delivery})
    log = await log_for(settings)
    pixels = np.ones((ROWS, 64), np.float32)
    async with serving(settings, log, TOGETHER):
        client = Client(log=log, settings=settings, compression=coding, content_type=content_type)
        async with client:
            response = await client.infer("digits", {"pixels": pixels})

    assert dict(response.headers)["content-encoding"] == coding.encode()
    np.testing.assert_allclose(response.outputs["scores"], np.tile(64 * np.arange(10.0), (ROWS, 1)))


async def test_compressed_values_pass_stages_apart(tmp_path: Path) -> None:
    """Their inputs are not in the source record as such, so they travel with the request."""
    settings = settings_of(tmp_path, inline_payload_bytes=100)
    log = await log_for(settings)
    rng = np.random.default_rng(7)
    async with (
        serving(settings, log, APART),
        Client(log=log, settings=settings, compression="gzip") as client,
    ):
        for _ in range(5):
            pixels = rng.standard_normal((ROWS, 64), np.float32)
            response = await client.infer("digits", {"pixels": pixels})
            expected = pixels.sum(axis=1, keepdims=True) * np.arange(10)
            np.testing.assert_allclose(response.outputs["scores"], expected, rtol=1e-3, atol=1e-3)


async def test_small_answers_are_not_compressed(tmp_path: Path) -> None:
    """A small request is not compressed either: a coding costs more than it saves."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    async with (
        serving(settings, log, TOGETHER),
        Client(log=log, settings=settings, compression="zstd") as client,
    ):
        response = await client.infer("digits", {"pixels": np.ones((1, 64), np.float32)})

    assert "content-encoding" not in dict(response.headers)
