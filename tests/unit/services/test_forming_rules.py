"""Who goes next, how large a batch gets, and what is refused: one rule at a time."""

from __future__ import annotations

from headrace.errors import Code
from headrace.flow.channel import Ask
from headrace.messages import Batch, Envelope, Request
from headrace.models.latency import Latency
from headrace.services.batcher.forming import Forming
from headrace.services.batcher.lanes import PATIENCE_US, PRIORITY_STEP_US
from tests.support.work import NOW_US, Limits, make_request

KEY = ("digits", "1")
NOW_MS = NOW_US // 1000
LINE_US = {1: 1050, 2: 1100, 4: 1200, 8: 1400, 16: 1800, 32: 2600}


def learned(us_of: dict[int, int]) -> Latency:
    """What runs take, by rows."""
    latency = Latency()
    for rows, us in us_of.items():
        for _ in range(3):
            latency.observe((64,), rows, us)
    return latency


def forming_of(limits: Limits) -> Forming:
    """With the same limits for every model."""
    return Forming(lambda _name, _version: limits, "test")


def filled(limits: Limits, *requests: Request) -> Forming:
    """With these waiting."""
    forming = forming_of(limits)
    for request in requests:
        forming.add(request, NOW_US)
    return forming


def request_of(
    *,
    tenant: str = "",
    priority: int = 0,
    in_ms: int = 0,
    shape_class: tuple[int, ...] = (64,),
    came_us: int = NOW_US,
    rows: int = 1,
) -> Request:
    """A request that came now, or then."""
    envelope = Envelope(
        deadline_ms=NOW_MS + in_ms if in_ms else 0, tenant=tenant, priority=priority
    )
    return make_request(shape_class=shape_class, ingested_us=came_us, envelope=envelope, rows=rows)


def pulled(forming: Forming, now_us: int = NOW_US, ask: Ask | None = None) -> Batch:
    """The next batch, of which there is one."""
    batch = forming.next(KEY, now_us, ask or Ask())
    assert batch is not None
    return batch


def backlogged(limits: Limits, row_us: int) -> Forming:
    """One whose queue has been getting shorter by a row in so many microseconds."""
    forming = filled(limits, *(make_request() for _ in range(100)))
    for number in range(5):
        pulled(forming, NOW_US - 4 * 4 * row_us + number * 4 * row_us)
    return forming


# --- who goes next ----------------------------------------------------------------------------


def test_the_earliest_deadline_goes_first_across_shapes() -> None:
    """However long the others have waited, and wherever in its group it stands."""
    old = request_of(shape_class=(1,), came_us=NOW_US - 1000)
    later = request_of(shape_class=(2,), in_ms=50)
    urgent = request_of(shape_class=(3,), in_ms=20)
    patient = request_of(shape_class=(3,), in_ms=80)

    forming = filled(Limits(), old, later, patient, urgent)

    assert pulled(forming).requests == [patient, urgent]
    assert pulled(forming).requests == [later]
    assert pulled(forming).requests == [old]


def test_a_request_without_a_deadline_is_not_passed_over_for_ever() -> None:
    """It counts as one with a deadline some seconds after it came."""
    old = request_of(shape_class=(1,), came_us=NOW_US - PATIENCE_US)
    urgent = request_of(shape_class=(2,), in_ms=20)

    assert pulled(filled(Limits(), old, urgent)).requests == [old]


def test_priority_goes_first_within_a_tenant() -> None:
    """Among requests that may share a batch, when they do not all fit."""
    low, high = request_of(priority=-1), request_of(priority=3)
    plain = request_of()

    forming = filled(Limits(max_batch_size=1), low, plain, high)

    assert [pulled(forming).requests[0] for _ in range(3)] == [high, plain, low]


def test_waiting_makes_up_for_priority() -> None:
    """A step of priority is worth a fixed time of waiting."""
    patient = request_of(came_us=NOW_US - PRIORITY_STEP_US - 1)
    urgent = request_of(priority=1)

    assert pulled(filled(Limits(max_batch_size=1), urgent, patient)).requests == [patient]


