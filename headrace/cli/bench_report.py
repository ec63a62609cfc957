"""Output of `headrace bench`: fields for programs, lines of text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.tools.bench.advice import Facts, advise
from headrace.tools.bench.histogram import Histogram
from headrace.tools.bench.measured import Measured

BAR = 40
PERCENTILES = (50, 90, 99, 99.9)


def as_fields(facts: Facts, measured: Measured) -> dict[str, Any]:
    """Return all results, with times in milliseconds."""
    sizes = sorted(measured.batch_sizes.items())
    return {
        "sent": measured.sent,
        "answered": measured.answered,
        "unanswered": measured.unanswered,
        "duplicates": measured.duplicates,
        "answers_per_s": measured.per_s,
        "statuses": dict(measured.statuses),
        "latency_ms": _percentiles(measured.latency),
        "sent_late_ms": _percentiles(measured.lateness) if len(measured.lateness) else None,
        "histogram": [
            {"up_to_ms": 1e3 * bound_s, "answers": count}
            for bound_s, count in measured.latency.bars()
        ],
        "mean_ms": {
            "queue": 1e3 * facts.queue_s,
            "batch": 1e3 * facts.batch_s,
            "compute": 1e3 * facts.compute_s,
            "outside": 1e3 * facts.outside_s,
        },
        "rows_per_batch": facts.rows_per_batch,
        "batch_sizes": [{"rows": rows, "answers_looked_into": count} for rows, count in sizes],
        "computing": facts.computing,
        "cores": facts.cores,
        "advice": [each._asdict() for each in advise(facts)],
    }


def _percentiles(histogram: Histogram) -> dict[str, float]:
    found = {f"p{percent:g}": 1e3 * histogram.percentile_s(percent) for percent in PERCENTILES}
    return found | {"max": 1e3 * histogram.max_s}


def as_text(fields: dict[str, Any]) -> str:
    """Format the fields as text."""
    return "\n".join([*_outcome(fields), "", *_histogram(fields), "", *_times(fields)])


def _outcome(fields: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{fields['answered']} of {fields['sent']} requests answered, "
        f"{fields['answers_per_s']:,.0f} a second"
        + (f"; {fields['unanswered']} unanswered" if fields["unanswered"] else "")
        + (f"; {fields['duplicates']} answered twice" if fields["duplicates"] else "")
    )
    others = {name: count for name, count in fields["statuses"].items() if name != "ok"}
    for name, count in sorted(others.items()):
        yield f"{name}: {count}"
    yield f"latency: {_shown(fields['latency_ms'])}"
    if fields["sent_late_ms"] is not None:
        yield f"sent late, which is part of it: {_shown(fields['sent_late_ms'])}"


def _shown(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in percentiles.items())


def _histogram(fields: dict[str, Any]) -> Iterator[str]:
    bars = fields["histogram"]
    most = max((bar["answers"] for bar in bars), default=1)
    for bar in bars:
        marks = "#" * round(BAR * bar["answers"] / most)
        yield f"  up to {_ms(bar['up_to_ms']):>9}  {bar['answers']:>9}  {marks}"


def _times(fields: dict[str, Any]) -> Iterator[str]:
    mean = fields["mean_ms"]
    yield (
        f"mean: waiting for a batch {_ms(mean['queue'])}, computing {_ms(mean['compute'])}, the "
        f"rest of the batch {_ms(mean['batch'])}, Kafka and decoding {_ms(mean['outside'])}"
    )
    yield (
        f"{fields['rows_per_batch']:.1f} rows in a run; the model computes "
        f"{fields['computing']:.0%} of the time"
        + (f"; {fields['cores']:.2f} cores busy" if fields["cores"] is not None else "")
    )
    for advice in fields["advice"]:
        yield f"{advice['binds']}: {advice['sentence']}"


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1000 else f"{value:.2f} ms"
