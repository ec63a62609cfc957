"""Objects that are fetched for claims, and the room that they take in the budget."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from headrace.claims.fetcher import ClaimFetcher
from headrace.config import ClaimSettings, LimitSettings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.delivery.budget import Budget
from headrace.delivery.inflight import AssignedPartition, InFlightTracker
from headrace.errors import Code, Rejected
from headrace.log.port import TopicPartition
from headrace.models.version import ModelVersion
from headrace.primitives.auto_reset_event import AutoResetEvent
from headrace.protocol.messages import Envelope, Request
from headrace.services.ingest.claims import ClaimWaits, Decoded
from headrace.services.ingest.decode import IngestRules, PendingClaim
from headrace.tuning import TUNING
from tests.support.claim_store import StandInStore
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.services import StillClock
from tests.support.work import make_request

OBJECT_BYTES = 900


class GatedLookup:
    """No models; on another thread than the loop's a search for one waits for the gate."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()

    def lookup(self, model: str | None, _version: str | None) -> ModelVersion:
        self.begun.set()
        self.gate.wait(DEADLINE_S)
        raise Rejected(Code.UNKNOWN_MODEL, f"model: expected another one than {model}")


class ClaimBench:
    """Claims that wait for a store which holds its objects back, until `release`."""

    def __init__(self, store: StandInStore, fetcher: ClaimFetcher) -> None:
        self.models = GatedLookup()
        self.models.gate.set()
        self.store = store
        self.fetcher = fetcher
        self.tracker = InFlightTracker(Budget(1000), lambda: None)
        self.finished: list[Request] = []
        self.waits = ClaimWaits(
            fetcher,
            IngestRules(self.models, LimitSettings()),
            self._finish,
            self.tracker.budget,
            AutoResetEvent(),
            StillClock(),
            replace(TUNING.ingest, room_interval_s=0.001),
        )

    async def _finish(self, claimed: Decoded) -> None:
        self.finished.append(claimed.request)

    def assign(self, number: int) -> AssignedPartition:
        return self.tracker.assign(TopicPartition("requests", number), AckedOffsets(0))

    def claim(self, name: str, assignment: AssignedPartition, offset: int = 0) -> PendingClaim:
        """A request with an allowed claim, whose record was admitted."""
        header = self.store.put(f"/in/{name}", b"x" * OBJECT_BYTES)
        envelope = Envelope(claim=header, model="none", content_type="image/png")
        request = make_request(envelope=envelope)
        request.value = None
        request.ack_handle = assignment.admit(offset, 10)
        return PendingClaim(request, self.fetcher.read_claim(header))

    def release(self) -> None:
        self.store.holds = False
        self.store.held.set()


@asynccontextmanager
async def claims_waiting() -> AsyncIterator[ClaimBench]:
    """A bench whose task runs; leaving closes it."""
    async with StandInStore() as store:
        store.holds = True
        async with ClaimFetcher(ClaimSettings(allowed=[f"{store.url}/in"])) as fetcher:
            bench = ClaimBench(store, fetcher)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bench.waits.run())
                await asyncio.sleep(0)
                yield bench
                await bench.waits.close()
                bench.release()


async def test_claim_that_was_left_in_the_log_holds_no_room() -> None:
    """Answers that wait for the next claim fill the budget: no other claim will make room."""
    async with claims_waiting() as bench:
        leaving, other = bench.assign(0), bench.assign(1)
        bench.waits.add(bench.claim("a", leaving), is_charged=False)
        await eventually(lambda: bench.store.reads == 1, what="the object is fetched")
        leaving.leaving = True
        bench.waits.drop_revoked()
        await eventually(lambda: not leaving.in_flight, what="it is left in the log")
        bench.release()
        other.admit(0, 990)
        second = bench.claim("b", other, 1)
        bench.waits.add(second, is_charged=False)
        await eventually(lambda: bench.finished == [second.request], what="it is here")


async def test_request_that_is_cancelled_twice_ends_once() -> None:
    """The second record comes while the fetch is being ended, which takes a turn of the loop."""
    async with claims_waiting() as bench:
        pending = bench.claim("a", bench.assign(0))
        bench.waits.add(pending, is_charged=True)
        await eventually(lambda: bench.store.reads == 1, what="the object is fetched")
        place = ("requests", 0, pending.request.offset)
        cancelling = make_request(envelope=Envelope(cancels=place))
        for _ in range(3):
            bench.waits.cancel([cancelling])
            await asyncio.sleep(0)
    assert bench.finished == [pending.request]


async def test_request_that_is_cancelled_while_its_object_is_decoded_ends_cancelled() -> None:
    """The record that cancels it would overtake it otherwise, and it would run."""
    async with claims_waiting() as bench:
        bench.release()
        bench.models.gate.clear()
        pending = bench.claim("a", bench.assign(0))
        bench.waits.add(pending, is_charged=True)
        await eventually(bench.models.begun.is_set, what="the object is decoded")
        place = ("requests", 0, pending.request.offset)
        found = bench.waits.cancel([make_request(envelope=Envelope(cancels=place))])
        bench.models.gate.set()
    assert found == bench.finished == [pending.request]
    assert pending.request.failure is not None
    assert pending.request.failure.code == Code.CANCELLED
