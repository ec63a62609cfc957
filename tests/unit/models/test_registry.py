"""Which versions take requests, through loading, failure and reload."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.opening import Known, Opened, look
from headrace.models.registry import Change, Models
from headrace.models.repository import Repository
from headrace.models.version import ModelVersion, State
from tests.support.models import add_version, digits, settings_for, unbatched

Open = Callable[[], Models]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens the repository for a process without an executor."""

    def open_it() -> Models:
        models = Models(settings_for(tmp_path))
        models.open()
        return models

    return open_it


class Executor:
    """Follows the changes as an executor does, and loads when it is told to."""

    def __init__(self, repository: Path) -> None:
        self.models = Models(settings_for(repository), executes=True)
        self.changes: list[Change] = []
        self.models.open()
        self.models.subscribe(self.changes.append)

    def loading(self) -> ModelVersion:
        """The one version that is loading."""
        [version] = self.models.versions(State.LOADING)
        return version

    def load(self) -> ModelVersion:
        """Have the one version that is loading become ready."""
        version = self.loading()
        self.models.mark_ready(version)
        return version

    def told(self) -> list[tuple[str, str]]:
        """Actions and numbers since the last call."""
        told = [(str(change.action), change.version.version) for change in self.changes]
        self.changes.clear()
        return told


def refusal(models: Models, name: str, version: str | None = None) -> Rejected:
    """How a look-up is refused."""
    with pytest.raises(Rejected) as caught:
        models.lookup(name, version)
    return caught.value


def replace(directory: Path, weight: float) -> None:
    """Put another model in the place of a version."""
    repository, name, number = directory.parents[1], directory.parent.name, int(directory.name)
    shutil.rmtree(directory)
    add_version(repository, name, number, digits(weight))


# --- look-up ----------------------------------------------------------------------------------


def test_lookup_without_a_version_gives_the_highest(tmp_path: Path, opened: Open) -> None:
    """Nine is before ten."""
    for number in (9, 10):
        add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
    models = opened()
    assert models.lookup("digits").version == "10"
    assert models.lookup("digits", "").version == "10"
    assert models.lookup("digits", "9").version == "9"


def test_unknown_model_is_refused_with_what_there_is(tmp_path: Path, opened: Open) -> None:
    """The caller sees the names to choose from."""
    add_version(tmp_path, "digits", 1, digits())
    error = refusal(opened(), "digit")
    assert error.code == Code.UNKNOWN_MODEL
    assert error.message == 'model_name: expected one of digits, got "digit"'


def test_unknown_model_of_none_is_refused(opened: Open) -> None:
    """An empty repository is said to be empty."""
    assert "expected a model, of which there is none" in refusal(opened(), "digits").message


def test_long_list_of_models_is_cut(tmp_path: Path, opened: Open) -> None:
    """An answer does not grow with the repository."""
    for number in range(23):
        (tmp_path / f"model{number:02}").mkdir()
    assert refusal(opened(), "x").message.endswith('model19 and 3 more, got "x"')


def test_unknown_version_is_refused_with_what_there_is(tmp_path: Path, opened: Open) -> None:
    """A version that is not selected is not there."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits())
    error = refusal(opened(), "digits", "1")
    assert error.code == Code.UNKNOWN_MODEL
    assert error.message == 'model_version: expected one of 2 of digits, got "1"'


def test_request_without_a_model_is_refused(opened: Open) -> None:
    """The message says where the name belongs."""
    error = refusal(opened(), "")
    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith("model_name: expected a name, in the value or in the header")


def test_broken_model_is_not_ready_with_its_fault(tmp_path: Path, opened: Open) -> None:
    """It may be mended, so it is not unknown; no path of this machine is told."""
    add_version(tmp_path, "digits", 1, digits(), "colour = 1\nshape = 2")
    error = refusal(opened(), "digits")
    assert (error.code, error.retry_after_ms) == (Code.MODEL_NOT_READY, None)
    assert error.message == (
        "model digits: digits/model.toml: colour: Extra inputs are not permitted"
    )


def test_broken_version_is_not_ready_with_its_fault(tmp_path: Path, opened: Open) -> None:
    """The other versions are not affected."""
    add_version(tmp_path, "digits", 1, digits(), 'versions = "all"')
    (tmp_path / "digits" / "2").mkdir()
    models = opened()
    assert models.lookup("digits").version == "1"
    assert refusal(models, "digits", "2").message == (
        "model digits/2: digits/2/model.onnx: expected the model here, got no file"
    )


def test_missing_repository_is_refused(tmp_path: Path) -> None:
    """Without a repository a process does not start."""
    with pytest.raises(ConfigurationError, match=r"models\.repository"):
        Models(settings_for(tmp_path / "none")).open()


# --- limits -----------------------------------------------------------------------------------


def test_limits_come_from_the_configuration(tmp_path: Path, opened: Open) -> None:
    """`model.toml` over the settings."""
    add_version(tmp_path, "digits", 1, digits(), "max_batch_size = 4\nmax_queue_delay_ms = 2.5")
    version = opened().lookup("digits")
    assert (version.max_batch_size, version.max_queue_delay_ms) == (4, 2.5)
    assert (version.max_batch_bytes, version.batching_off) == (8388608, "")


def test_unbatched_model_has_batches_of_one(tmp_path: Path, opened: Open) -> None:
    """And the reason is kept."""
    add_version(tmp_path, "fixed", 1, unbatched())
    version = opened().lookup("fixed")
    assert (version.max_batch_size, version.batching_off) == (1, "dimension 0 of x is fixed at 4")


def test_fault_at_warm_up_switches_batching_off(tmp_path: Path) -> None:
    """The executor found that larger runs fail."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.mark_ready(executor.loading(), batching_fault="two rows fail")
    version = executor.models.lookup("digits")
    assert (version.max_batch_size, version.batching_off) == (1, "two rows fail")


