"""Free ports that stay free."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Container

from headrace.tools.local_kafka.errors import BrokerUnavailable

_FIRST, _LAST = 20_000, 32_000
"""Below the ports that Linux hands to outgoing connections (32768 and up). A port from up there
could be taken, while its node is down, by a client of that very node: even by the client's
attempt to connect to it, which then finds itself at the other end."""
_ATTEMPTS = 200


def free_port(taken: Container[int], host: str) -> int:
    """A port on which nothing listens now, not in `taken`; chosen at random, so that two
    processes that choose at once hardly ever choose the same.

    Raises:
        BrokerUnavailable: if a few hundred attempts find none.
    """
    for _ in range(_ATTEMPTS):
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        if port not in taken and is_free(port, host):
            return port
    raise BrokerUnavailable(f"{_ATTEMPTS} ports between {_FIRST} and {_LAST} are all in use")


def is_free(port: int, host: str) -> bool:
    """Whether a server could listen there now, as Java's do (with SO_REUSEADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
