"""The command line `headrace` as a process that is forked from one with all modules imported.

A process that is started anew imports for half a second of processor time before it does anything,
and the tests start hundreds. What is run is the same: the command line, in a process of its own.
Tests that are about starting, or about what surrounds a process, start a new one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.cli import main
from headrace.primitives.child_process import die_with_parent

HEADRACE = Path(sys.executable).parent / "headrace"

# Not ONNX Runtime: it starts a thread, which a fork would not have.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "__main__",
        __name__,
        "headrace.cli.event_loop",
        "headrace.cli.gateway",
        "headrace.cli.run",
        "headrace.gateway.gateway",
        "headrace.log.kafka.log",
        "headrace.runtime.process",
        "pydantic_settings",
        "uvloop",
    ]
)

_first: list[object] = []
"""The first process, once it was started."""


class ForkedHeadrace:
    """`headrace ARGUMENTS` as a process, with the methods of `asyncio.subprocess.Process`.

    Args:
        arguments: of the command line.
        environment: all variables of the process.
        output: file to which it appends what it prints.
        prepare: called in the process before the command line runs; can be pickled.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._process = _forks.Process(
            target=_run,
            args=(list(arguments), dict(environment), output, Path.cwd(), prepare),
            daemon=True,  # one that a failed test leaves ends with the tests
        )
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start the process."""
        await _imported()
        # On this thread, like all reading of exit codes: each can be read once, and whoever starts
        # a process reads those of others.
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_exit)

    def _note_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        code = self._process.exitcode
        assert code is not None
        self._exit_code.set_result(code)

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None if it runs."""
        return self._exit_code.result() if self._exit_code.done() else None

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        return await asyncio.shield(self._exit_code)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self._exit_code.done():
            with suppress(ProcessLookupError):  # it has ended, and this loop does not know yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


async def _imported() -> None:
    """Wait until the process from which others are forked has imported all modules."""
    if not _first:
        first = _forks.Process(target=_do_nothing, daemon=True)
        await asyncio.to_thread(first.start)
        _first.append(first)


def _do_nothing() -> None:
    """Run in a process whose start shows that others start quickly."""


def _run(
    arguments: list[str],
    environment: dict[str, str],
    output: Path,
    directory: Path,
    prepare: Callable[[], None] | None,
) -> None:
    """Run the command line in this process, which has just been forked."""
    die_with_parent(os.getppid())  # it ends when the tests are killed
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if prepare is not None:
        prepare()
    main(arguments, prog_name="headrace")
