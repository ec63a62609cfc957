"""Requests in flight stay within their budget of bytes, whatever is held up and for how long.

A reply partition that is held up is in tests/broker/test_broker_trouble.py, since it takes several
brokers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.tools.local_kafka import LocalKafka
from tests.support.flooding import PARTITIONS, REQUESTS, flooding


@pytest.mark.timeout(240)
async def test_stuck_model_pauses_reading_within_memory_bound(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """A flood waits in the log while the model is stuck, and is answered when it goes on."""
    async with flooding(kafka, unique_name, tmp_path) as flooded:
        await flooded.send()
        await flooded.check_budget()

        flooded.gate.touch()

        await flooded.until_holds(f"{unique_name}.responses", PARTITIONS, REQUESTS)
        flooded.check_memory()


@pytest.mark.timeout(240)
async def test_unread_answers_do_not_delay_requests(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """All requests are answered although the one who wants to know has stopped asking."""
    responses = f"{unique_name}.responses"
    async with flooding(kafka, unique_name, tmp_path) as flooded:
        flooded.gate.touch()
        async with flooded.reading(responses, PARTITIONS) as consumer:
            await flooded.send(count=PARTITIONS)
            async with asyncio.timeout(20):
                await consumer.getone()

            await flooded.send(count=REQUESTS - PARTITIONS)
            await flooded.until_holds(responses, PARTITIONS, REQUESTS)

        flooded.check_memory()
        assert await flooded.in_flight_bytes() == 0
