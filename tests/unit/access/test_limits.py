"""The limits of one caller: what is refused, with which reason, and what is remembered."""

from __future__ import annotations

import pytest

from headrace.access.callers import Caller
from headrace.access.limits import CallerLimits, Limits, Reason
from headrace.errors import Code, Rejected
from headrace.gateway.gateway import Unavailable, UnderWay

RATE = Limits(requests_per_second=2.0, burst=3)
TWO_AT_ONCE = Limits(max_in_flight=2)
BYTES = Limits(max_in_flight_bytes=100)


def ended(callers: CallerLimits, caller: str, limits: Limits, now_s: float) -> None:
    """Begin a request and end it at once."""
    callers.end(caller, callers.begin(caller, limits, now_s), 0)


def refusal(callers: CallerLimits, caller: str, limits: Limits, now_s: float) -> Rejected:
    """Return how a further request is refused."""
    with pytest.raises(Rejected) as caught:
        callers.begin(caller, limits, now_s)
    return caught.value


def test_requests_over_rate_are_refused_until_token_comes_back() -> None:
    """The refusal says when that is; at two a second a token takes 500 ms."""
    callers = CallerLimits(max_idle=10)
    for _ in range(3):
        ended(callers, "a", RATE, 100.0)

    refused = refusal(callers, "a", RATE, 100.1)

    assert (refused.code, refused.retry_after_ms) == (Code.OVERLOADED, 401)
    assert refused.message == (
        "a: expected at most 2 requests per second, got more; the next one may come in 0.400 s"
    )
    assert callers.refused == {Reason.RATE: 1}
    ended(callers, "a", RATE, 100.5)
    refusal(callers, "a", RATE, 100.6)


@pytest.mark.parametrize(("per_second", "at_once"), [(0.1, 1), (5.0, 5)])
def test_burst_defaults_to_requests_of_second(per_second: float, at_once: int) -> None:
    """It is at least one, or a low rate would let nothing pass."""
    callers, limits = CallerLimits(max_idle=10), Limits(requests_per_second=per_second)
    for _ in range(at_once):
        ended(callers, "a", limits, 100.0)

    refusal(callers, "a", limits, 100.0)


def test_requests_over_concurrency_are_refused_until_one_ends() -> None:
    """When that will be is not known."""
    callers = CallerLimits(max_idle=10)
    first = callers.begin("a", TWO_AT_ONCE, 0.0)
    callers.begin("a", TWO_AT_ONCE, 0.0)

    refused = refusal(callers, "a", TWO_AT_ONCE, 0.0)

    assert (refused.code, refused.retry_after_ms) == (Code.OVERLOADED, None)
    assert refused.message == "a: expected at most 2 requests under way, got one more"
    assert callers.refused == {Reason.CONCURRENCY: 1}
    callers.end("a", first, 0)
    callers.begin("a", TWO_AT_ONCE, 0.0)


def test_request_refused_for_concurrency_takes_no_token() -> None:
    """A caller that asks too early is not slowed down for it."""
    callers = CallerLimits(max_idle=10)
    limits = Limits(requests_per_second=1.0, burst=2, max_in_flight=1)
    usage = callers.begin("a", limits, 100.0)
    refusal(callers, "a", limits, 100.0)

    callers.end("a", usage, 0)

    callers.begin("a", limits, 100.0)


@pytest.mark.parametrize(("size_bytes", "code"), [(41, Code.OVERLOADED), (101, Code.TOO_LARGE)])
def test_request_refused_for_known_bytes_takes_no_token(size_bytes: int, code: Code) -> None:
    """Neither one that may come again later, nor one that never fits."""
    callers = CallerLimits(max_idle=10)
    limits = Limits(requests_per_second=1.0, burst=2, max_in_flight_bytes=100)
    callers.begin("a", limits, 100.0).size_bytes += 60
    with pytest.raises(Rejected) as caught:
        callers.begin("a", limits, 100.0, size_bytes)

    assert caught.value.code is code
    assert callers.begin("a", limits, 100.0, 40).requests == 2


