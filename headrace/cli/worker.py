"""`python -m headrace.cli.worker PARENT_PID COMMAND ...`: the command line, in a worker process.

On Linux the worker drains when its parent dies, however it dies, so that a supervisor that starts
the parent again finds no workers of the one before. Elsewhere it outlives a killed parent.
"""

from __future__ import annotations

import signal
import sys

from headrace.cli.group import main
from headrace.primitives.child_process import die_with_parent

if __name__ == "__main__":
    if not die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM):
        sys.exit(-signal.SIGTERM)
    main(prog_name="headrace")
