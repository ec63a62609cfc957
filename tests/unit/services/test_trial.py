"""Trial loads in child processes: a version that ends its process is refused with the reason."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.models.registry import Models
from headrace.models.version import ModelVersion
from headrace.services.executor.trial import TrialLoads
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.models import settings_for
from tests.support.services import digits_models

MODEL = """
import os
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent


class Model:
    inputs = [("x", "FP32", (-1, 1))]
    outputs = [("y", "FP32", (-1, 1))]

    def load(self):
        (HERE / "loaded-by").write_text(str(os.getpid()))
        %s

    def unload(self):
        %s

    def run(self, inputs):
        return {"y": inputs["x"]}
"""
STOPPED = replace(TUNING.executor, trial_start_s=0.5)


def version_of(repository: Path, *, load: str = "", unload: str = "") -> ModelVersion:
    """A version in Python whose `load` and `unload` run some statements."""
    directory = repository / "model" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(MODEL % (load or "pass", unload or "pass"))
    config = 'backend = "python"\nprobe = false\nmax_load_s = 0.5\n'
    (repository / "model" / "model.toml").write_text(config)
    models = Models(settings_for(repository))
    models.open()
    return models.catalog.lookup("model", None)


@pytest.mark.parametrize(
    "load", ["", 'print("loading", flush=True)', 'os.write(1, b"loading")'], ids=str
)
async def test_version_that_loads_passes_trial_in_another_process(
    tmp_path: Path, load: str
) -> None:
    """What it prints is not taken for the outcome."""
    version = version_of(tmp_path, load=load)

    await TrialLoads(settings_for(tmp_path)).try_out(version)

    assert int((version.directory / "loaded-by").read_text()) != os.getpid()


async def test_onnx_version_passes_trial(tmp_path: Path) -> None:
    """It is probed and warmed up there, by its configuration."""
    version = digits_models(tmp_path, "max_batch_size = 4").catalog.lookup("digits", None)

    await TrialLoads(settings_for(tmp_path)).try_out(version)

    assert version.verdict is None  # nothing of it was loaded here


ENDS = {
    "exits": ("os._exit(3)", "ended with exit code 3"),
    "exits-with-success": ("os._exit(0)", "ended with exit code 0"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    "is-killed": ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "raises": ('raise ValueError("no weights")', "ValueError: no weights"),
    "leaves": ("raise SystemExit(4)", "SystemExit: 4"),
    "sleeps": ("time.sleep(3600)", r"within max_load_s = 0\.5 s, got no end"),
}


@pytest.mark.parametrize(("load", "reason"), ENDS.values(), ids=ENDS)
async def test_version_that_fails_in_trial_is_refused_with_reason(
    tmp_path: Path, load: str, reason: str
) -> None:
    """The error says how its process ended, or what it raised."""
    version = version_of(tmp_path, load=load)

    with pytest.raises(ConfigurationError, match=reason):
        await TrialLoads(settings_for(tmp_path)).try_out(version)


async def test_version_that_crashes_when_unloaded_is_refused(tmp_path: Path) -> None:
    """It would end the process that serves when a later version replaces it."""
    version = version_of(tmp_path, unload="os.kill(os.getpid(), signal.SIGABRT)")

    with pytest.raises(ConfigurationError, match="ended by SIGABRT"):
        await TrialLoads(settings_for(tmp_path)).try_out(version)


async def test_trial_that_cannot_be_interrupted_is_killed(tmp_path: Path) -> None:
    """A process that stops runs no code of ours that could end it."""
    version = version_of(tmp_path, load="os.kill(os.getpid(), signal.SIGSTOP)")

    with pytest.raises(ConfigurationError, match="time to start it, 1 s, got no end"):
        await TrialLoads(settings_for(tmp_path), STOPPED).try_out(version)


async def test_version_that_ended_its_trial_is_tried_again_only_when_changed(
    tmp_path: Path,
) -> None:
    """Each trial of it counts in a file; a reload makes a new object of the same version."""
    version = version_of(tmp_path, load='(HERE.parent / "tries").open("a").write("x"); os._exit(3)')
    tries = tmp_path / "model" / "tries"
    trials = TrialLoads(settings_for(tmp_path))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="ended with exit code 3"):
            await trials.try_out(version)
    assert tries.read_text() == "x"

    (version.directory / "model.py").write_text(MODEL % ("pass", "pass"))
    models = Models(settings_for(tmp_path))
    models.open()
    await trials.try_out(models.catalog.lookup("model", None))


async def test_cancelled_trial_leaves_no_child(tmp_path: Path) -> None:
    """The child is killed, and its thread ends."""
    version = version_of(tmp_path, load="os.kill(os.getpid(), signal.SIGSTOP)")
    loaded_by = version.directory / "loaded-by"
    trial = asyncio.create_task(TrialLoads(settings_for(tmp_path)).try_out(version), name="trial")
    await eventually(lambda: loaded_by.exists() and loaded_by.read_text() != "")

    trial.cancel()

    await eventually(lambda: not Path(f"/proc/{loaded_by.read_text()}").exists())
    with pytest.raises(asyncio.CancelledError):
        await trial