def test_bytes_of_all_requests_of_caller_are_bounded() -> None:
    """They are free again when a request ends."""
    callers = CallerLimits(max_idle=10)
    usage = callers.begin("a", BYTES, 0.0)
    usage.check_bytes(0, 60)
    usage.size_bytes += 60
    assert callers.begin("a", BYTES, 0.0) is usage

    with pytest.raises(Rejected, match=r"^OVERLOADED: a: expected at most 100 bytes .* got more$"):
        usage.check_bytes(0, 41)

    assert callers.refused == {Reason.BYTES: 1}
    callers.end("a", usage, 60)
    usage.check_bytes(0, 100)


def test_request_larger_than_all_bytes_of_caller_is_too_large() -> None:
    """It can never succeed, so that its caller is not asked to try again."""
    usage = CallerLimits(max_idle=10).begin("a", BYTES, 0.0)
    usage.size_bytes += 60

    with pytest.raises(Rejected, match=r"^TOO_LARGE: a: expected at most 100 bytes"):
        usage.check_bytes(60, 41)


def test_caller_over_limits_leaves_others_alone() -> None:
    """Each has tokens of its own."""
    callers = CallerLimits(max_idle=10)
    for _ in range(3):
        ended(callers, "a", RATE, 100.0)
    refusal(callers, "a", RATE, 100.0)

    ended(callers, "b", RATE, 100.0)


def test_changed_limits_hold_for_next_request() -> None:
    """Calls in flight stay counted when limits change."""
    callers = CallerLimits(max_idle=10)
    callers.begin("a", TWO_AT_ONCE, 0.0)

    refusal(callers, "a", Limits(max_in_flight=1), 0.0)


def test_idle_callers_beyond_limit_are_forgotten_oldest_first() -> None:
    """Callers with requests under way are kept."""
    callers = CallerLimits(max_idle=2)
    busy = callers.begin("busy", RATE, 100.0)
    for caller in ("a", "b", "c"):
        for _ in range(3):
            ended(callers, caller, RATE, 100.0)

    assert len(callers) == 3
    assert busy.requests == 1
    for remembered in ("b", "c"):
        refusal(callers, remembered, RATE, 100.0)
    ended(callers, "a", RATE, 100.0)


def test_many_callers_take_bounded_memory() -> None:
    """A caller with many addresses cannot make the table of callers grow beyond its bound."""
    callers = CallerLimits(max_idle=100)

    for number in range(10_000):
        ended(callers, f"address {number}", RATE, 100.0)

    assert len(callers) == 100


async def test_bytes_that_gateway_refuses_are_not_counted_for_caller() -> None:
    """If they were counted, each refusal would lower the caller's own limit for ever."""
    callers, limits = CallerLimits(max_idle=10), Limits(max_in_flight_bytes=1000)
    under_way = UnderWay(max_requests=10, max_bytes=100, callers=callers)
    caller = Caller("a", "caller a", limits)

    with under_way.counting(caller) as first, under_way.counting(caller) as second:
        first.add(60)
        with pytest.raises(Unavailable):
            second.add(60)

    usage = callers.begin("caller a", limits, 0.0)
    assert (usage.requests, usage.size_bytes) == (1, 0)
    assert (under_way.requests, under_way.size_bytes) == (0, 0)


async def test_caller_over_limits_takes_no_place_in_gateway() -> None:
    """It would otherwise fill the gateway with refusals."""
    callers = CallerLimits(max_idle=10)
    under_way = UnderWay(max_requests=2, max_bytes=100, callers=callers)
    narrow, other = Caller("a", "caller a", Limits(max_in_flight=1)), Caller()

    with under_way.counting(narrow):
        with pytest.raises(Rejected), under_way.counting(narrow):
            pass
        with under_way.counting(other):
            assert under_way.requests == 2
