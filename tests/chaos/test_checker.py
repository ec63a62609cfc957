"""The checker is itself checked: right histories pass, and every planted fault is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.checker import Breach, Promise, check, duplicates
from tests.chaos.histories import PLANTS, Planted, draw
from tests.chaos.history import (
    NO_NUMBER,
    Answered,
    Committed,
    Deleted,
    Fault,
    FaultKind,
    Happening,
    History,
    Sent,
    Skipped,
)
from tests.chaos.story import tell

PROMISES = [
    Promise(guarantee, order)
    for guarantee in ("at_least_once", "exactly_once")
    for order in ("none", "key", "partition")
]
promises = st.sampled_from(PROMISES)
seeds = st.integers(0, 2**32)
sizes = st.integers(12, 60)


@settings(deadline=None)
@given(seeds, st.integers(0, 60), promises)
def test_correct_history_passes_checker(seed: int, requests: int, promise: Promise) -> None:
    """Nothing is found where nothing is wrong, whatever the guarantee and the order."""
    assert check(draw(random.Random(seed), requests, promise), promise) == []


@pytest.mark.parametrize("breach", [each for each in PLANTS if each is not Breach.OVERTAKEN])
@settings(deadline=None)
@given(seed=seeds, requests=sizes, promise=promises)
def test_checker_finds_planted_fault(
    breach: Breach, seed: int, requests: int, promise: Promise
) -> None:
    """The breach is found, and laid to the request that it was planted in."""
    rng = random.Random(seed)
    planted = PLANTS[breach](draw(rng, requests, promise), rng)

    found = check(planted.history, promise)

    assert (breach, planted.request) in [(each.breach, each.requests[0]) for each in found]


@settings(deadline=None)
@given(seeds, sizes, st.sampled_from([each for each in PROMISES if each.order != "none"]))
def test_checker_finds_planted_overtaking(seed: int, requests: int, promise: Promise) -> None:
    """Two answers the wrong way round are found where order was asked for."""
    planted = _overtaken(seed, requests, promise)

    overtaken = [
        each.requests[0]
        for each in check(planted.history, promise)
        if each.breach is Breach.OVERTAKEN
    ]

    assert planted.request in overtaken


@settings(deadline=None)
@given(seeds, sizes)
def test_checker_allows_overtaking_without_promised_order(seed: int, requests: int) -> None:
    """The same history passes without a promise of order."""
    planted = _overtaken(seed, requests, Promise("exactly_once", "partition"))

    assert check(planted.history, Promise("exactly_once")) == []


def _overtaken(seed: int, requests: int, promise: Promise) -> Planted:
    rng = random.Random(seed)
    return PLANTS[Breach.OVERTAKEN](draw(rng, requests, promise), rng)


def _twice(*faults: Fault) -> History:
    """One request, answered at 10 ms and at 30 ms."""
    answer = Answered(10, "responses", 0, 0, 0, 0, 7, 7, "ok")
    again = answer._replace(at_ms=30, offset=1)
    return History([Sent(0, 7, 0, 0, "", ("ok",))], [answer, again], list(faults))


@pytest.mark.parametrize(
    ("fault", "explained"),
    [
        (Fault(20, 20, FaultKind.KILLED, ("executor", "responder")), True),
        (Fault(5, 10, FaultKind.FROZEN, ("responder",)), True),
        (Fault(30, 50, FaultKind.BROKER_RESTARTED, ()), True),
        (Fault(5, 9, FaultKind.KILLED, ("responder",)), False),
        (Fault(15, 25, FaultKind.BROKER_SILENT, ()), True),
        (Fault(15, 25, FaultKind.DRAIN_CUT_SHORT, ("responder",)), True),
        (Fault(15, 25, FaultKind.UNACKNOWLEDGED, ("responder",)), True),
        (Fault(15, 25, FaultKind.UNACKNOWLEDGED, ("ingest",)), False),
        (Fault(15, 25, FaultKind.THROTTLED, ()), False),
        (Fault(31, 50, FaultKind.CONNECTIONS_CUT, ()), False),
        (Fault(31, 50, FaultKind.BROKER_SILENT, ()), False),
        (Fault(20, 20, FaultKind.KILLED, ("ingest",)), False),
        (Fault(20, 20, FaultKind.REDEPLOYED, ()), False),
    ],
)
def test_repetition_needs_injected_fault_between_its_answers(fault: Fault, explained: bool) -> None:
    """Kind, process and time all have to fit, and under exactly once nothing is excused."""
    history = _twice(fault)

    assert (check(history, Promise()) == []) is explained
    assert [each.breach for each in check(history, Promise("exactly_once"))] == [Breach.DOUBLED]


@pytest.mark.parametrize(("is_refused_last", "breaches"), [(False, []), (True, [Breach.UNKEPT])])
def test_last_answer_to_request_that_may_be_refused_needs_dead_letter(
    is_refused_last: bool, breaches: list[Breach]
) -> None:
    """A process that is killed before the dead letter answers again; a claim may be right then."""
    history = _twice(Fault(20, 20, FaultKind.KILLED, ("responder",)))
    before, after = history.answered
    history.sent[0] = history.sent[0]._replace(statuses=("ok", "INVALID_REQUEST"))
    refused = (after if is_refused_last else before)._replace(
        status="INVALID_REQUEST", output=NO_NUMBER
    )
    history.answered[:] = [before, refused] if is_refused_last else [refused, after]

    assert [each.breach for each in check(history, Promise())] == breaches


def test_each_repetition_needs_its_own_injected_fault() -> None:
    """A third answer long after the fault is not excused by what excused the second."""
    history = _twice(Fault(20, 20, FaultKind.KILLED, ("responder",)))
    history.add(history.answered[-1]._replace(at_ms=90, offset=2))

    assert [each.breach for each in check(history, Promise())] == [Breach.DOUBLED]
    assert duplicates(history) == 2


def test_unreadable_record_in_history_must_have_no_answer() -> None:
    """Nothing is found without an answer, and an answer is."""
    unreadable = Sent(0, NO_NUMBER, 0, 0, "", ())
    committed = Committed(20, 0, 1, ())
    answer = Answered(10, "responses", 0, 0, 0, 0, NO_NUMBER, NO_NUMBER, "ok")

    assert check(History.of([unreadable, committed]), Promise()) == []
    answered = check(History.of([unreadable, answer, committed]), Promise())
    assert Breach.WRONG in {each.breach for each in answered}


REQUEST = Sent(0, 7, 0, 3, "", ("ok",), 500)
DELETED = Deleted(5, 0, 4, 500)
VALUE_LOST = Answered(10, "responses", 0, 0, 0, 3, 7, NO_NUMBER, "INTERNAL")
UNREAD = Skipped(6, 0, 0, 4)
COVERING = Committed(8, 0, 4, ())


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    "happened",
    [
        [DELETED, VALUE_LOST],
        [DELETED, UNREAD, COVERING],
        [DELETED, VALUE_LOST._replace(output=7, status="ok")],
    ],
    ids=["answered-internal", "unread", "answered"],
)
def test_deleted_request_may_fail_or_be_unread(happened: list[Happening], promise: Promise) -> None:
    """Its answer may be the documented error, and one that ingest had not read needs none."""
    assert check(History.of([REQUEST, *happened]), promise) == []


@pytest.mark.parametrize(
    ("happened", "breach"),
    [
        ([VALUE_LOST], Breach.WRONG),
        ([DELETED._replace(at_ms=11), VALUE_LOST], Breach.WRONG),
        ([DELETED._replace(end=3), VALUE_LOST], Breach.WRONG),
        ([DELETED._replace(partition=1), VALUE_LOST], Breach.WRONG),
        ([DELETED._replace(from_bytes=501), VALUE_LOST], Breach.WRONG),
        ([DELETED._replace(from_bytes=None), VALUE_LOST], Breach.WRONG),
        ([DELETED, VALUE_LOST._replace(status="MODEL_FAILED")], Breach.WRONG),
        ([DELETED, VALUE_LOST._replace(number=8)], Breach.CROSSED),
        ([DELETED, VALUE_LOST, VALUE_LOST._replace(at_ms=12, offset=1)], Breach.DOUBLED),
        ([DELETED], Breach.LOST),
        ([DELETED, UNREAD._replace(end=3)], Breach.LOST),
        ([DELETED, UNREAD._replace(partition=1)], Breach.LOST),
        ([UNREAD], Breach.LOST),
        ([DELETED, COVERING, VALUE_LOST], Breach.UNFINISHED),
    ],
)
def test_deletion_excuses_only_its_own_requests(happened: list[Happening], breach: Breach) -> None:
    """Place, time and size must fit, and what was read must be answered, once, before a commit."""
    history = History.of([REQUEST, *happened])

    assert [each.breach for each in check(history, Promise("exactly_once"))] == [breach]


@pytest.mark.parametrize(("happened", "found"), [([], [Breach.OVERTAKEN]), ([UNREAD], [])])
def test_late_answer_is_excused_only_if_ingest_reported_request_as_unread(
    happened: list[Happening], found: list[Breach]
) -> None:
    """It was in flight when ingest started again, and reported it."""
    later = REQUEST._replace(number=8, offset=4)
    answers = [
        Answered(10, "responses", 0, 0, 0, 4, 8, 8, "ok"),
        Answered(12, "responses", 0, 1, 0, 3, 7, 7, "ok"),
    ]
    history = History.of([REQUEST, later, DELETED, *happened, *answers])

    assert [each.breach for each in check(history, Promise(order="key"))] == found


@pytest.mark.parametrize("breach", [each for each in PLANTS if each is not Breach.OVERTAKEN])
@settings(deadline=None)
@given(seed=seeds, requests=sizes, promise=promises)
def test_checker_finds_planted_fault_of_deleted_requests(
    breach: Breach, seed: int, requests: int, promise: Promise
) -> None:
    """Deleting all requests after they were read hides no fault."""
    rng = random.Random(seed)
    planted = PLANTS[breach](draw(rng, requests, promise), rng)
    for partition in {request.partition for request in planted.history.sent}:
        planted.history.add(Deleted(0, partition, 10**6, 0))

    found = check(planted.history, promise)

    assert (breach, planted.request) in [(each.breach, each.requests[0]) for each in found]


def test_story_of_lost_request_tells_of_its_deletion() -> None:
    """It says when the record was deleted, and what ingest said of it."""
    history = History.of([REQUEST, DELETED, UNREAD._replace(end=3)])

    assert tell(history, check(history, Promise())[0]).splitlines() == [
        "lost: request 0/3 has no answer",
        "     0.000 s  request 0/3 (number 7) is written",
        "     0.005 s  the record of 0/3 is deleted",
    ]


def test_story_of_lost_request_lists_its_events_in_order() -> None:
    """It tells of the request, of the commits around it and of the faults meanwhile: no more."""
    history = History.of(
        [
            Sent(1000, 7, 0, 3, "", ("ok",)),
            Sent(1001, 8, 0, 4, "", ("ok",)),
            Answered(1500, "responses", 0, 0, 0, 4, 8, 8, "ok"),
            Fault(500, 900, FaultKind.FROZEN, ("ingest",)),
            Fault(1200, 1210, FaultKind.KILLED, ("responder",)),
            Fault(3000, 3000, FaultKind.KILLED, ("responder",)),
            Committed(900, 0, 2, ()),
            Committed(1100, 0, 3, ()),
            Committed(2000, 0, 5, ()),
            Committed(2500, 0, 5, ()),
        ]
    )
    lost = next(each for each in check(history, Promise()) if each.breach is Breach.LOST)

    assert tell(history, lost).splitlines() == [
        "lost: request 0/3 has no answer",
        "     0.000 s  request 0/3 (number 7) is written",
        "     0.100 s  the commit of partition 0, base 3 and 0 above it, does not cover 0/3",
        "     0.200 s  killed (responder)",
        "     0.210 s  killed (responder): over",
        "     1.000 s  the commit of partition 0, base 5 and 0 above it, covers 0/3",
    ]


@settings(deadline=None)
@given(seeds, st.integers(0, 60), promises)
def test_every_finding_of_checker_has_story(seed: int, requests: int, promise: Promise) -> None:
    """The story of each finding begins with the finding."""
    rng = random.Random(seed)
    history = draw(rng, max(requests, 12), promise)
    plant = PLANTS[rng.choice(list(PLANTS))]
    planted = plant(history, rng)

    for finding in check(planted.history, promise):
        assert tell(planted.history, finding).startswith(f"{finding.breach}: {finding.sentence}")


def test_history_survives_round_trip(tmp_path: Path) -> None:
    """Saving and loading changes nothing."""
    history = draw(random.Random(1), 40, Promise())
    history.add(DELETED)
    history.add(UNREAD)
    history.save(tmp_path / "history.jsonl")

    assert History.load(tmp_path / "history.jsonl") == history
