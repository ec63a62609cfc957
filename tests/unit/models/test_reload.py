"""Effects of a new scan of the repository on the versions that serve."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from headrace.errors import Code, ConfigurationError
from headrace.models.registry import Models, Reloaded
from headrace.models.repository import Repository, WantedModels
from headrace.models.scan import KnownVersions, OpenedModel, Retry, VersionScanner
from headrace.models.version import State
from headrace.protocol.control import WantedModel
from headrace.protocol.events import UnreadyVersion
from tests.support.models import add_version, digits, identity, settings_for
from tests.unit.models.executor import Executor, refusal


def replace(directory: Path, weight: float) -> None:
    """Put another model in the place of a version."""
    repository, name, number = directory.parents[1], directory.parent.name, int(directory.name)
    shutil.rmtree(directory)
    add_version(repository, name, number, digits(weight))


async def test_reload_without_change_changes_nothing(tmp_path: Path) -> None:
    """The versions are the same objects as before."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    before = executor.load()
    assert not any(await executor.models.reload())
    assert executor.models.catalog.lookup("digits") is before


async def test_reload_loads_new_model(tmp_path: Path) -> None:
    """The executor is told to load it."""
    executor = Executor(tmp_path)
    add_version(tmp_path, "digits", 1, digits())
    assert (await executor.models.reload()).added == ("digits/1",)
    assert executor.told() == [("load", "1")]


async def test_reload_unloads_removed_model(tmp_path: Path) -> None:
    """It takes no more requests, and the executor lets it go."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.load()
    shutil.rmtree(tmp_path / "digits")
    assert (await executor.models.reload()).removed == ("digits/1",)
    assert executor.told() == [("unload", "1")]
    assert version.state is State.UNLOADING
    assert refusal(executor.models, "digits").code == Code.UNKNOWN_MODEL


async def test_repository_that_is_emptied_is_named_once(tmp_path: Path) -> None:
    """Its models are unloaded, as Triton does, but a mount that has gone looks the same."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    before = await executor.models.reload()
    shutil.rmtree(tmp_path / "digits")
    emptied, after = await executor.models.reload(), await executor.models.reload()
    assert [each.emptied for each in (before, emptied, after)] == [(), (str(tmp_path),), ()]
    assert emptied.removed == ("digits/1",)


async def test_old_version_serves_until_new_version_is_ready(tmp_path: Path) -> None:
    """The old version is unloaded after that, so that one version is ready at any time."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    reloaded = await executor.models.reload()
    assert (reloaded.added, reloaded.removed) == (("digits/2",), ("digits/1",))
    assert executor.models.catalog.lookup("digits").version == "1"
    assert executor.told() == [("load", "2")]
    executor.load()
    assert executor.models.catalog.lookup("digits").version == "2"
    assert executor.told() == [("unload", "1")]


async def test_broken_new_version_leaves_old_one_serving(tmp_path: Path) -> None:
    """A version that fails to load leaves the old one where it is."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    executor.models.lifecycle.mark_failed(executor.loading(), "no memory")
    assert executor.models.catalog.lookup("digits").version == "1"
    assert executor.told() == [("load", "2")]


