"""The clients in other languages, each built and run as a user would."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.tools.local_kafka import LocalKafka, install
from tests.support.processes import Process, create_topics, environment, run_program
from tests.support.tree import ROOT

BUILD_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 40.0


@pytest.fixture
async def settings(kafka: LocalKafka, unique_name: str) -> AsyncIterator[dict[str, str]]:
    """The environment of an example whose digits are read while the test runs."""
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    settings = environment(kafka.bootstrap_servers, unique_name, models)
    await create_topics(settings)
    async with Process("ingest,batcher,executor,responder", settings):
        yield {"BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "NAMESPACE": unique_name}


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the examples, to build in."""
    ignored = shutil.ignore_patterns("node_modules")
    return Path(shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=ignored))


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skip a test where a tool chain is missing."""
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs("node", "npm")
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_javascript_example_prints_digit(settings: dict[str, str], examples: Path) -> None:
    """kafkajs, from its lock file."""
    folder = examples / "javascript"
    await run_program(["npm", "ci", "--silent"], {}, folder, BUILD_TIMEOUT_S)
    assert await run_program(["node", "digits.js"], settings, folder, RUN_TIMEOUT_S) == "[ 8 ]\n"


@needs("java", "javac")
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_java_example_prints_digit(settings: dict[str, str], examples: Path) -> None:
    """kafka-clients, of the jars that the broker itself runs on."""
    folder = examples / "java"
    class_path = os.pathsep.join([".", *map(str, install().jars)])
    await run_program(["javac", "-cp", class_path, "Digits.java"], {}, folder, BUILD_TIMEOUT_S)
    command = ["java", "-cp", class_path, "Digits"]
    printed = await run_program(command, settings, folder, RUN_TIMEOUT_S)
    assert printed.splitlines()[-1] == "[8]"


@needs("go")
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_go_example_prints_digit(settings: dict[str, str], examples: Path) -> None:
    """franz-go, from its module file."""
    folder = examples / "go"
    await run_program(["go", "build", "-o", "digits", "."], {}, folder, BUILD_TIMEOUT_S)
    assert await run_program(["./digits"], settings, folder, RUN_TIMEOUT_S) == "[8]\n"
