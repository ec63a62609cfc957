"""S(b): what is known holds, what lies between and beyond follows."""

from __future__ import annotations

import random

import msgpack
import pytest

from headrace.errors import ConfigurationError
from headrace.tools.simulate.service_times import (
    BatchTime,
    ServiceTime,
    learn,
    parse_service_time,
)
from tests.support.recordings import GivenRecording, recorded


def answer(rows: int, compute_us: int, model: str = "digits", around_us: int = 2) -> bytes:
    """The value of a response."""
    times = {"queue_us": 1, "batch_us": around_us, "compute_us": compute_us}
    parameters = {**times, "batch_size": rows}
    packed: bytes = msgpack.packb(
        {"model_name": model, "model_version": "1", "outputs": [], "parameters": parameters}
    )
    return packed


def answers(*values: bytes) -> GivenRecording:
    """Make a recording of these values."""
    return GivenRecording([recorded(number, value=each) for number, each in enumerate(values)])


def test_service_time_of_unmeasured_size_lies_between_measured() -> None:
    """Straight lines between the points, whatever line fits all of them."""
    service_time = ServiceTime([BatchTime(1, 100), BatchTime(4, 400), BatchTime(8, 500)])

    assert [service_time(rows) for rows in (1, 2, 4, 6, 8)] == [100, 200, 400, 450, 500]


def test_service_time_beyond_largest_size_follows_slope() -> None:
    """The slope is that of least squares, weighted by how often each size was seen."""
    service_time = ServiceTime([BatchTime(8, 500, 10), BatchTime(16, 900, 10)])

    assert (service_time.t0_us, service_time.a_us) == pytest.approx((100, 50))
    assert service_time(32) == 1700
    assert service_time(1) == 150


def test_service_time_never_falls_with_size() -> None:
    """A median that is below its neighbour's is noise."""
    service_time = ServiceTime([BatchTime(1, 100), BatchTime(2, 90), BatchTime(4, 120)])

    assert [service_time(rows) for rows in (1, 2, 3, 4)] == [100, 100, 110, 120]


@pytest.mark.parametrize(
    ("points", "expected"),
    [([BatchTime(1, 400), BatchTime(8, 100)], 0.0), ([BatchTime(8, 300)], 0.0)],
    ids=["falling", "single"],
)
def test_service_time_slope_is_never_negative(points: list[BatchTime], expected: float) -> None:
    """A line that would fall, or that one point alone gives, is level."""
    assert ServiceTime(points).a_us == expected


def test_drawn_run_times_resemble_recorded_ones() -> None:
    """Every size has the spread of all."""
    known = ServiceTime([BatchTime(1, 100), BatchTime(2, 200)])
    spread = known.spread([(1, 50), (1, 100), (2, 600)])
    run_us = spread.drawn(random.Random(1))

    assert sorted(run_us(4) for _ in range(6)) == [200, 200, 400, 400, 1200, 1200]
    assert spread(4) == 400


def test_drawn_run_times_keep_recorded_order() -> None:
    """A thousand recorded times are drawn in their order, from a random place on."""
    runs = [(1, 100.0 + number) for number in range(1000)]
    known, chance = ServiceTime([BatchTime(1, 100)]).spread(runs), random.Random(1)

    run_us = known.drawn(chance)
    drawn = [run_us(1) for _ in range(1000)]

    assert drawn == [100 + (drawn[0] - 100 + place) % 1000 for place in range(1000)]
    assert known.drawn(chance)(1) != drawn[0]


@pytest.mark.parametrize(
    ("text", "model", "us"),
    [("1000+50", "", 1100), ("digits=60+1.5", "digits", 63), ("a=b=7", "a=b", 7)],
)
def test_service_time_line_can_be_given(text: str, model: str, us: int) -> None:
    """For one model, or for all; without a part per row it is the same for all sizes."""
    name, service_time = parse_service_time(text)

    assert (name, service_time(2)) == (model, us)


@pytest.mark.parametrize("text", ["", "x", "1+", "-1+5", "nan", "inf+1", "0", "m="])
def test_invalid_service_time_line_is_refused(text: str) -> None:
    """With what was expected, and what came."""
    with pytest.raises(ValueError, match="expected \\[MODEL=\\]T0\\+A"):
        parse_service_time(text)


async def test_service_times_are_medians_of_answers_by_model() -> None:
    """Errors, and bytes that are no answer, tell nothing."""
    values = [answer(1, 90)] * 5 + [answer(1, 110)] * 5 + [answer(1, 100)]
    values += [answer(2, 200)] * 10 + [answer(1, 7, "other")] * 5 + [b"\xc1", b"\x80"]
    learned = await learn(answers(*values))

    assert {model: (each(1), each(2)) for model, each in learned.items()} == {
        "digits": (100, 200),
        "other": (7, 7),
    }


async def test_overhead_around_runs_is_learned_apart() -> None:
    """The quickest quarter waited for no run before their own. It is no part of S(b)."""
    learned = await learn(answers(*(answer(1, 100, around_us=each) for each in range(10, 19))))

    assert (learned["digits"].around_us, learned["digits"](1)) == (12, 100)


async def test_answers_of_one_run_count_as_one_run() -> None:
    """Ten runs of two rows have twenty answers; those of one of them follow each other."""
    learned = await learn(answers(*[answer(2, 100)] * 10, *[answer(2, 300)] * 10))

    (point,) = learned["digits"].points
    assert (point.rows, point.us, point.seen) == (2, 200, 10)


async def test_rarely_seen_sizes_are_left_out() -> None:
    """A single slow run of 32 rows has 32 answers."""
    values = [answer(1, 100)] * 20 + [answer(2, 120)] * 20 + [answer(32, 9000)] * 32
    learned = await learn(answers(*values))

    assert [each.rows for each in learned["digits"].points] == [1, 2]


@pytest.mark.parametrize(
    "other",
    [answer(1, -5), answer(1, 2**62), answer(1, 100, around_us=-1), answer(1, 1, around_us=2**62)],
)
async def test_answers_with_timings_that_are_none_are_left_out(other: bytes) -> None:
    """Another program may write to the topic as well, whose numbers mean something else."""
    learned = await learn(answers(*[answer(1, 100)] * 5, *[other] * 15))

    (point,) = learned["digits"].points
    assert (point.us, point.seen, learned["digits"].around_us) == (100, 5, 2)


async def test_answers_without_timings_are_refused() -> None:
    """There is nothing to simulate with."""
    with pytest.raises(ConfigurationError, match="expected answers with compute_us"):
        await learn(answers(b"\x80"))
