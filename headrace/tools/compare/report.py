"""Results of a comparison: as plain values, as lines of text, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.tools.compare.run import Comparison
from headrace.tools.compare.tally import (
    KINDS,
    Latencies,
    OutputTally,
    PairTally,
    WorstCase,
    ratio_of_medians,
)
from headrace.tools.compare.verdict import JudgedMeasure, is_same
from headrace.tools.pages import COLOURS, as_data_url, new_plot, render_page

KIND_NAMES = {"queue": "Waiting for a batch", "compute": "In the model", "end_to_end": "End to end"}
LOWEST_DECADE, HIGHEST_DECADE = -9, 3

CommandOf = Callable[[WorstCase], str]
"""Returns the command that replays one request alone."""


def summary(
    comparison: Comparison, findings: Sequence[JudgedMeasure], command_of: CommandOf
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
        second = "current" if comparison.reference_is_recorded else "current again"
        sides = {reference: comparison.reference, second: comparison.second, **sides}
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


def lines(comparison: Comparison, findings: Sequence[JudgedMeasure]) -> Iterator[str]:
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


# --- the HTML page ----------------------------------------------------------------------------


class SideNames(NamedTuple):
    """Descriptions of the compared sides."""

    recording: str
    reference: str
    candidate: str


def report(
    comparison: Comparison,
    findings: Sequence[JudgedMeasure],
    subjects: SideNames,
    command_of: CommandOf,
) -> str:
    """Return the page. It needs the packages of the extra `report`."""
    return render_page(
        "compare.html",
        verdict="same" if is_same(findings) else "different",
        subjects=subjects,
        requests=comparison.candidate.count,
        findings=[_finding_cells(each) for each in findings],
        outputs=list(_output_rows(comparison)),
        output_plots=list(_output_plots(comparison, findings)),
        top_k=comparison.top_k,
        codes=sorted(
            ((*codes, count) for codes, count in comparison.candidate.code_changes.items()),
            key=lambda row: -row[-1],
        ),
        latencies=list(_latency_rows(comparison)),
        latency_plots=list(_latency_plots(comparison)),
        worst=[_case(case, command_of) for case in comparison.worst.sorted()],
    )


def _finding_cells(finding: JudgedMeasure) -> list[str]:
    return [
        "✓" if finding.passed else "✗",
        finding.subject,
        finding.measure,
        number(finding.got),
        "" if finding.noise is None else number(finding.noise),
        ("≥ " if finding.at_least else "≤ ") + number(finding.limit),
    ]


def _noise_outputs(comparison: Comparison) -> Mapping[str, OutputTally]:
    return {} if comparison.noise is None else comparison.noise.outputs


def _output_rows(comparison: Comparison) -> Iterator[list[str]]:
    noise = _noise_outputs(comparison)
    for name, output in comparison.candidate.outputs.items():
        if name in noise:
            yield [name, "noise floor", *_output_cells(noise[name])]
        yield [name, "candidate", *_output_cells(output)]


def _output_cells(output: OutputTally) -> list[str]:
    cells = [str(output.count), str(output.exact)]
    if not output.comparable:
        return [*cells, *[""] * 5]
    shares = ["" if share is None else f"{share:.2%}" for share in (output.top1, output.topk)]
    return [
        *cells,
        number(output.max_abs),
        number(output.mean_abs),
        f"{output.cosine_min:.6f}",
        *shares,
    ]


def _output_plots(comparison: Comparison, findings: Sequence[JudgedMeasure]) -> Iterator[str]:
    """Plot the requests by the decade of their largest difference; equal ones are at the left."""
    noise = _noise_outputs(comparison)
    decades = np.arange(LOWEST_DECADE - 1, HIGHEST_DECADE)
    for name, output in comparison.candidate.outputs.items():
        if not output.comparable:
            continue
        figure, axes = new_plot()
        sides = {"reference": noise.get(name), "candidate": output}
        for place, (side, tally) in enumerate(sides.items()):
            if tally is not None and len(tally.largest):
                label = "noise floor" if side == "reference" else side
                shares = shares_by_decade(tally.largest)
                axes.bar(decades + 0.4 * place, shares, 0.4, color=COLOURS[side], label=label)
        limit = next((each.limit for each in findings if each[:2] == _difference_of(name)), 0.0)
        if limit > 0:
            axes.axvline(math.log10(limit), color="#b3261e", linestyle="--", label="allowed")
        axes.set_xticks(decades[::3], ["equal", *(f"1e{each}" for each in decades[3::3])])
        axes.set_xlabel(f"largest difference of {name}, per request")
        axes.set_ylabel("share of requests")
        axes.legend()
        yield as_data_url(figure)


def _difference_of(output: str) -> tuple[str, str]:
    return f"output {output}", "largest difference"


def shares_by_decade(values: Sequence[float]) -> list[float]:
    """Return the share of zeros, and of values per decade from the lowest one on."""
    found = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore"):
        decades = np.floor(np.log10(found))
    places = np.where(found == 0, -1, decades - LOWEST_DECADE)
    highest = HIGHEST_DECADE - LOWEST_DECADE - 1
    places = np.clip(places, np.where(found == 0, -1, 0), highest).astype(int)
    counts = np.bincount(places + 1, minlength=highest + 2)
    return [float(count) / found.size for count in counts]


def _latency_rows(comparison: Comparison) -> Iterator[list[str]]:
    for kind in KINDS:
        for name, latencies in sides_of(comparison).items():
            found = latencies.distribution(kind)
            if found is None:
                continue
            times_us = [found.p50_us, found.p90_us, found.p99_us, found.max_us]
            ratio = ratios(comparison)[kind] if name == "candidate" else None
            yield [
                KIND_NAMES[kind],
                name,
                *(f"{time_us / 1000:.3f}" for time_us in times_us),
                "" if ratio is None else f"{ratio:.2f}",
            ]


def _latency_plots(comparison: Comparison) -> Iterator[str]:
    """Plot the share of answers within a time, for each side."""
    for kind in ("compute", "end_to_end"):
        figure, axes = new_plot()
        sides = sides_of(comparison).items()
        for side, (name, latencies) in zip(COLOURS, sides, strict=False):
            values_us = latencies.values_us(kind)
            if values_us:
                colour = COLOURS["candidate" if name == "candidate" else side]
                times_ms = np.maximum(np.asarray(values_us, dtype=np.float64), 1.0) / 1000
                axes.ecdf(times_ms, color=colour, label=name)
        if axes.lines:
            axes.set_xscale("log")
            axes.set_xlabel(f"{KIND_NAMES[kind]}, ms")
            axes.set_ylabel("share of answers")
            axes.legend()
            yield as_data_url(figure)
