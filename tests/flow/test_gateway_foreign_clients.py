"""Clients of others than Triton, run as the pages say: KServe's, grpcurl and ghz."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.gateways import Served, gateway_of
from tests.support.tree import ROOT, code_blocks

MODELS = ROOT / "headrace" / "tools" / "demo" / "models"
KSERVE = ROOT / ".venv-clients" / "bin" / "python"
"""Its environment, which `make test-tools` makes: its requirements are none of ours."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def command(page: str, program: str) -> str:
    """Return the page's command that begins with this program, with all its lines."""
    (found,) = (
        each
        for block in code_blocks(page, "bash")
        for each in re.split(r"(?<!\\)\n", block)
        if each.startswith(f"{program} ")
    )
    return found


async def run(served: Served, *arguments: str, path: Path | None = None) -> str:
    """Run a program of a page against this gateway; return what it printed."""
    addresses = {"127.0.0.1:8000": served.url, "127.0.0.1:8001": served.grpc}
    pattern = "|".join(map(re.escape, addresses))
    process = await asyncio.create_subprocess_exec(
        *(re.sub(pattern, lambda found: addresses[found[0]], each) for each in arguments),
        cwd=ROOT,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    return printed.decode()


def installed(program: Path, name: str, folder: Path) -> Path:
    """Return a folder for `PATH` in which a program has its name without a version."""
    (folder / name).symlink_to(program)
    return folder


@pytest.mark.parametrize("page", ["http.md", "grpc.md"])
async def test_kserve_example_of_page_prints_label(page: str) -> None:
    """The answer of KServe's client to an empty image."""
    if not KSERVE.exists():
        pytest.skip("KServe's client is not installed: run `make test-tools`")
    (code,) = code_blocks(page, "python kserve")
    async with gateway_of(MODELS, grpc_port=0) as served:
        printed = await run(served, str(KSERVE), "-c", code)

    assert re.search(r"^\[\d\]$", printed, flags=re.MULTILINE), printed


async def test_grpcurl_example_of_page_prints_answer(grpcurl: Path, tmp_path: Path) -> None:
    """It finds the messages by reflection; the output is the label of the image."""
    said = command("grpc.md", "grpcurl")
    async with gateway_of(MODELS, grpc_port=0) as served:
        printed = await run(
            served, "bash", "-c", said, path=installed(grpcurl, "grpcurl", tmp_path)
        )

    answer = json.loads(printed)
    names = [output["name"] for output in answer["outputs"]]
    label = base64.b64decode(answer["raw_output_contents"][names.index("label")])
    assert np.frombuffer(label, "<i8").tolist() == [8]


async def test_ghz_example_of_page_counts_right_answers_alone(ghz: Path, tmp_path: Path) -> None:
    """A thousand calls of many at once, all of which end well."""
    said = command("grpc.md", "ghz")
    async with gateway_of(MODELS, grpc_port=0) as served:
        printed = await run(served, "bash", "-c", said, path=installed(ghz, "ghz", tmp_path))

    assert re.findall(r"\[(\w+)\]\s+(\d+) responses", printed) == [("OK", "1000")], printed
