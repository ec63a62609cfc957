"""A batch record on trial: its requests run one at a time, so that one of them is condemned.

A record of `batches` holds many requests. When it alone may have ended a process, each of its
requests is marked before it runs, and the next one waits until that one is settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.flow.delivery import Trial
from headrace.flow.endings import ran_alone
from headrace.messages import Batch, Request
from headrace.receipt import Receipt, Revocable
from headrace.topics import Stage


class PlaceReceipt:
    """One request's share of its record's receipt, which tells when it is settled."""

    __slots__ = ("_record", "settled")

    def __init__(self, record: Receipt) -> None:
        self._record = record
        self.settled = asyncio.Event()

    @property
    def assignment(self) -> Revocable:
        """See `Receipt`."""
        return self._record.assignment

    @property
    def void(self) -> bool:
        """See `Receipt`."""
        return self._record.void

    def settle(self) -> None:
        """See `Receipt`."""
        self._record.settle()
        self.settled.set()


async def try_batch(
    batch: Batch,
    offset: int,
    trial: Trial,
    offer: Callable[[Batch], Awaitable[None]],
    end: Callable[[list[Request]], Awaitable[None]],
) -> None:
    """Run a batch that is suspect.

    Args:
        batch: as it was read, its receipt counted in parts.
        offset: of its record.
        trial: what is known of it.
        offer: takes a batch that may run.
        end: takes requests that are not run any more, as failures.
    """
    places = list(enumerate(batch.requests))
    condemned = [request for place, request in places if (offset, place) in trial.condemned]
    for request in condemned:
        request.fail(ran_alone(Stage.EXECUTOR))
    if condemned:
        await end(condemned)
    left = [(place, request) for place, request in places if request.failure is None]
    if trial.run_place is None:
        if left:
            await offer(_of(batch, batch.batch_id, [request for _, request in left]))
        return
    for place, request in left:
        receipt = PlaceReceipt(request.receipt)
        request.receipt = receipt
        if not receipt.void:
            await trial.run_place(place)
        await offer(_of(batch, f"{batch.batch_id}.{place}", [request]))
        await receipt.settled.wait()  # runs have a deadline, and void ones are settled as well


def _of(batch: Batch, batch_id: str, requests: list[Request]) -> Batch:
    return Batch(batch_id, requests, batch.reason)