# --- the executor's word ----------------------------------------------------------------------


def test_version_is_not_ready_before_the_executor_says_so(tmp_path: Path) -> None:
    """Until then requests are told to come again."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    error = refusal(executor.models, "digits")
    assert (error.code, error.message) == (Code.MODEL_NOT_READY, "model digits is loading")
    assert error.retry_after_ms
    executor.load()
    assert executor.models.lookup("digits", "1").state is State.READY


def test_version_that_fails_is_not_ready_with_the_reason(tmp_path: Path) -> None:
    """There is no use in waiting for it."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.mark_failed(executor.loading(), f"{tmp_path}/digits/1: no memory")
    error = refusal(executor.models, "digits", "1")
    assert (error.message, error.retry_after_ms) == ("model digits/1: digits/1: no memory", None)


def test_ready_version_that_fails_takes_no_more_requests(tmp_path: Path) -> None:
    """A device may be lost later."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.mark_failed(executor.load(), "device lost")
    assert refusal(executor.models, "digits").message == "model digits: device lost"


# --- reload -----------------------------------------------------------------------------------


async def test_reload_without_a_change_changes_nothing(tmp_path: Path, opened: Open) -> None:
    """The versions are the same objects as before."""
    add_version(tmp_path, "digits", 1, digits())
    models = opened()
    before = models.lookup("digits")
    assert not any(await models.reload())
    assert models.lookup("digits") is before


async def test_new_model_is_found(tmp_path: Path) -> None:
    """The executor is told to load it."""
    executor = Executor(tmp_path)
    add_version(tmp_path, "digits", 1, digits())
    assert (await executor.models.reload()).added == ("digits/1",)
    assert executor.told() == [("load", "1")]


async def test_removed_model_is_unloaded(tmp_path: Path) -> None:
    """It takes no more requests, and the executor lets it go."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.load()
    shutil.rmtree(tmp_path / "digits")
    assert (await executor.models.reload()).removed == ("digits/1",)
    assert executor.told() == [("unload", "1")]
    assert version.state is State.UNLOADING
    assert refusal(executor.models, "digits").code == Code.UNKNOWN_MODEL


async def test_old_version_serves_until_the_new_one_is_ready(tmp_path: Path) -> None:
    """Then the old one is unloaded: there is no moment without a ready one."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    reloaded = await executor.models.reload()
    assert (reloaded.added, reloaded.removed) == (("digits/2",), ("digits/1",))
    assert executor.models.lookup("digits").version == "1"
    assert executor.told() == [("load", "2")]
    executor.load()
    assert executor.models.lookup("digits").version == "2"
    assert executor.told() == [("unload", "1")]


async def test_bad_new_version_does_not_take_the_old_ones_place(tmp_path: Path) -> None:
    """A version that fails to load leaves the old one where it is."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    executor.models.mark_failed(executor.loading(), "no memory")
    assert executor.models.lookup("digits").version == "1"
    assert executor.told() == [("load", "2")]


