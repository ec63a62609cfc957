"""The benchmark's advice: which part binds, by the measurements."""

from __future__ import annotations

import pytest

from headrace.tools.bench.advice import Facts, advise

BOUND = Facts(
    offered_per_s=None,
    answered_per_s=1000.0,
    failed_share=0.0,
    queue_s=0.01,
    batch_s=0.001,
    compute_s=0.002,
    outside_s=0.005,
    rows_per_batch=8.0,
    computing=0.25,
    max_batch_size=8,
    request_bytes=400,
    as_json=False,
)


def binds(**changes: object) -> list[str]:
    """Return the part named as the bottleneck when this is different."""
    return [each.binds for each in advise(BOUND._replace(**changes))]  # type: ignore[arg-type]  # fields of Facts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"computing": 0.9}, "compute"),
        ({"computing": 0.9, "cores": 0.2}, "compute"),
        ({"request_bytes": 600_000}, "copying"),
        ({}, "decoding"),
        ({"cores": 0.95}, "decoding"),
        ({"cores": 0.3}, "broker"),
        ({"offered_per_s": 1000.0}, "nothing"),
        ({"offered_per_s": 5000.0}, "decoding"),
    ],
)
def test_advice_names_bottleneck(changes: dict[str, object], expected: str) -> None:
    """The model before copying, copying before Python, Python before the broker."""
    assert binds(**changes) == [expected]


def test_advice_names_errors_first() -> None:
    """A load that is mostly refused tells little else."""
    assert binds(failed_share=0.5) == ["errors", "decoding"]


def test_advice_points_out_json() -> None:
    """It costs many times what MessagePack does."""
    assert binds(as_json=True) == ["decoding", "json"]


def test_advice_without_answers_names_no_bottleneck() -> None:
    """It says where to look for what does not answer."""
    (advice,) = advise(BOUND._replace(answered_per_s=0.0, rows_per_batch=0.0, offered_per_s=0.0))

    assert advice.binds == "unknown"
    assert "headrace doctor" in advice.sentence


def test_advice_without_timings_names_no_bottleneck() -> None:
    """Answers in a payload's own format have none, which are not times of zero."""
    assert binds(rows_per_batch=0.0, offered_per_s=1000.0, as_json=True) == ["unknown"]


@pytest.mark.parametrize(("rows", "word"), [(8.0, "larger max_batch_size"), (3.0, "3.0")])
def test_advice_on_computing_looks_at_batches(rows: float, word: str) -> None:
    """Full batches may grow; others are not held back by their limit."""
    (advice,) = advise(BOUND._replace(computing=0.95, rows_per_batch=rows))

    assert word in advice.sentence


def test_advice_without_bottleneck_names_largest_part() -> None:
    """The advice names the largest of the four parts of a request's time."""
    (advice,) = advise(BOUND._replace(offered_per_s=1000.0, outside_s=1.0))

    assert "Kafka and decoding" in advice.sentence
