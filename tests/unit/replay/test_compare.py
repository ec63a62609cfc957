"""How answers are compared and judged: statistics on arrays, without I/O."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.log.port import Record
from headrace.tools.compare.differences import (
    ArrayDifference,
    TimedAnswer,
    compare_answers,
    compare_arrays,
)
from headrace.tools.compare.report import SideNames, describe, report, shares_by_decade, summary
from headrace.tools.compare.run import AnsweredRequest, Comparison, load_answers
from headrace.tools.compare.tally import WorstCase, WorstCases
from headrace.tools.compare.verdict import Thresholds, is_same, judge
from tests.support.recordings import GivenRecording, recorded

K = 2


def _scores(*rows: list[float], dtype: Any = np.float32) -> NDArray[Any]:
    return np.array(rows, dtype=dtype)


def _answer(scores: NDArray[Any], label: int = 1, compute_us: int = 1000) -> TimedAnswer:
    outputs = {"scores": scores, "label": np.array([label])}
    return TimedAnswer("ok", "", outputs, 5, compute_us, compute_us + 500)


def _compared(
    candidate: TimedAnswer,
    *,
    count: int = 60,
    second: TimedAnswer | None = None,
    reference: TimedAnswer | None = None,
) -> Comparison:
    comparison = Comparison(K)
    current = reference or _answer(_scores([1.0, 2.0, 3.0]))
    for number in range(count):
        request = Record("<t>", 0, number, number, None, None, [])
        comparison.add(AnsweredRequest(request, current, second or current, candidate))
    return comparison


def _failed(comparison: Comparison, thresholds: Thresholds | None = None) -> list[str]:
    findings = judge(comparison.sides(), thresholds or Thresholds())
    return [f"{each.subject}: {each.measure}" for each in findings if not each.passed]


async def test_only_answers_to_selected_requests_are_held() -> None:
    """A topic of answers may be far larger than what the requests of a comparison need."""
    copy = recorded(2, headers=(("x-replay-of", b"source/1/7"),))
    names = ("recorded/0/0", "recorded/0/1", "source/1/7", "source/1/8", "recorded/0/0")
    answers = [
        recorded(number, headers=(("x-request", name.encode()),))
        for number, name in enumerate(names)
    ]
    answers.append(recorded(9, headers=()))

    held = await load_answers(GivenRecording(answers), GivenRecording([recorded(0), copy]))

    assert held == {name: answers[number] for number, name in enumerate(names[:3])}


def test_equal_arrays_are_exact() -> None:
    """NaN is equal to NaN, and infinity to itself."""
    array = _scores([1.0, math.nan, math.inf])

    found = compare_arrays(array, array.copy(), K)

    assert found.exact
    assert (found.max_abs, found.mean_abs, found.cosine, found.top1) == (0.0, 0.0, 1.0, 1.0)


def test_difference_is_largest_of_elements() -> None:
    """Largest and mean; the scale is the reference's."""
    found = compare_arrays(_scores([3.0, 4.0]), _scores([3.0, 5.0]), K)

    assert (found.max_abs, found.mean_abs, found.scale) == (1.0, 0.5, 4.0)
    assert found.cosine == pytest.approx(29 / (5 * math.sqrt(34)))


@pytest.mark.parametrize(("other", "largest"), [(1.5, 0.0), (2.0, 0.5), (math.nan, math.inf)])
def test_scalars_are_compared(other: float, largest: float) -> None:
    """A model that is not batched may have such outputs."""
    found = compare_arrays(np.array(1.5), np.array(other), K)

    assert (found.max_abs, found.mean_abs, found.top1) == (largest, largest, None)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_number_against_nan_differs_infinitely(other: float) -> None:
    """A difference between a number and NaN exceeds every threshold."""
    assert compare_arrays(_scores([1.0, 2.0]), _scores([1.0, other]), K).max_abs == math.inf


