"""The requests that `headrace bench` sends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnx
import pytest

from headrace.config import ModelSettings, Settings
from headrace.tools.bench.payloads import from_capture, made_up
from headrace.tools.replay.capture import CaptureWriter
from headrace.tools.simulate.scenarios import latest_models
from tests.support.models import digits
from tests.support.recordings import recorded


@pytest.mark.parametrize("version", [None, "7"])
def test_synthetic_request_names_version_only_when_given(
    tmp_path: Path, version: str | None
) -> None:
    """The version on this disk says nothing of what the processes serve that answer."""
    directory = tmp_path / "digits" / "3"
    directory.mkdir(parents=True)
    onnx.save(digits(), directory / "model.onnx")
    settings = Settings(models=ModelSettings(repository=tmp_path))

    payload = made_up(latest_models(settings, None)["digits"], version)

    assert msgspec.msgpack.decode(payload.value).get("model_version") == version


async def test_captured_requests_are_bounded_in_bytes(tmp_path: Path) -> None:
    """They stay in memory as long as the load runs."""
    path = tmp_path / "requests.capture"
    with CaptureWriter(path, "test") as writer:
        writer.add([recorded(number, value=b"x" * 1000) for number in range(9)])

    assert len(await from_capture(path)) == 9
    assert len(await from_capture(path, most_bytes=2500)) == 3
