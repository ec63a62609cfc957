"""The README's code, run as it stands there but for the broker's address and the namespace."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import AsyncIterator

import pytest

from headrace.tools.local_kafka import LocalKafka
from tests.support.processes import Process, create_topics, environment, run_program
from tests.support.tree import ROOT

ADDRESS = "127.0.0.1:9092"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
async def settings(kafka: LocalKafka, unique_name: str) -> AsyncIterator[dict[str, str]]:
    """The settings of a Headrace that serves the demo's models while the test runs."""
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    settings = environment(kafka.bootstrap_servers, unique_name, models)
    await create_topics(settings)
    async with Process("ingest,batcher,executor,responder", settings):
        yield settings


async def test_plain_producer_and_consumer_get_digit(settings: dict[str, str]) -> None:
    """The example with aiokafka prints what the image shows."""
    plain, _ = _blocks(settings)

    assert await run_program([sys.executable, "-c", plain], settings) == "[8]\n"


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

    assert await run_program([sys.executable, "-c", script], settings) == "[8]\n"


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
