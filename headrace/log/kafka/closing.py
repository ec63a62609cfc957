"""Close aiokafka's objects in bounded time.

Their own `stop()` waits for brokers that may be gone (aiokafka issues 1013 and 1101) and can raise
a stray `CancelledError` (issue 647). Here the tasks are cancelled, the sockets closed and the
exceptions of both retrieved, so that none is reported as unretrieved on collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import ProducerClosed

_POLITE_S: Final = 2.0
_SWEEP_S: Final = 1.0


async def hang_up(connection: AIOKafkaConnection) -> None:
    """Close one connection; reset it if the other side is slow to close."""
    protocol = connection._protocol
    closed = connection.close(reason=CloseReason.SHUTDOWN)
    if protocol is None:  # never connected
        return
    _, open_still = await asyncio.wait([closed], timeout=_SWEEP_S)
    if open_still:
        protocol._transport.abort()
        await asyncio.wait(open_still, timeout=_SWEEP_S)


async def close_client(client: AIOKafkaClient) -> None:
    """Close the sockets; reset those that do not close within a second."""
    client.force_metadata_update = _nobody_asked(client)
    await _cancelled([client._sync_task])
    client._sync_task = None
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)
    connections = list(client._conns.values())
    client._conns.clear()
    await asyncio.gather(*map(hang_up, connections))


async def close_consumer(consumer: AIOKafkaConsumer) -> None:
    """Leave the group if the coordinator answers in time, and release all resources."""
    stopping = asyncio.create_task(consumer.stop(), name="kafka-consumer-stop")
    await asyncio.wait([stopping], timeout=_POLITE_S)
    coordinator, fetcher = consumer._coordinator, consumer._fetcher
    tasks: list[asyncio.Task[Any] | None] = [stopping]
    for owner, names in (
        (coordinator, ("_coordination_task", "_heartbeat_task", "_commit_refresh_task")),
        (coordinator, ("_reset_committed_task",)),
        (fetcher, ("_fetch_task",)),
    ):
        tasks += [getattr(owner, name, None) for name in names]
    if fetcher is not None:
        tasks += fetcher._pending_tasks
    await _cancelled(tasks)
    await close_client(consumer._client)


async def close_producer(producer: AIOKafkaProducer) -> None:
    """Stop sending; what is queued or unacknowledged fails with `ProducerClosed`."""
    producer._closed = True
    sender, accumulator = producer._sender, producer._message_accumulator
    accumulator._closed = True
    # Close the sockets first: requests in flight end with them, and a cancelled sender awaits
    # those.
    task = sender.sender_task
    if task is not None:
        task.cancel()
    await close_client(producer.client)
    if task is not None:
        await asyncio.wait([task], timeout=_SWEEP_S)
    await _cancelled([task, *_tasks_of(sender)])
    accumulator.fail_all(ProducerClosed())
    for batches in accumulator._batches.values():
        for batch in batches:
            batch._drain_waiter.exception()


def _tasks_of(owner: object) -> list[asyncio.Task[Any]]:
    """Return the tasks that run methods of this object; aiokafka's sender keeps no list of them."""
    frames = ((task, getattr(task.get_coro(), "cr_frame", None)) for task in asyncio.all_tasks())
    return [task for task, frame in frames if frame and frame.f_locals.get("self") is owner]


def _nobody_asked(client: AIOKafkaClient) -> Any:
    """Make a closed client ignore the metadata requests of its last tasks."""

    def force_metadata_update() -> asyncio.Future[bool]:
        done: asyncio.Future[bool] = client._loop.create_future()
        done.set_result(False)
        return done

    return force_metadata_update


async def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel the running tasks, wait briefly, and retrieve their exceptions."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    if there:
        await asyncio.wait(there, timeout=_SWEEP_S)
    for task in there:
        if task.done() and not task.cancelled():
            task.exception()
