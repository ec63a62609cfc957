"""The answering step for exactly once: answers, dead letters and offsets in one transaction.

A transaction that the log refuses is taken apart until the answer that is at fault stands alone;
that one gives way, by the same rules as without transactions, and the others go as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.errors import Rejected
from headrace.flow.books import Outgoing, by_offset, requests_of
from headrace.flow.sealing import Lost, Records, Sealing, Unsealed
from headrace.log.errors import LogRefused, TopicForbidden, UnknownPartition
from headrace.services.responder.composing import Addressed, Composer
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import Answering

RETRY_S = 0.1
MAX_RETRY_S = 5.0


class SealedStep:
    """Answers requests of one source partition; see `turns.Step`."""

    def __init__(self, sealing: Sealing, composer: Composer, metrics: Metrics) -> None:
        self._sealing = sealing
        self._composer = composer
        self._metrics = metrics

    async def __call__(self, number: int, outgoing: list[Outgoing]) -> Sequence[Outgoing]:
        left = by_offset(outgoing)
        while left:
            try:
                await self._seal(number, left, _Draft(self._composer))
            except (UnknownPartition, TopicForbidden) as error:
                left = self._reroute(left, error)
            except Rejected as error:
                if len(left) == 1:
                    await self._alone(number, left, error)
                    continue
                middle = len(left) // 2
                waiting = await self(number, left[:middle])
                left = left[middle:]
                if waiting:  # then nothing that is above it has room either
                    return [*waiting, *left]
            else:
                return left
        return []

    async def _seal(self, number: int, outgoing: list[Outgoing], draft: _Draft) -> None:
        """Until it is sealed, or void; what has to wait for room stays in the list.

        Raises:
            Rejected: the log refuses a record.
        """
        pause_s = RETRY_S
        while outgoing:
            try:
                await self._sealing.seal(number, outgoing, draft.compose)
            except Unsealed:
                self._metrics.retried("send", len(outgoing))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            except Lost:
                self._metrics.void.inc(len(outgoing))
                for request in requests_of(outgoing):
                    request.receipt.settle()
                outgoing.clear()
            else:
                draft.note()
                return

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
        (request, target), bare, with_letter = outgoing[0], False, True
        while outgoing:
            letters = self._composer.letters([request])
            with_letter = not (with_letter and letters)
            way: tuple[object, bool] | None = (target, bare)
            if with_letter:
                found = self._composer.give_way(request, target, error, bare=bare)
                way = found
                if found is not None:
                    target, bare = found
            draft = _Draft(self._composer, bare=bare, letters=with_letter, answers=way is not None)
            outgoing[:] = [(request, target)]
            try:
                await self._seal(number, outgoing, draft)
            except Rejected as refusal:
                error = refusal
                continue
            if not with_letter:
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
            self._addressed.setdefault(target, []).append(request)
        records = {
            target: [
                composer.answer(request, self._began_us, bare=self._bare) for request in requests
            ]
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
