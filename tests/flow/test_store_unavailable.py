"""Models in an S3 bucket that becomes unavailable, as long as it likes and in every way."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.log.memory import MemoryLog
from headrace.models.config import read_model_config
from headrace.models.packing.files import make_manifest, write_manifest
from headrace.models.repository import FoundVersion, read_signature
from headrace.topics import STAGES
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.pipelines import log_for, serving
from tests.support.s3_bucket import Absence, S3Bucket

CREATED = datetime(2026, 1, 2, tzinfo=UTC)
QUICK = replace(
    TUNING,
    models=replace(
        TUNING.models,
        store_attempts=2,
        store_retry_first_s=0.001,
        store_retry_max_s=0.001,
        store_cached_s=0.2,
    ),
)
REQUESTS = {
    Absence.REFUSES: 0,  # of which the bucket sees nothing
    Absence.ABORTS: 2 * 40,
    Absence.FAILS: 2 * 40,
    Absence.SILENT: 10,
}
"""Those of 40 polls, as many as in ten minutes with the default interval; fewer where each of them
has to wait.
"""


def settings_with(directory: Path, mode: str = "poll") -> Settings:
    """Settings of a process that looks at the bucket ten times a second."""
    return make_settings(
        {
            "topics": {"partitions": 1},
            "models": {
                "repository": "s3://models",
                "mode": mode,
                "poll_interval_ms": 100,
                "cache_dir": directory / "cache",
                "keep_replaced_s": 0,
                "trial_load": False,
            },
        }
    )


def upload(bucket: S3Bucket, scratch: Path, number: int) -> None:
    """Pack a version and put it into the bucket; version n multiplies by n."""
    directory = scratch / "digits" / str(number)
    add_version(scratch, "digits", number, digits(number), "probe = false")
    config = read_model_config(directory.parent / "model.toml", Settings())
    signature = read_signature(FoundVersion(str(number), directory, ""), config)
    manifest = make_manifest(directory, config, signature, CREATED, {})
    write_manifest(directory, manifest)
    for name in (*manifest.files, "manifest.json"):
        bucket.objects[f"digits/{number}/{name}"] = (directory / name).read_bytes()


@asynccontextmanager
async def using(
    settings: Settings, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[S3Bucket, MemoryLog, Client]]:
    """A bucket with version 1, and a client that asks for it."""
    async with S3Bucket() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        upload(bucket, directory / "made", 1)
        log = await log_for(settings)
        async with Client(log=log, settings=settings) as client:
            yield bucket, log, client


async def version_of_answer(client: Client) -> str:
    """The version that answers, by its outputs and by what it says."""
    response = await client.infer("digits", {"pixels": np.ones((1, 64), np.float32)})
    assert response.model_version == f"{response.outputs['scores'][0][1] / 64:.0f}"
    return response.model_version


@pytest.mark.timeout(120)
@pytest.mark.parametrize("absence", Absence)
async def test_process_restarted_while_bucket_is_unavailable_serves_from_cache_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absence: Absence
) -> None:
    """It looks for the bucket as often as in ten minutes, and then takes the new version."""
    settings = settings_with(tmp_path)
    async with using(settings, tmp_path, monkeypatch) as (bucket, log, client):
        async with serving(settings, log, [STAGES], QUICK):
            assert await version_of_answer(client) == "1"
            await bucket.go_away(absence)
            assert await version_of_answer(client) == "1"
        async with serving(settings, log, [STAGES], QUICK):
            assert await version_of_answer(client) == "1"
            enough = bucket.requests + REQUESTS[absence]
            await eventually(lambda: bucket.requests >= enough, what="it looks for the bucket")
            assert await version_of_answer(client) == "1"
            await bucket.come_back()
            upload(bucket, tmp_path / "made", 2)

            async def has_new_version() -> bool:
                return await version_of_answer(client) == "2"

            await eventually(has_new_version, what="version 2 answers")


async def test_version_that_could_not_be_downloaded_at_start_is_served_after_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a signal, although such a process does not look at its repository otherwise."""
    settings = settings_with(tmp_path, "all")
    async with using(settings, tmp_path, monkeypatch) as (bucket, log, client):
        async with serving(settings, log, [STAGES], QUICK):
            assert await version_of_answer(client) == "1"
        shutil.rmtree(tmp_path / "cache" / "versions")
        await bucket.go_away(Absence.FAILS)
        async with serving(settings, log, [STAGES], QUICK):
            with pytest.raises(InferenceError, match="is unavailable, and the version is not"):
                await version_of_answer(client)
            await bucket.come_back()

            async def is_served() -> bool:
                try:
                    return await version_of_answer(client) == "1"
                except InferenceError:
                    return False

            await eventually(is_served, what="the version answers")
