"""The broker's configuration (`server.properties`), computed from ports and choices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLAINTEXT = "PLAINTEXT"
SECURE = "SASL_SSL"
CONTROLLER = "CONTROLLER"
HOST = "127.0.0.1"

_MIB = 1024 * 1024

SMALL_AND_QUICK: Mapping[str, str] = {
    # The default is 50 partitions each; with only one, faults between partitions would not show.
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.num.partitions": "8",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # Expire the session of a killed node sooner than Kafka's 9 s, so that it may come back.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # A misspelled topic must be an error, not a new topic.
    "auto.create.topics.enable": "false",
    # The cleaner's buffer would be 128 MiB by default, a quarter of the heap.
    "log.cleaner.dedupe.buffer.size": str(4 * _MIB),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
}
"""Differences from Kafka's defaults on every local broker. `group.coordinator.append.linger.ms` is
left at its default on purpose: it determines how long a commit takes, and so what is measured.
"""


@dataclass(frozen=True, slots=True)
class NodePorts:
    """Ports of one node; `secure` is 0 without a secure listener."""

    plaintext: int
    controller: int
    secure: int = 0


def server_properties(
    node_id: int,
    ports: Sequence[NodePorts],
    log_directory: Path,
    *,
    security: Mapping[str, str],
    overrides: Mapping[str, str],
) -> dict[str, str]:
    """Return the settings of node `node_id` among `len(ports)` nodes, all of them controllers.

    Args:
        node_id: from 1.
        ports: of all nodes, in the order of their ids.
        log_directory: the node's data directory.
        security: settings of the secure listener; empty for none.
        overrides: settings that override all others.
    """
    return (
        _identity(node_id, ports, log_directory)
        | _listeners(ports[node_id - 1])
        | _replication(len(ports))
        | dict(SMALL_AND_QUICK)
        | dict(security)
        | dict(overrides)
    )


def _identity(node_id: int, ports: Sequence[NodePorts], log_directory: Path) -> dict[str, str]:
    voters = (f"{number}@{HOST}:{each.controller}" for number, each in enumerate(ports, start=1))
    return {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": ",".join(voters),
        "log.dirs": str(log_directory),
    }


def _listeners(ports: NodePorts) -> dict[str, str]:
    clients = [f"{PLAINTEXT}://{HOST}:{ports.plaintext}"]
    if ports.secure:
        clients.append(f"{SECURE}://{HOST}:{ports.secure}")
    return {
        "listeners": ",".join([*clients, f"{CONTROLLER}://{HOST}:{ports.controller}"]),
        "advertised.listeners": ",".join(clients),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": PLAINTEXT,
        "listener.security.protocol.map": (
            f"{CONTROLLER}:{PLAINTEXT},{PLAINTEXT}:{PLAINTEXT},{SECURE}:{SECURE}"
        ),
    }


def _replication(nodes: int) -> dict[str, str]:
    replicas = str(min(nodes, 3))
    in_sync = str(max(1, min(nodes, 3) - 1))
    return {
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def render(properties: Mapping[str, str]) -> str:
    """Return the text of a Java properties file, in ASCII. Source: `java.util.Properties.load`.

    Raises:
        ValueError: a key contains anything but letters, digits, `.`, `_` and `-`.
    """
    lines = []
    for key, value in properties.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", key):
            raise ValueError(f"expected the name of a broker setting, got {key!r}")
        # JSON's escapes are valid in Java too, including those of non-ASCII characters.
        lines.append(f"{key}={json.dumps(value)[1:-1]}\n")
    return "".join(lines)