async def test_unreadable_new_version_does_not_take_the_old_ones_place(tmp_path: Path) -> None:
    """Nor does one whose file cannot even be opened; the fault is told."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    (tmp_path / "digits" / "2").mkdir()
    [fault] = (await executor.models.reload()).faults
    assert fault.startswith("digits/2: digits/2/model.onnx: expected the model here")
    assert executor.models.lookup("digits").version == "1"
    assert executor.told() == []


async def test_version_broken_in_place_goes_on_serving(tmp_path: Path) -> None:
    """It is still wanted; what lies on the disk now cannot take its place."""
    for number in (1, 2):
        directory = add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
    executor = Executor(tmp_path)
    for version in executor.models.versions(State.LOADING):
        executor.models.mark_ready(version)
    (directory / "model.onnx").write_bytes(b"")
    [fault] = (await executor.models.reload()).faults
    assert fault.startswith("digits/2: digits/2/model.onnx: ")
    assert executor.models.lookup("digits", "2").state is State.READY
    assert executor.told() == []


async def test_failed_version_is_tried_again_at_reload(tmp_path: Path) -> None:
    """What made it fail may have gone."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.mark_failed(executor.loading(), "no memory")
    await executor.models.reload()
    assert executor.told() == [("load", "1")]


async def test_version_changed_in_place_is_loaded_beside_the_old_one(tmp_path: Path) -> None:
    """The old files' version serves until the new files' is ready."""
    directory = add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    old = executor.load()
    replace(directory, weight=2)
    assert (await executor.models.reload()).changed == ("digits/1",)
    assert executor.models.lookup("digits") is old
    new = executor.load()
    assert executor.models.lookup("digits", "1") is new
    assert executor.told() == [("load", "1"), ("unload", "1")]
    assert (old.state, new.state) == (State.UNLOADING, State.READY)


async def test_version_that_is_superseded_while_it_loads_is_let_go(tmp_path: Path) -> None:
    """Its readiness comes too late and is of no interest."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    first = executor.loading()
    add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    assert executor.told() == [("unload", "1"), ("load", "2")]
    executor.models.mark_ready(first)
    assert refusal(executor.models, "digits").message == "model digits is loading"


async def test_version_no_longer_selected_waits_for_those_that_are(tmp_path: Path) -> None:
    """With several selected, the old one goes when all of them have settled."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    add_version(tmp_path, "digits", 3, digits(), "versions = [2, 3]")
    await executor.models.reload()
    second, third = executor.models.versions(State.LOADING)
    executor.models.mark_ready(second)
    assert executor.models.lookup("digits", "1").state is State.READY
    executor.models.mark_failed(third, "no memory")
    assert refusal(executor.models, "digits", "1").code == Code.UNKNOWN_MODEL


async def test_broken_configuration_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """A slip of the pen in `model.toml` stops nothing; the fault is told."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.load()
    (tmp_path / "digits" / "model.toml").write_text("colour = 1", encoding="utf-8")
    reloaded = await executor.models.reload()
    assert reloaded.removed == ()
    assert "colour" in reloaded.faults[0]
    assert executor.models.lookup("digits") is version


async def test_missing_repository_leaves_all_models_as_they_were(tmp_path: Path) -> None:
    """A directory that is away for a moment does not unload everything."""
    add_version(tmp_path / "models", "digits", 1, digits())
    executor = Executor(tmp_path / "models")
    version = executor.load()
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(ConfigurationError, match=r"models\.repository"):
        await executor.models.reload()
    assert executor.models.lookup("digits") is version


async def test_version_put_aside_during_a_look_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is read in another thread while the executor goes on reporting."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    first = executor.load()
    second_directory = add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    shutil.rmtree(second_directory)

    def look_while_the_second_becomes_ready(repository: Repository, known: Known) -> list[Opened]:
        monkeypatch.undo()
        opened = look(repository, known)
        executor.load()
        return opened

    monkeypatch.setattr("headrace.models.registry.look", look_while_the_second_becomes_ready)
    await executor.models.reload()
    assert first.state is State.UNLOADING
    assert executor.loading().version == "1"
    assert executor.models.lookup("digits").version == "2"


def test_status_shows_versions_and_faults(tmp_path: Path, opened: Open) -> None:
    """What an operator wants to see of each."""
    add_version(tmp_path, "bad", 1, digits(), "colour = 1")
    add_version(tmp_path, "digits", 1, digits())
    bad, good = opened().status()
    assert (bad["name"], bad["version"], bad["state"]) == ("bad", "", "failed")
    assert good == {
        "name": "digits",
        "version": "1",
        "state": "ready",
        "reason": "",
        "max_batch_size": 32,
        "batching_off": "",
    }


@pytest.mark.parametrize(
    ("config", "inline"),
    [("", True), ('device = "cuda:0"', False)],
    ids=["cpu", "cuda"],
)
def test_only_sessions_on_the_cpu_run_in_any_thread(
    tmp_path: Path, opened: Open, config: str, inline: bool
) -> None:
    """CUDA's state belongs to one thread."""
    add_version(tmp_path, "digits", 1, digits(), config)
    assert opened().lookup("digits").may_inline is inline
