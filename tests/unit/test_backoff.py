"""Pauses between retries."""

from __future__ import annotations

import pytest

from headrace.primitives.backoff import Backoff


def test_pause_after_each_failure_doubles_up_to_limit() -> None:
    """The limit holds for any number of failures."""
    backoff = Backoff(first_s=0.05, longest_s=1.0)

    pauses = [backoff.pause_s(attempt) for attempt in (0, 1, 2, 3, 4, 5, 6, 10_000)]

    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("random_share", "pause_s"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_pause_with_random_share_deviates_by_jitter(random_share: float, pause_s: float) -> None:
    """The limit applies before the jitter."""
    backoff = Backoff(first_s=0.1, longest_s=1.0, jitter=0.2)

    assert backoff.pause_s(9, random_share) == pytest.approx(pause_s)
