"""Processes by name, so that a successor can tell that one is gone.

A consumer group does not notice that a member has died before its session has timed out, and lets
nobody begin until then. A process that is started again on the same machine can know better: it
asks the kernel.

Each process binds a Unix socket in Linux's abstract namespace, under a random name, and holds it
until it ends, in whatever way: then the kernel forgets the name. While the process lives, others
can connect to it. The abstract namespace belongs to a network namespace, so that a process is
called `host/boot/network/token`: the host's name, the machine's boot id, the number of the network
namespace, and the random name. Network namespaces that exist at the same time have different
numbers. So, where all but the token are the asker's own, a name that nobody holds is that of a
process that has ended. Of others nothing is known: not of one in a container with another network,
even where the host is called the same and the process id is the same.
Source: unix(7), namespaces(7).

Where this is not Linux, or the kernel does not let us, a process has no name, and nobody takes it
for gone.
"""

from __future__ import annotations

import functools
import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@functools.cache
def process_name() -> str:
    """The name of this process, from the first call until it ends; empty where it has none."""
    place, token = _place(), secrets.token_hex(8)
    if not place:
        return ""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(_address(token))
    except OSError:
        held.close()
        return ""
    held.detach()  # nobody closes it but the kernel
    return f"{place}/{token}"


def is_gone(name: str) -> bool:
    """Whether the process of this name has certainly ended."""
    place, _, token = name.rpartition("/")
    if not place or place != _place():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_address(token))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # nobody may ask
    return False


def _address(token: str) -> str:
    return f"\0headrace-{token}"


def _place() -> str:
    """Within which each token is one process's."""
    try:
        boot = _BOOT_ID.read_text("ascii").strip()[:8]
        network = _NETWORK.readlink().name.strip("net:[]")
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{network}"
