"""Configurations that callers send with a load."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from headrace.config import make_settings
from headrace.control.repository_api import ControlledRepository
from headrace.errors import Rejected
from headrace.log.memory import MemoryLog
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.s3_bucket import Absence, S3Bucket


class NoModels:
    """A process without models."""

    def status(self) -> list[dict[str, Any]]:
        return []


class CountingThreads(ThreadPoolExecutor):
    """Threads that count what they are given."""

    given = 0

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        self.given += 1
        return super().submit(*args, **options)


@pytest.fixture
def repository() -> ControlledRepository:
    """The repository API of a process whose models may be changed by calls."""
    return ControlledRepository(MemoryLog(), make_settings({}), NoModels(), lambda: None)


async def test_configuration_is_read_beside_event_loop(repository: ControlledRepository) -> None:
    """Protobuf reads JSON in Python, which takes a second for 1 MB."""
    threads = CountingThreads(1)
    asyncio.get_running_loop().set_default_executor(threads)
    with pytest.raises(Rejected, match=r"parameters\.config: name: expected digits, got x"):
        await repository.load("digits", {"config": '{"name": "x"}'}, "anyone")

    assert threads.given == 1


async def test_large_configuration_is_refused_unread(repository: ControlledRepository) -> None:
    """The sentence has the limit, and not that this is no JSON."""
    most = TUNING.control.config_characters
    expected = rf"parameters\.config: expected at most {most} characters, got {most + 1}"
    with pytest.raises(Rejected, match=expected):
        await repository.load("digits", {"config": "x" * (most + 1)}, "anyone")
    with pytest.raises(Rejected, match="Expecting value"):
        await repository.load("digits", {"config": "x" * most}, "anyone")


async def test_index_whose_callers_hang_up_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading takes a thread until the store answers, however many callers have gone."""
    async with S3Bucket() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bucket.objects["digits/1/manifest.json"] = b"{}"
        settings = make_settings({"models": {"repository": "s3://models"}})
        repository = ControlledRepository(MemoryLog(), settings, NoModels(), lambda: None)
        await repository.index(ready_only=False)
        requests_of_reading = bucket.requests
        await bucket.go_away(Absence.SILENT)
        for _ in range(3):
            call = asyncio.create_task(repository.index(ready_only=False))
            await eventually(lambda: bucket.requests > requests_of_reading)
            call.cancel()
        last = asyncio.create_task(repository.index(ready_only=False))
        await bucket.come_back()

        assert [(each["name"], each["version"]) for each in await last] == [("digits", "1")]
        assert bucket.requests == 2 * requests_of_reading
