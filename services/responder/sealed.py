"""The answering step for exactly once: answers, dead letters and offsets in one transaction.

A transaction that the log refuses is taken apart until the answer that is at fault stands alone;
that one gives way, by the same rules as without transactions, and the others go as they are.

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

from headrace.errors import Rejected
from headrace.flow.books import Outgoing, by_offset, requests_of
from headrace.flow.inflight import LedgerReceipt
from headrace.flow.sealing import Lost, Records, Sealing, Unsealed
from headrace.log.errors import LogRefused, NoLeader, TopicForbidden, UnknownPartition
from headrace.log.port import TopicPartition
from headrace.services.responder.composing import Addressed, Composer
from headrace.services.responder.gathering import pause_s
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering

log = structlog.get_logger(__name__)

RETRY_S = 0.1
MAX_RETRY_S = 5.0
STALLED_S = 2.0
MAX_STALLED_S = 60.0
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


class SealedStep:
    """Answers requests of one source partition; see `turns.Step`.

    Args:
        responses: the topic; what is for one of its partitions is put aside only where that has
            no leader.
        in_order: nothing is put aside, since nothing may pass it.
    """

    def __init__(
        self,
        sealing: Sealing,
        composer: Composer,
        metrics: Metrics,
        responses: str,
        *,
        in_order: bool,
    ) -> None:
        self._sealing = sealing
        self._composer = composer
        self._metrics = metrics
        self._responses = responses
        self._in_order = in_order
        self._stalls: dict[TopicPartition, _Stall] = {}
        self._last: dict[int, _Ended] = {}

    async def __call__(self, number: int, outgoing: list[Outgoing]) -> Sequence[Outgoing]:
        began_s = time.monotonic()
        first = outgoing[0][0].receipt if outgoing else None
        left = await self._answer_now(number, outgoing)
        last, ended_s = self._last.get(number, _NEVER), time.monotonic()
        follows = began_s - last.pause_ended_s < FOLLOWS_WITHIN_S
        found_s = 0.0
        if follows and isinstance(first, LedgerReceipt) and not first.void:
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
        return [*aside, *await self._answer(number, by_offset(outgoing))]

    async def _answer(self, number: int, left: list[Outgoing]) -> Sequence[Outgoing]:
        while left:
            try:
                await self._seal(number, left)
            except (UnknownPartition, TopicForbidden) as error:
                left = self._reroute(left, error)
            except Rejected as error:
                if len(left) == 1:
                    await self._alone(number, left, error)
                    return left
                middle = len(left) // 2
                waiting = await self._answer(number, left[:middle])
                left = left[middle:]
                if waiting:  # then nothing that is above it has room either
                    return [*waiting, *left]
            else:
                return left
        return []

    async def _seal(
        self, number: int, outgoing: list[Outgoing], draft: _Draft | None = None
    ) -> None:
        """Until it is sealed, or void; what has to wait stays in the list.

        Raises:
            Rejected: the log refuses a record.
        """
        pause_s = RETRY_S
        while not await self._try(number, outgoing, draft or _Draft(self._composer)):
            away = any(target.topic != self._responses for _, target in outgoing)
            if away and not self._in_order and await self._isolate(number, outgoing, draft):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _try(self, number: int, outgoing: list[Outgoing], draft: _Draft) -> bool:
        """One transaction; False when it failed. Void answers are settled without it, and those
        for partitions without leaders stay in the list.
        """
        leaderless: list[Outgoing] = []
        done = False
        try:
            while outgoing and not done:
                try:
                    await self._sealing.seal(number, outgoing, draft.compose)
                except NoLeader as error:
                    here = [each for each in outgoing if each[1] == error.partition]
                    if self._in_order or not here:
                        return False
                    self._stall(error.partition, STALLED_S)
                    leaderless += here
                    outgoing[:] = [each for each in outgoing if each[1] != error.partition]
                else:
                    draft.note()
                    done = True
        except Unsealed:
            self._metrics.retried("send", len(outgoing))
            return False
        except Lost:
            self._metrics.void.inc(len(outgoing))
            for request in requests_of(outgoing):
                request.receipt.settle()
            outgoing.clear()
        finally:
            outgoing += leaderless
        return True

    async def _isolate(self, number: int, outgoing: list[Outgoing], draft: _Draft | None) -> bool:
        """Seal the answers for each reply partition by themselves; what fails stays, as stalled.
        A draft is of one answer, which is tried in another form.

        Returns:
            False when those for `responses` fail as well: no reply partition is at fault then.
        """
        targets = {target for _, target in outgoing if target.topic != self._responses}
        home = [each for each in outgoing if each[1] not in targets]
        done = await self._try(number, home, _Draft(self._composer))
        outgoing[:] = [*home, *(each for each in outgoing if each[1] in targets)]
        if not done:
            return False
        for target in sorted(targets):
            part = [each for each in outgoing if each[1] == target]
            if not await self._try(number, part, draft or _Draft(self._composer)):
                before = self._stalls.get(target)
                pause_s = STALLED_S if before is None else 2 * before.pause_s
                self._stall(target, min(pause_s, MAX_STALLED_S))
            elif not part:
                self._stalls.pop(target, None)
            outgoing[:] = [*part, *(each for each in outgoing if each[1] != target)]
        return True

    def _stall(self, target: TopicPartition, pause_s: float) -> None:
        self._stalls[target] = _Stall(time.monotonic() + pause_s, pause_s)
        log.warning(Event.ANSWERS_STALLED, topic=str(target), again_in_s=pause_s)

    def _is_stalled(self, target: TopicPartition, now_s: float) -> bool:
        stall = self._stalls.get(target)
        return stall is not None and now_s < stall.until_s

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

    async def _alone(self, number: int, outgoing: list[Outgoing], error: Rejected) -> None:
        """One answer that was refused gives way until something of it is taken.

        A refusal does not say whether the answer is at fault or its dead letter. So each form of
        the answer is tried with the letter, and then without.
        """
        (request, target), bare, with_letter, given_up = outgoing[0], False, True, False
        while True:
            letters = self._composer.letters([request])
            with_letter = not (with_letter and letters)
            if with_letter:
                way = self._composer.give_way(request, target, error, bare=bare)
                given_up = way is None
                target, bare = way or (target, bare)
            draft = _Draft(self._composer, bare=bare, letters=with_letter, answers=not given_up)
            outgoing[:] = [(request, target)]
            try:
                await self._seal(number, outgoing, draft)
            except Rejected as refusal:
                error = refusal
                continue
            if not (with_letter or outgoing):  # what is left in there waits
                for where in letters:
                    self._composer.unkept(where, 1)
            return


class _Draft:
    """The records of one transaction, and what is told of them once it is sealed."""

    def __init__(
        self, composer: Composer, *, bare: bool = False, letters: bool = True, answers: bool = True
    ) -> None:
        self._composer = composer
        self._bare = bare
        self._letters = letters
        self._answers = answers
        self._addressed: Addressed = {}
        self._began_us = 0
        self._encoded_us = 0

    def compose(self, outgoing: Sequence[Outgoing]) -> Records:
        """See `headrace.flow.sealing`."""
        composer = self._composer
        self._began_us = composer.clock()
        self._addressed = {}
        for request, target in outgoing:
            if request.skipped:
                continue
            self._addressed.setdefault(target, []).append(request)
        records = {
            target: composer.answers(requests, self._began_us, bare=self._bare)
            for target, requests in self._addressed.items()
            if self._answers
        }
        self._encoded_us = composer.clock()
        if self._letters:
            failed = [request for request, _ in outgoing if request.failure is not None]
            records |= composer.letters(failed)
        return records

    def note(self) -> None:
        """It is sealed."""
        if self._addressed:
            now_us = self._composer.clock()
            times = Answering(self._began_us, self._encoded_us, now_us, now_us)
            self._composer.answered(self._addressed, times)
