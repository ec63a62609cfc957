"""`headrace run` as processes of its own, started and stopped as an operator would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from headrace.config import load_settings
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import plan_topics
from tests.support.conditions import eventually
from tests.support.forked import ForkedHeadrace
from tests.support.tree import ROOT

START_DEADLINE_S = 40.0
STOP_DEADLINE_S = 30.0
PROGRAM_TIMEOUT_S = 150.0


class Process:
    """One `headrace run STAGES` against a broker; entered when it says that it is ready.

    Args:
        stages: as on the command line; none for `headrace gateway`.
        environment: settings, as `HEADRACE_…` variables.
        options: before the stages on the command line.
        start_deadline_s: longest time until it is ready.
    """

    def __init__(
        self,
        stages: str,
        environment: dict[str, str],
        options: Sequence[str] = (),
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self._start_deadline_s = start_deadline_s
        self._stages = stages or "gateway"
        self._arguments = ["run", *options, stages] if stages else ["gateway", *options]
        self._environment = {
            **{name: value for name, value in os.environ.items() if "HEADRACE" not in name},
            **environment,
            "HEADRACE_TELEMETRY__HTTP_PORT": "0",
        }
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed in __aexit__
        self._process: ForkedHeadrace | None = None
        self._earlier_output = 0
        self.http_port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Start it, also once more, and wait until `/health/ready` answers 200."""
        self._earlier_output = len(self.output)
        output = Path(self._output.name)
        self._process = ForkedHeadrace(self._arguments, self._environment, output)
        await self._process.start()
        try:
            await eventually(self._is_ready, deadline_s=self._start_deadline_s, recheck_s=0.05)
        except AssertionError as error:
            await self.kill()
            raise AssertionError(
                f"{self._stages} did not get ready: {error}\n{self.output}"
            ) from None
        except BaseException:
            await self.kill()
            raise

    async def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            raise AssertionError(f"exit code {self._process.returncode}")
        found = re.search(r'"http_port": (\d+)', self.output[self._earlier_output :])
        if found is None:
            return False
        self.http_port = int(found[1])
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{self.http_port}/health/ready"
                async with session.get(url) as response:
                    return response.status == 200
        except aiohttp.ClientError:
            return False

    async def get(self, path: str) -> str:
        """Return the answer of the process' HTTP server."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.http_port}{path}") as response,
        ):
            return await response.text()

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.terminate()
        self._output.close()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    async def terminate(self) -> int:
        """SIGTERM; returns the exit code once it has drained."""
        self.send(signal.SIGTERM)
        return await self.wait()

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """The exit code, when it ends by itself."""
        assert self._process is not None
        try:
            async with asyncio.timeout(deadline_s):
                return await self._process.wait()
        except TimeoutError:
            await self.kill()
            raise AssertionError(f"{self._stages} did not end:\n{self.output}") from None

    @property
    def pid(self) -> int:
        """Its id."""
        assert self._process is not None
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Its resident memory."""
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def peak_resident_bytes(self) -> int:
        """The most that it has had resident so far (`VmHWM` of proc_pid_status(5))."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) * 1024

    @property
    def cpu_s(self) -> float:
        """The processor time that its threads have used so far, in the kernel as well."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def is_ready(self) -> bool:
        """Whether `/health/ready` answers 200 now."""
        return await self._is_ready()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    def logged(self, event: str, field: str) -> list[Any]:
        """Return the values of a field in all log lines with an event that have it."""
        return [line[field] for line in self.events if line["event"] == event and field in line]

    @property
    def output(self) -> str:
        """Return what the process has printed so far."""
        return os.pread(self._output.fileno(), 10_000_000, 0).decode(errors="replace")

    @property
    def events(self) -> list[dict[str, object]]:
        """Its log lines."""
        lines = self.output.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def environment(
    bootstrap_servers: str, namespace: str, models: Path, **more: str
) -> dict[str, str]:
    """Settings for `Process`; further ones by their names without the prefix."""
    return {
        "HEADRACE_NAMESPACE": namespace,
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
        "HEADRACE_MODELS__REPOSITORY": str(models),
        **{f"HEADRACE_{name}": value for name, value in more.items()},
    }


async def create_topics(settings: dict[str, str]) -> None:
    """Create the topics of `HEADRACE_…` variables, as `headrace topics create` does, but without
    the half second of a process.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name, value in settings.items():
            patched.setenv(name, value)
        configured = load_settings()
    async with open_log(configured) as log:
        await log.create_topics(
            list(plan_topics(configured).values()),
            replication_factor=configured.topics.replication_factor,
        )


async def headrace(arguments: Sequence[str], settings: dict[str, str]) -> str:
    """Run a command of the CLI to its end, which must be good; return what it printed."""
    with tempfile.NamedTemporaryFile() as output:
        process = ForkedHeadrace(arguments, {**os.environ, **settings}, Path(output.name))
        await process.start()
        try:
            async with asyncio.timeout(PROGRAM_TIMEOUT_S):
                code = await process.wait()
        finally:
            process.kill()
            await process.wait()
        printed = output.read().decode()
    assert code == 0, printed
    return printed


async def run_program(
    command: Sequence[str | Path],
    settings: dict[str, str],
    directory: Path = ROOT,
    timeout_s: float = PROGRAM_TIMEOUT_S,
) -> str:
    """Run a program to its end in a directory, with these variables besides those of the test;
    return what it printed. It must exit with 0.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            printed, failed = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, failed.decode()
    return printed.decode()


def transform_children(parent: int) -> list[int]:
    """The children of a process that transform payloads now."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in children.read_text().split() if _transforms(child)]
    return found


def _transforms(child: str) -> bool:
    return b"headrace.transforms.child" in Path(f"/proc/{child}/cmdline").read_bytes()
