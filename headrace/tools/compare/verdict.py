"""Thresholds and findings. Pure.

Without thresholds from the user, the limits follow from the noise floor: the difference of the
current model from itself, times a margin. A float output may always differ by a few steps of its
datatype, since a batch of another size rounds differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.tools.compare.tally import Latencies, OutputTally, PairTally, ratio_of_medians

ROUNDING = 1e-5
"""Share of an output's scale; smaller differences never count against a candidate."""

ROUNDING_STEPS = 8
"""Like `ROUNDING`, in multiples of the datatype's resolution, which decides for FP16 and BF16."""

TOP1_SLACK = 0.001
"""Share of rows in which two nearly equal top scores may swap."""

COMPARABLE_UNRECORDED = 0.5
"""Share of requests that both sides must answer with outputs, if no recorded answers say how many
were answered so.
"""

LATENCY_KINDS = ("compute", "end_to_end")
LATENCY_SLACK_US = 200.0
"""A median that is later by less than this does not count as slower, whatever the ratio."""

LATENCY_COUNT = 50
"""Least number of answers for judging latencies; with fewer they are only shown."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits set by the user; None derives them from the noise floor.

    Attributes:
        margin: multiple of the noise floor.
        max_abs: largest difference of a float output.
        max_mismatched: share of requests whose label, text or other exact output differs.
        min_top1: share of rows whose largest element keeps its index.
        max_code_changes: share of requests that end with another code.
        max_latency_ratio: of the medians, candidate to current.
        min_recorded: share of requests with a recorded answer, if the reference is recorded
            answers.
        min_comparable: share of requests that both sides answer with outputs.
    """

    margin: float = 4.0
    max_abs: float | None = None
    max_mismatched: float | None = None
    min_top1: float | None = None
    max_code_changes: float | None = None
    max_latency_ratio: float = 1.5
    min_recorded: float = 1.0
    min_comparable: float | None = None


class JudgedMeasure(NamedTuple):
    """One judged measure.

    Attributes:
        subject: such as `output scores`, `answers` or `latency`.
        measure: what was measured.
        noise: the same of the current model against itself; None if not measured.
        limit: `got` may reach it, but not exceed it (`at_least`: not fall below it).
    """

    subject: str
    measure: str
    got: float
    noise: float | None
    limit: float
    passed: bool
    at_least: bool = False


class Sides(NamedTuple):
    """Data to judge; `noise` and the current side are None if the current model was not run.
    `missing` counts requests without a recorded answer; `recorded` says that the reference is
    recorded answers.
    """

    candidate: PairTally
    noise: PairTally | None
    candidate_latencies: Latencies
    current_latencies: Latencies | None
    again_latencies: Latencies | None = None
    missing: int = 0
    recorded: bool = False


def judge(sides: Sides, thresholds: Thresholds) -> list[JudgedMeasure]:
    """Return all findings, including passed ones. Zero requests do not count as no difference."""
    findings = [_compared(sides.candidate)]
    if sides.missing:
        findings.append(_recorded(sides, thresholds))
    changes = _code_changes(sides, thresholds)
    findings.append(changes)
    if sides.candidate.count:
        findings.append(_comparable(sides, thresholds, changes.limit))
    for name, output in sides.candidate.outputs.items():
        noise = None if sides.noise is None else sides.noise.outputs.get(name)
        findings += _judge_output(f"output {name}", output, noise, thresholds)
    findings += _judge_latency(sides, thresholds)
    return findings


def is_same(findings: Sequence[JudgedMeasure]) -> bool:
    """Return the verdict."""
    return all(finding.passed for finding in findings)


def _compared(candidate: PairTally) -> JudgedMeasure:
    count = candidate.count
    return JudgedMeasure("requests", "compared", count, None, 1, count >= 1, at_least=True)


def _recorded(sides: Sides, thresholds: Thresholds) -> JudgedMeasure:
    share = sides.candidate.count / (sides.candidate.count + sides.missing)
    limit = thresholds.min_recorded
    measure = "share with a recorded answer"
    return JudgedMeasure("requests", measure, share, None, limit, share >= limit, at_least=True)


