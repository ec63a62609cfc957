"""How long runs take is learned from them, whatever else happens on the machine."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.profiling.latency import Latency, Point, isotonic, round_up_rows
from headrace.tuning import TUNING

CLASS = (64,)


def seeded(us_of: dict[int, int], times: int = 1) -> Latency:
    """A latency that has seen runs of these sizes."""
    latency = Latency()
    for _ in range(times):
        for rows, us in us_of.items():
            latency.observe(CLASS, rows, us)
    return latency


def test_latency_before_first_run_is_unknown() -> None:
    """An unknown latency is reported as unknown, and limits nothing."""
    latency = Latency()

    assert latency.predict_us(CLASS, 4) is None
    assert latency.best_rows(CLASS, 32) == 32
    assert latency.table() == []


def test_latency_of_unseen_size_lies_between_seen_ones() -> None:
    """Straight lines join the sizes that were seen; the fitted slope leads out of them."""
    latency = seeded({2: 1100, 4: 1200, 8: 1400})

    assert [latency.predict_us(CLASS, rows) for rows in (1, 2, 3, 6, 8, 16)] == [
        1050,
        1100,
        1150,
        1300,
        1400,
        1800,
    ]


def test_single_delayed_run_leaves_latency() -> None:
    """One run in ten that takes a hundred times as long does not move the median."""
    latency = Latency()
    for number in range(200):
        latency.observe(CLASS, 8, 100_000 if number % 10 == 0 else 1000)

    assert latency.predict_us(CLASS, 8) == 1000


@pytest.mark.parametrize(("before_us", "after_us"), [(1000, 3000), (3000, 1000)])
def test_latency_follows_change_within_sixteen_runs(before_us: int, after_us: int) -> None:
    """When runs take longer or shorter from now on, so does the prediction."""
    latency = seeded({8: before_us}, times=500)

    for _ in range(32):
        latency.observe(CLASS, 8, after_us)

    assert latency.predict_us(CLASS, 8) == after_us


def test_latency_never_falls_with_batch_size() -> None:
    """Noise between neighbouring sizes is evened out by how often each was seen."""
    chance = random.Random(3)
    latency = Latency()
    for _ in range(400):
        rows = chance.randint(1, 32)
        latency.observe(CLASS, rows, round((1000 + 50 * rows) * chance.uniform(0.7, 1.5)))

    times = [latency.predict_us(CLASS, rows) or 0 for rows in range(1, 65)]
    assert times == sorted(times)
    assert times[31] == pytest.approx(2600, rel=0.25)


def test_slowdown_applies_to_sizes_not_seen_since() -> None:
    """When runs of one size take five times as long, others are predicted to do so as well."""
    latency = seeded({16: 1000, 32: 1500}, times=20)

    for _ in range(8):
        latency.observe(CLASS, 16, 5000)

    assert latency.predict_us(CLASS, 16) == 5000
    assert latency.predict_us(CLASS, 32) == 7500


def test_old_observation_yields_to_recent_one() -> None:
    """A size that once was slower than a larger one is now is not any more."""
    latency = seeded({8: 1000, 16: 1800, 32: 1900}, times=20)

    for _ in range(1000):
        latency.observe(CLASS, 8, 1000)
        latency.observe(CLASS, 32, 1500)

    assert latency.predict_us(CLASS, 16) == pytest.approx(1500, rel=0.02)


def test_sizes_are_compared_with_concurrent_observations() -> None:
    """A size that only ran while the machine was at half its speed is not taken for a slow one."""
    latency = seeded({8: 8000}, times=20)
    for number in range(40):
        latency.observe(CLASS, *((4, 7600) if number % 8 == 7 else (8, 16_000)))

    for _ in range(20):
        latency.observe(CLASS, 8, 8000)

    assert latency.predict_us(CLASS, 4) == pytest.approx(3800, rel=0.01)
    assert latency.best_rows(CLASS, 8) == 4


def test_steady_slowdown_keeps_sizes_apart() -> None:
    """Sums are scaled before they get out of bounds, and this moves no prediction."""
    latency = seeded({8: 800, 16: 1200}, times=20)
    slowdown = 1.0
    for _ in range(1000):
        slowdown *= 1.02
        for rows, us in ((8, 800), (16, 1200)):
            latency.observe(CLASS, rows, round(us * slowdown))

    ratio = (latency.predict_us(CLASS, 16) or 0) / (latency.predict_us(CLASS, 8) or 1)
    assert ratio == pytest.approx(1.5, rel=0.02)
    assert latency.predict_us(CLASS, 8) == pytest.approx(800 * slowdown, rel=0.2)


def test_best_size_is_that_of_least_cost_per_row() -> None:
    """Magika on a CPU runs 406 rows a second at a size of 8, and 312 at 64."""
    magika = {1: 3300, 2: 5500, 4: 10_200, 8: 19_700, 16: 44_400, 32: 97_000, 64: 205_000}
    assert seeded(magika, times=3).best_rows(CLASS, 64) == 8


@pytest.mark.parametrize(("us", "best"), [(16_100, 8), (16_500, 16)])
def test_larger_best_size_needs_one_percent_gain(us: int, best: int) -> None:
    """With 16 rows in 32 ms, batches of 8 cost 0.6 or 3 % more for each row."""
    assert seeded({8: us, 16: 32_000}).best_rows(CLASS, 16) == best


def test_best_size_with_one_seen_size_is_limit() -> None:
    """A model whose runs all had two rows gets batches as large as its limit."""
    assert seeded({2: 10_000}).best_rows(CLASS, 16) == 16


def test_best_size_of_quick_runs_is_largest() -> None:
    """The overhead of a batch exceeds the time of such a run, so that large batches are best."""
    assert seeded({8: 15, 16: 40, 32: 95}).best_rows(CLASS, 32) == 32


def test_best_size_is_limit_where_batching_pays() -> None:
    """With a fixed cost for each run, more rows are always better."""
    assert seeded({1: 1050, 8: 1400, 32: 2600}).best_rows(CLASS, 32) == 32


def test_batch_size_is_cut_to_slack() -> None:
    """The size is cut to what is done within the slack, and to one row at worst."""
    latency = seeded({1: 1050, 8: 1400, 32: 2600})

    assert latency.best_rows(CLASS, 32, slack_us=2000) == 20
    assert latency.best_rows(CLASS, 32, slack_us=5) == 1


def test_latency_of_unknown_shape_is_that_of_nearest_smaller() -> None:
    """A shape that never ran is not refused for what a longer one took."""
    latency = Latency()
    latency.observe((16,), 1, 100)
    latency.observe((128,), 1, 800)

    assert latency.predict_us((100,), 1) == 100
    assert latency.predict_us((512,), 1) == 800
    assert latency.predict_us((4,), 1) == 100


def test_latency_of_endless_shapes_takes_bounded_memory() -> None:
    """The class that was seen longest ago makes room."""
    latency = Latency()
    sizes = range(10 * TUNING.models.shape_classes)
    for size in sizes:
        latency.observe((size,), 1, 100 + size)
        latency.observe((7,), 1, 107)

    # A forgotten size is predicted by a smaller one, which is quicker.
    known = [size for size in sizes if latency.predict_us((size,), 1) == 100 + size]
    assert known == [7, *sizes[1 - TUNING.models.shape_classes :]]
    assert [7] in [entry["shape_class"] for entry in latency.table()]
    assert len(latency.table()) == TUNING.models.shown_shape_classes


def test_latency_table_is_readable_text() -> None:
    """It has the line, the best size, and each size that was seen."""
    assert seeded({2: 1100, 4: 1200, 8: 1400}).table() == [
        {
            "shape_class": [64],
            "t0_us": 1000.0,
            "row_us": 50.0,
            "runs": 3,
            "best_rows": 8,
            "compute_us": {"2": 1100, "4": 1200, "8": 1400},
        }
    ]


@given(st.integers(1, 100_000))
def test_latency_bucket_exceeds_size_by_less_than_sixteenth(rows: int) -> None:
    """Sizes up to 64 are exact, and others rounded up by less than a sixteenth."""
    bucket = round_up_rows(rows, 64)

    assert rows <= bucket <= rows * 17 / 16
    assert round_up_rows(bucket, 64) == bucket


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.01, 100)), min_size=1, max_size=40))
def test_isotonic_regression_is_monotone_and_keeps_weighted_mean(
    values: list[tuple[float, float]],
) -> None:
    """Pooling adjacent violators moves weight about and loses none of it."""
    points = [Point(place, us, weight) for place, (us, weight) in enumerate(values, 1)]

    fitted = isotonic(points)

    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(fitted))
    total = sum(each.us * each.weight for each in points)
    assert sum(
        one * each.weight for one, each in zip(fitted, points, strict=True)
    ) == pytest.approx(total)


def test_margin_covers_all_but_two_latest_batches() -> None:
    """All but two of the latest batches end within the margin; early batches are no credit."""
    latency = Latency()
    assert latency.margin_us == 0
    for late_us in [*range(-500, 0), *range(TUNING.models.margin_batches)]:
        latency.observe_lateness(late_us)
    assert latency.margin_us == TUNING.models.margin_batches - 2

    for _ in range(TUNING.models.margin_batches):
        latency.observe_lateness(-10)
    assert latency.margin_us == 0
