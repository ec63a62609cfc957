"""Free ports that stay free."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Container

from headrace.tools.local_kafka.errors import BrokerUnavailable

_FIRST, _LAST = 20_000, 32_000
"""Below the ports that Linux uses for outgoing connections (32768 and up). While a node is down, a
client of that node could take such a port: even by trying to connect to it, which then connects to
itself.
"""
_ATTEMPTS = 200


def free_port(taken: Container[int], host: str) -> int:
    """Return a random port that is not in `taken` and that nothing listens on.

    It is random so that two processes that choose at once rarely choose the same.

    Raises:
        BrokerUnavailable: a few hundred attempts found none.
    """
    for _ in range(_ATTEMPTS):
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        if port not in taken and is_free(port, host):
            return port
    raise BrokerUnavailable(f"{_ATTEMPTS} ports between {_FIRST} and {_LAST} are all in use")


def is_free(port: int, host: str) -> bool:
    """Return whether a server could listen there now, as Java's do (with SO_REUSEADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
