"""A real Kafka on this machine's loopback interface: one or several nodes, for
tests and the demo.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from headrace.tools.local_kafka.configuration import HOST, ClusterDirectory, NodePorts
from headrace.tools.local_kafka.installation import BrokerUnavailable, Installation, install
from headrace.tools.local_kafka.process import JvmProcess
from headrace.tools.local_kafka.security import (
    Certificates,
    ScramTls,
    make_certificates,
    scram_arguments,
    secure_listener,
)

# --- ports ---------------------------------------------------------------------------------------


_FIRST, _LAST = 20_000, 32_000
"""Below the ports that Linux uses for outgoing connections (32768 and up). While a node is down, a
client of that node could take such a port: even by trying to connect to it, which then connects to
itself.
"""
_ATTEMPTS = 200


def free_port(taken: Container[int], host: str) -> int:
    """Return a random port that is not in `taken`, not reserved, and that nothing listens on.

    It is random so that two processes that choose at once rarely choose the same.

    Raises:
        BrokerUnavailable: a few hundred attempts found none.
    """
    port, reservation = reserve_port(taken, host)
    reservation.close()
    return port


def reserve_port(taken: Container[int], host: str) -> tuple[int, socket.socket]:
    """Return such a port, which no other caller on this machine gets until the socket is closed.

    The socket is the UDP port of the same number. A server that is stopped does not listen, so that
    another one could take its port before it is started again.

    Raises:
        BrokerUnavailable: see `free_port`.
    """
    for _ in range(_ATTEMPTS):
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        if port not in taken and is_free(port, host):
            reservation = reserve(port, host)
            if reservation is not None:
                return port, reservation
    raise BrokerUnavailable(f"{_ATTEMPTS} ports between {_FIRST} and {_LAST} are all in use")


def reserve(port: int, host: str) -> socket.socket | None:
    """Return what reserves a port until it is closed; None if the port is reserved already."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        reservation.bind((host, port))
    except OSError:
        reservation.close()
        return None
    return reservation


