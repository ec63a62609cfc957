"""The broker's configuration (`server.properties`), computed from ports and choices."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.tools.local_kafka.installation import Installation
from headrace.tools.local_kafka.process import JvmProcess

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
    # An idle controller writes a record each 500 ms by default: a third of an idle node's CPU.
    "metadata.max.idle.interval.ms": "5000",
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


# --- directories ---------------------------------------------------------------------------------


_DATA = "data"
_META_PROPERTIES = "meta.properties"
_CHECKPOINT = "bootstrap.checkpoint"
_SERVER_PROPERTIES = "server.properties"
_CLUSTER_ID = "cluster-id"
_LOG4J = Path(__file__).with_name("log4j2.properties")
_JVM_OPTIONS_VARIABLE = "KAFKA_JVM_PERFORMANCE_OPTS"
_HEAP = ("-Xms256m", "-Xmx512m")
# The format tool runs for half a second, for which the optimising compiler does not pay.
_SHORT_RUN = ("-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class ClusterDirectory:
    """Folder of a cluster with `nodes` nodes."""

    def __init__(self, path: Path, nodes: int) -> None:
        self.path = path
        self.nodes = nodes

    def node_path(self, node_id: int) -> Path:
        return self.path / f"node-{node_id}"

    def configure(
        self,
        ports: Sequence[NodePorts],
        security: Mapping[str, str],
        overrides: Mapping[str, str],
    ) -> None:
        """Write each node's `server.properties`.

        Raises:
            ConfigurationError: the folder contains a cluster of another size.
        """
        found = len(list(self.path.glob("node-*")))
        if found not in {0, self.nodes}:
            raise ConfigurationError(
                f"{self.path}: expected a cluster of {self.nodes} nodes, got one of {found}"
            )
        for node_id in range(1, self.nodes + 1):
            directory = self.node_path(node_id)
            directory.mkdir(parents=True, exist_ok=True)
            properties = server_properties(
                node_id, ports, directory / _DATA, security=security, overrides=overrides
            )
            text = render(properties)
            (directory / _SERVER_PROPERTIES).write_text(text, encoding="ascii")

    async def format(
        self,
        installation: Installation,
        options: Sequence[str],
        credentials: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Format the storage of unformatted nodes, by Kafka's tool unless it has been run with
        these options before: it takes a second for each node.

        Args:
            installation: keeps what the tool has written.
            options: passed to the tool.
            credentials: passed to the tool too, but what it writes with them is not kept.
            timeout_s: time limit of the tool.

        Raises:
            BrokerFailed: the tool failed; with its output.
        """
        unformatted = [
            node_id
            for node_id in range(1, self.nodes + 1)
            if not (self.node_path(node_id) / _DATA / _META_PROPERTIES).exists()
        ]
        checkpoint = installation.bootstrap_checkpoint(options)
        if checkpoint.is_file() and not credentials:
            for node_id in unformatted:
                self._format_like_tool(node_id, checkpoint)
            return
        await self._run_format_tool(installation, unformatted, [*options, *credentials], timeout_s)
        if unformatted and not credentials:
            installation.keep(self.node_path(unformatted[0]) / _DATA / _CHECKPOINT, checkpoint)

    def _format_like_tool(self, node_id: int, checkpoint: Path) -> None:
        data = self.node_path(node_id) / _DATA
        data.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint, data / _CHECKPOINT)
        identity = {
            "version": "1",
            "cluster.id": self._cluster_id(),
            "node.id": str(node_id),
            "directory.id": _new_id(),
        }
        (data / _META_PROPERTIES).write_text(render(identity), encoding="ascii")

    async def _run_format_tool(
        self,
        installation: Installation,
        node_ids: Sequence[int],
        arguments: Sequence[str],
        timeout_s: float,
    ) -> None:
        options = [f"--cluster-id={self._cluster_id()}", f"--config={_SERVER_PROPERTIES}"]
        command = installation.command(
            "kafka.tools.StorageTool", "format", *options, *arguments, jvm=(*_SHORT_RUN, _log4j())
        )
        tools = [JvmProcess("format", self.node_path(each), command) for each in node_ids]
        try:
            for tool in tools:
                tool.spawn()
            for tool in tools:
                if not await tool.wait(timeout_s) or tool.exit_status != 0:
                    raise tool.failure("to format the storage")
        finally:
            for tool in tools:
                tool.kill()

    def broker(self, installation: Installation, node_id: int) -> JvmProcess:
        """Return the process of a node, not yet spawned.

        `KAFKA_JVM_PERFORMANCE_OPTS` has further options of its JVM, as in Kafka's own scripts.
        """
        options = [*_HEAP, _log4j(), *shlex.split(os.environ.get(_JVM_OPTIONS_VARIABLE, ""))]
        if node_id == 1 and not installation.has_class_archive:
            options.append(f"-XX:ArchiveClassesAtExit={self.written_class_archive}")
        command = installation.command("kafka.Kafka", _SERVER_PROPERTIES, jvm=tuple(options))
        return JvmProcess(f"kafka-{node_id}", self.node_path(node_id), command)

    @property
    def written_class_archive(self) -> Path:
        """Path to which node 1 writes its class archive when it ends, if it was started without."""
        return self.node_path(1) / "classes.jsa"

    def _cluster_id(self) -> str:
        file = self.path / _CLUSTER_ID
        if not file.exists():
            file.write_text(_new_id(), encoding="ascii")
        return file.read_text(encoding="ascii")


def _new_id() -> str:
    """Return a new id: sixteen bytes in base64 without padding, as Kafka writes it."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


def _log4j() -> str:
    return f"-Dlog4j2.configurationFile={_LOG4J}"