def test_tenants_share_a_batch_evenly() -> None:
    """Whoever sends much gets what the others leave."""
    much = [request_of(tenant="much") for _ in range(20)]
    little = [request_of(tenant="little") for _ in range(3)]

    forming = filled(Limits(max_batch_size=8), *much, *little)

    first = [request.envelope.tenant for request in pulled(forming).requests]
    assert (first.count("much"), first.count("little")) == (5, 3)
    assert len(pulled(forming).requests) == 8


def test_rows_are_shared_and_not_requests() -> None:
    """A tenant with requests of three rows gets a third as many of them."""
    wide = [request_of(tenant="wide", rows=3) for _ in range(8)]
    narrow = [request_of(tenant="narrow") for _ in range(8)]

    batch = pulled(filled(Limits(max_batch_size=12), *wide, *narrow))

    rows = {"wide": 0, "narrow": 0}
    for request in batch.requests:
        rows[request.envelope.tenant] += request.rows
    assert rows == {"wide": 6, "narrow": 6}


def test_a_high_priority_does_not_take_another_tenants_share() -> None:
    """Priorities are among a tenant's own requests."""
    urgent = [request_of(tenant="a", priority=100) for _ in range(10)]
    plain = [request_of(tenant="b") for _ in range(10)]

    batch = pulled(filled(Limits(max_batch_size=4), *urgent, *plain))

    assert sorted(request.envelope.tenant for request in batch.requests) == ["a", "a", "b", "b"]


def test_a_tenant_that_was_away_gets_no_credit_for_it() -> None:
    """Its share begins when it comes, and not with what it might have had before."""
    steady = [request_of(tenant="steady") for _ in range(30)]
    forming = filled(Limits(max_batch_size=2), *steady, request_of(tenant="other"))
    for _ in range(8):
        pulled(forming)
    for _ in range(10):
        forming.add(request_of(tenant="back"))

    tenants = [one.envelope.tenant for _ in range(4) for one in pulled(forming).requests]

    assert (tenants.count("steady"), tenants.count("back")) == (4, 4)


def test_a_thousand_tenants_do_not_make_a_batch_slow() -> None:
    """Every one of 20,000 tenants gets its row, and no batch looks at all of them."""
    requests = [request_of(tenant=str(number)) for number in range(20_000)]
    forming = filled(Limits(max_batch_size=32), *requests)

    rows = 0
    while (batch := forming.next(KEY, NOW_US)) is not None:
        rows += batch.rows

    assert rows == 20_000


# --- when a batch closes, and how large it is -------------------------------------------------


def test_a_batch_for_a_busy_instance_waits_until_it_asked() -> None:
    """What comes until then joins; then it closes, full or not."""
    forming = filled(Limits(), request_of())
    ask = Ask(close_at_us=NOW_US + 500)

    assert forming.next(KEY, NOW_US + 499, ask) is None
    forming.add(request_of(), NOW_US + 499)

    batch = pulled(forming, NOW_US + 500, ask)
    assert (batch.reason, batch.rows) == ("just_in_time", 2)


def test_a_full_batch_does_not_wait_for_a_busy_instance() -> None:
    """More would not fit, so it can be gathered now; other shapes still wait."""
    single = request_of(shape_class=(1,), in_ms=100)
    full = [request_of() for _ in range(4)]
    forming = filled(Limits(max_batch_size=4), single, *full)
    ask = Ask(close_at_us=NOW_US + 500)

    batch = pulled(forming, NOW_US, ask)

    assert (batch.reason, batch.requests) == ("full", full)
    assert forming.next(KEY, NOW_US, ask) is None


