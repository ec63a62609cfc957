"""When a consumer's next fetch goes out: after the answers to a few records, not before them.

aiokafka asks for more as soon as records are taken, before anybody has looked at them. To encode
that request, to write it and to have the broker look at it takes a good part of the time that one
record needs on its way to an answer, on cores that may be the same. Where a poll brought few
records, the request therefore lets some turns of the event loop pass, in which those go through
their stages; with nothing else to do these are over at once. Where a poll brought many, fetching
overlaps with work that takes longer than the fetch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.fetch import FetchRequest

FEW_RECORDS: Final = 4
TURNS: Final = 10
"""From a poll until the answer to its record is written, with all stages in one process."""


class Fetching:
    """Holds back the fetches of one consumer's client."""

    def __init__(self) -> None:
        self._turns = 0

    def take_over(self, client: AIOKafkaClient) -> None:
        """Have this client's fetches wait, for the turns that the last poll gave."""
        client.send = partial(self._sent, client.send)

    def polled(self, records: int) -> None:
        """So many records were taken now."""
        self._turns = TURNS if 0 < records <= FEW_RECORDS else 0

    async def _sent(
        self, send: Callable[..., Awaitable[Any]], node_id: int, request: Any, **options: Any
    ) -> Any:
        if isinstance(request, FetchRequest):
            for _ in range(self._turns):
                await asyncio.sleep(0)
        return await send(node_id, request, **options)