async def test_unreadable_new_version_leaves_old_one_serving(tmp_path: Path) -> None:
    """A new version whose file cannot be opened replaces nothing, and its fault is reported."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    (tmp_path / "digits" / "2").mkdir()
    [fault] = (await executor.models.reload()).faults
    assert fault.startswith("digits/2: digits/2/model.onnx: expected the model here")
    assert executor.models.catalog.lookup("digits").version == "1"
    assert executor.told() == []


async def test_version_that_breaks_callers_leaves_old_one_serving(tmp_path: Path) -> None:
    """Its inputs are others; the reason says which, and what permits it."""
    add_version(tmp_path, "model", 1, identity("FP32"))
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "model", 2, identity("INT64"))
    [fault] = (await executor.models.reload()).faults
    assert fault.startswith(
        "model/2: expected the inputs and outputs of version 1, which is in service: "
        "input x: expected FP32"
    )
    assert fault.endswith("allow_breaking_versions permits it")
    assert executor.models.catalog.lookup("model").version == "1"
    assert executor.told() == []


async def test_permitted_version_that_breaks_callers_replaces_old_one(tmp_path: Path) -> None:
    """Callers have agreed to the other inputs."""
    add_version(tmp_path, "model", 1, identity("FP32"))
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "model", 2, identity("INT64"), "allow_breaking_versions = true")
    assert (await executor.models.reload()).faults == ()
    executor.load()
    assert executor.models.catalog.lookup("model").version == "2"


async def test_lower_version_that_breaks_callers_replaces_higher_one(tmp_path: Path) -> None:
    """Going back is always possible."""
    add_version(tmp_path, "model", 2, identity("INT64"))
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "model", 1, identity("FP32"), "versions = [1]")
    assert (await executor.models.reload()).faults == ()
    executor.load()
    assert executor.models.catalog.lookup("model").version == "1"


async def test_version_broken_in_place_continues_serving(tmp_path: Path) -> None:
    """It is still wanted; what lies on the disk now cannot take its place."""
    for number in (1, 2):
        directory = add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
    executor = Executor(tmp_path)
    for version in executor.models.catalog.versions(State.LOADING):
        executor.models.lifecycle.mark_ready(version)
    (directory / "model.onnx").write_bytes(b"")
    [fault] = (await executor.models.reload()).faults
    assert fault.startswith("digits/2: digits/2/model.onnx: ")
    assert executor.models.catalog.lookup("digits", "2").state is State.READY
    assert executor.told() == []


async def test_reload_retries_failed_version(tmp_path: Path) -> None:
    """The cause of the failure may have gone since."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.lifecycle.mark_failed(executor.loading(), "no memory")
    await executor.models.reload()
    assert executor.told() == [("load", "1")]


async def test_failed_version_waits_for_change_without_retry(tmp_path: Path) -> None:
    """Its predecessor serves; it is loaded again when its files have changed."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    before = executor.load()
    replace(tmp_path / "digits" / "1", 2.0)
    await executor.models.reload(retry=False)
    executor.models.lifecycle.mark_failed(executor.loading(), "out of memory")
    executor.told()

    await executor.models.reload(retry=False)
    assert executor.told() == []
    assert executor.models.catalog.lookup("digits") is before
    replace(tmp_path / "digits" / "1", 3.0)
    await executor.models.reload(retry=False)
    assert executor.told() == [("load", "1")]


async def test_only_requested_version_is_loaded_again(tmp_path: Path) -> None:
    """One of two failed versions is loaded again, and one of two that could not be read."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
        add_version(tmp_path, "broken", number, digits(), 'versions = "all"')
    paths = [tmp_path / "broken" / str(number) / "model.onnx" for number in (1, 2)]
    content = [path.read_bytes() for path in paths]
    times = [path.stat().st_mtime_ns for path in paths]
    for path in paths:
        path.write_bytes(bytes(len(content[0])))
        os.utime(path, ns=(0, times[0]))
    executor = Executor(tmp_path)
    for version in executor.models.catalog.versions(State.LOADING):
        executor.models.lifecycle.mark_failed(version, "no memory")
    for path, whole in zip(paths, content, strict=True):  # in a way that only reading would notice
        path.write_bytes(whole)
        os.utime(path, ns=(0, times[0]))

    await executor.models.reload(retry={("digits", "2"), ("broken", "1")})

    loading = executor.models.catalog.versions(State.LOADING)
    assert [(each.name, each.version) for each in loading] == [("broken", "1"), ("digits", "2")]
    assert [*executor.models.catalog.faults("broken")] == ["2"]


async def test_unreadable_version_is_not_read_again_without_retry(tmp_path: Path) -> None:
    """The reason stays, until its files change or a retry is wanted."""
    add_version(tmp_path, "digits", 1, digits())
    path = tmp_path / "digits" / "1" / "model.onnx"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    status = path.stat()
    executor = Executor(tmp_path)
    reason = executor.models.catalog.faults("digits")["1"]

    path.write_bytes(content)  # in a way that only reading would notice
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert await executor.models.reload(retry=False) == Reloaded(
        (), (), (), (f"digits/1: {reason}",)
    )
    assert (await executor.models.reload()).added == ("digits/1",)


