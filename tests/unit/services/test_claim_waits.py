"""Objects that are fetched for claims, and the room that they take in the budget."""

from __future__ import annotations

import asyncio
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


def claiming(
    fetcher: ClaimFetcher, header: bytes, assignment: AssignedPartition, offset: int = 0
) -> PendingClaim:
    """A request with an allowed claim, whose record was admitted."""
    request = make_request(envelope=Envelope(claim=header, model="none"))
    request.value = None
    request.ack_handle = assignment.admit(offset, 10)
    return PendingClaim(request, fetcher.read_claim(header))


async def test_claim_that_was_left_in_the_log_holds_no_room(tmp_path: Path) -> None:
    """Answers that wait for the next claim fill the budget: no other claim will make room."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    leaving, other = (
        tracker.assign(TopicPartition("requests", number), AckedOffsets(0)) for number in range(2)
    )
    models = Models(settings_for(tmp_path))
    models.open()
    finished: list[Request] = []

    async def finish(claimed: Claimed) -> None:
        finished.append(claimed.request)

    async with StandInStore() as store:
        store.holds = True
        headers = [store.put(f"/in/{name}", b"x" * OBJECT_BYTES) for name in ("a", "b")]
        async with ClaimFetcher(ClaimSettings(allowed=[f"{store.url}/in"])) as fetcher:
            waits = ClaimWaits(
                fetcher,
                IngestRules(models.catalog, LimitSettings()),
                finish,
                tracker.budget,
                AutoResetEvent(),
                StillClock(),
                replace(TUNING.ingest, room_interval_s=0.001),
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits.run())
                await asyncio.sleep(0)
                waits.add(claiming(fetcher, headers[0], leaving), is_charged=False)
                await eventually(lambda: store.reads == 1, what="the object is fetched")
                leaving.leaving = True
                waits.revoked()
                await eventually(lambda: not leaving.in_flight, what="it is left in the log")
                store.holds = False
                store.held.set()
                other.admit(0, 990)
                second = claiming(fetcher, headers[1], other, 1)
                waits.add(second, is_charged=False)
                await eventually(lambda: finished == [second.request], what="it is here")
                await waits.close()


async def test_request_that_is_cancelled_twice_ends_once(tmp_path: Path) -> None:
    """The second record comes while the fetch is being ended, which takes a turn of the loop."""
    tracker = InFlightTracker(Budget(1000), lambda: None)
    assignment = tracker.assign(TopicPartition("requests", 0), AckedOffsets(0))
    finished: list[Request] = []

    async def finish(claimed: Claimed) -> None:
        finished.append(claimed.request)

    models = Models(settings_for(tmp_path))
    async with StandInStore() as store:
        store.holds = True
        header = store.put("/in/a", b"x" * OBJECT_BYTES)
        async with ClaimFetcher(ClaimSettings(allowed=[f"{store.url}/in"])) as fetcher:
            waits = ClaimWaits(
                fetcher,
                IngestRules(models.catalog, LimitSettings()),
                finish,
                tracker.budget,
                AutoResetEvent(),
                StillClock(),
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(waits.run())
                await asyncio.sleep(0)
                pending = claiming(fetcher, header, assignment)
                waits.add(pending, is_charged=True)
                await eventually(lambda: store.reads == 1, what="the object is fetched")
                place = ("requests", 0, pending.request.offset)
                cancelling = make_request(envelope=Envelope(cancels=place))
                for _ in range(3):
                    waits.cancel([cancelling])
                    await asyncio.sleep(0)
                await waits.close()
                store.holds = False
                store.held.set()
    assert finished == [pending.request]
