"""Replaces itself by another command, which the system kills when its parent process dies.

This file is run, never imported: `python die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]`.
Setting the signal between fork and exec in the parent (`preexec_fn`) is not safe in a process with
threads. A small program that sets it and then execs the command is safe, and keeps the process id.
Linux only (`PR_SET_PDEATHSIG` in prctl(2)); elsewhere the command outlives a killed parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Request the signal, then exec `command`."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            sys.exit(1)  # The parent died before the signal was requested.
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
