"""Rules that a history must not break. Pure: it knows nothing of how the history came about.

The rules, for requests that the log holds and answers that a `read_committed` reader saw:

- *lost*: a request without an answer. A record that cannot be read has none.
- *unkept*: a request whose answer says that it can never succeed, without a dead letter. Where
  another attempt may end differently, as with a claim that came with wrong bytes, the last answer
  counts: the process may have been killed between an answer and its dead letter.
- *doubled*: a request with more answers than the guarantee allows. Exactly once allows one. At
  least once allows a further one only where a fault explains it: between the timestamps of two
  consecutive answers (both included) lies some part of a fault that can take a partition from
  its owner before what it answered is committed, or leave unknown what became of an answer, and
  that hit a process with the responder, or the brokers. A process that joins, leaves or is
  redeployed in order explains nothing; only where the time to drain ends before the requests in
  flight are answered may it leave behind what was answered and not yet committed.
- *invented*: an answer to a request that nobody sent.
- *crossed*: an answer with another request's outputs, correlation id or partition.
- *wrong*: an answer whose status is none of those that the request may have, or an answer to a
  record that cannot be read.
- *overtaken*: where order is asked for, a first answer that stands behind that of a later request
  of its partition, or of its partition and key.
- *unfinished*: a commit that covers a request which had no answer by then.
- *retreated*: a committed base below one that was committed before.

Where requests were deleted, as retention deletes them, two things are allowed besides, and only for
these requests:

- an answer `INTERNAL` after the deletion, if the value was only in the deleted record;
- no answer, a commit without one, or an answer behind those of later requests, if ingest reported
  the offset as deleted before it was read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from tests.chaos.history import (
    NO_NUMBER,
    Answered,
    Committed,
    Deleted,
    Fault,
    FaultKind,
    History,
    Identity,
    Sent,
)

Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]
Order: TypeAlias = Literal["none", "key", "partition"]

OK = "ok"
VALUE_LOST = "INTERNAL"
KEPT = frozenset({"INVALID_REQUEST", "INVALID_TENSOR", "UNKNOWN_MODEL"})
RESPONDER = "responder"
EXPLAINING = frozenset(
    {
        FaultKind.KILLED,
        FaultKind.CRASHED,
        FaultKind.FROZEN,
        FaultKind.LOST_PARTITION,
        FaultKind.BROKER_RESTARTED,
        FaultKind.CONNECTIONS_CUT,
        FaultKind.BROKER_SILENT,
        FaultKind.DRAIN_CUT_SHORT,
        FaultKind.UNACKNOWLEDGED,
    }
)


class Breach(StrEnum):
    """A rule that a history can break."""

    LOST = "lost"
    UNKEPT = "unkept"
    DOUBLED = "doubled"
    INVENTED = "invented"
    CROSSED = "crossed"
    WRONG = "wrong"
    OVERTAKEN = "overtaken"
    UNFINISHED = "unfinished"
    RETREATED = "retreated"


@dataclass(frozen=True)
class Promise:
    """The guarantee and order that were promised of the run."""

    guarantee: Guarantee = "at_least_once"
    order: Order = "none"


class Finding(NamedTuple):
    """A broken rule, the requests that it concerns, and what is wrong in one sentence."""

    breach: Breach
    requests: tuple[Identity, ...]
    sentence: str


def check(history: History, promise: Promise) -> list[Finding]:
    """Return every breach of the promise in the history, by request."""
    sent = {request.identity: request for request in history.sent}
    answers: dict[Identity, list[Answered]] = defaultdict(list)
    for answer in history.answered:
        answers[answer.identity].append(answer)
    skipped = unread(history)
    found = [
        *_lost(sent, answers, skipped),
        *_unkept(history),
        *_doubled(history.faults, answers, promise),
        *_misaddressed(sent, history.answered, history.deleted),
        *_overtaken(sent, history.answered, promise, skipped),
        *_unfinished(sent, answers, history.committed, skipped),
        *_retreated(history.committed),
    ]
    return sorted(found, key=lambda finding: (finding.requests, finding.breach))


def duplicates(history: History) -> int:
    """How many answers there are beyond the first of each request."""
    return len(history.answered) - len({answer.identity for answer in history.answered})


def deleted(history: History) -> set[Identity]:
    """Return the requests whose records were deleted."""
    return {
        request.identity
        for request in history.sent
        if any(_is_in(request, each) for each in history.deleted)
    }


def unread(history: History) -> set[Identity]:
    """Return the requests that were deleted, and of which ingest says that it had not read them."""
    return {
        identity
        for identity in deleted(history)
        if any(
            each.partition == identity.partition and each.first <= identity.offset < each.end
            for each in history.skipped
        )
    }


def explains(fault: Fault, first_ms: int, second_ms: int) -> bool:
    """Whether a fault can be why a request was answered at both these times."""
    return (
        fault.kind in EXPLAINING
        and (not fault.stages or RESPONDER in fault.stages)
        and fault.began_ms <= second_ms
        and first_ms <= fault.ended_ms
    )


def _lost(
    sent: dict[Identity, Sent], answers: dict[Identity, list[Answered]], skipped: set[Identity]
) -> Iterator[Finding]:
    for identity, request in sent.items():
        if request.statuses and identity not in answers and identity not in skipped:
            yield Finding(Breach.LOST, (identity,), f"request {identity} has no answer")


def _unkept(history: History) -> Iterator[Finding]:
    kept = {letter.identity for letter in history.kept}
    refused = {answer.identity for answer in history.answered if answer.status in KEPT}
    may_change = {request.identity for request in history.sent if len(request.statuses) > 1}
    in_order = sorted(history.answered, key=lambda answer: answer.at_ms)
    last = {answer.identity: answer.status for answer in in_order}
    for identity in refused - kept:
        if identity in may_change and last[identity] not in KEPT:
            continue
        yield Finding(Breach.UNKEPT, (identity,), f"request {identity} has no dead letter")


def _doubled(
    faults: Sequence[Fault], answers: dict[Identity, list[Answered]], promise: Promise
) -> Iterator[Finding]:
    for identity, all_of_one in answers.items():
        if len(all_of_one) == 1:
            continue
        times = sorted(answer.at_ms for answer in all_of_one)
        if promise.guarantee == "exactly_once":
            sentence = f"request {identity} has {len(times)} answers"
        elif all(any(explains(fault, *pair) for fault in faults) for pair in pairwise(times)):
            continue
        else:
            sentence = f"request {identity} has {len(times)} answers, and no fault explains them"
        yield Finding(Breach.DOUBLED, (identity,), sentence)


def _misaddressed(
    sent: dict[Identity, Sent], answered: Sequence[Answered], deletions: Sequence[Deleted]
) -> Iterator[Finding]:
    """Invented, crossed or wrong."""
    for answer in answered:
        identity = answer.identity
        request = sent.get(identity)
        if request is None:
            sentence = f"an answer to request {identity}, which nobody sent"
            yield Finding(Breach.INVENTED, (identity,), sentence)
            continue
        if foreign := _foreign(request, answer):
            sentence = f"the answer to request {identity} has {foreign}"
            yield Finding(Breach.CROSSED, (identity,), sentence)
        lost_value = answer.status == VALUE_LOST and _lost_value(request, answer, deletions)
        if answer.status not in request.statuses and not lost_value:
            expected = " or ".join(request.statuses) or "no answer"
            sentence = f"request {identity} expected {expected}, got {answer.status}"
            yield Finding(Breach.WRONG, (identity,), sentence)


def _is_in(request: Sent, deletion: Deleted) -> bool:
    return request.partition == deletion.partition and request.offset < deletion.end


def _lost_value(request: Sent, answer: Answered, deletions: Sequence[Deleted]) -> bool:
    """Return True if the value of a request was in a record that was deleted before the answer."""
    return bool(request.statuses) and any(
        _is_in(request, each)
        and each.from_bytes is not None
        and request.size_bytes >= each.from_bytes
        and each.at_ms <= answer.at_ms
        for each in deletions
    )


def _foreign(request: Sent, answer: Answered) -> str:
    """Return the parts of an answer that belong to another request; empty if there are none."""
    expected_output = request.number if answer.status == OK else NO_NUMBER
    if answer.number != request.number:
        return f"correlation id {answer.number} in the place of {request.number}"
    if answer.output != expected_output:
        return f"output {answer.output} in the place of {expected_output}"
    if answer.partition != request.partition:
        return f"partition {answer.partition} in the place of {request.partition}"
    return ""


def _overtaken(
    sent: dict[Identity, Sent],
    answered: Sequence[Answered],
    promise: Promise,
    skipped: set[Identity],
) -> Iterator[Finding]:
    if promise.order == "none":
        return
    furthest: dict[tuple[str, int, str], Identity] = {}
    seen: set[Identity] = set()
    for answer in sorted(answered, key=lambda each: (each.topic, each.partition, each.offset)):
        identity = answer.identity
        if identity in seen or identity not in sent or identity in skipped:
            continue
        seen.add(identity)
        key = sent[identity].key if promise.order == "key" else ""
        lane = (answer.topic, identity.partition, key)
        ahead = furthest.get(lane)
        if ahead is not None and ahead > identity:
            sentence = f"request {identity} was overtaken by {ahead}"
            yield Finding(Breach.OVERTAKEN, (identity, ahead), sentence)
        else:
            furthest[lane] = identity


def _unfinished(
    sent: dict[Identity, Sent],
    answers: dict[Identity, list[Answered]],
    committed: Sequence[Committed],
    skipped: set[Identity],
) -> Iterator[Finding]:
    """The first commit that covers a request, against its first answer."""
    waiting: dict[int, list[Identity]] = defaultdict(list)
    for identity, request in sent.items():
        if request.statuses and identity not in skipped:
            waiting[identity.partition].append(identity)
    for commit in sorted(committed):
        left = []
        for identity in waiting[commit.partition]:
            if not commit.covers(identity.offset):
                left.append(identity)
            elif min((each.at_ms for each in answers.get(identity, ())), default=None) is None:
                sentence = f"a commit covers request {identity}, which has no answer"
                yield Finding(Breach.UNFINISHED, (identity,), sentence)
            elif min(each.at_ms for each in answers[identity]) > commit.at_ms:
                sentence = f"a commit covered request {identity} before it was answered"
                yield Finding(Breach.UNFINISHED, (identity,), sentence)
        waiting[commit.partition] = left


def _retreated(committed: Sequence[Committed]) -> Iterator[Finding]:
    bases: dict[int, int] = {}
    for commit in sorted(committed):
        base = bases.get(commit.partition, 0)
        if commit.base < base:
            sentence = f"the base of partition {commit.partition} fell from {base} to {commit.base}"
            yield Finding(Breach.RETREATED, (Identity(commit.partition, commit.base),), sentence)
        bases[commit.partition] = max(base, commit.base)
