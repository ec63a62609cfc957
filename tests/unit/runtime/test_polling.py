"""Polling of the repository: what is logged, and what an unavailable store does."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.models.registry import Models, Reloaded
from headrace.runtime.polling import RepositoryPoller
from headrace.telemetry.logs import Event
from tests.support.conditions import eventually
from tests.support.models import add_version, digits, settings_for

NOTHING = Reloaded((), (), (), ())
NEW = NOTHING._replace(added=("digits/2",))
EMPTIED = NOTHING._replace(emptied=("models",))
FAULTY = NOTHING._replace(faults=("digits/2: no model",))
UNAVAILABLE = NOTHING._replace(outages=("s3://models: nobody answers",))
GONE = ConfigurationError("models.repository: models: No such file or directory")


class ScriptedModels:
    """Models whose readings end as a list says; the last outcome repeats."""

    def __init__(self, *outcomes: Reloaded | ConfigurationError) -> None:
        self._outcomes = list(outcomes)
        self.reads = 0
        self.outages: tuple[str, ...] = ()

    async def reload(self, *, retry: bool = True) -> Reloaded:
        assert not retry
        self.reads += 1
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, ConfigurationError):
            raise outcome
        self.outages = outcome.outages
        return outcome


@pytest.mark.parametrize(
    ("outcomes", "events"),
    [
        ((NOTHING, NOTHING), []),
        ((NEW, NOTHING), [Event.MODELS_RELOADED]),
        ((FAULTY, FAULTY, NOTHING), [Event.MODELS_RELOADED, Event.MODELS_RELOADED]),
        (
            (UNAVAILABLE, UNAVAILABLE, NOTHING, UNAVAILABLE),
            [Event.STORE_UNAVAILABLE, Event.STORE_UNAVAILABLE],
        ),
        ((EMPTIED, NOTHING), [Event.REPOSITORY_EMPTIED]),
        ((GONE, GONE, NOTHING, GONE), [Event.MODELS_RELOAD_FAILED, Event.MODELS_RELOAD_FAILED]),
    ],
    ids=["nothing", "version", "fault", "store unavailable", "emptied", "repository gone"],
)
async def test_news_is_logged_once(
    outcomes: tuple[Reloaded | ConfigurationError, ...], events: list[Event]
) -> None:
    """An unchanged outcome is not logged again; one that comes back is."""
    poller = RepositoryPoller(ScriptedModels(*outcomes), 1.0)
    with capture_logs() as logged:
        for _ in outcomes:
            await poller.poll()

    assert [each["event"] for each in logged] == events


async def test_repository_that_was_gone_is_followed_when_it_is_back(tmp_path: Path) -> None:
    """Meanwhile everything serves on."""
    repository = tmp_path / "models"
    add_version(repository, "digits", 1, digits())
    settings: Settings = settings_for(repository)
    models = Models(settings)
    models.open()
    poller = RepositoryPoller(models, 1.0)
    shutil.move(repository, tmp_path / "elsewhere")
    await poller.poll()
    assert models.catalog.lookup("digits").version == "1"

    shutil.move(tmp_path / "elsewhere", repository)
    add_version(repository, "digits", 2, digits())
    await poller.poll()
    assert models.catalog.lookup("digits").version == "2"


async def test_repository_is_read_again_and_again() -> None:
    """The poller reads the repository until the process ends."""
    models = ScriptedModels(NOTHING)
    async with asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(RepositoryPoller(models, 0.001).run())
        await eventually(lambda: models.reads > 2)
        polling.cancel()


async def test_repository_is_read_after_outage_until_store_is_available() -> None:
    """Otherwise it is not looked at."""
    models = ScriptedModels(UNAVAILABLE, NOTHING)
    async with asyncio.TaskGroup() as tasks:
        poller = RepositoryPoller(models, 0.001, after_outage=True)
        polling = tasks.create_task(poller.run())
        models.outages = UNAVAILABLE.outages
        await eventually(lambda: not models.outages, what="the store is available")
        polling.cancel()
    assert models.reads == 2
