"""Models in an object store, changed by commands, on a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.outcome import Exit
from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import STAGES
from tests.support.command_line import Call
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.pipelines import serving
from tests.support.versitygw import Versitygw

IMAGE = {"pixels": np.ones((1, 64), np.float32)}


@pytest.mark.timeout(120)
async def test_versions_pushed_to_s3_are_loaded_named_rolled_back_and_unloaded(
    kafka: LocalKafka,
    unique_name: str,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    versitygw_program: Path,
) -> None:
    """After each command, each name is answered by the version that it is to have."""
    settings = make_settings(
        {
            "namespace": unique_name,
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "topics": {"partitions": 1},
            "models": {
                "repository": "s3://models",
                "cache_dir": tmp_path / "cache",
                "mode": "explicit",
                "keep_replaced_s": 0,
                "trial_load": False,
            },
        }
    )

    async def run(*arguments: str, here: bool = False) -> None:
        """Run a command; `here`, with the repository in the current directory."""
        given = None if here else settings
        ended = await asyncio.to_thread(call, "models", *arguments, obj=given)
        assert ended.exit_code == Exit.DONE, ended.output

    async def push(number: int) -> None:
        """Put a version into the bucket, which multiplies by its number."""
        add_version(tmp_path / "models", "digits", number, digits(number), "probe = false")
        await run("pack", "digits", str(number), here=True)
        await run("push", "digits", str(number), "--to", "s3://models", here=True)

    async def answered_by(name: str, version: str | None = None) -> str:
        """Return the version that answers, by its outputs, or the code of the refusal."""
        try:
            response = await client.infer(name, IMAGE, version=version)
        except InferenceError as error:
            return error.code
        return f"{response.outputs['scores'][0][1] / 64:.0f}"

    async def is_answered_by(expected: str, name: str, version: str | None = None) -> None:
        async def holds() -> bool:
            return await answered_by(name, version) == expected

        await eventually(holds, what=f"{name}/{version} is {expected}", recheck_s=0.05)

    async with Versitygw(versitygw_program, tmp_path / "store") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        async with open_log(settings) as log:
            await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
            async with serving(settings, log, [STAGES]), Client(settings=settings) as client:
                await push(1)
                await run("load", "digits", "1", "--wait")
                assert await answered_by("digits") == "1"
                await push(2)
                await run("load", "digits", "2", "--wait")
                assert await answered_by("digits", "2") == "2"
                assert await answered_by("digits") == "1"
                await run("label", "digits", "canary", "2")
                await is_answered_by("2", "digits@canary")
                await run("default", "digits", "2")
                await is_answered_by("2", "digits")
                await run("rollback", "digits", "--to", "2")
                await is_answered_by("1", "digits")
                await run("unload", "digits", "2")
                await is_answered_by("UNKNOWN_MODEL", "digits", "2")
                assert await answered_by("digits") == "1"
