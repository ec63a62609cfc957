"""Directory of a cluster: one folder per node, configured and formatted before the first start."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.tools.local_kafka.installation import Installation
from headrace.tools.local_kafka.process import JvmProcess
from headrace.tools.local_kafka.properties import NodePorts, render, server_properties

_DATA = "data"
_SERVER_PROPERTIES = "server.properties"
_CLUSTER_ID = "cluster-id"
_LOG4J = Path(__file__).with_name("log4j2.properties")
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
        self, installation: Installation, arguments: Sequence[str], timeout_s: float
    ) -> None:
        """Format the storage of unformatted nodes; `arguments` are passed to the tool.

        Raises:
            BrokerFailed: the tool failed; with its output.
        """
        options = [f"--cluster-id={self._cluster_id()}", f"--config={_SERVER_PROPERTIES}"]
        command = installation.command(
            "kafka.tools.StorageTool", "format", *options, *arguments, jvm=(*_SHORT_RUN, _log4j())
        )
        tools = [
            JvmProcess("format", self.node_path(node_id), command)
            for node_id in range(1, self.nodes + 1)
            if not (self.node_path(node_id) / _DATA / "meta.properties").exists()
        ]
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
        """Return the process of a node, not yet spawned."""
        command = installation.command("kafka.Kafka", _SERVER_PROPERTIES, jvm=(*_HEAP, _log4j()))
        return JvmProcess(f"kafka-{node_id}", self.node_path(node_id), command)

    def _cluster_id(self) -> str:
        """Return the cluster's id: sixteen bytes in base64 without padding, as Kafka writes it."""
        file = self.path / _CLUSTER_ID
        if not file.exists():
            text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=")
            file.write_bytes(text)
        return file.read_text(encoding="ascii")


def _log4j() -> str:
    return f"-Dlog4j2.configurationFile={_LOG4J}"
