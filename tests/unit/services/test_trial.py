"""Trials in child processes: a version that ends its process is refused with the reason."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.errors import ConfigurationError
from headrace.models.config import make_model_config
from headrace.models.load_faults import is_fault_of_model
from headrace.models.packing.files import make_manifest, write_manifest
from headrace.models.registry import Models
from headrace.models.repository import Repository
from headrace.models.scan import VersionScanner
from headrace.models.signature import Signature
from headrace.models.version import ModelVersion
from headrace.protocol.control import WantedModel
from headrace.services.executor.trial import TrialLoads
from tests.support.conditions import eventually
from tests.support.models import add_version, digits, settings_for
from tests.support.python_models import with_hooks
from tests.support.services import digits_models
from tests.support.tuning import EAGER

STOPPED = replace(EAGER.executor, trial_start_s=0.5)


def version_of(repository: Path, *, load: str = "", unload: str = "") -> ModelVersion:
    """A version in Python whose `load` and `unload` run some statements."""
    directory = repository / "model" / "1"
    directory.mkdir(parents=True)
    load = f'(HERE / "loaded-by").write_text(str(os.getpid())); {load or "pass"}'
    (directory / "model.py").write_text(with_hooks(load=load, unload=unload or "pass"))
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
    """Output that the version prints is not taken for the outcome."""
    version = version_of(tmp_path, load=load)

    await TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version)

    assert int((version.directory / "loaded-by").read_text()) != os.getpid()


async def test_onnx_version_passes_trial(tmp_path: Path) -> None:
    """It is probed and warmed up there, by its configuration."""
    version = digits_models(tmp_path, "max_batch_size = 4").catalog.lookup("digits", None)

    await TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version)

    assert version.verdict is None  # nothing of it was loaded here


ENDS = {
    "exits": ("os._exit(3)", "ended with exit code 3"),
    "exits-with-success": ("os._exit(0)", "ended with exit code 0"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
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
        await TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version)


@pytest.mark.parametrize(
    ("load", "run", "is_of_model"),
    [
        ("", "def walk", True),
        ("raise MemoryError", "def run", False),
        (ENDS["crashes"][0], "def run", False),
    ],
    ids=["no run", "no memory", "crash"],
)
async def test_trial_says_whether_version_is_at_fault(
    tmp_path: Path, load: str, run: str, is_of_model: bool
) -> None:
    """The errors of the child process have other classes here, and no causes."""
    version = version_of(tmp_path, load=load)
    file = version.directory / "model.py"
    file.write_text(file.read_text().replace("def run", run))

    with pytest.raises(ConfigurationError) as refused:
        await TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version)

    assert is_fault_of_model(refused.value) == is_of_model


async def test_version_that_crashes_when_unloaded_is_refused(tmp_path: Path) -> None:
    """It would end the process that serves when a later version replaces it."""
    version = version_of(tmp_path, unload="os.kill(os.getpid(), signal.SIGABRT)")

    with pytest.raises(ConfigurationError, match="ended by SIGABRT"):
        await TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version)


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
    trials = TrialLoads(settings_for(tmp_path), EAGER.executor)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="ended with exit code 3"):
            await trials.try_out(version)
    assert tries.read_text() == "x"

    (version.directory / "model.py").write_text(with_hooks())
    models = Models(settings_for(tmp_path))
    models.open()
    await trials.try_out(models.catalog.lookup("model", None))


TENSORS = """
inputs = [{name = "x", datatype = "FP32", shape = [-1, 1]}]
outputs = [{name = "y", datatype = "FP32", shape = [-1, 1]}]
"""
"""With these in `model.toml`, a version is opened without a trial."""
KILLED = """
def end():
    Path(%r).open("a").write("x")
    os.kill(os.getpid(), signal.SIGKILL)


