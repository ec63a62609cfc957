"""The answering step for exactly once: answers, dead letters and offsets in one transaction.

Records that their topics are known to refuse are found while encoding, before the transaction
begins, and replaced by a fallback, by the same rules as without transactions. If the brokers
refuse a transaction all the same, it is halved until the refused answer is alone; only that
answer gets a fallback.

A transaction that times out is halved as well; see `step_size`.

Answers for a partition without a leader are *stalled*: they are retried every few seconds, and
the other answers are committed without them. A transaction that does not end in time may have hit
a partition that is unavailable in another way. Then the answers of each reply partition are
committed separately, and those that fail again are stalled too.
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
from headrace.services.responder.draft import Draft, sizes_of
from headrace.services.responder.encoder import AnswerEncoder
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
"""How long answers for a topic without write permission go to `responses` without a new try."""
MAX_FORBIDDEN = 10_000
FOLLOWS_WITHIN_S = 0.01
"""A step measures how quickly requests are answered only if it begins this soon after the last
one; a burst after a silence does not.
"""


class _Stall(NamedTuple):
    until_s: float
    pause_s: float


class _Ended(NamedTuple):
    """When the transactions of a partition's last step ended, and the pause after them."""

    ended_s: float
    pause_ended_s: float


_NEVER = _Ended(float("-inf"), float("-inf"))


class TransactionalStep:
    """Answer requests of one source partition in transactions; see `turns.Step`.

    Args:
        responses: the topic of default answers; they are stalled only if their partition has no
            leader.
        in_order: never stall answers, because later answers must not overtake them.
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
                if waiting:  # no room in the commit's metadata, so none for higher offsets either
                    return [*waiting, *left]
        return []

    async def _seal(self, number: int, outgoing: list[Outgoing], draft: Draft) -> Rejected | None:
        """Commit until all answers are committed or revoked; those that must wait stay listed.

        Returns:
            Why the log refuses a record of the answers left in the list; None if it does not.
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
        """Try one transaction; return False if it failed. Revoked answers are acknowledged
        without it; answers for partitions without leaders stay in the list.
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
        """Commit one transaction, after replacing answers that are refused before it begins.

        Answers for partitions without leaders move from `outgoing` to `leaderless`.

        Returns:
            False if answers for a partition without a leader must not be left behind.
        """
        while outgoing:
            try:
                await self._sealing.seal(number, outgoing, draft.compose)
            # Both refusals come before the transaction begins: the producer stays usable.
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
                draft.note()  # after the commit: an aborted transaction answers nothing
                return True
        return True

    def _size(self, number: int) -> StepSize:
        size = self._sizes.get(number)
        if size is None:
            size = self._sizes[number] = StepSize(self._sizing)
        return size

    def _halve(self, number: int, outgoing: Sequence[Outgoing]) -> None:
        """Make a partition's next transactions smaller than this one, which timed out."""
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
        """Commit the answers of each reply partition separately; stall those that fail again.

        Returns:
            False if the answers for `responses` fail too: then no reply partition is at fault.
        """
        targets = {target for _, target in outgoing if target.topic != self._responses}
        home = [each for each in outgoing if each[1] not in targets]
        # `responses` first: only if it works can a failure be blamed on a reply partition.
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
        """Remember a forbidden topic: each attempt to write to it costs a producer."""
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
        """Redirect answers that their topic does not accept to `responses`, as failures."""
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
        """Replace one answer that the brokers refused by fallbacks until one is accepted.

        A refusal does not say whether the answer or its dead letter is at fault. So each form of
        the answer is tried with the letter, and then without it.
        """
        while refusal is not None:
            request, target = outgoing[0]
            if not draft.leave_letter_out(request):
                draft.keep_letter(request)
                outgoing[:] = [(request, draft.next_form(request, target, refusal))]
            refusal = await self._seal(number, outgoing, draft)
