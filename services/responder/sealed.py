"""The answering step for exactly once: answers, dead letters and offsets in one transaction.

Records that their topics are known to refuse are found while the transaction is encoded: they give
way before it begins, by the same rules as without transactions. A transaction that the brokers
refuse all the same is taken apart until the answer that is at fault stands alone; that one gives
way, and the others go as they are.

A transaction that takes too long is halved; see `step_size`.

The answers for a partition that has no leader are *stalled*: they are put aside, and tried again
now and then, and the others go without them. A transaction that does not end in time may have met
a partition that is lost in another way. Then the answers for each reply partition are sealed by
themselves, and what fails again is stalled as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from headrace.delivery.inflight import InFlightAck
from headrace.delivery.offset_store import Outgoing, by_offset, requests_of
from headrace.delivery.transactions import PartitionLost, PartitionTransactions, TransactionAborted
from headrace.errors import Rejected, drop_tracebacks
from headrace.log.errors import (
    LogRefused,
    NoLeader,
    RecordsRefused,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.port import TopicPartition
from headrace.services.responder.composing import AnswerEncoder
from headrace.services.responder.draft import Draft, sizes_of
from headrace.services.responder.gathering import pause_s
from headrace.services.responder.step_size import StepSize, StepSizing
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

RETRY_S = 0.1
MAX_RETRY_S = 5.0
STALLED_S = 2.0
MAX_STALLED_S = 60.0
FORBIDDEN_S = 30.0
"""So long answers for a topic that we may not write to go to `responses` without another try."""
MAX_FORBIDDEN = 10_000
FOLLOWS_WITHIN_S = 0.01
"""A step that begins so soon after the last one tells how quickly requests are answered. A burst
after some silence does not.
"""


class _Stall(NamedTuple):
    until_s: float
    pause_s: float


class _Ended(NamedTuple):
    """A step of a partition: when its transactions ended, and the pause after them."""

    ended_s: float
    pause_ended_s: float


_NEVER = _Ended(float("-inf"), float("-inf"))


class TransactionalStep:
    """Answers requests of one source partition; see `turns.Step`.

    Args:
        responses: the topic; what is for one of its partitions is put aside only where that has
            no leader.
        in_order: nothing is put aside, since nothing may pass it.
        sizing: the bounds of a transaction's size.
    """

    def __init__(
        self,
        sealing: PartitionTransactions,
        composer: AnswerEncoder,
        metrics: Metrics,
        responses: str,
        *,
        in_order: bool,
        sizing: StepSizing,
    ) -> None:
        self._sealing = sealing
        self._composer = composer
        self._metrics = metrics
        self._responses = responses
        self._in_order = in_order
        self._sizing = sizing
        self._sizes: dict[int, StepSize] = {}
        self._stalls: dict[TopicPartition, _Stall] = {}
        self._forbidden: dict[str, float] = {}  # until when, in monotonic seconds
        self._last: dict[int, _Ended] = {}

    async def __call__(self, number: int, outgoing: list[Outgoing]) -> Sequence[Outgoing]:
        began_s = time.monotonic()
        first = outgoing[0][0].ack_handle if outgoing else None
        left = await self._answer_now(number, outgoing)
        last, ended_s = self._last.get(number, _NEVER), time.monotonic()
        follows = began_s - last.pause_ended_s < FOLLOWS_WITHIN_S
        found_s = 0.0
        if follows and isinstance(first, InFlightAck) and not first.revoked:
            answers, under_way = len(outgoing) - len(left), first.assignment.in_flight
            found_s = pause_s(answers, ended_s - last.ended_s, under_way)
            await asyncio.sleep(found_s)
        self._last[number] = _Ended(ended_s, ended_s + found_s)
        return left

    async def _answer_now(self, number: int, outgoing: list[Outgoing]) -> Sequence[Outgoing]:
        now_s = time.monotonic()
        aside = [each for each in outgoing if self._is_stalled(each[1], now_s)]
        if aside:
            outgoing = [each for each in outgoing if not self._is_stalled(each[1], now_s)]
        if self._forbidden:
            outgoing = self._reroute_forbidden(outgoing, now_s)
        return [*aside, *await self._answer(number, by_offset(outgoing))]

    async def _answer(self, number: int, left: list[Outgoing]) -> Sequence[Outgoing]:
        draft = Draft(self._composer)
        while left:
            refusal = await self._seal(number, left, draft)
            if refusal is None:
                return left
            if isinstance(refusal, UnknownPartition | TopicForbidden):
                left = self._reroute(left, refusal)
                if isinstance(refusal, TopicForbidden):
                    self._remember(refusal)
            elif len(left) == 1:
                await self._answer_refused(number, left, draft, refusal)
                return left
            else:
                middle = len(left) // 2
                waiting = await self._answer(number, left[:middle])
                left = left[middle:]
                if waiting:  # then nothing that is above it has room either
                    return [*waiting, *left]
        return []

    async def _seal(self, number: int, outgoing: list[Outgoing], draft: Draft) -> Rejected | None:
        """Commit transactions until all is sealed, or revoked; what has to wait stays in the list.

        Returns:
            why the log refuses a record of what is left in the list; None where it does not.
        """
        size = self._size(number)
        pause_s = RETRY_S
        while outgoing:
            count = len(outgoing) if size.limit_bytes is None else size.count(sizes_of(outgoing))
            part = outgoing[:count]
            try:
                done = await self._try(number, part, draft)
                if not done and self._may_isolate(part):
                    done = await self._isolate(number, part, draft)
            except Rejected as error:
                drop_tracebacks(error)
                return error
            finally:
                outgoing[:count] = part
            if done and part:
                return None
            if done:
                pause_s = RETRY_S
            elif part:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
        return None

    async def _try(self, number: int, outgoing: list[Outgoing], draft: Draft) -> bool:
        """One transaction; False when it failed. Void answers are acknowledged without it, and
        those for partitions without leaders stay in the list.
        """
        size = self._size(number)
        size_bytes = 0 if size.limit_bytes is None else sum(sizes_of(outgoing))
        leaderless: list[Outgoing] = []
        began_s = time.monotonic()
        try:
            if not await self._commit(number, outgoing, draft, leaderless):
                return False
        except TransactionAborted as error:
            self._metrics.retried("send", len(outgoing))
            if error.timed_out:
                self._halve(number, outgoing)
            return False
        except PartitionLost:
            self._metrics.revoked.inc(len(outgoing))
            for request in requests_of(outgoing):
                request.ack_handle.ack()
            outgoing.clear()
        finally:
            draft.release()
            outgoing += leaderless
        if size_bytes:
            size.committed(size_bytes, time.monotonic() - began_s)
        return True

    async def _commit(
        self, number: int, outgoing: list[Outgoing], draft: Draft, leaderless: list[Outgoing]
    ) -> bool:
        """Commit one transaction, after what is refused before it begins has given way.

        What goes to partitions without leaders is moved from `outgoing` to `leaderless`.

        Returns:
            False when a partition without a leader must not be passed over.
        """
        while outgoing:
            try:
                await self._sealing.seal(number, outgoing, draft.compose)
            except RecordsRefused as error:
                outgoing[:] = draft.replace_refused(outgoing, error)
            except NoLeader as error:
                here = [each for each in outgoing if each[1] == error.partition]
                if self._in_order or not here:
                    return False
                self._stall(error.partition, STALLED_S)
                leaderless += here
                outgoing[:] = [each for each in outgoing if each[1] != error.partition]
            else:
                draft.note()
                return True
        return True

    def _size(self, number: int) -> StepSize:
        size = self._sizes.get(number)
        if size is None:
            size = self._sizes[number] = StepSize(self._sizing)
        return size

    def _halve(self, number: int, outgoing: Sequence[Outgoing]) -> None:
        """Make the next transactions of a partition smaller than this one, which timed out."""
        size, size_bytes = self._size(number), sum(sizes_of(outgoing))
        size.timed_out(size_bytes, len(outgoing))
        self._metrics.transaction_timeouts.inc()
        log.warning(
            Event.TRANSACTION_TIMED_OUT,
            partition=number,
            answers=len(outgoing),
            size_bytes=size_bytes,
            next_bytes=size.limit_bytes,
        )

    def _may_isolate(self, outgoing: Sequence[Outgoing]) -> bool:
        away = any(target.topic != self._responses for _, target in outgoing)
        return away and not self._in_order

    async def _isolate(self, number: int, outgoing: list[Outgoing], draft: Draft) -> bool:
        """Seal the answers for each reply partition by themselves; what fails stays, as stalled.

        Returns:
            False when those for `responses` fail as well: no reply partition is at fault then.
        """
        targets = {target for _, target in outgoing if target.topic != self._responses}
        home = [each for each in outgoing if each[1] not in targets]
        done = await self._try(number, home, draft)
        outgoing[:] = [*home, *(each for each in outgoing if each[1] in targets)]
        if not done:
            return False
        for target in sorted(targets):
            theirs = [each for each in outgoing if each[1] == target]
            count = self._size(number).count(sizes_of(theirs))
            part, rest = theirs[:count], theirs[count:]
            if not await self._try(number, part, draft):
                before = self._stalls.get(target)
                pause_s = STALLED_S if before is None else 2 * before.pause_s
                self._stall(target, min(pause_s, MAX_STALLED_S))
            elif not part:
                self._stalls.pop(target, None)
            outgoing[:] = [*part, *rest, *(each for each in outgoing if each[1] != target)]
        return True

    def _stall(self, target: TopicPartition, pause_s: float) -> None:
        self._stalls[target] = _Stall(time.monotonic() + pause_s, pause_s)
        log.warning(Event.ANSWERS_STALLED, topic=str(target), again_in_s=pause_s)

    def _is_stalled(self, target: TopicPartition, now_s: float) -> bool:
        stall = self._stalls.get(target)
        return stall is not None and now_s < stall.until_s

    def _remember(self, refusal: TopicForbidden) -> None:
        """A caller who names such a topic again must not cost everybody else a producer again."""
        if len(self._forbidden) >= MAX_FORBIDDEN:
            self._forbidden.clear()
        self._forbidden[refusal.topic] = time.monotonic() + FORBIDDEN_S

    def _reroute_forbidden(self, outgoing: list[Outgoing], now_s: float) -> list[Outgoing]:
        for topic in {target.topic for _, target in outgoing} & self._forbidden.keys():
            if now_s < self._forbidden[topic]:
                outgoing = self._reroute(outgoing, TopicForbidden(topic))
            else:
                del self._forbidden[topic]
        return outgoing

    def _reroute(
        self, outgoing: Sequence[Outgoing], error: UnknownPartition | TopicForbidden
    ) -> list[Outgoing]:
        """What goes to a topic that does not take it goes to `responses`, as a failure."""
        if isinstance(error, UnknownPartition):
            astray = [each for each in outgoing if each[1] == error.partition]
        else:
            astray = [each for each in outgoing if each[1].topic == error.topic]
        if not astray:
            raise LogRefused(error.message) from error
        way = {}
        for request, target in astray:
            found = self._composer.give_way(request, target, error, bare=False)
            assert found is not None, "only what is too large is given up"
            way[request] = found[0]
        return [(request, way.get(request, target)) for request, target in outgoing]

    async def _answer_refused(
        self, number: int, outgoing: list[Outgoing], draft: Draft, refusal: Rejected | None
    ) -> None:
        """One answer that the brokers refused gives way until something of it is taken.

        A refusal does not say whether the answer is at fault or its dead letter. So each form of
        the answer is tried with the letter, and then without.
        """
        while refusal is not None:
            request, target = outgoing[0]
            if not draft.leave_letter_out(request):
                draft.keep_letter(request)
                outgoing[:] = [(request, draft.next_form(request, target, refusal))]
            refusal = await self._seal(number, outgoing, draft)
