"""Objects that are fetched for claims, and the room that they take in the budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from headrace.claims.fetcher import ClaimFetcher
from headrace.config import ClaimSettings, LimitSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.log.port import TopicPartition
from headrace.models.registry import Models
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.protocol.messages import Envelope, Request
from headrace.services.ingest.claims import Claimed, ClaimWaits
from headrace.services.ingest.decode import IngestRules, PendingClaim
from headrace.tuning import TUNING
from tests.support.claim_store import StandInStore
from tests.support.conditions import eventually
from tests.support.models import settings_for
from tests.support.services import StillClock
from tests.support.work import make_request

OBJECT_BYTES = 900


class ClaimBench:
    """Claims that wait for a store which holds its objects back, until `release`."""

    def __init__(self, store: StandInStore, fetcher: ClaimFetcher, tmp_path: Path) -> None:
        models = Models(settings_for(tmp_path))
        models.open()
        self.store = store
        self.fetcher = fetcher
        self.tracker = InFlightTracker(Budget(1000), lambda: None)
        self.finished: list[Request] = []
        self.waits = ClaimWaits(
            fetcher,
            IngestRules(models.catalog, LimitSettings()),
            self._finish,
            self.tracker.budget,
            AutoResetEvent(),
            StillClock(),
            replace(TUNING.ingest, room_interval_s=0.001),
        )

    async def _finish(self, claimed: Claimed) -> None:
        self.finished.append(claimed.request)

    def assign(self, number: int) -> AssignedPartition:
        return self.tracker.assign(TopicPartition("requests", number), AckedOffsets(0))

    def claim(self, name: str, assignment: AssignedPartition, offset: int = 0) -> PendingClaim:
        """A request with an allowed claim, whose record was admitted."""
        header = self.store.put(f"/in/{name}", b"x" * OBJECT_BYTES)
        request = make_request(envelope=Envelope(claim=header, model="none"))
        request.value = None
        request.ack_handle = assignment.admit(offset, 10)
        return PendingClaim(request, self.fetcher.read_claim(header))

    def release(self) -> None:
        self.store.holds = False
        self.store.held.set()


@asynccontextmanager
async def claims_waiting(tmp_path: Path) -> AsyncIterator[ClaimBench]:
    """A bench whose task runs; leaving closes it."""
    async with StandInStore() as store:
        store.holds = True
        async with ClaimFetcher(ClaimSettings(allowed=[f"{store.url}/in"])) as fetcher:
            bench = ClaimBench(store, fetcher, tmp_path)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bench.waits.run())
                await asyncio.sleep(0)
                yield bench
                await bench.waits.close()
                bench.release()


async def test_claim_that_was_left_in_the_log_holds_no_room(tmp_path: Path) -> None:
    """Answers that wait for the next claim fill the budget: no other claim will make room."""
    async with claims_waiting(tmp_path) as bench:
        leaving, other = bench.assign(0), bench.assign(1)
        bench.waits.add(bench.claim("a", leaving), is_charged=False)
        await eventually(lambda: bench.store.reads == 1, what="the object is fetched")
        leaving.leaving = True
        bench.waits.revoked()
        await eventually(lambda: not leaving.in_flight, what="it is left in the log")
        bench.release()
        other.admit(0, 990)
        second = bench.claim("b", other, 1)
        bench.waits.add(second, is_charged=False)
        await eventually(lambda: bench.finished == [second.request], what="it is here")


async def test_request_that_is_cancelled_twice_ends_once(tmp_path: Path) -> None:
    """The second record comes while the fetch is being ended, which takes a turn of the loop."""
    async with claims_waiting(tmp_path) as bench:
        pending = bench.claim("a", bench.assign(0))
        bench.waits.add(pending, is_charged=True)
        await eventually(lambda: bench.store.reads == 1, what="the object is fetched")
        place = ("requests", 0, pending.request.offset)
        cancelling = make_request(envelope=Envelope(cancels=place))
        for _ in range(3):
            bench.waits.cancel([cancelling])
            await asyncio.sleep(0)
    assert bench.finished == [pending.request]
