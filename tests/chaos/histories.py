"""Right histories, drawn at random, and faults to plant in them: both to test the checker."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import NamedTuple

from tests.chaos.checker import Breach, Promise
from tests.chaos.history import (
    NO_NUMBER,
    Answered,
    Committed,
    Fault,
    FaultKind,
    History,
    Identity,
    Kept,
    Sent,
)

PARTITIONS = 3
TOPIC = "responses"
KEYS = ("amber", "birch", "cedar")
RESPONDER_KILLED = (FaultKind.KILLED, ("executor", "responder"))
EXPLANATIONS = (RESPONDER_KILLED, (FaultKind.BROKER_RESTARTED, ()), (FaultKind.FROZEN, ()))
NO_EXPLANATIONS = (
    (FaultKind.JOINED, ("responder",)),
    (FaultKind.REDEPLOYED, ()),
    (FaultKind.KILLED, ("ingest",)),
)


def draw(rng: random.Random, requests: int, promise: Promise) -> History:
    """A history that breaks no promise: answered in an order that the promise allows, committed
    now and then, with faults that explain some repetitions where those are allowed.
    """
    history = History()
    offsets = [rng.randrange(5) for _ in range(PARTITIONS)]
    for number in range(requests):
        partition = rng.randrange(PARTITIONS)
        status = "ok" if rng.random() < 0.9 else "INVALID_TENSOR"
        history.add(
            Sent(number, number, partition, offsets[partition], rng.choice(KEYS), (status,))
        )
        if status != "ok":
            history.add(Kept(partition, offsets[partition]))
        offsets[partition] += rng.choice((1, 1, 1, 2))
    _answer(history, rng, promise)
    _repeat(history, rng, promise)
    _commit(history, rng)
    return history


def _answer(history: History, rng: random.Random, promise: Promise) -> None:
    order = list(history.sent)
    if promise.order == "none":
        rng.shuffle(order)
    elif promise.order == "key":
        order = _interleaved(order, rng)
    for at_ms, request in enumerate(order, start=len(order)):
        history.add(right_answer(history, request, at_ms))


def _interleaved(requests: list[Sent], rng: random.Random) -> list[Sent]:
    """Interleave the requests, in order for each partition and key."""
    lanes: dict[tuple[int, str], list[Sent]] = {}
    for request in requests:
        lanes.setdefault((request.partition, request.key), []).append(request)
    turns = [lane for lane, waiting in lanes.items() for _ in waiting]
    rng.shuffle(turns)
    return [lanes[lane].pop(0) for lane in turns]


def _repeat(history: History, rng: random.Random, promise: Promise) -> None:
    """Answer some once more, each time with a fault in between that is to blame."""
    if promise.guarantee == "exactly_once":
        return
    for answer in rng.sample(history.answered, min(3, len(history.answered))):
        kind, stages = rng.choice(EXPLANATIONS)
        fault_ms = answer.at_ms + rng.randrange(20)
        history.add(Fault(fault_ms, fault_ms + rng.randrange(20), kind, stages))
        request = next(each for each in history.sent if each.identity == answer.identity)
        history.add(right_answer(history, request, fault_ms + rng.randrange(20)))


def _commit(history: History, rng: random.Random) -> None:
    """Commit at some moments all that is answered by then, or less."""
    last_ms = max((answer.at_ms for answer in history.answered), default=0)
    bases = [0] * PARTITIONS
    for at_ms in sorted(rng.randrange(last_ms + 10) for _ in range(10)):
        for partition in range(PARTITIONS):
            answered = {
                answer.request_offset
                for answer in history.answered
                if answer.request_partition == partition and answer.at_ms <= at_ms
            }
            open_ = sorted(
                request.offset
                for request in history.sent
                if request.partition == partition and request.offset not in answered
            )
            base = open_[0] if open_ else max(answered, default=-1) + 1
            base = bases[partition] = rng.randint(bases[partition], max(base, bases[partition]))
            above = tuple((each, each + 1) for each in sorted(answered) if each >= base)
            history.add(Committed(at_ms, partition, base, above if rng.random() < 0.7 else ()))


def right_answer(history: History, request: Sent, at_ms: int) -> Answered:
    """Return the correct answer to the request, given all that its partition holds before it."""
    behind = [each.offset for each in history.answered if each.partition == request.partition]
    status = request.statuses[0]
    return Answered(
        at_ms,
        TOPIC,
        request.partition,
        max(behind, default=-1) + 1,
        *request.identity,
        request.number,
        request.number if status == "ok" else NO_NUMBER,
        status,
    )


class Planted(NamedTuple):
    """A history that was right before one thing in it was changed, and whom that concerns."""

    history: History
    request: Identity


Plant = Callable[[History, random.Random], Planted]


def plant_lost(history: History, rng: random.Random) -> Planted:
    """All answers to one request are gone."""
    victim = rng.choice(history.sent).identity
    kept = [answer for answer in history.answered if answer.identity != victim]
    return Planted(dataclasses.replace(history, answered=kept, committed=[]), victim)


def plant_doubled(history: History, rng: random.Random) -> Planted:
    """One request is answered again, with only faults in between that explain nothing."""
    victim = rng.choice(history.sent)
    last_ms = max(event.ended_ms for event in history.faults) if history.faults else 0
    at_ms = max(last_ms, *(answer.at_ms for answer in history.answered)) + 1
    kind, stages = rng.choice(NO_EXPLANATIONS)
    once = [answer for answer in history.answered if answer.identity != victim.identity]
    changed = dataclasses.replace(history, answered=once, faults=list(history.faults), committed=[])
    changed.add(right_answer(changed, victim, at_ms))
    changed.add(Fault(at_ms + 1, at_ms + 2, kind, stages))
    changed.add(right_answer(changed, victim, at_ms + 3))
    return Planted(changed, victim.identity)


def plant_invented(history: History, rng: random.Random) -> Planted:
    """An answer names a request that does not exist."""
    answer = rng.choice(history.answered)
    invented = answer._replace(request_offset=10_000, offset=10_000)
    changed = dataclasses.replace(history, answered=[*history.answered, invented])
    return Planted(changed, invented.identity)


def plant_crossed(history: History, rng: random.Random) -> Planted:
    """An answer carries something of another request."""
    place = rng.randrange(len(history.answered))
    answer = history.answered[place]
    foreign = rng.choice(
        [
            answer._replace(number=answer.number + 1),
            answer._replace(output=answer.number + 1),
            answer._replace(partition=answer.partition + 1, offset=10_000),
        ]
    )
    return Planted(_with(history, place, foreign), answer.identity)


def plant_wrong(history: History, rng: random.Random) -> Planted:
    """A request that should be served is told that the model failed."""
    right = [place for place, each in enumerate(history.answered) if each.status == "ok"]
    place = rng.choice(right or [0])
    answer = history.answered[place]._replace(status="MODEL_FAILED", output=NO_NUMBER)
    return Planted(_with(history, place, answer), answer.identity)


def plant_unkept(history: History, rng: random.Random) -> Planted:
    """A request that is refused has no dead letter."""
    place = rng.randrange(len(history.answered))
    answer = history.answered[place]._replace(status="INVALID_TENSOR", output=NO_NUMBER)
    kept = [letter for letter in history.kept if letter.identity != answer.identity]
    changed = dataclasses.replace(_with(history, place, answer), kept=kept)
    return Planted(changed, answer.identity)


def plant_unfinished(history: History, rng: random.Random) -> Planted:
    """A commit covers a request a moment before its first answer."""
    victim = rng.choice(history.sent).identity
    first_ms = min(each.at_ms for each in history.answered if each.identity == victim)
    others = [each for each in history.committed if not each.covers(victim.offset)]
    early = Committed(first_ms - 1, victim.partition, 0, ((victim.offset, victim.offset + 1),))
    return Planted(dataclasses.replace(history, committed=[*others, early]), victim)


def plant_retreated(history: History, rng: random.Random) -> Planted:
    """A late commit of an old owner takes the base back."""
    partition = rng.randrange(PARTITIONS)
    times = [each.at_ms for each in history.committed]
    last_ms = max(*times, *(each.at_ms for each in history.answered)) + 1
    highest = max(request.offset for request in history.sent) + 1
    late = Committed(last_ms + 1, partition, 0, ())
    changed = dataclasses.replace(
        history, committed=[*history.committed, Committed(last_ms, partition, highest, ()), late]
    )
    return Planted(changed, Identity(partition, 0))


def plant_overtaken(history: History, rng: random.Random) -> Planted:
    """Two neighbours of one partition and key are answered the wrong way round."""
    lanes: dict[tuple[int, str], list[Identity]] = {}
    for request in history.sent:
        lanes.setdefault((request.partition, request.key), []).append(request.identity)
    victim, overtaker = rng.choice([lane for lane in lanes.values() if len(lane) > 1])[:2]
    changed = dataclasses.replace(history, answered=[], committed=[])
    for answer in history.answered:
        if answer.identity == victim:
            continue
        changed.answered.append(answer)
        if answer.identity == overtaker:
            late = next(each for each in history.answered if each.identity == victim)
            changed.answered.append(late._replace(at_ms=answer.at_ms))
    _renumber(changed)
    return Planted(changed, victim)


def _renumber(history: History) -> None:
    ends = [0] * PARTITIONS
    for place, answer in enumerate(history.answered):
        history.answered[place] = answer._replace(offset=ends[answer.partition])
        ends[answer.partition] += 1


def _with(history: History, place: int, answer: Answered) -> History:
    answered = [*history.answered]
    answered[place] = answer
    return dataclasses.replace(history, answered=answered)


PLANTS: dict[Breach, Plant] = {
    Breach.LOST: plant_lost,
    Breach.UNKEPT: plant_unkept,
    Breach.DOUBLED: plant_doubled,
    Breach.INVENTED: plant_invented,
    Breach.CROSSED: plant_crossed,
    Breach.WRONG: plant_wrong,
    Breach.UNFINISHED: plant_unfinished,
    Breach.RETREATED: plant_retreated,
    Breach.OVERTAKEN: plant_overtaken,
}
