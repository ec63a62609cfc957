"""A store of models that is unavailable for long.

Run it with `python -m tests.chaos.store_unavailable --minutes 10`.

A process serves a model from an S3 bucket, which then refuses connections, fails, and says nothing,
each for a third of the time. In the middle of each third the process is started again. Callers go
on all the time. In the end the bucket is back, and has a new version.

The bucket is that of the tests, or with `--versitygw` a real gateway to a directory, which is
killed, and held (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import aiohttp
import click

from benchmarks.cluster import a_port
from tests.support.conditions import eventually
from tests.support.go_tools import FIXTURES, NotBuilt, build, read_tool
from tests.support.models import add_version, digits
from tests.support.processes import Process, headrace
from tests.support.s3_bucket import BUCKET, Absence, S3Bucket
from tests.support.stand_in_server import HOST
from tests.support.tree import ROOT
from tests.support.versitygw import Versitygw

CALL_EVERY_S = 0.1
CALL_TIMEOUT_S = 30.0
POLL_INTERVAL_MS = 1000
NEW_VERSION_S = 120.0
START_S = 180.0
EVERY = "ingest,batcher,executor,responder"


class Store(Protocol):
    """A bucket that can become unavailable."""

    @property
    def environment(self) -> dict[str, str]: ...
    async def go_away(self, absence: Absence) -> None: ...
    async def come_back(self) -> None: ...


def open_store(directory: Path, *, is_real: bool) -> AbstractAsyncContextManager[Store]:
    """Serve a bucket: by versitygw, or by the stand-in of the tests.

    Raises:
        NotBuilt: versitygw cannot be had on this machine.
    """
    if not is_real:
        return S3Bucket()
    return Versitygw(build(read_tool(ROOT / FIXTURES["versitygw_program"])), directory)


class Restart(NamedTuple):
    """A start of the process while the store was unavailable, and when it was ready."""

    absence: Absence
    ready_s: float


class Found(NamedTuple):
    """The result of a trial in which the store was unavailable.

    Attributes:
        answers: calls that were answered, all by the first version while the store was unavailable.
        wrong: what callers got instead; nothing while the process is being started counts.
        new_version_s: from the end of the upload until the new version answered.
    """

    answers: int
    wrong: list[str]
    restarts: list[Restart]
    new_version_s: float


class Caller:
    """Calls the model through the process' gateway."""

    def __init__(self, port: int) -> None:
        self._url = f"http://{HOST}:{port}/v2/models/digits/infer"
        pixels = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1 / 64] * 64}
        self._body = {"inputs": [pixels]}
        self.is_up = asyncio.Event()
        self.answers = 0
        self.wrong: list[str] = []

    async def call(self) -> str:
        """Return the version that answers. Raises `aiohttp.ClientError`."""
        limit = aiohttp.ClientTimeout(CALL_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as http,
            http.post(self._url, json=self._body) as answer,
        ):
            if answer.status != 200:
                return f"{answer.status}: {await answer.text()}"
            found = await answer.json()
        version: str = found["model_version"]
        computed = f"{found['outputs'][0]['data'][1]:.0f}"
        return version if version == computed else f"outputs of {computed} by {version}"

    async def run(self) -> None:
        """Call until cancelled, but not while the process is down."""
        while True:
            await self.is_up.wait()
            version = await self.call()
            if version == "1":
                self.answers += 1
            else:
                self.wrong.append(version)
            await asyncio.sleep(CALL_EVERY_S)


async def measure(
    minutes: float, scratch: Path, say: Callable[[str], None], *, is_real: bool
) -> Found:
    """Run it, with a real store or the stand-in of the tests.

    Raises:
        AssertionError: something does not come.
        NotBuilt: see `open_store`.
    """
    port = a_port()
    async with open_store(scratch / "store", is_real=is_real) as store:
        environment = {
            **store.environment,
            "HEADRACE_MODELS__REPOSITORY": f"s3://{BUCKET}",
            "HEADRACE_MODELS__CACHE_DIR": str(scratch / "cache"),
            "HEADRACE_MODELS__MODE": "poll",
            "HEADRACE_MODELS__POLL_INTERVAL_MS": str(POLL_INTERVAL_MS),
            "HEADRACE_MODELS__KEEP_REPLACED_S": "1",
            "HEADRACE_GATEWAY__HTTP_PORT": str(port),
            "HEADRACE_GATEWAY__GRPC_PORT": "off",
        }
        await upload(scratch / "made", 1, environment)
        caller = Caller(port)
        restarts = []
        process = await start(environment, caller)
        try:
            async with asyncio.TaskGroup() as tasks:
                calling = tasks.create_task(caller.run(), name="caller")
                for absence in (Absence.REFUSES, Absence.FAILS, Absence.SILENT):
                    await store.go_away(absence)
                    await asyncio.sleep(minutes * 60 / 6)
                    caller.is_up.clear()
                    await process.terminate()
                    began_s = time.monotonic()
                    process = await start(environment, caller)
                    restarts.append(Restart(absence, time.monotonic() - began_s))
                    say(f"{restarts[-1]}, {caller.answers} answers, {len(caller.wrong)} wrong")
                    await asyncio.sleep(minutes * 60 / 6)
                    await store.come_back()
                calling.cancel()
            await upload(scratch / "made", 2, environment)
            new_version_s = await _wait_for_new_version(caller)
        finally:
            await process.kill()
    return Found(caller.answers, caller.wrong, restarts, new_version_s)


async def start(environment: dict[str, str], caller: Caller) -> Process:
    """Start the process, and let callers go on when it is ready."""
    process = Process(EVERY, environment, ["--gateway"], START_S)
    await process.start()
    caller.is_up.set()
    return process


async def _wait_for_new_version(caller: Caller) -> float:
    began_s = time.monotonic()

    async def answers() -> bool:
        return await caller.call() == "2"

    await eventually(answers, deadline_s=NEW_VERSION_S, what="the new version", recheck_s=0.05)
    return time.monotonic() - began_s


async def upload(made: Path, number: int, environment: dict[str, str]) -> None:
    """Make a version, pack it, and push it to the store by the commands."""
    add_version(made, "digits", number, digits(number), "probe = false")
    local = {**environment, "HEADRACE_MODELS__REPOSITORY": str(made)}
    await headrace(["models", "pack", "digits", str(number)], local)
    await headrace(["models", "push", "digits", str(number), "--to", f"s3://{BUCKET}"], local)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=10.0, show_default=True)
@click.option("--versitygw", is_flag=True, help="A real store, built with Go if it is not yet.")
def main(minutes: float, versitygw: bool) -> None:
    """Keep a store unavailable; exit code 1 if a caller noticed."""
    with tempfile.TemporaryDirectory() as scratch:
        measuring = measure(minutes, Path(scratch), click.echo, is_real=versitygw)
        try:
            found = asyncio.run(measuring)
        except NotBuilt as reason:
            raise click.ClickException(str(reason)) from reason
    click.echo(f"{found.answers} answers, {len(found.wrong)} wrong: {found.wrong[:3]}")
    click.echo(
        f"new version after {found.new_version_s:.1f} s, of which up to 1 s to the next poll"
    )
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
