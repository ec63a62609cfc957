"""When fetches go out: behind the answers to few records, and beside the work on many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest

from headrace.log.kafka.fetching import FEW_RECORDS, TURNS, Fetching

FETCH = FetchRequest(50, 1, 1, 1, [], rack_id="")


class Client:
    """Says in which turn of the event loop something was sent."""

    def __init__(self) -> None:
        self.turn = 0

    async def send(self, node_id: int, request: Any, **options: Any) -> int:
        assert (node_id, options) == (1, {"group": 2})
        return self.turn


async def sent_after(records: int | None, request: Any) -> int:
    """How many turns after a poll of so many records a request goes out; None: no poll yet."""
    client: Any = Client()
    fetching = Fetching()
    fetching.take_over(client)
    if records is not None:
        fetching.polled(FEW_RECORDS)
        fetching.polled(records)

    async def count() -> None:
        while True:
            client.turn += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        turn: int = await client.send(1, request, group=2)
        counting.cancel()
    return turn


@pytest.mark.parametrize("records", [1, FEW_RECORDS])
async def test_few_records_go_before_the_next_fetch(records: int) -> None:
    """As many turns as they take from stage to stage."""
    assert await sent_after(records, FETCH) == TURNS


@pytest.mark.parametrize("records", [None, 0, FEW_RECORDS + 1])
async def test_fetch_goes_out_at_once_otherwise(records: int | None) -> None:
    """It overlaps with the work on many records, and nobody waits where none came."""
    assert await sent_after(records, FETCH) == 0


async def test_other_requests_wait_for_nothing() -> None:
    """A heartbeat or a commit is no fetch."""
    assert await sent_after(1, MetadataRequest([])) == 0
