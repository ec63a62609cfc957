"""A Java process: started, signalled and awaited, independent of any event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.tools.local_kafka.installation import BrokerFailed

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_POLL_S = 0.02
_LOG_TAIL_BYTES = 4000


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition` is true; return False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        # Child processes outlive a single test's event loop, so no loop can watch them.
        await asyncio.sleep(_POLL_S)
    return True


class JvmProcess:
    """A process that runs `command` in `directory`, with its output in `<directory>/<name>.log`.

    On Linux the process is killed when the thread that spawned it ends, so spawn it from a thread
    that lives as long as the process, such as the main thread.
    """

    def __init__(self, name: str, directory: Path, command: Sequence[str]) -> None:
        self.name = name
        self.directory = directory
        self.command = tuple(command)
        self.log_file = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_running(self) -> bool:
        """True while the process exists, paused or not."""
        return self.pid is not None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last process; negative for a signal, None if none has ended."""
        return None if self._process is None else self._process.poll()

    def spawn(self) -> None:
        """Start the process without waiting."""
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
                # Ctrl-C in a terminal is meant for us; we stop the broker afterwards.
                process_group=0,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process exists."""
        if self._process is not None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """Pause the process (SIGSTOP). On Linux, return when all its threads have stopped."""
        self.signal(signal.SIGSTOP)
        pid = self.pid
        if pid is not None and sys.platform == "linux":
            # A thread that runs on another core goes on for a moment. Leave the state to be read
            # again by others: an exit would be that of `subprocess`.
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Resume a paused process."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Request a clean exit, also of a paused process."""
        self.signal(signal.SIGTERM)
        self.resume()

    async def wait(self, timeout_s: float) -> bool:
        """Return whether the process ended within `timeout_s`."""
        return await wait_until(lambda: not self.is_running, timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Stop the process: by request, and after `timeout_s` by force."""
        try:
            self.terminate()
            await self.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process, as in a crash, and reap it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()  # Only the kernel can delay SIGKILL.

    def failure(self, expected: str) -> BrokerFailed:
        """Return an error with what was expected, what the process did, and the end of the log."""
        status = self.exit_status
        state = "still runs" if status is None else f"ended with status {status}"
        return BrokerFailed(
            f"{self.name}: expected {expected}, but it {state}; the end of its log:\n{self.tail()}"
        )

    def tail(self) -> str:
        """Return the last part of the log."""
        if not self.log_file.exists():
            return ""
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