async def test_version_changed_in_place_is_loaded_beside_old_one(tmp_path: Path) -> None:
    """The old files' version serves until the new files' is ready."""
    directory = add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    old = executor.load()
    replace(directory, weight=2)
    assert (await executor.models.reload()).changed == ("digits/1",)
    assert executor.models.catalog.lookup("digits") is old
    new = executor.load()
    assert executor.models.catalog.lookup("digits", "1") is new
    assert executor.told() == [("load", "1"), ("unload", "1")]
    assert (old.state, new.state) == (State.UNLOADING, State.READY)


async def test_reload_leaves_changed_version_alone_while_it_loads(tmp_path: Path) -> None:
    """A load may take minutes, and would never end if each look at the files began it anew."""
    directory = add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    replace(directory, 2.0)
    await executor.models.reload()
    changed = executor.loading()
    executor.told()
    assert not any(await executor.models.reload())
    assert executor.told() == []
    assert executor.loading() is changed


async def test_version_superseded_while_loading_is_dropped(tmp_path: Path) -> None:
    """Its readiness comes too late and is of no interest."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    first = executor.loading()
    add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    assert executor.told() == [("unload", "1"), ("load", "2")]
    executor.models.lifecycle.mark_ready(first)
    assert refusal(executor.models, "digits").message == "model digits is loading"


async def test_deselected_version_serves_until_selected_ones_are_ready(tmp_path: Path) -> None:
    """With several selected, the old one goes when all of them have acknowledged."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, digits())
    add_version(tmp_path, "digits", 3, digits(), "versions = [2, 3]")
    await executor.models.reload()
    second, third = executor.models.catalog.versions(State.LOADING)
    executor.models.lifecycle.mark_ready(second)
    assert executor.models.catalog.lookup("digits", "1").state is State.READY
    executor.models.lifecycle.mark_failed(third, "no memory")
    assert refusal(executor.models, "digits", "1").code == Code.UNKNOWN_MODEL


async def test_broken_configuration_leaves_model_unchanged(tmp_path: Path) -> None:
    """A slip of the pen in `model.toml` stops nothing; the fault is told."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.load()
    (tmp_path / "digits" / "model.toml").write_text("colour = 1", encoding="utf-8")
    reloaded = await executor.models.reload()
    assert reloaded.removed == ()
    assert "colour" in reloaded.faults[0]
    assert executor.models.catalog.lookup("digits") is version


async def test_missing_repository_leaves_all_models_unchanged(tmp_path: Path) -> None:
    """A directory that is missing for a moment does not unload everything."""
    add_version(tmp_path / "models", "digits", 1, digits())
    executor = Executor(tmp_path / "models")
    version = executor.load()
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(ConfigurationError, match=r"models\.repository"):
        await executor.models.reload()
    assert executor.models.catalog.lookup("digits") is version


async def test_version_retired_during_scan_is_opened_again(tmp_path: Path) -> None:
    """The disk is read in another thread while the executor goes on reporting. Other models, which
    memory may not hold twice, are not loaded again.
    """
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "other", 1, digits())
    scanner = InterruptedScanner(Repository(tmp_path, settings_for(tmp_path)))
    executor = Executor(tmp_path, scanner)
    first, other = executor.models.catalog.versions()
    for version in (first, other):
        executor.models.lifecycle.mark_ready(version)
    second_directory = add_version(tmp_path, "digits", 2, digits())
    await executor.models.reload()
    shutil.rmtree(second_directory)

    scanner.after_scan = executor.load  # the second becomes ready during the scan
    await executor.models.reload()

    assert first.state is State.UNLOADING
    assert (executor.loading().name, executor.loading().version) == ("digits", "1")
    assert executor.models.catalog.lookup("digits").version == "2"
    assert executor.models.catalog.lookup("other") is other


async def test_change_of_overrides_loads_version_beside_old_one(tmp_path: Path) -> None:
    """It is not ready before it has been read and loaded with them, and the old one serves."""
    add_version(tmp_path, "digits", 1, digits(), "max_batch_size = 4")
    executor = Executor(tmp_path)
    models = executor.models
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    await models.reload()
    before = executor.load()
    executor.told()

    models.want({"digits": WantedModel(versions=["1"], default="1", overrides={"probe": False})})
    assert models.wanted.unready() == [
        UnreadyVersion("digits", "1", "not read yet", is_under_way=True)
    ]
    await models.reload()
    assert models.wanted.unready() == [UnreadyVersion("digits", "1", "loading", is_under_way=True)]
    assert models.catalog.lookup("digits") is before
    executor.load()

    config = models.catalog.lookup("digits").config
    assert (config.max_batch_size, config.probe, models.wanted.unready()) == (4, False, [])
    assert executor.told() == [("load", "1"), ("unload", "1")]


async def test_faulty_overrides_leave_old_version_serving(tmp_path: Path) -> None:
    """The process says what is wrong, and a correction ends that."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    models = executor.models
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    await models.reload()
    before = executor.load()
    models.want({"digits": WantedModel(versions=["1"], default="1", overrides={"labels": "x"})})
    await models.reload()
    [unready] = models.wanted.unready()
    assert "labels, postprocess_output: expected postprocess" in unready.reason
    assert not unready.is_under_way
    assert models.catalog.lookup("digits") is before
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    await models.reload()
    assert models.wanted.unready() == []
    assert models.catalog.lookup("digits") is before


