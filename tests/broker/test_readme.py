"""The README's code, run as it stands there but for the broker's address and the namespace."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.tools.local_kafka import LocalKafka
from tests.support.processes import Process, environment, headrace

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:9092"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
DEADLINE_S = 30.0


@pytest.fixture
async def settings(kafka: LocalKafka, unique_name: str) -> AsyncIterator[dict[str, str]]:
    """The settings of a Headrace that serves the demo's models while the test runs."""
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    settings = environment(kafka.bootstrap_servers, unique_name, models)
    await headrace(["topics", "create"], settings)
    async with Process("ingest,batcher,executor,responder", settings):
        yield settings


async def test_plain_producer_and_consumer_get_digit(settings: dict[str, str]) -> None:
    """The example with aiokafka prints what the image shows."""
    plain, _ = _blocks(settings)

    assert await _printed(plain, settings) == "[8]"


async def test_client_gets_digit(settings: dict[str, str]) -> None:
    """The example with the client, given the image of the one before, prints the same."""
    plain, client = _blocks(settings)
    image = re.search(r"^image = .+$", plain, flags=re.MULTILINE)
    assert image is not None
    imports, _, call = client.partition("\n\n")
    script = "\n".join(
        [
            "import asyncio, numpy as np",
            imports,
            image[0],
            "async def main():",
            textwrap.indent(call, "    "),
            "asyncio.run(main())",
        ]
    )

    assert await _printed(script, settings) == "[8]"


def _blocks(settings: dict[str, str]) -> list[str]:
    """The README's Python, on this test's broker and in its namespace."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = settings["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"]
    return [
        block.replace(ADDRESS, address).replace('"headrace.re', f'"{_namespace(settings)}.re')
        for block in BLOCK.findall(text)
    ]


def _namespace(settings: dict[str, str]) -> str:
    return settings["HEADRACE_NAMESPACE"]


async def _printed(script: str, settings: dict[str, str]) -> str:
    """Return what a script, run in the root of the repository, prints; it must exit with 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, errors.decode()
    return output.decode().strip()
