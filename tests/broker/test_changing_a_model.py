"""The page about changing a model: each of its commands is run as it stands, on a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import tritonclient.http as triton

from headrace.tools.local_kafka import LocalKafka
from tests.support.processes import Process, create_topics, headrace
from tests.support.tree import ROOT

DIGITS = ROOT / "headrace" / "tools" / "demo" / "models" / "digits" / "1"
BLOCK = re.compile(r"^```(sh|toml)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The page's code blocks of a language."""
    page = (ROOT / "docs" / "changing-a-model.md").read_text(encoding="utf-8")
    return [text for name, text in BLOCK.findall(page) if name == language]


def commands() -> list[list[str]]:
    """The arguments of the page's commands, in their order."""
    return [shlex.split(line)[1:] for block in blocks("sh") for line in block.splitlines()]


def settings_of_page(kafka: LocalKafka, namespace: str, directory: Path) -> dict[str, str]:
    """The page's settings, with this test's broker and namespace, and its repository."""
    (text,) = blocks("toml")
    tomllib.loads(text)
    text = text.replace("127.0.0.1:9092", kafka.bootstrap_servers)
    text = text.replace('namespace = "headrace"', f'namespace = "{namespace}"')
    repository = directory / "models"
    for version in ("1", "2"):
        shutil.copytree(DIGITS, repository / "digits" / version)
    path = directory / "headrace.toml"
    path.write_text(text.replace('"models"', json.dumps(os.fspath(repository))), encoding="utf-8")
    return {"HEADRACE_CONFIG": os.fspath(path)}


STAGES = ("ingest", "batcher", "executor", "responder")
START_DEADLINE_S = 120.0
"""The processes start at once."""


@asynccontextmanager
async def processes_of_stages(settings: dict[str, str]) -> AsyncIterator[None]:
    """A process for each stage."""
    async with AsyncExitStack() as stack:
        processes = [Process(stage, settings, (), START_DEADLINE_S) for stage in STAGES]
        await asyncio.gather(*[stack.enter_async_context(each) for each in processes])
        yield


@pytest.mark.timeout(300)
async def test_commands_of_page_change_all_processes(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """The stages apart follow all commands in the page's order; at the end version 1 is the default
    again. Fused processes follow Triton's clients below.
    """
    settings = settings_of_page(kafka, unique_name, tmp_path)
    create, run, *changes = commands()
    assert (create, run) == (["topics", "create"], ["run"])
    await headrace(create, settings)
    async with processes_of_stages(settings):
        printed = [await headrace(each, settings) for each in changes]
        status = json.loads(await headrace(["models", "status", "--json"], settings))
    assert status["models"] == {"digits": {"versions": ["1"], "default": "1"}}
    assert status["followed"]
    assert [report["generation"] for report in status["processes"].values()] == [9] * len(STAGES)
    history = json.loads(printed[-1])
    assert [(each["action"], each["why"]) for each in history] == [
        ("load", "first release"),
        ("load", ""),
        ("label", ""),
        ("default", "ticket 4711"),
        ("label", ""),
        ("unload", ""),
        ("load", "ticket 4712"),
        ("load", "ticket 4713"),
        ("rollback", "worse on night images"),
    ]


async def test_version_that_is_not_there_is_refused(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """Nothing is written, and the versions of the repository are listed."""
    settings = settings_of_page(kafka, unique_name, tmp_path)
    await create_topics(settings)
    with pytest.raises(AssertionError, match="expected one of the repository, 1, 2, got 7"):
        await headrace(["models", "load", "digits", "7"], settings)
    assert await headrace(["models", "history", "--json"], settings) == "[]\n"


@pytest.mark.timeout(120)
async def test_triton_clients_at_two_processes_change_both(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """A load is answered when both serve it; of two at once the one that loses is told who won."""
    settings = settings_of_page(kafka, unique_name, tmp_path)
    settings["HEADRACE_TELEMETRY__MODEL_CHANGES"] = "anyone"
    await create_topics(settings)
    every = ",".join(STAGES)

    def load(process: Process, version: int) -> str:
        config = {"version_policy": {"specific": {"versions": [version]}}}
        with triton.InferenceServerClient(
            f"127.0.0.1:{process.http_port}", network_timeout=60
        ) as client:
            try:
                client.load_model("digits", config=json.dumps(config))
            except triton.InferenceServerException as error:
                return str(error)
        return ""

    async with Process(every, settings) as one, Process(every, settings) as other:
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(asyncio.to_thread(load, process, version))
                for process, version in ((one, 1), (other, 2))
            ]
        served = [json.loads(await each.get("/v2/models/digits")) for each in (one, other)]

    lost = [call.result() for call in calls if call.result()]
    assert len(lost) < 2
    assert all("409" in each and "expected generation" in each for each in lost)
    assert served[0]["versions"][-1:] == served[1]["versions"][-1:]
    assert served[0]["versions"]