async def test_wanted_reading_finds_version_changed_in_place(tmp_path: Path) -> None:
    """It is not ready until the files have been read once more."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    models = executor.models
    models.want({"digits": WantedModel(versions=["1"], default="1")})
    await models.reload()
    before = executor.load()
    replace(tmp_path / "digits" / "1", 2.0)
    models.want({"digits": WantedModel(versions=["1"], default="1", reads=1)})
    assert models.wanted.unready() == [
        UnreadyVersion("digits", "1", "not read yet", is_under_way=True)
    ]
    await models.reload()
    executor.load()
    assert models.wanted.unready() == []
    assert models.catalog.lookup("digits") is not before


async def test_announcements_of_others_do_not_make_version_ready_that_still_loads(
    tmp_path: Path,
) -> None:
    """An executor says that a version is ready when it has loaded it, and not before."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    assert executor.models.remote is None, "nothing applies announcements here"
    assert executor.loading().state is State.LOADING
    assert executor.models.wanted.is_on_its_way("digits", "1")
    executor.load()
    assert not executor.models.wanted.is_on_its_way("digits", "1")


async def test_version_is_retired_though_another_one_has_failed_in_executors(
    tmp_path: Path,
) -> None:
    """They have retired it, so that requests which are bound to it would wait for nobody."""
    for number in (1, 2, 3):
        add_version(tmp_path, "digits", number, digits())
    failed = UnreadyVersion("digits", "1", "executor e: no such file")
    awaited = {"1": failed}
    models = Models(
        settings_for(tmp_path), binds=True, awaited=lambda _, number: awaited.get(number)
    )
    models.want({"digits": WantedModel(versions=["2"], default="2")})
    models.open()
    assert models.catalog.lookup("digits", "2").version == "2"
    models.want({"digits": WantedModel(versions=["1", "3"], default="3")})
    await models.reload()
    assert models.catalog.lookup("digits").version == "3"
    assert refusal(models, "digits", "2").code == Code.UNKNOWN_MODEL


async def serving_one(directory: Path) -> Executor:
    """An executor that serves version 1, which the control topic names."""
    add_version(directory, "digits", 1, digits())
    executor = Executor(directory)
    executor.models.want({"digits": WantedModel(versions=["1"], default="1")})
    await executor.models.reload()
    executor.load()
    return executor