%s
"""


@pytest.mark.parametrize(
    ("at_load", "at_import", "config"),
    [("end()", "", TENSORS), ("pass", "end()", "")],
    ids=["at-load", "at-import"],
)
async def test_version_whose_trial_was_killed_is_tried_once_more_when_its_files_are_read_again(
    tmp_path: Path, at_load: str, at_import: str, config: str
) -> None:
    """Where memory is short, the kernel kills it, and there may be enough later."""
    tries = tmp_path / "tries"
    directory = tmp_path / "model" / "1"
    directory.mkdir(parents=True)
    imported = KILLED % (str(tries), at_import)
    (directory / "model.py").write_text(with_hooks(imported=imported, load=at_load))
    (tmp_path / "model" / "model.toml").write_text(f'backend = "python"\nprobe = false\n{config}')
    settings = settings_for(tmp_path)
    trials = TrialLoads(settings, EAGER.executor)
    models = Models(settings, scanner=scanner_of(tmp_path, trials))
    for reads, expected in ((0, "x"), (0, "x"), (1, "xx"), (1, "xx")):
        models.want({"model": WantedModel(versions=["1"], default="1", reads=reads)})
        [fault] = (await models.reload()).faults or await fault_of_load(models, trials)
        assert "ended by SIGKILL" in fault
        assert tries.read_text() == expected


async def fault_of_load(models: Models, trials: TrialLoads) -> list[str]:
    """Try to load the only version, as an executor does, and return why that failed."""
    version = models.catalog.models["model"].selected["1"]
    with pytest.raises(ConfigurationError) as refused:
        await trials.try_out(version)
    models.lifecycle.mark_failed(version, str(refused.value))
    return [str(refused.value)]


async def test_cancelled_trial_leaves_no_child(tmp_path: Path) -> None:
    """The child is killed, and its thread ends."""
    version = version_of(tmp_path, load="os.kill(os.getpid(), signal.SIGSTOP)")
    loaded_by = version.directory / "loaded-by"
    trial = asyncio.create_task(
        TrialLoads(settings_for(tmp_path), EAGER.executor).try_out(version), name="trial"
    )
    await eventually(lambda: loaded_by.exists() and loaded_by.read_text() != "")

    trial.cancel()

    await eventually(lambda: not Path(f"/proc/{loaded_by.read_text()}").exists())
    with pytest.raises(asyncio.CancelledError):
        await trial


def scanner_of(repository: Path, trials: TrialLoads | None = None) -> VersionScanner:
    """A scanner that tries versions before it opens them."""
    settings = settings_for(repository)
    trials = trials or TrialLoads(settings, EAGER.executor)
    return VersionScanner(Repository(repository, settings), try_opening=trials.try_opening)


def add_imported(repository: Path, code: str, *, config: str = "") -> Path:
    """A version in Python whose file runs some statements when it is imported."""
    directory = repository / "model" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(with_hooks(imported=code))
    config = f'backend = "python"\nprobe = false\nmax_load_s = 0.5\n{config}'
    (repository / "model" / "model.toml").write_text(config)
    return directory


IMPORTS = {
    "exits": ("os._exit(3)", "ended with exit code 3"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    "raises": ('raise ValueError("no weights")', "ValueError: no weights"),
    "leaves": ("raise SystemExit(4)", "SystemExit: 4"),
    "never-ends": ("while True: pass", r"within max_load_s = 0\.5 s, got no end"),
    "stops": ("os.kill(os.getpid(), signal.SIGSTOP)", "time to start it, 1 s, got no end"),
}


@pytest.mark.parametrize(("code", "reason"), IMPORTS.values(), ids=IMPORTS)
def test_version_that_fails_at_import_is_refused_with_reason(
    tmp_path: Path, code: str, reason: str
) -> None:
    """Its file ends a child process, and this one opens the other model."""
    add_imported(tmp_path, code)
    add_version(tmp_path, "digits", 1, digits())
    tuning = STOPPED if "SIGSTOP" in code else EAGER.executor
    trials = TrialLoads(settings_for(tmp_path), tuning)

    opened = scanner_of(tmp_path, trials).scan({})

    [good, bad] = opened
    assert [*good.versions] == ["1"]
    assert bad.versions == {}
    assert re.search(reason, bad.faults["1"])


def test_transform_that_ends_process_at_import_is_refused_with_reason(tmp_path: Path) -> None:
    """Every process with ingest imports it, whether it has an executor or not."""
    add_version(tmp_path, "digits", 1, digits(), 'transform = "python"')
    (tmp_path / "digits" / "transform.py").write_text("import os\nos._exit(3)\n")

    [opened] = scanner_of(tmp_path).scan({})

    assert "ended with exit code 3" in opened.faults["1"]


def test_version_that_ended_its_process_at_import_is_opened_when_changed(tmp_path: Path) -> None:
    """No scan runs the code of the version again until its files change."""
    tries = tmp_path / "tries"
    directory = add_imported(tmp_path, f"open({str(tries)!r}, 'a').write('x')\nos._exit(3)")
    scanner = scanner_of(tmp_path)
    for _ in range(2):
        [opened] = scanner.scan({})
        assert "ended with exit code 3" in opened.faults["1"]
    assert tries.read_text() == "x"

    (directory / "model.py").write_text(with_hooks())
    [opened] = scanner.scan({})
    assert opened.faults == {}


def test_code_that_differs_from_its_manifest_never_runs(tmp_path: Path) -> None:
    """The files are compared before the child starts."""
    ran = tmp_path / "ran"
    directory = add_imported(tmp_path, f"open({str(ran)!r}, 'w').close()")
    config = make_model_config({"backend": "python"}, settings_for(tmp_path))
    signature = Signature((), (), batched=False)
    write_manifest(directory, make_manifest(directory, config, signature, datetime.now(UTC), {}))
    with (directory / "model.py").open("a") as file:
        file.write("# changed\n")

    [opened] = scanner_of(tmp_path).scan({})

    assert "model.py: expected" in opened.faults["1"]
    assert not ran.exists()


def test_version_whose_configuration_has_its_signature_is_opened_without_trial(
    tmp_path: Path,
) -> None:
    """Nothing of it is imported before it is loaded, which has its own trial."""
    add_imported(tmp_path, "os._exit(3)", config=TENSORS)

    [opened] = scanner_of(tmp_path).scan({})

    assert opened.faults == {}
