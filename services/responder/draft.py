"""The records of an answering step's transactions, for exactly once.

A record that its topic refuses before the transaction begins is replaced here by a fallback; only
that record is encoded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from headrace.delivery.offset_store import Outgoing
from headrace.delivery.producing import too_large
from headrace.delivery.transactions import Records
from headrace.errors import Rejected
from headrace.log.errors import RecordsRefused
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.messages import Request
from headrace.services.responder.encoder import Addressed, AnswerEncoder
from headrace.telemetry.span_attributes import Answering

ANSWER_BYTES = 256
"""Approximate size of an answer without its outputs and its key."""


class Draft:
    """The records of a step's transactions, and the fallbacks of refused answers.

    A refused answer keeps its fallback from one transaction to the next: it may be bare or left
    out, and its dead letter may be left out.
    """

    def __init__(self, composer: AnswerEncoder) -> None:
        self._composer = composer
        self._bare: set[Request] = set()
        self._given_up: set[Request] = set()
        self._letterless: set[Request] = set()
        self._encoded: dict[Request, NewRecord] = {}  # answers that need not be encoded again
        self._records: dict[TopicPartition, list[NewRecord]] = {}
        self._addressed: Addressed = {}
        self._answers: Addressed = {}
        self._letters: Addressed = {}
        self._clock = composer.anchored()
        self._began_us = 0
        self._encoded_us = 0

    def compose(self, outgoing: Sequence[Outgoing]) -> Records:
        """Return the answers and dead letters of one transaction; see
        `headrace.delivery.transactions`.
        """
        composer = self._composer
        self._clock = composer.anchored()
        self._began_us = self._clock()
        self._addressed, self._letters = {}, {}
        for request, target in outgoing:
            if not request.skipped:
                self._addressed.setdefault(target, []).append(request)
        self._answers = self._addressed
        if self._given_up:
            self._answers = {
                target: [each for each in requests if each not in self._given_up]
                for target, requests in self._addressed.items()
            }
        self._records = {
            target: self._encode(requests) for target, requests in self._answers.items()
        }
        self._encoded_us = self._clock()
        for request, _ in outgoing:
            if request.failure is not None and request not in self._letterless:
                where = composer.letter_target(request)
                if where is not None:
                    self._letters.setdefault(where, []).append(request)
        for where, requests in self._letters.items():
            self._records[where] = list(map(composer.letter, requests))
        return self._records

    def _encode(self, requests: Sequence[Request]) -> list[NewRecord]:
        encode, bare, encoded = self._composer.answers, self._bare, self._encoded
        if not (bare or encoded):
            return encode(requests, self._began_us)
        missing = [each for each in requests if each not in encoded]
        for is_bare in (False, True):
            part = [each for each in missing if (each in bare) is is_bare]
            encoded.update(zip(part, encode(part, self._began_us, bare=is_bare), strict=True))
        return [encoded[each] for each in requests]

    def replace_refused(
        self, outgoing: Sequence[Outgoing], error: RecordsRefused
    ) -> list[Outgoing]:
        """Choose fallbacks for refused records; return all answers with the targets to try next.

        Raises:
            LogRefused: one of Headrace's topics refused a record for a reason other than size.
        """
        for target, requests in self._answers.items():
            self._encoded.update(zip(requests, self._records[target], strict=True))
        targets: dict[Request, TopicPartition] = {}
        for where, refused in error.refused.items():
            if where in self._letters:
                too_large(where, refused)
                self._letterless.update(self._letters[where][index] for index in refused)
                continue
            for index, refusal in refused.items():
                request = self._answers[where][index]
                targets[request] = self.next_form(request, where, refusal)
        return [(request, targets.get(request, target)) for request, target in outgoing]

    def next_form(
        self, request: Request, target: TopicPartition, refusal: Rejected
    ) -> TopicPartition:
        """Choose the fallback of an answer and return its target; see `AnswerEncoder.give_way`."""
        self._encoded.pop(request, None)
        way = self._composer.give_way(request, target, refusal, bare=request in self._bare)
        if way is None:
            self._given_up.add(request)
            return target
        target, is_bare = way
        (self._bare.add if is_bare else self._bare.discard)(request)
        return target

    def leave_letter_out(self, request: Request) -> bool:
        """Leave out a dead letter; return False if there is none, or it is left out already."""
        if request in self._letterless or self._composer.letter_target(request) is None:
            return False
        self._letterless.add(request)
        return True

    def keep_letter(self, request: Request) -> None:
        """Undo `leave_letter_out`."""
        self._letterless.discard(request)

    def note(self) -> None:
        """Count and log what the last transaction has committed."""
        if not self._addressed:
            return
        if self._letterless:
            self._note_letterless()
        now_us = self._clock()
        times = Answering(self._began_us, self._encoded_us, now_us, now_us)
        self._composer.answered(self._addressed, times)

    def _note_letterless(self) -> None:
        counts = Counter[TopicPartition]()
        for request in chain.from_iterable(self._addressed.values()):
            where = self._composer.letter_target(request)
            if where is not None and request in self._letterless:
                counts[where] += 1
        for where, count in counts.items():
            self._composer.unkept(where, count)

    def release(self) -> None:
        """Free the encoded records after their transaction."""
        self._encoded, self._records = {}, {}
        self._addressed, self._answers, self._letters = {}, {}, {}


def sizes_of(outgoing: Iterable[Outgoing]) -> Iterator[int]:
    """Yield the approximate bytes of each answer, its dead letter included."""
    for request, _ in outgoing:
        size_bytes = ANSWER_BYTES + len(request.key or b"") + sum(map(len, request.contents or ()))
        if request.failure is not None:
            size_bytes += len(request.value or b"")
        yield size_bytes