def test_the_size_is_the_one_with_the_best_throughput() -> None:
    """Where more rows cost more each, more wait than are taken."""
    latency = learned({1: 3000, 4: 10_000, 8: 19_000, 16: 60_000, 32: 200_000})
    requests = [request_of() for _ in range(30)]

    batch = pulled(filled(Limits(32, 10_000, latency=latency), *requests))

    assert (batch.rows, batch.reason) == (8, "full")


def test_a_larger_size_is_tried_again_at_times() -> None:
    """It may have become better since it was last seen: one batch in 128 is twice as large."""
    latency = learned({1: 3000, 4: 10_000, 8: 19_000, 16: 60_000, 32: 200_000})
    forming = filled(Limits(32, 10_000, latency=latency), *(request_of() for _ in range(3000)))

    sizes = [pulled(forming).rows for _ in range(256)]

    assert (sizes.count(8), sizes.count(16)) == (254, 2)


def test_a_batch_is_cut_so_that_its_most_urgent_request_is_in_time() -> None:
    """All twenty would take 2 ms; in 1.5 ms ten rows can be done."""
    urgent = request_of(in_ms=0)
    urgent.envelope = Envelope(deadline_ms=NOW_MS + 2)
    others = [request_of() for _ in range(19)]
    forming = filled(Limits(32, 10_000, latency=learned(LINE_US)), urgent, *others)

    batch = pulled(forming, NOW_US + 500)

    assert (batch.reason, batch.rows, batch.requests[0]) == ("deadline", 10, urgent)


def test_under_a_backlog_batches_stay_large_and_the_late_are_let_go() -> None:
    """Small batches would make everybody late."""
    hopeless = request_of(in_ms=1)
    others = [request_of() for _ in range(40)]
    forming = filled(Limits(32, 10_000, latency=learned(LINE_US)), hopeless, *others)

    batch = pulled(forming)

    assert batch.rows == 32
    assert forming.ended == [hopeless]
    assert hopeless.failure is not None
    assert hopeless.failure.code == Code.OVERLOADED
    assert hopeless.failure.retry_after_ms == 2


def test_a_request_is_run_even_if_it_should_be_late_when_there_is_nothing_else() -> None:
    """The prediction may be wrong, and nothing else would show it."""
    alone = request_of(in_ms=1)

    batch = pulled(filled(Limits(32, 10_000, latency=learned({1: 50_000})), alone))

    assert batch.requests == [alone]


# --- what is refused --------------------------------------------------------------------------


def test_what_would_be_late_is_refused_before_it_waits() -> None:
    """80 rows at 1 ms each lie before it, so 50 ms are too few, and 100 ms are not."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    late, fine = request_of(in_ms=50), request_of(in_ms=100)

    forming.add(late, NOW_US)
    forming.add(fine, NOW_US)

    assert forming.ended == [late]
    assert late.failure is not None
    assert late.failure.code == Code.OVERLOADED
    assert late.failure.retry_after_ms is not None
    assert 30 <= late.failure.retry_after_ms <= 36
    assert "expected an answer within 50 ms" in late.failure.message


def test_headers_alone_are_enough_to_refuse() -> None:
    """Before anything is decoded, where they name the model."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    late = Envelope(deadline_ms=NOW_MS + 50, model="digits")

    failure = forming.refusal(late, NOW_US, "ingest")

    assert failure is not None
    assert (failure.code, failure.stage) == (Code.OVERLOADED, "ingest")
    assert forming.refusal(late._replace(deadline_ms=NOW_MS + 100), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(model="other"), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(version="2"), NOW_US, "ingest") is None
    assert forming.refusal(late._replace(deadline_ms=0), NOW_US, "ingest") is None


