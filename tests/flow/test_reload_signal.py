"""SIGHUP on a running process: the repository is looked at again, and nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.conditions import eventually
from tests.support.processes import Process

DEMO_MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"


@pytest.mark.timeout(90)
async def test_sighup_loads_new_version_and_refuses_broken_one(tmp_path: Path) -> None:
    """A version that was added serves after SIGHUP; one that cannot be read is reported."""
    repository = tmp_path / "models"
    shutil.copytree(DEMO_MODELS, repository)
    process = Process(
        "ingest,batcher,executor,responder", {"HEADRACE_MODELS__REPOSITORY": os.fspath(repository)}
    )
    async with process:
        before = json.loads(await process.get("/v2/models/digits"))
        shutil.copytree(repository / "digits" / "1", repository / "digits" / "2")
        (repository / "broken" / "1").mkdir(parents=True)
        (repository / "broken" / "1" / "model.onnx").write_bytes(b"not a model")

        process.send(signal.SIGHUP)

        async def reloaded() -> bool:
            return bool(json.loads(await process.get("/v2/models/digits"))["versions"] == ["2"])

        await eventually(reloaded, what="version 2 to serve")
        broken = await process.get("/v2/models/broken/ready")
        ready = await process.get("/health/ready")
        code = await process.terminate()

    assert before["versions"] == ["1"]
    assert "model.onnx" in broken
    assert "ready" in ready
    assert code == 0


@pytest.mark.timeout(120)
async def test_model_that_exits_or_hangs_at_import_ends_no_process(tmp_path: Path) -> None:
    """After SIGHUP both are reported, what is new beside them serves, and SIGTERM works."""
    repository = tmp_path / "models"
    shutil.copytree(DEMO_MODELS, repository)
    process = Process(
        "ingest,batcher,executor,responder", {"HEADRACE_MODELS__REPOSITORY": os.fspath(repository)}
    )
    async with process:
        for name, source in (
            ("exits", "import sys; sys.exit(0)"),
            ("hangs", "while True: pass"),
            ("interrupts", "raise KeyboardInterrupt"),
        ):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "1" / "model.py").write_text(source)
            (repository / name / "model.toml").write_text('backend = "python"\nmax_load_s = 6')
        shutil.copytree(repository / "digits" / "1", repository / "digits" / "2")

        process.send(signal.SIGHUP)

        async def reloaded() -> bool:
            return bool(json.loads(await process.get("/v2/models/digits"))["versions"] == ["2"])

        await eventually(reloaded, what="version 2 to serve", deadline_s=60)
        output = process.output
        code = await process.terminate()

    assert "exits/1/model.py: SystemExit: 0" in output
    assert "interrupts/1/model.py: KeyboardInterrupt" in output
    assert "expected the import to end within max_load_s = 6 s, got no end" in output
    assert "models.reload_slow" in output
    assert code == 0
