"""Processes by name, so that a successor can tell that one is gone.

A consumer group does not notice that a member has died before its session has timed out, and lets
nobody begin until then. A process that is started again on the same machine, or in the same
container, can know better: it asks the machine.

A name is `host/boot/namespace/pid/start`: the host's name, the machine's boot id, the number of the
namespace of process ids, the process id, and when the process started, in clock ticks since boot.
Where `/proc` is not as Linux has it, a process has no name, and nobody takes it for gone.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19
_GONE = frozenset("ZX")


def process_name(pid: int | None = None) -> str:
    """The name of a process of this machine, or of this one; empty where it has none."""
    pid = os.getpid() if pid is None else pid
    host = socket.gethostname()
    start = _start(pid)
    if start is None or host.startswith("localhost"):
        return ""
    try:
        boot = _BOOT_ID.read_text("ascii").strip()[:8]
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    return f"{host}/{boot}/{namespace}/{pid}/{start}"


def is_gone(name: str) -> bool:
    """Whether the process of this name has certainly ended.

    In a container that was started again the process ids are counted anew: there the former
    process had the same id as this one has now.
    """
    ours = process_name()
    if not (name and ours) or name == ours:
        return False
    host, boot, namespace, pid, start = name.split("/")
    our_host, our_boot, our_namespace, our_pid, _ = ours.split("/")
    if host != our_host:
        return False
    if boot != our_boot:
        return True
    if namespace != our_namespace:
        return pid == our_pid
    return _start(int(pid)) != start


def _start(pid: int) -> str | None:
    """When a process started; None when there is none with this id, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    state, *rest = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return None if state in _GONE else rest[_START_FIELD - 1]
