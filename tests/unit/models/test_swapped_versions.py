"""Versions that are unloaded before their successors are loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.models.version import ModelVersion, State
from headrace.protocol.control import WantedModel
from tests.support.models import add_version, digits, unbatched
from tests.unit.models.executor import Executor, refusal

FIRST = 'swap = "unload_first"'


def serving(repository: Path, config: str = FIRST) -> tuple[Executor, ModelVersion]:
    """An executor with version 1 ready."""
    add_version(repository, "digits", 1, digits(), config)
    executor = Executor(repository)
    old = executor.load()
    executor.told()
    return executor, old


async def swapping(repository: Path) -> tuple[Executor, ModelVersion, ModelVersion]:
    """One that is to replace version 1 by version 2."""
    executor, old = serving(repository)
    add_version(repository, "digits", 2, digits(), FIRST)
    await executor.models.reload()
    return executor, old, executor.loading()


async def test_new_version_is_loaded_when_old_one_is_gone(tmp_path: Path) -> None:
    """Requests are bound to it from the beginning, and wait."""
    executor, old, new = await swapping(tmp_path)
    assert executor.told() == [("unload", "1")]
    assert executor.models.catalog.lookup("digits") is new
    assert new.state is State.LOADING
    assert refusal(executor.models, "digits", "1").message.startswith("model_version: expected")

    executor.models.lifecycle.mark_gone(old)
    assert executor.told() == [("load", "2")]
    executor.models.lifecycle.mark_ready(new)
    assert executor.told() == []
    assert [executor.models.catalog.servable(), new.state] == [[new], State.READY]


async def test_old_version_is_loaded_again_when_new_one_fails(tmp_path: Path) -> None:
    """Requests that wait for the new version are bound to the old one; the reason is shown."""
    executor, old, new = await swapping(tmp_path)
    executor.models.lifecycle.mark_gone(old)
    executor.told()
    executor.models.lifecycle.mark_failed(new, "no memory")
    assert executor.told() == [("reassign", "2"), ("load", "1")]
    assert executor.models.catalog.lookup("digits") is old
    assert (old.state, old.reason) == (State.LOADING, "loading again, since version 2 failed")

    executor.models.lifecycle.mark_ready(old)
    assert executor.models.catalog.servable() == [old]
    shown = {each["version"]: each["reason"] for each in executor.models.catalog.status()}
    assert shown == {"1": "", "2": "no memory"}
    assert executor.told() == []


async def test_model_without_any_version_refuses_with_reason(tmp_path: Path) -> None:
    """The old one could not be loaded again either."""
    executor, old, new = await swapping(tmp_path)
    executor.models.lifecycle.mark_gone(old)
    executor.models.lifecycle.mark_failed(new, "no memory")
    executor.told()
    executor.models.lifecycle.mark_failed(old, "no memory either")
    assert executor.told() == [("reassign", "1")]
    assert refusal(executor.models, "digits").message == "model digits: no memory"


async def test_changed_files_of_same_version_leave_its_requests_to_it(tmp_path: Path) -> None:
    """They are in one queue, which the old one must not go on to empty."""
    executor, old = serving(tmp_path)
    (tmp_path / "digits" / "model.toml").write_text(f"{FIRST}\nmax_batch_size = 4")
    await executor.models.reload()
    (change,) = executor.changes
    assert (change.action, change.version, change.leaves_waiting) == ("unload", old, True)
    executor.told()
    executor.models.lifecycle.mark_gone(old)
    new = executor.load()
    assert executor.told() == [("load", "1")]
    assert executor.models.catalog.lookup("digits", "1") is new


async def test_third_version_replaces_the_one_that_loads(tmp_path: Path) -> None:
    """It waits until both are gone, and the first is what is left if it fails. Requests that wait
    for the second are bound to the third.
    """
    executor, old, second = await swapping(tmp_path)
    executor.told()
    add_version(tmp_path, "digits", 3, digits(), FIRST)
    await executor.models.reload()
    assert executor.told() == [("unload", "2"), ("reassign", "2")]
    executor.models.lifecycle.mark_gone(old)
    assert executor.told() == []
    executor.models.lifecycle.mark_gone(second)
    assert executor.told() == [("load", "3")]
    third = executor.models.catalog.lookup("digits")
    executor.models.lifecycle.mark_failed(third, "no memory")
    assert executor.told() == [("reassign", "3"), ("load", "1")]
    assert executor.load() is old
    assert executor.models.catalog.servable() == [old]


async def want(executor: Executor, *versions: str) -> None:
    """Have these versions wanted, and read; the first is the default."""
    wanted = WantedModel(versions=list(versions), default=versions[0])
    executor.models.want({"digits": wanted})
    await executor.models.reload(retry=())


async def test_version_added_before_old_one_is_gone_is_loaded_after_that(tmp_path: Path) -> None:
    """So is the new one, which is still wanted, and for which requests wait."""
    executor, old = serving(tmp_path)
    for number in (2, 3):
        add_version(tmp_path, "digits", number, digits(), FIRST)
    await want(executor, "2")
    await want(executor, "2", "3")
    assert executor.told() == [("unload", "1")]
    executor.models.lifecycle.mark_gone(old)
    assert executor.told() == [("load", "2"), ("load", "3")]


async def test_version_added_after_old_one_is_gone_is_loaded_at_once(tmp_path: Path) -> None:
    """Nothing is left to wait for, although the new one is still loading."""
    executor, old = serving(tmp_path)
    for number in (2, 3):
        add_version(tmp_path, "digits", number, digits(), FIRST)
    await want(executor, "2")
    executor.models.lifecycle.mark_gone(old)
    executor.told()
    await want(executor, "2", "3")
    assert executor.told() == [("load", "3")]


async def test_version_added_after_swap_that_failed_leaves_old_one_the_default(
    tmp_path: Path,
) -> None:
    """Version 2 cannot be loaded, so the default means version 1, until it is to mean another."""
    executor, old = serving(tmp_path)
    for number in (2, 3):
        add_version(tmp_path, "digits", number, digits(), FIRST)
    await want(executor, "2")
    executor.models.lifecycle.mark_gone(old)
    executor.models.lifecycle.mark_failed(executor.loading(), "no memory")
    executor.load()
    executor.told()
    await want(executor, "2", "3")
    assert executor.told() == [("load", "3")]
    executor.load()
    assert executor.models.catalog.lookup("digits") is old
    await want(executor, "3", "2")
    assert executor.models.catalog.lookup("digits").version == "3"


@pytest.mark.parametrize("is_default_first", [True, False])
async def test_default_that_fails_beside_another_new_version_means_old_one(
    tmp_path: Path, is_default_first: bool
) -> None:
    """It is loaded again at once; the other new version is served, too."""
    executor, old = serving(tmp_path)
    for number in (2, 3):
        add_version(tmp_path, "digits", number, digits(), FIRST)
    await want(executor, "2", "3")
    executor.models.lifecycle.mark_gone(old)
    new = {each.version: each for each in executor.models.catalog.versions()}
    executor.told()
    if not is_default_first:
        executor.models.lifecycle.mark_ready(new["3"])
    executor.models.lifecycle.mark_failed(new["2"], "no memory")
    assert executor.told() == [("reassign", "2"), ("load", "1")]
    assert executor.models.catalog.lookup("digits") is old
    executor.models.lifecycle.mark_ready(old)
    executor.models.lifecycle.mark_ready(new["3"])
    assert executor.models.catalog.lookup("digits") is old
    assert executor.models.catalog.lookup("digits", "3") is new["3"]
    assert executor.told() == []


async def test_version_whose_new_settings_fail_is_loaded_as_before(tmp_path: Path) -> None:
    """Those of another version of the model, whose settings are new as well, are in effect."""
    add_version(tmp_path, "digits", 2, digits(), FIRST)
    executor, _ = serving(tmp_path)
    await want(executor, "2", "1")
    while executor.changes:
        executor.load()
        executor.told()
    before = {each.version: each for each in executor.models.catalog.versions()}
    wanted = WantedModel(versions=["1", "2"], default="2", overrides={"max_batch_size": 4})
    executor.models.want({"digits": wanted})
    await executor.models.reload(retry=())
    for old in before.values():
        executor.models.lifecycle.mark_gone(old)
    new = {version: executor.models.catalog.lookup("digits", version) for version in ("1", "2")}
    executor.models.lifecycle.mark_ready(new["1"])
    executor.models.lifecycle.mark_failed(new["2"], "no memory")
    executor.models.lifecycle.mark_ready(before["2"])
    assert executor.models.catalog.lookup("digits") is before["2"]
    assert executor.models.catalog.lookup("digits", "1") is new["1"]


async def test_reload_during_swap_changes_nothing(tmp_path: Path) -> None:
    """The same versions are wanted."""
    executor, old, new = await swapping(tmp_path)
    executor.told()
    await executor.models.reload()
    executor.models.lifecycle.mark_gone(old)
    await executor.models.reload()
    assert executor.told() == [("load", "2")]
    executor.models.lifecycle.mark_ready(new)
    assert executor.models.catalog.servable() == [new]


async def test_removed_model_takes_back_what_waits_for_its_swap(tmp_path: Path) -> None:
    """Nothing will load the new version any more."""
    executor, _, _ = await swapping(tmp_path)
    executor.told()
    shutil.rmtree(tmp_path / "digits")
    await executor.models.reload()
    assert executor.told() == [("unload", "2"), ("reassign", "2")]
    assert executor.models.catalog.versions() == []


async def test_incompatible_version_unloads_nothing(tmp_path: Path) -> None:
    """It is refused before the old one would have to go."""
    executor, old = serving(tmp_path)
    add_version(tmp_path, "digits", 2, unbatched(), FIRST)
    await executor.models.reload()
    assert executor.told() == []
    assert executor.models.catalog.servable() == [old]
