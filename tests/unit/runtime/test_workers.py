"""Worker processes: who is started again, and how all of them stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from headrace.primitives.backoff import Backoff
from headrace.runtime.shutdown import Stop
from headrace.runtime.workers import WorkerCommand, Workers
from headrace.tuning import TUNING
from tests.support.conditions import eventually

QUICK = replace(TUNING.runtime, worker_restart=Backoff(0.01, 0.01))
UNUSABLE = 2
NOTE = "import os, sys; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); "
DRAINING = (
    "import signal; signals = {signal.SIGTERM, signal.SIGHUP}; "
    "signal.pthread_sigmask(signal.SIG_BLOCK, signals); "
    f"{NOTE} got = [signal.sigwait(signals) for _ in range(int(sys.argv[2]))]; "
    "sys.exit(0 if got[-1] == signal.SIGTERM else 3)"
)
"""Ends well with the last of so many signals, if that is SIGTERM."""


def command(code: str, *arguments: object, **environment: str) -> WorkerCommand:
    return WorkerCommand([sys.executable, "-S", "-c", code, *map(str, arguments)], environment)


def pids_in(folder: Path) -> set[int]:
    return {int(each.name) for each in folder.iterdir()}


@asynccontextmanager
async def running(
    commands: Sequence[WorkerCommand],
) -> AsyncIterator[tuple[Workers, Stop, asyncio.Task[int]]]:
    """Workers, whose end is awaited when the context is left."""
    stop, workers = Stop(), Workers(commands, UNUSABLE, QUICK)
    task = asyncio.create_task(workers.run(stop), name="workers")
    try:
        yield workers, stop, task
    finally:
        stop.request()
        await task


async def test_worker_that_ends_is_started_again(tmp_path: Path) -> None:
    """However it ends: well, by a signal, or with a failure."""
    ending = [f"{NOTE} sys.exit({code})" for code in (0, 1)]
    killed = f"{NOTE} import signal; os.kill(os.getpid(), signal.SIGKILL)"
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    commands = [
        command(code, folder) for code, folder in zip([*ending, killed], folders, strict=True)
    ]
    async with running(commands):
        await eventually(lambda: all(len(pids_in(folder)) > 1 for folder in folders))


async def test_stop_is_passed_on_and_awaited(tmp_path: Path) -> None:
    """All of them drain, and the exit code says so; none is started again."""
    async with running([command(DRAINING, tmp_path, 1)] * 2) as (_, stop, task):
        await eventually(lambda: len(pids_in(tmp_path)) == 2)
        stop.request()
        assert await task == 0

    assert len(pids_in(tmp_path)) == 2


async def test_second_stop_is_passed_on(tmp_path: Path) -> None:
    """It ends a drain at once."""
    noted = tmp_path / "noted"
    hearing = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); "
        f"{NOTE} signal.sigwait({{15}}); open({str(noted)!r}, 'w').close(); signal.sigwait({{15}})"
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    async with running([command(hearing, pids)]) as (_, stop, task):
        await eventually(lambda: len(pids_in(pids)) == 1)
        stop.request()
        await eventually(noted.exists)
        stop.request()
        assert await task == 0


async def test_failure_of_drain_is_in_exit_code(tmp_path: Path) -> None:
    """One of two suffices."""
    failing = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{15}}); {NOTE}"
    failing += "signal.sigwait({15}); sys.exit(1)"
    commands = [command(DRAINING, tmp_path, 1), command(failing, tmp_path)]
    async with running(commands) as (_, stop, task):
        await eventually(lambda: len(pids_in(tmp_path)) == 2)
        stop.request()
        assert await task == 1


async def test_other_signals_reach_all_workers(tmp_path: Path) -> None:
    """SIGHUP, which looks for changed models."""
    async with running([command(DRAINING, tmp_path, 2)] * 2) as (workers, stop, task):
        await eventually(lambda: len(pids_in(tmp_path)) == 2)
        workers.send(signal.SIGHUP)
        stop.request()
        assert await task == 0


async def test_unusable_settings_at_first_start_end_all(tmp_path: Path) -> None:
    """To start it again would change nothing; the others are stopped."""
    commands = [command(DRAINING, tmp_path, 1), command(f"raise SystemExit({UNUSABLE})")]
    async with running(commands) as (_, _, task):
        assert await task == UNUSABLE


async def test_unusable_settings_at_later_start_leave_others(tmp_path: Path) -> None:
    """They still have what they began with, and the next start may find the file mended."""
    marked = tmp_path / "started-before"
    counted = tmp_path / "pids"
    counted.mkdir()
    code = (
        f"{NOTE} first = not os.path.exists({str(marked)!r}); open({str(marked)!r}, 'w').close(); "
        f"sys.exit(0 if first else {UNUSABLE})"
    )
    async with running([command(code, counted)]) as (_, _, task):
        await eventually(lambda: len(pids_in(counted)) > 2)
        assert not task.done()


async def test_worker_that_cannot_be_started_leaves_others_and_is_tried_again(
    tmp_path: Path,
) -> None:
    """When the machine has no process left, the other workers must not lose their parent."""
    pids, late = tmp_path / "pids", tmp_path / "late"
    pids.mkdir()
    commands = [command(DRAINING, pids, 1), WorkerCommand([str(late)], {})]
    async with running(commands) as (_, stop, task):
        await eventually(lambda: len(pids_in(pids)) == 1)
        script = tmp_path / "script"
        script.write_text(f"#!/bin/sh\ntouch {pids}/$$\nexec sleep 600\n")
        script.chmod(0o755)
        script.rename(late)
        await eventually(lambda: len(pids_in(pids)) == 2)
        stop.request()
        assert await task == 0
