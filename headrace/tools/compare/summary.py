"""Results of a comparison, as plain values and as lines of text. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.tools.compare.run import Comparison
from headrace.tools.compare.tally import (
    KINDS,
    Latencies,
    OutputTally,
    PairTally,
    WorstCase,
    ratio_of_medians,
)
from headrace.tools.compare.verdict import Finding, is_same

CommandOf = Callable[[WorstCase], str]
"""Returns the command that replays one request alone."""


def summary(
    comparison: Comparison, findings: Sequence[Finding], command_of: CommandOf
) -> dict[str, Any]:
    """Return all results in JSON's types; latencies in microseconds."""
    noise = comparison.noise
    return {
        "verdict": "same" if is_same(findings) else "different",
        "requests": comparison.candidate.count,
        "missing": comparison.missing,
        "top_k": comparison.top_k,
        "findings": [
            {name: _finite(value) for name, value in finding._asdict().items()}
            for finding in findings
        ],
        "candidate": _pair(comparison.candidate),
        "noise": None if noise is None else _pair(noise),
        "latency_us": {name: _latency(each) for name, each in sides_of(comparison).items()},
        "latency_ratio": ratios(comparison),
        "worst": [_case(case, command_of) for case in comparison.worst.sorted()],
    }


def sides_of(comparison: Comparison) -> dict[str, Latencies]:
    """Return the measured latencies, by the name of their side."""
    reference = "recorded" if comparison.reference_is_recorded else "current"
    sides = {reference: comparison.reference, "candidate": comparison.other}
    if comparison.noise is not None:
        again = "current" if comparison.reference_is_recorded else "current again"
        sides = {reference: comparison.reference, again: comparison.again, **sides}
    return sides


def ratios(comparison: Comparison) -> dict[str, float | None]:
    """Return the ratios of candidate to current medians, by kind; None if the
    current was not run.
    """
    current = comparison.sides().current_latencies
    return {
        kind: None
        if current is None
        else ratio_of_medians(comparison.other.distribution(kind), current.distribution(kind))
        for kind in KINDS
    }


def _pair(pair: PairTally) -> dict[str, Any]:
    return {
        "exact": pair.exact,
        "codes": [[*codes, count] for codes, count in sorted(pair.codes.items())],
        "outputs": {name: _output(output) for name, output in pair.outputs.items()},
    }


def _output(output: OutputTally) -> dict[str, Any]:
    found: dict[str, Any] = {
        "compared": output.count,
        "exact": output.exact,
        "mismatched": output.mismatched,
    }
    if output.comparable:
        found |= {
            "max_abs": _finite(output.max_abs),
            "mean_abs": _finite(output.mean_abs),
            "scale": output.scale,
            "cosine_min": output.cosine_min,
            "cosine_mean": output.cosine_mean,
            "top1": output.top1,
            "topk": output.topk,
        }
    return found


def _finite(value: Any) -> Any:
    """Replace infinities, which JSON does not have."""
    return "Infinity" if value == math.inf else value


def _latency(latencies: Latencies) -> dict[str, Any]:
    found = {kind: latencies.distribution(kind) for kind in KINDS}
    return {kind: each._asdict() for kind, each in found.items() if each is not None}


def _case(case: WorstCase, command_of: CommandOf) -> dict[str, Any]:
    return {
        "request": f"{case.topic}/{case.partition}/{case.offset}",
        "model": case.model,
        "differs": describe(case),
        "command": command_of(case),
    }


def describe(case: WorstCase) -> str:
    """Describe the difference of the answers to one request in a line."""
    before, after = case.difference.codes
    if before != after:
        message = case.other.message or case.reference.message
        return f"{before} became {after}" + (f": {message}" if message else "")
    parts = []
    for name, each in case.difference.outputs.items():
        if each.comparable and not each.exact:
            parts.append(f"{name} differs by up to {number(each.max_abs)}")
        elif not each.exact:
            parts.append(f"{name}: {_shown(case, name)}")
    return "; ".join(parts)


def _shown(case: WorstCase, name: str) -> str:
    left, right = case.reference.outputs.get(name), case.other.outputs.get(name)
    if left is None or right is None:
        return "only one side has it"
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{left.dtype}{list(left.shape)} became {right.dtype}{list(right.shape)}"
    places = (left != right).reshape(-1).nonzero()[0]
    first = int(places[0])
    before, after = (each.reshape(-1)[first : first + 1].tolist()[0] for each in (left, right))
    return f"{before!r:.60} became {after!r:.60} at {first}"


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def lines(comparison: Comparison, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings, the worst requests and the verdict as text."""
    for finding in findings:
        noise = "" if finding.noise is None else f", noise {number(finding.noise)}"
        bound = "at least" if finding.at_least else "at most"
        mark = "ok  " if finding.passed else "FAIL"
        yield (
            f"{mark}  {finding.subject}: {finding.measure} {number(finding.got)} "
            f"({bound} {number(finding.limit)}{noise})"
        )
    verdict = "same" if is_same(findings) else "different"
    yield f"{verdict}: {comparison.candidate.count} requests compared"
