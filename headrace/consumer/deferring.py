"""Requests of a model over its share of the budget: left in the log, and read again later.

A model that cannot keep up would fill the budget with its requests, and nothing else would be read.
So a request whose model, or tenant, is over its share (`headrace.delivery.budget`) is *deferred*:
its bytes are let go, and its offset stays unanswered. Reading goes on behind it. When its claim has
room again, the record is read a second time (`headrace.consumer.rereading`).

- A claim that comes to its limit is given a moment first: a model that gets on has room by then,
  and no record of its backlog is read twice.
- As long as requests of a claim are deferred, later ones of it are too, so they do not overtake.
- A request whose deadline passes while it is deferred is read again then, to be answered; so is
  one that would be late, as far as can be predicted, to be refused.
- A partition with `max_deferred_records` of them is paused alone, which bounds how far it is read
  ahead.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple, TypeAlias

from headrace.clock import Clock, wall_clock_us
from headrace.delivery.budget import Claim, FairQueue
from headrace.delivery.inflight import AssignedPartition, Deferred, InFlightAck
from headrace.log.port import TopicPartition
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.tuning import TUNING, ConsumerTuning

Refusal: TypeAlias = Callable[[Envelope, int], Failure | None]
"""Why a request with this envelope, behind so many deferred rows, would be late; see
`headrace.services.batcher.batcher.DynamicBatcher.refusal`."""


class Sorted(NamedTuple):
    """Requests that are let in, those whose claim has no room, and those that were failed."""

    kept: list[Request]
    over: list[Request]
    ended: list[Request]


class Deferral:
    """The requests of one source that are left in the log.

    Args:
        shares: claims on the source's budget.
        refusal: asked for requests with a deadline; None where nothing can be predicted.
        clock: the wall clock, by which deadlines are judged.
    """

    def __init__(
        self,
        shares: FairQueue,
        refusal: Refusal | None = None,
        clock: Clock = wall_clock_us,
        tuning: ConsumerTuning = TUNING.consumer,
    ) -> None:
        self.shares = shares
        self._refusal = refusal
        self._tuning = tuning
        self._clock = clock
        self._waiting: dict[Claim, deque[Deferred]] = {}
        self._deadlines: list[tuple[int, int, Deferred]] = []
        self._order = count()
        self._prune_at = tuning.deadline_prune_at
        self._late: dict[tuple[AssignedPartition, int], Failure] = {}
        self._predicted_s = 0.0
        self._wanted = asyncio.Event()
        self._freed = asyncio.Event()

    # --- what comes ---------------------------------------------------------------------------

    def sort_out(
        self, requests: Sequence[Request], *, again: bool, on_trial: bool = False
    ) -> Sorted:
        """Charge requests to their claims, as far as there is room, and fail what would be late.

        Args:
            requests: admitted, in offset order.
            again: they were deferred before, and their room is kept.
            on_trial: they are suspects, which run in any case.
        """
        ended: list[Request] = []
        if again:
            requests, ended = self._fail_late(requests)
        kept, over = self._let_in(requests, free=again or on_trial)
        if over and self._refusal is not None:
            over, late = self._refuse(over, self._refusal)
            ended += late
        return Sorted(kept, over, ended)

    def _let_in(
        self, requests: Sequence[Request], *, free: bool
    ) -> tuple[list[Request], list[Request]]:
        kept: list[Request] = []
        over: list[Request] = []
        model, tenant, claim = "", "", None
        for request in requests:
            ack_handle = request.ack_handle
            if type(ack_handle) is not InFlightAck:  # a record that cancels another one
                kept.append(request)
                continue
            envelope = request.envelope
            if claim is None or request.model != model or envelope.tenant != tenant:
                model, tenant = request.model, envelope.tenant
                claim = self.shares.claim(model, tenant)
            size_bytes = ack_handle.size_bytes
            if free or (not claim.deferred and self.shares.has_room(claim, size_bytes)):
                claim.charge(size_bytes)
                ack_handle.claim = claim
                kept.append(request)
            else:
                over.append(request)
        return kept, over

    def _refuse(
        self, requests: Sequence[Request], refusal: Refusal
    ) -> tuple[list[Request], list[Request]]:
        """Fail those that would be late behind all that is deferred before them."""
        able: list[Request] = []
        ended: list[Request] = []
        ahead: dict[Claim, int] = {}
        for request in requests:
            claim = self.shares.claim(request.model, request.envelope.tenant)
            if claim not in ahead:
                ahead[claim] = sum([each.rows for each in self._waiting.get(claim, ())])
            failure = None
            if request.envelope.deadline_ms:
                failure = refusal(_asked(request), ahead[claim])
            if failure is None:
                ahead[claim] += request.rows
                able.append(request)
            else:
                ended.append(_failed(request, failure))
        return able, ended

    def _fail_late(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Fail those that are read again because they would be late."""
        if not self._late:
            return list(requests), []
        able: list[Request] = []
        ended: list[Request] = []
        for request in requests:
            ack_handle = request.ack_handle
            assert isinstance(ack_handle, InFlightAck)
            failure = self._late.pop((ack_handle.assignment, ack_handle.offset), None)
            if failure is None:
                able.append(request)
            else:
                ended.append(_failed(request, failure))
        return able, ended

    async def wait_for_room(self, requests: Sequence[Request]) -> list[Request]:
        """Let requests in as their claims get room, for a moment; defer those that are left.

        Returns those that are let in.
        """
        kept: list[Request] = []
        over = list(requests)
        try:
            async with asyncio.timeout(self._tuning.deferral_grace_s):
                while over and not self._is_saturated(over[0]):
                    self._freed.clear()
                    await self._freed.wait()
                    more, over = self._let_in(over, free=False)
                    kept += more
        except TimeoutError:
            pass
        for request in over:
            self._defer(request)
        return kept

    def _is_saturated(self, request: Request) -> bool:
        claim = self.shares.claim(request.model, request.envelope.tenant)
        recently_s = time.monotonic() - self._tuning.saturated_s
        return claim.deferred > 0 or claim.deferred_s > recently_s

    def _defer(self, request: Request) -> None:
        ack_handle = request.ack_handle
        assert isinstance(ack_handle, InFlightAck)
        if ack_handle.revoked:
            ack_handle.ack()
            return
        claim = self.shares.claim(request.model, request.envelope.tenant)
        deferred = ack_handle.defer(claim, request.rows, _asked(request))
        claim.deferred += 1
        claim.deferred_s = time.monotonic()
        self._waiting.setdefault(claim, deque()).append(deferred)
        self._note_deadline(deferred)
        self._wanted.set()

    def _note_deadline(self, deferred: Deferred) -> None:
        if deadline_ms := deferred.envelope.deadline_ms:
            entry = (deadline_ms * 1000, next(self._order), deferred)
            heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) >= self._prune_at:
            # Most are read again long before their deadlines, which may lie years ahead.
            self._drop_gone_deadlines()
            self._prune_at = max(self._tuning.deadline_prune_at, 2 * len(self._deadlines))

    def _drop_gone_deadlines(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if not _is_gone(entry[2])]
        heapq.heapify(self._deadlines)

    # --- what goes ----------------------------------------------------------------------------

    def freed(self) -> None:
        """Something was acknowledged, so that there may be room."""
        self._freed.set()

    def forget(self) -> None:
        """Forget what is revoked, or about to be: the next owner finds it in the log."""
        for claim, waiting in list(self._waiting.items()):
            left = deque(each for each in waiting if not _is_gone(each))
            claim.deferred -= len(waiting) - len(left)
            self._waiting[claim] = left
            if not left:
                del self._waiting[claim]
        self._drop_gone_deadlines()
        self._late = {each: failure for each, failure in self._late.items() if not each[0].revoked}

    def partitions(self) -> set[TopicPartition]:
        """Return the partitions that have deferred records which are not being read again."""
        return {each.assignment.partition for some in self._waiting.values() for each in some}

    async def wait_deferred(self, timeout_s: float | None = None) -> bool:
        """Wait until something is deferred; False after a time in which nothing was."""
        if self._waiting:
            return True
        self._wanted.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True

    def pick(self) -> dict[AssignedPartition, list[Deferred]]:
        """Return what is to be read again now, in offset order, and reserve its room."""
        now_us, now_s = self._clock(), time.monotonic()
        interval_s = self._tuning.refusal_interval_s
        picked = self._pick_due(now_us)
        if self._refusal is not None and now_s - self._predicted_s >= interval_s:
            self._predicted_s = now_s
            picked += self._pick_late(self._refusal)
        for deferred in picked:
            self._waiting[deferred.claim].remove(deferred)
        for claim, waiting in self._waiting.items():
            while waiting and self._has_room(claim, waiting[0].size_bytes):
                deferred = waiting.popleft()
                deferred.reserve()
                picked.append(deferred)
        self._waiting = {claim: waiting for claim, waiting in self._waiting.items() if waiting}
        found: dict[AssignedPartition, list[Deferred]] = {}
        for deferred in picked:
            deferred.claim.deferred -= 1
            found.setdefault(deferred.assignment, []).append(deferred)
        return {each: sorted(some, key=_offset) for each, some in found.items()}

    def put_back(self, unread: Iterable[Deferred]) -> None:
        """Have records wait on that were picked, and could not be read."""
        now_us = self._clock()
        for deferred in unread:
            deferred.release()
            if _is_gone(deferred):
                continue
            deferred.claim.deferred += 1
            waiting = self._waiting.get(deferred.claim, ())
            self._waiting[deferred.claim] = deque(sorted([*waiting, deferred], key=_offset))
            if deferred.envelope.deadline_ms * 1000 <= now_us:  # otherwise it is still noted
                self._note_deadline(deferred)

    def _has_room(self, claim: Claim, size_bytes: int) -> bool:
        return self.shares.has_room(claim, size_bytes, uncharged_bytes=size_bytes)

    def _pick_due(self, now_us: int) -> list[Deferred]:
        """Pick those whose deadline has passed, as many as may be read at a time."""
        due: list[Deferred] = []
        left_bytes = self.shares.limit_bytes * self._tuning.overdue_fraction
        while self._deadlines and self._deadlines[0][0] <= now_us and left_bytes > 0:
            deferred = heapq.heappop(self._deadlines)[2]
            if not deferred.is_reserved and not _is_gone(deferred):
                deferred.reserve()
                left_bytes -= deferred.size_bytes
                due.append(deferred)
        return due

    def _pick_late(self, refusal: Refusal) -> list[Deferred]:
        """Pick those that would be late behind all that is deferred before them."""
        # Those that have ended otherwise, when they were read again, were not asked for.
        self._late = {
            place: failure for place, failure in self._late.items() if place[1] in place[0].deferred
        }
        late: list[Deferred] = []
        left_bytes = self.shares.limit_bytes * self._tuning.overdue_fraction
        for waiting in self._waiting.values():
            rows = 0
            for deferred in waiting:
                if left_bytes <= 0:
                    return late
                if deferred.is_reserved:
                    continue
                failure = None
                if deferred.envelope.deadline_ms:
                    failure = refusal(deferred.envelope, rows)
                if failure is None:
                    rows += deferred.rows
                    continue
                self._late[deferred.assignment, deferred.offset] = failure
                deferred.reserve()
                left_bytes -= deferred.size_bytes
                late.append(deferred)
        return late


def _asked(request: Request) -> Envelope:
    """What is asked of a refusal, without what only the answer needs."""
    return request.envelope._replace(
        correlation_id=None,
        reply_topic=None,
        traceparent=None,
        tracestate=None,
        model=request.model,
        version=request.version,
    )


def _failed(request: Request, failure: Failure) -> Request:
    request.fail(failure)
    request.value = None  # nobody keeps what may be asked again
    return request


def _offset(deferred: Deferred) -> int:
    return deferred.offset


def _is_gone(deferred: Deferred) -> bool:
    """Its assignment has ended, or has forgotten it."""
    assignment = deferred.assignment
    return assignment.revoked or assignment.deferred.get(deferred.offset) is not deferred
