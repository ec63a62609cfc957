"""Versions that were replaced while requests bound to them may still come from another process."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.errors import Code
from headrace.models.lifecycle import VersionChange
from headrace.models.registry import Models
from headrace.models.version import ModelVersion, State
from headrace.protocol.events import ExecutorEvent, HostedModel
from tests.support.models import add_version, digits, settings_for
from tests.unit.models.executor import refusal

KEPT_S = 60.0


class Repository:
    """A repository of `digits`, read by a process apart from ingest, and its clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_s = 1000.0
        self.unloaded: list[ModelVersion] = []
        self.reassigned: list[ModelVersion] = []
        settings = settings_for(directory)
        assert settings.models.keep_replaced_s == KEPT_S
        self.models = Models(settings, keeps_replaced=True, clock_s=lambda: self.now_s)
        add_version(directory, "digits", 1, digits())
        self.models.open()
        self.models.lifecycle.subscribe(self._note)
        self.first = self.models.catalog.lookup("digits")

    def _note(self, change: VersionChange) -> None:
        (self.unloaded if change.action == "unload" else self.reassigned).append(change.version)

    async def replace_first(self) -> None:
        """Add version 2, which is wanted instead of version 1, and look at the repository."""
        add_version(self.directory, "digits", 2, digits())
        await self.models.reload()


async def test_replaced_version_is_found_by_its_number_alone(tmp_path: Path) -> None:
    """A request that names no version gets the new one."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    assert repository.models.catalog.lookup("digits").version == "2"
    assert repository.models.catalog.lookup_bound("digits", "1") is repository.first
    assert repository.first in repository.models.catalog.versions(State.READY)


async def test_replaced_version_is_unloaded_after_last_use(tmp_path: Path) -> None:
    """The time counts from its last use."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    repository.now_s += KEPT_S - 1
    repository.models.catalog.lookup_bound("digits", "1")
    repository.now_s += KEPT_S - 1
    repository.models.lifecycle.unload_unused()
    assert repository.unloaded == []
    repository.now_s += 1
    repository.models.lifecycle.unload_unused()
    assert repository.unloaded == [repository.first]
    assert refusal(repository.models, "digits", "1").code == Code.UNKNOWN_MODEL


async def test_replaced_version_is_kept_while_requests_wait_for_it(tmp_path: Path) -> None:
    """Afterwards its time begins; what comes too late for an executor gets another version."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    repository.now_s += KEPT_S
    waiting = {("digits", "1")}
    repository.models.lifecycle.unload_unused(lambda *key: key in waiting)
    repository.now_s += KEPT_S - 1
    repository.models.lifecycle.unload_unused()
    assert repository.unloaded == []
    repository.now_s += 1
    repository.models.lifecycle.unload_unused()
    assert repository.unloaded == repository.reassigned == [repository.first]


async def test_replaced_version_is_kept_while_executor_announces_it(tmp_path: Path) -> None:
    """It can run elsewhere, so a batcher lets requests through that are bound to it."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    repository.now_s += KEPT_S - 1
    hosted = HostedModel(name="digits", version="1", instances=1, max_batch_size=4)
    assert repository.models.remote is not None
    repository.models.remote.apply_event(
        ExecutorEvent(executor="one", silent_after_ms=1000, models=[hosted])
    )
    repository.now_s += KEPT_S - 1
    repository.models.lifecycle.unload_unused()
    assert repository.models.catalog.lookup("digits", "1").max_batch_size == 4


async def test_reselected_version_serves_without_loading(tmp_path: Path) -> None:
    """A new version that turned out badly is undone at once."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    shutil.rmtree(tmp_path / "digits" / "2")
    await repository.models.reload()
    assert repository.models.catalog.lookup("digits") is repository.first
    assert repository.first.reason == ""
    repository.now_s += KEPT_S
    repository.models.lifecycle.unload_unused()
    assert [version.version for version in repository.unloaded] == ["2"]


async def test_replaced_version_is_dropped_for_another_of_its_number(tmp_path: Path) -> None:
    """Batches name a version by its number, which can mean one version only."""
    repository = Repository(tmp_path)
    await repository.replace_first()
    shutil.rmtree(tmp_path / "digits")
    add_version(tmp_path, "digits", 1, digits(weight=2))
    await repository.models.reload()
    assert repository.models.catalog.lookup("digits", "1") is not repository.first
    assert repository.first in repository.unloaded


async def test_removed_model_is_kept_like_replaced_version(tmp_path: Path) -> None:
    """Ingest may learn of the removal later."""
    repository = Repository(tmp_path)
    shutil.rmtree(tmp_path / "digits")
    await repository.models.reload()
    assert repository.models.catalog.lookup_bound("digits", "1") is repository.first
    assert refusal(repository.models, "digits").code == Code.UNKNOWN_MODEL


async def test_unloaded_version_that_is_selected_again_says_why_it_is_not_ready(
    tmp_path: Path,
) -> None:
    """Its refusals give the reason, which is not that it was replaced for a while."""
    repository = Repository(tmp_path)
    repository.models.lifecycle.mark_unloaded(repository.first, "unloaded while idle")
    await repository.replace_first()
    assert repository.first.reason == "unloaded while idle"
    shutil.rmtree(tmp_path / "digits" / "2")
    await repository.models.reload()
    assert repository.models.catalog.lookup("digits") is repository.first
    assert repository.first.reason == "unloaded while idle"
