"""Comparison as a self-contained HTML page: no script, no outside resource. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from headrace.tools.compare.plots import cumulative, magnitudes
from headrace.tools.compare.run import Comparison
from headrace.tools.compare.style import STYLE
from headrace.tools.compare.summary import CommandOf, describe, number, ratios, sides_of
from headrace.tools.compare.tally import KINDS, OutputTally
from headrace.tools.compare.verdict import Finding, is_same

KIND_NAMES = {"queue": "Waiting for a batch", "compute": "In the model", "end_to_end": "End to end"}


class Subjects(NamedTuple):
    """Descriptions of the compared sides."""

    recording: str
    reference: str
    candidate: str


def report(
    comparison: Comparison, findings: Sequence[Finding], subjects: Subjects, command_of: CommandOf
) -> str:
    """Return the page. Everything that comes from records or names is escaped."""
    body = "\n".join(
        [
            *_heading(comparison, findings, subjects),
            *_findings(findings),
            *_outputs(comparison, findings),
            *_codes(comparison),
            *_latency(comparison),
            *_worst(comparison, command_of),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>headrace replay compare</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _heading(
    comparison: Comparison, findings: Sequence[Finding], subjects: Subjects
) -> Iterator[str]:
    same = is_same(findings)
    verdict, style = ("same", "good") if same else ("different", "bad")
    yield f'<h1>The candidate is <span class="verdict {style}">{verdict}</span></h1>'
    yield (
        f'<p class="about">{comparison.candidate.count} requests of '
        f"{escape(subjects.recording)}; reference: {escape(subjects.reference)}; "
        f"candidate: {escape(subjects.candidate)}</p>"
    )


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "<h2>What was judged</h2>"
    rows = [
        [
            _mark(finding.passed),
            escape(finding.subject),
            escape(finding.measure),
            number(finding.got),
            "" if finding.noise is None else number(finding.noise),
            ("≥ " if finding.at_least else "≤ ") + number(finding.limit),
        ]
        for finding in findings
    ]
    yield _table(["", "of", "measure", "candidate", "noise floor", "allowed"], rows, 3)


def _mark(passed: bool) -> str:
    return '<b class="good">✓</b>' if passed else '<b class="bad">✗</b>'


def _outputs(comparison: Comparison, findings: Sequence[Finding]) -> Iterator[str]:
    outputs = comparison.candidate.outputs
    if not outputs:
        return
    noise = {} if comparison.noise is None else comparison.noise.outputs
    yield "<h2>Outputs</h2>"
    headings = ["output", "side", "compared", "exact", "largest", "mean", "cosine, least"]
    headings += ["top-1", f"top-{comparison.top_k}"]
    rows = []
    for name, output in outputs.items():
        sides = [("candidate", output)]
        if name in noise:
            sides.insert(0, ("noise floor", noise[name]))
        rows += [[escape(name), side, *_cells(each)] for side, each in sides]
    yield _table(headings, rows, 2)
    yield '<div class="plots">'
    for name, output in outputs.items():
        if output.comparable:
            series: dict[str, Sequence[float]] = {}
            if name in noise:
                series["noise floor"] = noise[name].largest
            series["candidate"] = output.largest
            title = f"largest difference of {name}, per request"
            yield f"<figure>{magnitudes(series, title, _limit(findings, name))}</figure>"
    yield "</div>"


def _cells(output: OutputTally) -> list[str]:
    cells = [str(output.count), str(output.exact)]
    if not output.comparable:
        return [*cells, *[""] * 5]
    shares = ["" if share is None else f"{share:.2%}" for share in (output.top1, output.topk)]
    numbers = [output.max_abs, output.mean_abs]
    return [*cells, *map(number, numbers), f"{output.cosine_min:.6f}", *shares]


def _limit(findings: Sequence[Finding], name: str) -> float | None:
    wanted = (f"output {name}", "largest difference")
    return next((each.limit for each in findings if each[:2] == wanted), None)


def _codes(comparison: Comparison) -> Iterator[str]:
    changes = comparison.candidate.code_changes
    yield "<h2>Codes</h2>"
    if not changes:
        yield f"<p>All {comparison.candidate.count} requests ended with the same code.</p>"
        return
    rows = [
        [escape(before), escape(after), str(count)]
        for (before, after), count in sorted(changes.items(), key=lambda each: -each[1])
    ]
    yield _table(["reference", "candidate", "requests"], rows, 2)


def _latency(comparison: Comparison) -> Iterator[str]:
    sides = sides_of(comparison)
    yield "<h2>Latency</h2>"
    rows = []
    for kind in KINDS:
        for name, latencies in sides.items():
            found = latencies.distribution(kind)
            if found is not None:
                times = [found.p50_us, found.p90_us, found.p99_us, found.max_us]
                cells = [f"{time_us / 1000:.3f}" for time_us in times]
                ratio = ratios(comparison)[kind] if name == "candidate" else None
                shown = "" if ratio is None else f"{ratio:.2f}"
                rows.append([KIND_NAMES[kind], escape(name), *cells, shown])
    headings = ["", "side", "p50 ms", "p90 ms", "p99 ms", "max ms", "ratio of medians"]
    yield _table(headings, rows, 2)
    yield '<div class="plots">'
    for kind in ("compute", "end_to_end"):
        plot = cumulative(
            {name: each.values_us(kind) for name, each in sides.items()}, KIND_NAMES[kind]
        )
        if plot:
            yield f"<figure>{plot}</figure>"
    yield "</div>"


def _worst(comparison: Comparison, command_of: CommandOf) -> Iterator[str]:
    cases = comparison.worst.sorted()
    yield "<h2>The worst requests</h2>"
    if not cases:
        yield "<p>None differs in anything.</p>"
        return
    rows = [
        [
            escape(f"{case.topic}/{case.partition}/{case.offset}"),
            escape(case.model),
            escape(describe(case)),
            f"<code>{escape(command_of(case))}</code>",
        ]
        for case in cases
    ]
    yield _table(["request", "model", "differs", "alone"], rows, len(rows[0]))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], first_number: int) -> str:
    """Return a table. Cells are HTML; columns from `first_number` on hold numbers."""
    styles = ['class="n"' if place >= first_number else "" for place in range(len(headings))]
    head = "".join(
        f"<th {style}>{heading}</th>" for heading, style in zip(headings, styles, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td {style}>{cell}</td>" for cell, style in zip(row, styles, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
