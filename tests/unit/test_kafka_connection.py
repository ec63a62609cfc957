"""What is made of a server's first answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.config import KafkaSettings
from headrace.log.errors import LogUnavailable
from headrace.log.kafka import connection as kafka_connection
from headrace.log.kafka.connection import Connection


class Starting:
    """A connection to a broker that has just begun to listen."""

    def __init__(self, *_: object, **__: object) -> None: ...

    async def connect(self) -> None: ...

    async def send(self, request: object) -> SimpleNamespace:
        return SimpleNamespace(brokers=[])


async def test_a_broker_that_is_starting_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names no broker yet: that is no verdict on our credentials, which would end a process."""

    async def hung_up(connection: object) -> None: ...

    monkeypatch.setattr(kafka_connection, "DirectConnection", Starting)
    monkeypatch.setattr(kafka_connection, "hang_up", hung_up)
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:9092"))
    assert await connection.refusal() is None
    with pytest.raises(LogUnavailable, match="it is starting"):
        await connection.open_client()
