"""SIGHUP on a running process: the repository is looked at again, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.conditions import eventually
from tests.support.processes import Process, run_program
from tests.support.tree import ROOT

DEMO_MODELS = ROOT / "headrace" / "tools" / "demo" / "models"


def commands_of_page() -> list[str]:
    """The commands of the page about changing a model that need no control topic."""
    page = (ROOT / "docs" / "changing-a-model.md").read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(90)
async def test_sighup_loads_new_version_and_refuses_broken_one(tmp_path: Path) -> None:
    """A version that the page's commands add serves after SIGHUP, and its predecessor again after
    they have moved it away; one that cannot be read is reported.
    """
    add, withdraw = commands_of_page()
    repository = tmp_path / "models"
    shutil.copytree(DEMO_MODELS, repository)
    process = Process(
        "ingest,batcher,executor,responder", {"HEADRACE_MODELS__REPOSITORY": os.fspath(repository)}
    )
    async with process:
        before = json.loads(await process.get("/v2/models/digits"))
        (repository / "broken" / "1").mkdir(parents=True)
        (repository / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
        for commands, version in ((add, "2"), (withdraw, "1")):
            await run_program(["sh", "-ec", commands], {"PID": str(process.pid)}, tmp_path)

            async def reloaded(version: str = version) -> bool:
                found = json.loads(await process.get("/v2/models/digits"))["versions"]
                return bool(found == [version])

            await eventually(reloaded, what=f"version {version} serves")
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
            ("hangs", "import time; time.sleep(3600)"),
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
