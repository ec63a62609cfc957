"""A process of Java: started, signalled and awaited, independent of any event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.tools.local_kafka.errors import BrokerFailed

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_POLL_S = 0.02
_LOG_TAIL_BYTES = 4000


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        # Child processes outlive the event loop of one test, so no loop can watch them.
        await asyncio.sleep(_POLL_S)
    return True


class JvmProcess:
    """A process that runs `command` in `directory`, its output in `<directory>/<name>.log`.

    On Linux the process is killed when the thread that spawned it ends, so spawn from a thread
    that lives as long as the process shall: the main one.
    """

    def __init__(self, name: str, directory: Path, command: Sequence[str]) -> None:
        self.name = name
        self.directory = directory
        self.command = tuple(command)
        self.log_file = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_running(self) -> bool:
        """Whether the process is there, paused or not."""
        return self.pid is not None

    @property
    def exit_status(self) -> int | None:
        """How the last process ended; negative for a signal, None if none has."""
        return None if self._process is None else self._process.poll()

    def spawn(self) -> None:
        """Start the process, and do not wait for anything."""
        if self.is_running:
            raise RuntimeError(f"{self.name} runs already, as process {self.pid}")
        shim = [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid())]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line; no shell
                [*shim, *self.command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal is for us; the broker is stopped in its turn.
                process_group=0,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is there."""
        if self._process is not None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """Hold the process; it notices nothing."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a held process go on."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask for a clean end, of a paused process too."""
        self.signal(signal.SIGTERM)
        self.resume()

    async def wait(self, timeout_s: float) -> bool:
        """Whether the process has ended within `timeout_s`."""
        return await wait_until(lambda: not self.is_running, timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """End the process: a request first, after `timeout_s` by force."""
        try:
            self.terminate()
            await self.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process at once, as a crash would, and reap it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()  # Nothing holds up SIGKILL but the kernel.

    def failure(self, expected: str) -> BrokerFailed:
        """An error with the end of the log: what was expected, and what the process did."""
        status = self.exit_status
        state = "still runs" if status is None else f"ended with status {status}"
        return BrokerFailed(
            f"{self.name}: expected {expected}, but it {state}; the end of its log:\n{self.tail()}"
        )

    def tail(self) -> str:
        """The last part of the log."""
        if not self.log_file.exists():
            return ""
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