def is_free(port: int, host: str) -> bool:
    """Return whether a server could listen there now, as Java's do (with SO_REUSEADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# --- readiness -----------------------------------------------------------------------------------


_ATTEMPT_TIMEOUT_S = 5.0


async def listens(host: str, port: int) -> bool:
    """Return whether something accepts connections there."""
    try:
        async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def known_brokers(bootstrap_servers: str) -> frozenset[int]:
    """Return the ids of the brokers that this one lists; empty while it does not answer."""
    admin = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap_servers,
        request_timeout_ms=int(_ATTEMPT_TIMEOUT_S * 1000),
        client_id="headrace-local-kafka",
    )
    try:
        async with asyncio.timeout(2 * _ATTEMPT_TIMEOUT_S):
            await admin.start()
            cluster = await admin.describe_cluster()
    except (KafkaError, OSError, TimeoutError):
        return frozenset()
    finally:
        await admin.close()
    return frozenset(broker["node_id"] for broker in cluster["brokers"])


# --- the cluster ---------------------------------------------------------------------------------


_POLL_S = 0.05
_WATCH_POLL_S = 0.5
_STOP_TIMEOUT_S = 10.0


class LocalKafka:
    """A Kafka cluster in KRaft mode in which every node is both broker and controller.

    `async with` starts and stops it. It is not bound to an event loop, so one cluster can serve
    many loops in succession. Start it from a thread that lives as long as the cluster: on Linux the
    nodes are killed with the thread that started them, so that none outlives a killed process.

    Args:
        directory: for data, certificates and logs, which a later cluster can reuse; None means a
            temporary directory, removed at the end.
        nodes: number of nodes; their ids are 1 to `nodes`.
        port: port of node 1, the other nodes use the next ones; 0 picks free ports.
        security: None for plaintext only, or an additional listener with TLS and SASL.
        properties: broker settings (`server.properties`) that override all others.
        features: level of each feature, such as `transaction.version`, that a new cluster has
            instead of Kafka's default (`kafka-storage.sh format --feature`).
        start_timeout_s: time limit of a start.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        nodes: int = 1,
        port: int = 0,
        security: ScramTls | None = None,
        properties: Mapping[str, str] | None = None,
        features: Mapping[str, int] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        if nodes < 1:
            raise ValueError(f"nodes: expected 1 or more, got {nodes}")
        self._kept = directory
        self._count = nodes
        self._port = port
        self._security = security
        self._overrides = dict(properties or {})
        self._features = dict(features or {})
        self._start_timeout_s = start_timeout_s
        self._installation: Installation | None = None
        self._path: Path | None = None
        self._certificates: Certificates | None = None
        self._ports: tuple[NodePorts, ...] = ()
        self._reservations: list[socket.socket] = []
        self._nodes: tuple[JvmProcess, ...] = ()

    @property
    def bootstrap_servers(self) -> str:
        """Addresses for clients: of the listener with TLS and SASL if there is one."""
        secure = self._security is not None
        return self._addresses([each.secure if secure else each.plaintext for each in self._ports])

    @property
    def plaintext_bootstrap_servers(self) -> str:
        """Addresses of the listener without security, which always exists."""
        return self._addresses([each.plaintext for each in self._ports])

    @staticmethod
    def _addresses(ports: list[int]) -> str:
        return ",".join(f"{HOST}:{port}" for port in ports)

    @property
    def certificates(self) -> Certificates:
        """PEM files of the TLS listener, including its authority and a client certificate."""
        if self._certificates is None:
            raise RuntimeError("this cluster has no TLS listener, or has not been started")
        return self._certificates

    @property
    def ca_file(self) -> Path:
        """Certificate authority that clients must trust (PEM)."""
        return self.certificates.authority

    @property
    def node_ids(self) -> range:
        """Ids of the nodes, from 1."""
        return range(1, self._count + 1)

    def pid(self, node_id: int = 1) -> int | None:
        """Return the process id of a node, or None if it is not running."""
        return self.node(node_id).pid

    def node(self, node_id: int = 1) -> JvmProcess:
        """Return the process of a node."""
        if not self._nodes:
            raise RuntimeError("the cluster has not been started")
        if node_id not in self.node_ids:
            raise ValueError(f"node_id: expected 1 to {self._count}, got {node_id}")
        return self._nodes[node_id - 1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Install Kafka if needed, format the storage, start all nodes, and wait until they serve.

        Raises:
            BrokerUnavailable: this machine cannot run a broker, or a port is in use.
            ChecksumMismatch: a fetched jar differs from the lock.
            BrokerFailed: a node does not start; with the end of its log.
        """
        if self._nodes:
            raise RuntimeError("the cluster runs already")
        self._installation = installation = await asyncio.to_thread(install)
        self._path = self._kept or Path(tempfile.mkdtemp(prefix="headrace-kafka-"))
        self._path = self._path.resolve()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._ports = self._choose_ports()
            directory = ClusterDirectory(self._path, self._count)
            directory.configure(self._ports, self._security_settings(), self._overrides)
            options = [f"--feature={name}={level}" for name, level in self._features.items()]
            credentials = scram_arguments(self._security) if self._security is not None else []
            await directory.format(installation, options, credentials, self._start_timeout_s)
            self._nodes = tuple(directory.broker(installation, each) for each in self.node_ids)
            for node in self._nodes:
                node.spawn()
            await self._wait_serving(self.node_ids)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all nodes, by force if they take too long, and remove temporary files."""
        nodes, self._nodes = self._nodes, ()
        try:
            async with asyncio.TaskGroup() as stopping:
                for node in nodes:
                    stopping.create_task(node.stop(_STOP_TIMEOUT_S), name=f"stop {node.name}")
            self._keep_class_archive(nodes)
        finally:
            for reservation in self._reservations:
                reservation.close()
            self._reservations.clear()
            if self._path is not None and self._kept is None:
                shutil.rmtree(self._path)
            self._path = None

    def _keep_class_archive(self, nodes: Sequence[JvmProcess]) -> None:
        """Keep the class archive of node 1, unless it was killed while it wrote it."""
        if not nodes or self._path is None or nodes[0].exit_status == -signal.SIGKILL:
            return
        written = ClusterDirectory(self._path, self._count).written_class_archive
        if written.is_file():
            assert self._installation is not None
            self._installation.keep(written, self._installation.class_archive)
            written.unlink()

    async def start_node(self, node_id: int = 1) -> None:
        """Start a node that was stopped or killed, with its data, and wait until it serves.

        Raises:
            BrokerFailed: it does not start; with the end of its log.
        """
        self.node(node_id).spawn()
        await self._wait_serving([node_id])

    async def stop_node(self, node_id: int = 1) -> None:
        """Stop a node cleanly: its partitions first move to other nodes, if there are any."""
        await self.node(node_id).stop(_STOP_TIMEOUT_S)

    def kill_node(self, node_id: int = 1) -> None:
        """Kill a node, as in a crash (SIGKILL)."""
        self.node(node_id).kill()

    def pause_node(self, node_id: int = 1) -> None:
        """Pause a node's process (SIGSTOP): its connections stay open but do not respond."""
        self.node(node_id).pause()

    def resume_node(self, node_id: int = 1) -> None:
        """Resume a paused node (SIGCONT)."""
        self.node(node_id).resume()

    async def watch(self) -> None:
        """Never return; raise `BrokerFailed` when a node ends that was not stopped."""
        while True:
            self._check_alive(self.node_ids)
            await asyncio.sleep(_WATCH_POLL_S)

    async def _wait_serving(self, node_ids: Sequence[int]) -> None:
        """Wait until each of these nodes accepts connections and lists all of them."""
        node_id = node_ids[0]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                for node_id in node_ids:
                    await self._wait_listening(node_id)
                for node_id in node_ids:
                    await self._wait_listing(node_id, node_ids)
        except TimeoutError:
            expected = f"to serve within {self._start_timeout_s:.0f} s"
            raise self.node(node_id).failure(expected) from None

    async def _wait_listening(self, node_id: int) -> None:
        while not await listens(HOST, self._ports[node_id - 1].plaintext):
            self._check_alive([node_id])
            await asyncio.sleep(_POLL_S)

    async def _wait_listing(self, node_id: int, node_ids: Sequence[int]) -> None:
        server = f"{HOST}:{self._ports[node_id - 1].plaintext}"
        while not await known_brokers(server) >= frozenset(node_ids):
            self._check_alive(node_ids)
            await asyncio.sleep(_POLL_S)

    def _check_alive(self, node_ids: Sequence[int]) -> None:
        for number in node_ids:
            if not self.node(number).is_running:
                raise self.node(number).failure("to run")

    def _choose_ports(self) -> tuple[NodePorts, ...]:
        fixed = [self._port + number if self._port else 0 for number in range(self._count)]

        def pick(wanted: int = 0) -> int:
            if not wanted:
                port, reservation = reserve_port(fixed, HOST)
                self._reservations.append(reservation)
                return port
            if not is_free(wanted, HOST):
                raise BrokerUnavailable(f"port {wanted} on {HOST} is in use; choose another")
            return wanted

        secure = self._security is not None
        return tuple(
            NodePorts(
                plaintext=pick(0 if secure else port),
                controller=pick(),
                secure=pick(port) if secure else 0,
            )
            for port in fixed
        )

    def _security_settings(self) -> dict[str, str]:
        if self._security is None:
            return {}
        assert self._path is not None
        self._certificates = make_certificates(self._path)
        return secure_listener(self._security, self._certificates)