def _code_changes(sides: Sides, thresholds: Thresholds) -> JudgedMeasure:
    noise = None if sides.noise is None else sides.noise.changed_share
    limit = thresholds.max_code_changes
    if limit is None:
        limit = thresholds.margin * (noise or 0.0)
    got = sides.candidate.changed_share
    return JudgedMeasure("answers", "share with another code", got, noise, limit, got <= limit)


def _comparable(sides: Sides, thresholds: Thresholds, allowed_changes: float) -> JudgedMeasure:
    """Compare the number of requests that both sides answered with outputs with the expected one.

    Two sides that refuse everything do not differ, but nothing is known of the candidate then.
    """
    candidate = sides.candidate
    count = candidate.count
    limit = thresholds.min_comparable
    if limit is None and sides.recorded:
        # The requests with a changed code may all have been answered with outputs before.
        limit = max(candidate.reference_ok / count - allowed_changes, 1 / count)
    elif limit is None:
        limit = COMPARABLE_UNRECORDED
    got = candidate.compared / count
    measure = "share with outputs on both sides"
    return JudgedMeasure("requests", measure, got, None, limit, got >= limit, at_least=True)


def _judge_output(
    subject: str, output: OutputTally, noise: OutputTally | None, thresholds: Thresholds
) -> Iterator[JudgedMeasure]:
    wrong = output.mismatched_share
    wrong_noise = None if noise is None else noise.mismatched_share
    limit = thresholds.max_mismatched
    if limit is None:
        limit = thresholds.margin * (wrong_noise or 0.0)
    yield JudgedMeasure(subject, "share that differs", wrong, wrong_noise, limit, wrong <= limit)
    if not output.comparable:
        return
    limit = thresholds.max_abs
    if limit is None:
        rounding = max(ROUNDING, ROUNDING_STEPS * output.resolution) * output.scale
        limit = max(thresholds.margin * (0.0 if noise is None else noise.max_abs), rounding)
    noise_abs = None if noise is None else noise.max_abs
    got = output.max_abs
    yield JudgedMeasure(subject, "largest difference", got, noise_abs, limit, got <= limit)
    if output.top1 is not None:
        yield _judge_top1(subject, output.top1, noise, thresholds)


def _judge_top1(
    subject: str, top1: float, noise: OutputTally | None, thresholds: Thresholds
) -> JudgedMeasure:
    noise_top1 = None if noise is None else noise.top1
    limit = thresholds.min_top1
    if limit is None:
        lost = 1.0 - (1.0 if noise_top1 is None else noise_top1)
        limit = max(1.0 - thresholds.margin * lost - TOP1_SLACK, 0.0)
    return JudgedMeasure(
        subject, "top-1 agreement", top1, noise_top1, limit, top1 >= limit, at_least=True
    )


def _judge_latency(sides: Sides, thresholds: Thresholds) -> Iterator[JudgedMeasure]:
    """Judge ratios of medians; those of the current model's two runs show how reliable they are."""
    if sides.current_latencies is None:
        return
    for kind in LATENCY_KINDS:
        candidate = sides.candidate_latencies.distribution(kind)
        current = sides.current_latencies.distribution(kind)
        ratio = ratio_of_medians(candidate, current)
        if ratio is None or candidate is None or current is None:
            continue
        if min(candidate.answers, current.answers) < LATENCY_COUNT:
            continue
        noise = None
        if sides.again_latencies is not None:
            noise = ratio_of_medians(sides.again_latencies.distribution(kind), current)
        limit = thresholds.max_latency_ratio
        if noise:
            limit *= max(noise, 1.0 / noise)
        later_us = candidate.p50_us - current.p50_us
        passed = ratio <= limit or later_us < LATENCY_SLACK_US
        measure = f"median {kind.replace('_', ' ')}, ratio"
        yield JudgedMeasure("latency", measure, ratio, noise, limit, passed)