def test_label_agreement_is_counted_by_rows() -> None:
    """Top-1 by the place of the largest; top-k by the places that both have, in any order."""
    left = _scores([3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0])
    right = _scores([2.0, 3.0, 1.0, 0.0], [3.0, 0.0, 1.0, 2.0])

    found = compare_arrays(left, right, K)

    assert (found.top1, found.topk) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([b"cat"], dtype=object), np.array([b"dog"], dtype=object)),
        (np.zeros(2, np.float32), np.zeros(3, np.float32)),
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
    ],
)
def test_other_than_equal_shaped_floats_are_compared_exactly(
    left: NDArray[Any], right: NDArray[Any]
) -> None:
    """Integers, texts, and arrays of differing shapes or datatypes are compared exactly."""
    assert compare_arrays(left, right, K) == ArrayDifference(exact=False)
    assert compare_arrays(left, left.copy(), K).exact


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e300])
def test_cosine_is_exact_for_extreme_values(value: float) -> None:
    """Squares neither overflow nor vanish; two zeros point the same way."""
    array = np.array([value, value])

    assert compare_arrays(array, array, K).cosine == pytest.approx(1.0)


def test_output_missing_on_one_side_differs() -> None:
    """Whichever side it is."""
    with_two, with_one = _answer(_scores([1.0, 2.0])), TimedAnswer("ok")

    assert not compare_answers(with_two, with_one, K).exact
    assert not compare_answers(with_one, with_two, K).exact


def test_candidate_within_rounding_passes() -> None:
    """A batch of another size rounds otherwise; the noise floor need not have met it."""
    close = _scores([1.0, 2.0, 3.0 + 2e-5])

    assert _failed(_compared(_answer(close))) == []


def test_float_beyond_noise_and_rounding_fails() -> None:
    """One percent of one score."""
    assert _failed(_compared(_answer(_scores([1.0, 2.0, 3.03])))) == [
        "output scores: largest difference"
    ]


def test_noise_of_reference_widens_tolerance() -> None:
    """The current model's distance from itself is not held against the candidate."""
    second = _answer(_scores([1.0, 2.0, 3.01]))
    candidate = _answer(_scores([1.0, 2.0, 3.03]))

    assert _failed(_compared(candidate, second=second)) == []
    assert _failed(_compared(candidate, second=second), Thresholds(margin=2.0)) != []


def test_half_precision_has_wider_tolerance() -> None:
    """A few of its own steps."""
    bfloat16 = ml_dtypes.bfloat16
    reference = _answer(_scores([1.0, 2.0], dtype=bfloat16))
    candidate = _answer(_scores([1.0, 2.015625], dtype=bfloat16))

    assert _failed(_compared(candidate, reference=reference)) == []


def test_other_label_fails_comparison() -> None:
    """Labels are exact."""
    found = _failed(_compared(_answer(_scores([1.0, 2.0, 3.0]), label=2)))

    assert found == ["output label: share that differs"]


def test_other_error_code_fails_comparison() -> None:
    """No outputs are compared."""
    assert _failed(_compared(TimedAnswer("MODEL_FAILED", "out of range"))) == [
        "answers: share with another code",
        "requests: share with outputs on both sides",
    ]


def test_slower_median_fails_and_few_answers_are_not_judged() -> None:
    """Compute and end to end; a median of a handful says nothing."""
    slow = _answer(_scores([1.0, 2.0, 3.0]), compute_us=3000)

    assert _failed(_compared(slow)) == [
        "latency: median compute, ratio",
        "latency: median end to end, ratio",
    ]
    assert _failed(_compared(slow, count=10)) == []


def test_small_delay_is_not_slower_whatever_its_ratio() -> None:
    """30 µs in place of 10 µs is what a timer shows, not a model."""
    reference = _answer(_scores([1.0]), compute_us=10)
    candidate = _answer(_scores([1.0]), compute_us=30)

    assert _failed(_compared(candidate, reference=reference)) == []