async def test_wanted_version_is_on_its_way_until_it_is_ready_or_fails(tmp_path: Path) -> None:
    """It is on its way even before the repository is read, which takes long for downloads."""
    executor = await serving_one(tmp_path)
    models = executor.models
    add_version(tmp_path, "digits", 2, digits())
    models.want({"digits": WantedModel(versions=["1", "2", "3"], default="1")})
    assert [models.wanted.is_on_its_way("digits", each) for each in "1234"] == [
        False,
        True,
        True,
        False,
    ]
    assert not models.wanted.is_on_its_way("other", "1")
    await models.reload()
    assert [models.wanted.is_on_its_way("digits", each) for each in "123"] == [False, True, False]
    models.lifecycle.mark_failed(executor.loading(), "no memory")
    assert not models.wanted.is_on_its_way("digits", "2")


async def test_label_of_version_that_is_not_read_yet_is_not_ready(tmp_path: Path) -> None:
    """Reading may take long for downloads. Whoever sends a request again gets an answer then."""
    models = (await serving_one(tmp_path)).models
    two = WantedModel(versions=["1", "2"], default="1", labels={"canary": "2"})
    models.want({"digits": two})
    refused = refusal(models, "digits@canary")
    assert (refused.code, refused.message) == (Code.MODEL_NOT_READY, "model digits/2 is loading")


TWO_WANTED = {"digits": WantedModel(versions=["1", "2"], default="2", labels={"old": "2"})}
FORMER = {"digits": {"": ["1"]}}


async def started_with(directory: Path) -> Executor:
    """An executor that has started since the default was to move from version 1 to version 2."""
    for number in (1, 2):
        add_version(directory, "digits", number, digits(number), 'versions = "all"')
    executor = Executor(directory)
    executor.models.want(TWO_WANTED, FORMER)
    await executor.models.reload()
    return executor


def mark(executor: Executor, number: str, failure: str = "") -> None:
    """Have a version become ready, or fail."""
    versions = executor.models.catalog.versions()
    [version] = [each for each in versions if each.version == number]
    if failure:
        executor.models.lifecycle.mark_failed(version, failure)
    else:
        executor.models.lifecycle.mark_ready(version)


async def test_name_of_failed_version_means_what_it_did_also_after_start(tmp_path: Path) -> None:
    """After a start a name means what it does in other processes; a new label means nothing."""
    executor = await started_with(tmp_path)
    mark(executor, "1")
    assert refusal(executor.models, "digits").code == Code.MODEL_NOT_READY  # 2 is loading
    mark(executor, "2", "no memory")
    assert executor.models.catalog.lookup("digits").version == "1"
    assert refusal(executor.models, "digits@old").code == Code.MODEL_NOT_READY


async def test_name_of_failed_version_means_it_when_it_is_ready_after_all(tmp_path: Path) -> None:
    """Its files, or what it lacked, may have changed."""
    executor = await started_with(tmp_path)
    mark(executor, "2", "no memory")
    mark(executor, "1")
    assert executor.models.catalog.lookup("digits").version == "1"
    await executor.models.reload()
    mark(executor, "2")
    assert executor.models.catalog.lookup("digits").version == "2"


async def test_version_that_breaks_while_it_serves_has_no_substitute(tmp_path: Path) -> None:
    """A caller of the default must not get answers of another version without notice."""
    executor = await started_with(tmp_path)
    mark(executor, "1")
    mark(executor, "2")
    mark(executor, "2", "the device is gone")
    assert refusal(executor.models, "digits").code == Code.MODEL_NOT_READY


async def test_version_that_is_gone_is_on_its_way_while_nothing_can_be_bound_instead(
    tmp_path: Path,
) -> None:
    """An executor that starts after an unload gets requests that are bound to the old version."""
    for number in (2, 3):
        add_version(tmp_path, "digits", number, digits())
    executor = Executor(tmp_path)
    models = executor.models
    models.want({"digits": WantedModel(versions=["2"], default="2")})
    assert models.wanted.is_on_its_way("digits", "1")
    await models.reload()
    assert models.wanted.is_on_its_way("digits", "1")
    executor.load()
    assert not models.wanted.is_on_its_way("digits", "1")
    models.want({"digits": WantedModel(versions=["2", "3"], default="3")})
    await models.reload()
    assert executor.loading().version == "3"
    assert not models.wanted.is_on_its_way("digits", "1")  # version 2 still has the name