def test_another_tenants_backlog_refuses_nobody_else() -> None:
    """What lies before a request is what goes before it."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    other = request_of(in_ms=50, tenant="other")

    forming.add(other, NOW_US)

    assert forming.ended == []


def test_a_backlog_of_lower_priority_refuses_nobody_above_it() -> None:
    """Those wait behind it."""
    forming = backlogged(Limits(max_batch_size=4), row_us=1000)
    urgent = request_of(in_ms=50, priority=1)

    forming.add(urgent, NOW_US)

    assert forming.ended == []


def test_nothing_is_refused_before_a_pace_is_known() -> None:
    """A long queue says nothing while nobody has taken from it."""
    requests = [request_of(in_ms=5) for _ in range(1000)]

    forming = filled(Limits(max_batch_size=4), *requests)

    assert forming.ended == []


def test_time_without_a_backlog_does_not_slow_the_pace() -> None:
    """A request a second is no sign that a row takes a second."""
    forming = forming_of(Limits(max_batch_size=4))
    for second in range(10):
        forming.add(request_of(came_us=NOW_US + second * 1_000_000))
        pulled(forming, NOW_US + second * 1_000_000)
    requests = [request_of(in_ms=60_000) for _ in range(100)]
    for request in requests:
        forming.add(request, NOW_US + 10_000_000)

    assert forming.ended == []


def test_a_request_is_cancelled_while_it_waits() -> None:
    """It leaves with its own code, and one that has gone into a batch stays."""
    kept, gone, ran = request_of(), request_of(), request_of()
    forming = filled(Limits(max_batch_size=1), ran, gone, kept)
    pulled(forming)

    for each in (gone, ran):
        record = make_request("", envelope=Envelope(cancels=("t", 0, each.offset)))
        forming.add(record)
    cancelling, ended = forming.cancel()

    assert (len(cancelling), ended, forming.ended) == (2, 1, [gone])
    assert gone.failure is not None
    assert gone.failure.code == Code.CANCELLED
    assert ran.failure is None
    assert pulled(forming).requests == [kept]


def test_room_is_left_for_what_batches_were_late_by() -> None:
    """With a full batch before it, a request has to be in time by that much."""
    latency = learned({1: 1000, 4: 4000})
    for _ in range(64):
        latency.slipped(30_000)
    forming = backlogged(Limits(max_batch_size=4, latency=latency), row_us=1000)
    late, fine = request_of(in_ms=100), request_of(in_ms=130)

    forming.add(late, NOW_US)
    forming.add(fine, NOW_US)

    assert forming.ended == [late]


def test_an_idle_instance_tries_what_is_likely_to_be_in_time() -> None:
    """The margin is for a backlog: here nobody else wants the place."""
    latency = learned({1: 1000, 2: 1100})
    for _ in range(64):
        latency.slipped(30_000)
    requests = [request_of(in_ms=5), request_of(in_ms=5)]

    batch = pulled(filled(Limits(latency=latency), *requests))

    assert batch.requests == requests
    assert batch.end_us == NOW_US + 1100


def test_a_batch_is_not_cut_while_there_is_a_backlog() -> None:
    """The last batch left some behind: what fits into one now is what admission let in."""
    forming = filled(
        Limits(32, 10_000, latency=learned(LINE_US)), *(request_of() for _ in range(44))
    )
    pulled(forming)
    forming.add(request_of(in_ms=1), NOW_US)

    assert (pulled(forming).rows, forming.ended[0].failure is not None) == (12, True)


def test_a_batch_that_was_held_up_does_not_make_the_queue_look_slow() -> None:
    """One of twenty takes a second instead of 4 ms; after it as much is let in as before."""
    forming = filled(Limits(max_batch_size=4), *(make_request() for _ in range(160)))
    now_us = NOW_US - 2_000_000
    for number in range(20):
        pulled(forming, now_us)
        now_us += 1_000_000 if number == 15 else 4000
    fine, late = request_of(in_ms=110), request_of(in_ms=70)
    fine.envelope, late.envelope = (
        Envelope(deadline_ms=now_us // 1000 + in_ms) for in_ms in (110, 70)
    )

    forming.add(fine, now_us)
    forming.add(late, now_us)

    assert forming.ended == [late]
