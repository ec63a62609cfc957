"""A batch record on trial: one request after the other, and no mate pays for the culprit."""

from __future__ import annotations

import asyncio

from headrace.errors import Code
from headrace.flow.batch_trial import try_batch
from headrace.flow.delivery import Trial
from headrace.messages import Batch, Request
from tests.support.work import TestReceipt, make_request

OFFSET = 7


class Executor:
    """Takes batches, and settles their requests when it is told to; notes what happens when."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.running: list[Request] = []
        self.ended: list[Request] = []

    async def offer(self, batch: Batch) -> None:
        self.story.append(f"run {','.join(str(request.id) for request in batch.requests)}")
        self.running += batch.requests

    async def end(self, requests: list[Request]) -> None:
        self.ended += requests

    async def mark(self, place: int) -> None:
        self.story.append(f"mark {place}")

    def settle(self) -> None:
        running, self.running = self.running, []
        for request in running:
            request.receipt.settle()


def batch_of(count: int) -> Batch:
    """Requests that are called by their places."""
    requests = [make_request() for _ in range(count)]
    for place, request in enumerate(requests):
        request.id = str(place)
    return Batch("b", requests, "full")


async def test_each_request_is_marked_and_settled_before_the_next_runs() -> None:
    """In the order of their places, and those that are condemned do not run."""
    executor, batch = Executor(), batch_of(3)
    trial = Trial(frozenset({(OFFSET, 1), (OFFSET + 1, 0)}), executor.mark)
    trying = asyncio.create_task(try_batch(batch, OFFSET, trial, executor.offer, executor.end))
    stories = []
    while not trying.done():
        await asyncio.sleep(0)
        stories.append(list(executor.story))
        executor.settle()
    await trying

    assert [story for story in stories if len(story) == 2] == [["mark 0", "run 0"]]
    assert executor.story == ["mark 0", "run 0", "mark 2", "run 2"]
    (request,) = executor.ended
    assert request.id == "1"
    assert request.failure is not None
    assert request.failure.code == Code.MODEL_FAILED


async def test_beside_others_a_batch_runs_whole() -> None:
    """Without those that were condemned before."""
    executor, batch = Executor(), batch_of(3)

    await try_batch(
        batch, OFFSET, Trial(frozenset({(OFFSET, 0)}), None), executor.offer, executor.end
    )

    assert executor.story == ["run 1,2"]
    assert [request.id for request in executor.ended] == ["0"]


async def test_a_batch_that_is_condemned_whole_runs_not_at_all() -> None:
    """Its requests are answered, and nothing is left."""
    executor, batch = Executor(), batch_of(2)
    condemned = frozenset((OFFSET, place) for place in range(2))

    await try_batch(batch, OFFSET, Trial(condemned, None), executor.offer, executor.end)

    assert executor.story == []
    assert len(executor.ended) == 2


async def test_what_has_become_void_is_not_marked() -> None:
    """Its next owner marks it; here it only goes where void work goes."""
    executor, batch = Executor(), batch_of(1)
    receipt = batch.requests[0].receipt
    assert isinstance(receipt, TestReceipt)
    receipt.void = True
    trying = asyncio.create_task(
        try_batch(batch, OFFSET, Trial(frozenset(), executor.mark), executor.offer, executor.end)
    )
    while not trying.done():
        await asyncio.sleep(0)
        executor.settle()
    await trying

    assert executor.story == ["run 0"]
    assert receipt.settled == 1
