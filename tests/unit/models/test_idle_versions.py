"""Versions that are unloaded while they are idle, and loaded again when a request comes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import Code, Rejected
from headrace.models.catalog import RequestedVersions
from headrace.models.index import describe_index
from headrace.models.profiling.batch_safety import Batching, Verdict
from headrace.models.version import State
from tests.support.models import add_version, digits
from tests.unit.models.executor import Executor, refusal


def unloaded(repository: Path, config: str = 'unload_idle = "wait"') -> Executor:
    """An executor whose only version was unloaded."""
    add_version(repository, "digits", 1, digits(), config)
    executor = Executor(repository)
    executor.models.lifecycle.mark_unloaded(executor.load(), "unloaded while idle")
    executor.told()
    return executor


def test_unloaded_version_is_still_served(tmp_path: Path) -> None:
    """It is found, counts as ready, and the index calls it so; looking does not load it."""
    executor = unloaded(tmp_path)
    catalog = executor.models.catalog
    version = catalog.lookup("digits")
    assert (version.state, catalog.servable()) == (State.UNLOADED, [version])
    (entry,) = describe_index(catalog.status(), ready_only=True)
    assert (entry["state"], entry["reason"]) == ("READY", "unloaded while idle")
    assert executor.told() == []


def test_request_has_it_loaded_again_once(tmp_path: Path) -> None:
    """However many requests come until it is there."""
    executor = unloaded(tmp_path)
    found = [executor.models.catalog.lookup_bound("digits", "1") for _ in range(3)]
    assert executor.told() == [("load", "1")]
    executor.models.lifecycle.mark_ready(found[0])
    assert (found[0].state, found[0].reason) == (State.READY, "")
    assert executor.models.catalog.lookup("digits") is found[0]


def test_verdict_on_changed_files_holds(tmp_path: Path) -> None:
    """The version is probed again if its files were changed while it was not in memory."""
    executor = unloaded(tmp_path)
    version = executor.models.catalog.lookup_bound("digits", "1")
    verdict = Verdict(Batching.NOT_BATCHABLE, "rows leak")
    executor.models.lifecycle.mark_ready(version, verdict)
    assert (version.max_batch_size, version.batching_off) == (1, "rows leak")


def test_version_that_had_no_room_is_loaded_by_next_request(tmp_path: Path) -> None:
    """Those that wait are refused with the reason and a retry time; it stays unloaded."""
    executor = unloaded(tmp_path)
    version = executor.models.catalog.lookup_bound("digits", "1")
    version.load_s = 2.5
    executor.told()
    executor.models.lifecycle.refuse_waiting(version, "no room")
    (change,) = executor.changes
    assert change.action == "refuse"
    assert change.refusal is not None
    assert (change.refusal.code, change.refusal.message, change.refusal.retry_after_ms) == (
        Code.MODEL_NOT_READY,
        "model digits/1: no room",
        2500,
    )
    executor.told()
    executor.models.catalog.lookup_bound("digits", "1")
    assert executor.told() == [("load", "1")]


def test_version_that_cannot_be_loaded_again_has_failed(tmp_path: Path) -> None:
    """Requests that wait for the version are assigned again; new ones get the reason."""
    executor = unloaded(tmp_path)
    version = executor.models.catalog.lookup_bound("digits", "1")
    executor.told()
    executor.models.lifecycle.mark_failed(version, "its file is gone")
    assert executor.told() == [("reassign", "1")]
    assert refusal(executor.models, "digits").message == "model digits: its file is gone"


async def test_removed_version_is_unloaded_whether_in_memory_or_not(tmp_path: Path) -> None:
    """A load that a request has begun ends it, after the request."""
    executor = unloaded(tmp_path)
    version = executor.models.catalog.lookup_bound("digits", "1")
    executor.told()
    shutil.rmtree(tmp_path / "digits")
    await executor.models.reload()
    assert executor.told() == [("unload", "1")]
    executor.models.lifecycle.mark_ready(version)
    assert version.state is State.UNLOADING
    assert executor.models.catalog.versions() == []


async def test_reload_leaves_unloaded_version_as_it_is(tmp_path: Path) -> None:
    """Nothing has changed about it."""
    executor = unloaded(tmp_path)
    reloaded = await executor.models.reload()
    assert (reloaded.added, reloaded.changed, executor.told()) == ((), (), [])
    assert executor.models.catalog.lookup("digits").state is State.UNLOADED


async def test_new_version_replaces_unloaded_one(tmp_path: Path) -> None:
    """Its requests, if any wait, are not lost: the executor is told to let it go."""
    executor = unloaded(tmp_path)
    add_version(tmp_path, "digits", 2, digits(), 'unload_idle = "wait"')
    await executor.models.reload()
    assert executor.models.catalog.lookup("digits").version == "1"
    executor.load()
    assert executor.told() == [("load", "2"), ("unload", "1")]
    assert executor.models.catalog.lookup("digits").version == "2"


async def test_version_is_retired_though_those_that_remain_are_unloaded(tmp_path: Path) -> None:
    """Going back to the one before takes effect at once: that one is loaded when it is needed."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits(), 'unload_idle = "wait"\nversions = "all"')
    executor = Executor(tmp_path)
    models = executor.models
    for version in models.catalog.versions():
        models.lifecycle.mark_ready(version)
    for version in models.catalog.versions():
        models.lifecycle.mark_unloaded(version, "unloaded while idle")
    executor.told()
    shutil.rmtree(tmp_path / "digits" / "2")
    await models.reload()
    assert executor.told() == [("unload", "2")]
    assert models.catalog.lookup("digits").version == "1"


@pytest.mark.parametrize(("setting", "refuses"), [("wait", False), ("refuse", True)])
def test_new_requests_wait_or_are_refused_by_setting(
    tmp_path: Path, setting: str, *, refuses: bool
) -> None:
    """A refused request has the version loaded again from the event loop's thread."""
    executor = unloaded(tmp_path, f'unload_idle = "{setting}"')
    scheduled: list[Callable[[], None]] = []
    models = executor.models
    load_again = models.lifecycle.load_again
    requested = RequestedVersions(models.catalog, scheduled.append, load_again)
    refused = requested.refusal_of_bound("digits", "1")
    assert (refused is not None, is_refused(requested)) == (refuses, refuses)
    assert executor.told() == []
    for call in scheduled:
        call()
    assert executor.told() == ([("load", "1")] if refuses else [])
    executor.models.lifecycle.mark_ready(executor.models.catalog.lookup("digits"))
    assert not is_refused(requested)
    assert requested.refusal_of_bound("digits", "1") is None


def is_refused(requested: RequestedVersions) -> bool:
    """Whether a new request is refused."""
    try:
        requested.lookup("digits")
    except Rejected as error:
        return (error.code, error.retry_after_ms) == (Code.MODEL_NOT_READY, 1000)
    return False
