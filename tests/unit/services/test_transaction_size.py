"""How many answers a transaction takes: fewer after a time-out, more while they are quick."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.services.responder.transactional import TransactionSize
from headrace.tuning import TUNING

TIMEOUT_S = 10.0
SIZING = replace(
    TUNING.responder, quick_transaction_share=0.25, unlimited_transaction_bytes=100_000
)
QUICK_S, SLOW_S = 1.0, 3.0
ANSWER = 200


def after_timeout(size_bytes: int) -> TransactionSize:
    """A size of which a transaction of many answers has timed out."""
    size = TransactionSize(TIMEOUT_S, SIZING)
    size.record_timeout(size_bytes, answers=100)
    return size


def quick_transactions_until(size: TransactionSize, limit_bytes: int | None) -> int:
    """How many quick transactions it takes to grow to a limit; None is no limit at all."""
    for transactions in range(10_000):
        if size.limit_bytes is None or (limit_bytes and size.limit_bytes >= limit_bytes):
            return transactions
        size.record_committed(size.limit_bytes, QUICK_S)
    raise AssertionError(f"{size.limit_bytes} after 10,000 quick transactions")


def test_transaction_size_that_timed_out_is_tried_again_later() -> None:
    """The cause of the time-out may have passed."""
    assert (
        quick_transactions_until(after_timeout(20_000), 20_000) == SIZING.transaction_size_patience
    )


def test_transaction_size_that_timed_out_again_is_tried_half_as_often() -> None:
    """Each try costs a whole timeout; what worked below it goes on meanwhile."""
    size = after_timeout(20_000)
    quick_transactions_until(size, 20_000)
    size.record_timeout(20_500, answers=100)
    assert 15_000 < (size.limit_bytes or 0) < 20_000
    assert quick_transactions_until(size, 20_000) == 2 * SIZING.transaction_size_patience


def test_working_transaction_size_is_halved_when_it_times_out() -> None:
    """The quota was lowered, for instance."""
    size = after_timeout(20_000)
    size.record_committed(10_000, QUICK_S)
    size.record_timeout(9_000, answers=40)
    assert size.limit_bytes == 4_500


def test_transaction_size_before_any_timeout_is_unlimited() -> None:
    """Nothing is known that would speak for less."""
    size = TransactionSize(TIMEOUT_S, SIZING)
    size.record_committed(10, SLOW_S)
    assert size.limit_bytes is None
    assert size.count([10**9] * 50) == 50


def test_transaction_that_timed_out_is_halved() -> None:
    """The size is halved again where once was not enough."""
    size = after_timeout(20_000)
    assert size.limit_bytes == 10_000
    assert size.count([ANSWER] * 100) == 50
    size.record_timeout(10_000, answers=50)
    assert size.limit_bytes == 5_000


def test_single_answer_timeout_leaves_transaction_size() -> None:
    """It cannot be divided, and says nothing of steps of several."""
    size = after_timeout(20_000)
    size.record_timeout(30_000, answers=1)
    assert size.limit_bytes == 10_000


def test_slow_transaction_keeps_size() -> None:
    """A larger step could time out."""
    size = after_timeout(20_000)
    size.record_committed(10_000, SLOW_S)
    assert size.limit_bytes == 10_000


def test_small_transaction_leaves_size() -> None:
    """That few answers were quickly written says nothing of more."""
    size = after_timeout(20_000)
    size.record_committed(400, QUICK_S)
    assert size.limit_bytes == 10_000


def test_transaction_size_near_timeout_grows_by_eighth() -> None:
    """Each further time-out would cost `transaction_timeout_ms`."""
    size = after_timeout(20_000)
    size.record_committed(10_000, QUICK_S)
    assert size.limit_bytes == 11_251


def test_transaction_size_far_below_timeout_doubles() -> None:
    """A size that was halved in an outage is large again after a few transactions."""
    size = after_timeout(20_000)
    size.record_timeout(800, answers=4)
    size.record_timeout(400, answers=2)
    assert quick_transactions_until(size, None) < SIZING.transaction_size_patience + 20


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 5_000), min_size=1, max_size=50), st.floats(0, 30)),
        max_size=60,
    ),
    st.integers(5_000, 50_000),
)
def test_transaction_size_stays_within_bounds(
    steps: list[tuple[list[int], float]], capacity_bytes: int
) -> None:
    """A step has at least one answer, keeps to the limit, and shrinks with each time-out."""
    size = TransactionSize(TIMEOUT_S, SIZING)
    for sizes, took_s in steps:
        limit, count = size.limit_bytes, size.count(sizes)
        step_bytes = sum(sizes[:count])
        assert count >= 1
        assert count == 1 or limit is None or step_bytes <= limit
        if step_bytes > capacity_bytes:
            size.record_timeout(step_bytes, count)
            assert count == 1 or size.count(sizes[:count]) < count
        else:
            size.record_committed(step_bytes, took_s)
            if limit is not None and size.limit_bytes is not None:
                assert limit <= size.limit_bytes <= 2 * limit + 1
        assert size.limit_bytes is None or size.limit_bytes >= 1


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=200), st.integers(5_000, 50_000))
def test_backlog_of_fitting_answers_is_finished(sizes: list[int], capacity_bytes: int) -> None:
    """With a time-out for each halving, and no more after that while transactions are slow."""
    size = TransactionSize(TIMEOUT_S, SIZING)
    left, timeouts = list(sizes), 0
    while left:
        step = left[: size.count(left)]
        if sum(step) > capacity_bytes:
            size.record_timeout(sum(step), len(step))
            timeouts += 1
        else:
            size.record_committed(sum(step), SLOW_S)
            del left[: len(step)]
    assert timeouts <= 8
