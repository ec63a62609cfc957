"""Child process that runs one of this package's modules in a fresh interpreter.

It inherits no socket, no lock and no thread. On Linux the kernel kills it when the thread that
started it ends (`PR_SET_PDEATHSIG` in prctl(2)), as it does when the whole process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def start_child(
    module: str,
    *arguments: str,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
    niceness: int = 0,
) -> subprocess.Popen[bytes]:
    """Start a module as a child process. The id of this process is passed as its last argument.

    With a `niceness` above 0, other processes have priority from the child's first import on.
    """
    child = subprocess.Popen(  # noqa: S603 - our own module
        [*interpreter(module), *arguments, str(os.getpid())],
        stdin=stdin,
        stdout=stdout,
        pass_fds=pass_fds,
        env={**os.environ, **import_path()},
        start_new_session=True,
    )
    if niceness:
        lower_priority(child.pid, niceness)
    return child


def interpreter(module: str) -> list[str]:
    """Return the command that runs a module without the modules of the working directory, which may
    have the names of others; `import_path` has its environment.
    """
    return [sys.executable, "-P", "-m", module]


def import_path() -> dict[str, str]:
    """Return the variable by which a child process finds the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


def lower_priority(pid: int, niceness: int, proc: Path = Path("/proc")) -> None:
    """Give other processes priority over a process and over its session, as far as allowed.

    Args:
        pid: id of a process that leads a session of its own.
        niceness: 1 to 19, of both.
        proc: where the system's files of processes are.
    """
    # Either may fail alone: the process has ended, it may not be done, or there is no such file.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    # Linux divides the processor between sessions first, and only then by their processes'
    # niceness ("The autogroup feature" in sched(7)).
    with suppress(OSError):
        (proc / f"{pid}/autogroup").write_text(str(niceness), encoding="ascii")


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this child when its parent dies; return False if it has died already.

    The child ignores SIGINT and SIGTERM from now on, which reach a whole process group or control
    group: stopping it is its parent's business.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return die_with_parent(parent)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> bool:
    """Let the kernel send this process a signal when its parent dies; return False if it has died
    already.

    Linux only; elsewhere a child outlives a killed parent.
    """
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the signal was requested.
    return os.getppid() == parent


def describe_exit(code: int) -> str:
    """Return the name of the signal that ended a child, or its exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
