"""Programs under measurement: starting and ending them, and reading their usage from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHOWN_LINES = 3
SHOWN_CHARACTERS = 300


class ProgramFailed(Exception):
    """A program under measurement ended unexpectedly, or made no progress."""


class Program(NamedTuple):
    """A command line, environment variables that override ours, and a working directory."""

    command: Sequence[str | Path]
    environment: Mapping[str, str] = {}
    directory: Path | None = None


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process since its start: all threads, user and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def family(pid: int) -> list[int]:
    """Return a process and its running descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def without_directories(text: str) -> str:
    """Shorten absolute paths in a text, for the results."""
    for directory in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
        text = text.replace(f"{directory}/", "")
    return text


def _family_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of those that it has started."""
    total_s = 0.0
    for each in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            total_s += cpu_s(each)
    return total_s


class Running:
    """Some programs that run while the context lasts; leaving it kills them.

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
            cwd=program.directory,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            for pid in family(process.pid)[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.wait()
        self._output.close()

    @property
    def output(self) -> str:
        """The output of the programs until now."""
        return os.pread(self._output.fileno(), 10_000_000, 0).decode(errors="replace")

    def last_words(self) -> str:
        """Return the end of the output, without the directories of this machine."""
        text = without_directories(self.output)
        lines = [line.strip() for line in text.splitlines() if line.strip(" |-+^~")]
        return " / ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARACTERS:]

    def check(self) -> None:
        """Raise `ProgramFailed` if one of them has ended."""
        for process in self._processes:
            if process.poll() is not None:
                raise ProgramFailed(f"ended with {process.returncode}: {self.last_words()}")

    def cpu_s(self) -> float:
        """Return the CPU time of all programs since their start."""
        return sum(self.cpu_each_s())

    def cpu_each_s(self) -> list[float]:
        """Return the CPU time of each since its start, in the order of the programs."""
        return [_family_cpu_s(process.pid) for process in self._processes]

    def signal(self, number: int) -> None:
        """Send a signal to all of them."""
        for process in self._processes:
            process.send_signal(number)

    def resident_bytes(self) -> int:
        """Return the current resident memory of all programs."""
        return sum(resident_bytes(process.pid) for process in self._processes)
