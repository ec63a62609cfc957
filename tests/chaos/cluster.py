"""A Kafka of one node: the system reaches it through a proxy, the harness by a way of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from headrace.tools.local_kafka import LocalKafka
from headrace.tools.local_kafka.broker import reserve_port
from tests.support.tcp_proxy import HOST, TcpProxy

# A machine that is busy otherwise makes a broker miss the heartbeats of its own controller.
PROPERTIES = {"broker.session.timeout.ms": "6000"}
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Cluster:
    """One broker, and the proxy in front of its second listener.

    Attributes:
        direct: the bootstrap server for the harness: clients that write down what is true.
        proxied: the bootstrap server for the system under test; the broker sends its clients on
            to the proxy as well.
    """

    kafka: LocalKafka
    proxy: TcpProxy
    direct: str
    proxied: str


@asynccontextmanager
async def running_cluster() -> AsyncIterator[Cluster]:
    """A broker that is stopped, with its proxy, when the context is left."""
    async with AsyncExitStack() as stack:
        ports: list[int] = []
        for _ in range(3):
            port, reservation = reserve_port(ports, HOST)
            stack.enter_context(reservation)
            ports.append(port)
        direct, controller, behind = ports
        async with TcpProxy(behind) as proxy:
            listeners = {"PLAINTEXT": direct, "PROXIED": behind, "CONTROLLER": controller}
            advertised = {"PLAINTEXT": direct, "PROXIED": proxy.port}
            properties = PROPERTIES | {
                "listeners": _addresses(listeners),
                "advertised.listeners": _addresses(advertised),
                "listener.security.protocol.map": ",".join(
                    f"{name}:PLAINTEXT" for name in listeners
                ),
                "controller.quorum.voters": f"1@{HOST}:{controller}",
            }
            async with LocalKafka(
                port=direct, properties=properties, start_timeout_s=START_TIMEOUT_S
            ) as kafka:
                yield Cluster(kafka, proxy, f"{HOST}:{direct}", f"{HOST}:{proxy.port}")


def _addresses(ports: dict[str, int]) -> str:
    return ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items())