def test_noisy_latency_widens_latency_tolerance() -> None:
    """Two runs of the same model that differ by half cannot tell another one apart by less."""
    second = _answer(_scores([1.0, 2.0, 3.0]), compute_us=2000)
    candidate = _answer(_scores([1.0, 2.0, 3.0]), compute_us=2500)

    assert _failed(_compared(candidate, second=second)) == []


def test_fewer_comparable_answers_than_recorded_ones_fail() -> None:
    """Two of three were recorded with outputs; one of them is comparable."""
    good, bad = _answer(_scores([1.0, 2.0, 3.0])), TimedAnswer("INTERNAL")
    comparison = Comparison(K, reference_is_recorded=True)
    request = Record("<t>", 0, 0, 0, None, None, [])
    for reference, candidate in ((good, good), (good, bad), (bad, bad)):
        comparison.add(AnsweredRequest(request, reference, None, candidate))
    thresholds = Thresholds(min_comparable=None, max_code_changes=0.1)

    assert "requests: share with outputs on both sides" in _failed(comparison, thresholds)


def test_recorded_refusals_need_no_outputs() -> None:
    """Requests that the recording refuses as well have no outputs to compare."""
    good, bad = _answer(_scores([1.0, 2.0, 3.0])), TimedAnswer("INVALID_TENSOR")
    comparison = Comparison(K, reference_is_recorded=True)
    request = Record("<t>", 0, 0, 0, None, None, [])
    for answer in (good, bad, bad):
        comparison.add(AnsweredRequest(request, answer, None, answer))

    assert _failed(comparison) == []


def test_empty_comparison_does_not_pass() -> None:
    """An empty comparison would be the easiest way to pass."""
    assert _failed(Comparison()) == ["requests: compared"]


def test_worst_differences_are_kept_in_order() -> None:
    """Other codes before other labels before larger differences; equal ones not at all."""
    reference = _answer(_scores([1.0, 2.0, 3.0]))
    others = [
        _answer(_scores([1.0, 2.0, 3.1])),
        reference,
        TimedAnswer("INTERNAL", "lost"),
        _answer(_scores([1.0, 2.0, 3.0]), label=7),
        _answer(_scores([1.0, 2.0, 3.5])),
    ]
    worst = WorstCases(kept=3)
    for offset, other in enumerate(others):
        difference = compare_answers(reference, other, K)
        worst.add(WorstCase("t", 0, offset, "m", difference, reference, other))

    assert [describe(case) for case in worst.sorted()] == [
        "ok became INTERNAL: lost",
        "label: 1 became 7 at 0",
        "scores differs by up to 0.5",
    ]


def test_compare_report_escapes_names() -> None:
    """Names come from records, and records from anybody."""
    comparison = _compared(TimedAnswer("<b>", "<script>alert(1)</script>"))
    findings = judge(comparison.sides(), Thresholds())

    page = report(comparison, findings, SideNames("<a>", "&", "'"), lambda case: "<run>")

    assert ElementTree.fromstring(page).tag == "html"
    assert "<script>" not in page
    assert "&lt;t&gt;/0/0" in page


def test_compare_summary_json_has_all_findings() -> None:
    """Infinity, which JSON lacks, is its name."""
    comparison = _compared(_answer(_scores([1.0, 2.0, math.nan])))
    findings = judge(comparison.sides(), Thresholds())

    found = summary(comparison, findings, lambda case: "run")

    assert found["verdict"] == "different"
    assert not is_same(findings)
    assert found["candidate"]["outputs"]["scores"]["max_abs"] == "Infinity"
    assert found["latency_ratio"]["compute"] == 1.0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_shares_by_decade_include_extreme_values() -> None:
    """Zeros come first; values beyond the decades count in the outermost ones."""
    shares = shares_by_decade([0.0, 1e-30, 2e-9, 1e30, math.inf])

    assert (shares[0], shares[1], shares[-1]) == (0.2, 0.4, 0.4)
    assert sum(shares) == pytest.approx(1.0)