class InterruptedScanner(VersionScanner):
    """A scanner during whose next scan something happens."""

    after_scan: Callable[[], object] | None = None

    def scan(
        self, known: KnownVersions, wanted: WantedModels | None = None, *, retry: Retry = True
    ) -> list[OpenedModel]:
        opened = super().scan(known, wanted, retry=retry)
        if self.after_scan is not None:
            happen, self.after_scan = self.after_scan, None
            happen()
        return opened


async def test_import_that_hangs_delays_only_one_reload(tmp_path: Path) -> None:
    """While it is still running, later ones tell of it at once, and take up what else is new."""
    directory = tmp_path / "hangs" / "1"
    directory.mkdir(parents=True)
    marks = tmp_path / "imports"
    # Interrupting does not end it, as with native code.
    code = f"""
import threading
with open({str(marks)!r}, "a") as file:
    file.write("x")
while True:
    try:
        threading.Event().wait(0.01)
    except BaseException:
        pass
    if not __import__("os").path.exists({str(directory)!r}):
        break
"""
    (directory / "model.py").write_text(code, encoding="utf-8")
    (tmp_path / "hangs" / "model.toml").write_text('backend = "python"\nmax_load_s = 0.05')
    executor = Executor(tmp_path)
    add_version(tmp_path, "digits", 1, digits())

    reloaded = await executor.models.reload()

    assert marks.read_text() == "x"  # imported once, by the first look
    assert reloaded.added == ("digits/1",)
    assert "expected the import to end within max_load_s" in reloaded.faults[0]
    shutil.rmtree(tmp_path / "hangs")  # which ends the thread


def other_input() -> onnx.ModelProto:
    """A model that calls the input of `digits` by another name."""
    model = digits()
    model.graph.input[0].name = model.graph.node[0].input[0] = "image"
    return model


async def test_breaking_version_is_refused_at_each_reload(tmp_path: Path) -> None:
    """The old one serves on, also when the repository is read again."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.load()
    add_version(tmp_path, "digits", 2, other_input())
    for _ in range(2):
        [fault] = (await executor.models.reload()).faults
        assert fault.startswith(
            "digits/2: expected the inputs and outputs of version 1, which is in service: "
            "input image: expected none of this name, got FP32 [-1, 64]; "
            "input pixels: expected FP32 [-1, 64], got none of this name; "
        )
    assert executor.models.catalog.lookup("digits").version == "1"
    assert executor.told() == []


async def test_processes_decide_alike_about_breaking_version(tmp_path: Path) -> None:
    """Each with the version that the wanted state says, whether it serves there or not."""
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "digits", 2, other_input())
    for compatible, state in (({"2": "1"}, "failed"), ({}, "ready")):
        models = Models(settings_for(tmp_path))
        wanted = WantedModel(versions=["1", "2"], default="2", compatible=compatible)
        models.want({"digits": wanted})
        models.open()
        states = [str(version.state) for version in models.catalog.versions()]
        assert states == ["ready", state]
        assert len(models.wanted.unready()) == states.count("failed")


async def test_breaking_version_that_is_permitted_is_under_way_before_it_is_read(
    tmp_path: Path,
) -> None:
    """Whoever waits for the change would else take the former failure for its end."""
    add_version(tmp_path, "digits", 1, digits())
    add_version(tmp_path, "digits", 2, other_input())
    models = Models(settings_for(tmp_path))
    wanted = WantedModel(versions=["1", "2"], default="1", compatible={"2": "1"})
    models.want({"digits": wanted})
    models.open()
    assert [each.is_under_way for each in models.wanted.unready()] == [False]

    permitted = WantedModel(versions=["1", "2"], default="1")
    models.want({"digits": permitted})

    assert models.wanted.unready() == [
        UnreadyVersion("digits", "2", "not read yet", is_under_way=True)
    ]
