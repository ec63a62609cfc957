"""Programs under measurement: started, looked at through /proc, and ended."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHOWN_LINES = 3
SHOWN_CHARACTERS = 300


class ProgramFailed(Exception):
    """A program under measurement ended by itself, or did not get on."""


class Program(NamedTuple):
    """A command line, and what is set in its environment over ours."""

    command: Sequence[str | Path]
    environment: Mapping[str, str] = {}


def cpu_s(pid: int) -> float:
    """The processor time of a process until now, all threads and the kernel's part in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def without_directories(text: str) -> str:
    """A text as it may stand in results: paths from where we are, or by their names alone."""
    for directory in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
        text = text.replace(f"{directory}/", "")
    return text


class Running:
    """Some programs, from entering to leaving; they are killed in the end.

    There is nothing to be saved from them: each run has topics and a group of its own.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        try:
            for program in self._programs:
                self._processes.append(self._start(program))
        except BaseException:
            self._end()
            raise
        return self

    def _start(self, program: Program) -> subprocess.Popen[bytes]:
        ours = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
        return subprocess.Popen(
            program.command,
            env={**ours, **program.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._output.close()

    @property
    def output(self) -> str:
        """What they have printed so far."""
        return os.pread(self._output.fileno(), 10_000_000, 0).decode(errors="replace")

    def last_words(self) -> str:
        """The end of what they have printed, without the directories of this machine."""
        text = without_directories(self.output)
        lines = [line.strip() for line in text.splitlines() if line.strip(" |-+^~")]
        return " / ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]

    def check(self) -> None:
        """Raises `ProgramFailed` when one of them has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise ProgramFailed(f"ended with {process.returncode}: {self.last_words()}")

    def cpu_s(self) -> float:
        """The processor time of all of them until now."""
        return sum(self.cpu_each_s())

    def cpu_each_s(self) -> list[float]:
        """The processor time of each until now, in the order of the programs."""
        return [cpu_s(process.pid) for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to all of them."""
        for process in self._processes:
            process.send_signal(number)

    def resident_bytes(self) -> int:
        """The memory of all of them now."""
        return sum(resident_bytes(process.pid) for process in self._processes)
