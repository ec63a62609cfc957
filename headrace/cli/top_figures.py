"""Figures of a process from two polls: rates, means and current values. Pure.

Names end with their unit: `_per_s`, `_s` (a duration), `_bytes`; the others are counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from headrace.cli.top_status import Model, Source, Status

Figures = dict[str, float | None]
"""None means unknown: nothing happened between the polls, or there is no data."""

OUTCOMES = ("ok", "expired", "refused", "failed")


class ModelFigures(Struct):
    """One version of a model. Rows and runs are counted by model: they are those of all versions
    that are ready.
    """

    name: str
    version: str
    state: str
    remarks: list[str]
    figures: Figures


class SourceFigures(Struct):
    """One source topic."""

    topic: str
    remarks: list[str]
    figures: Figures


class ProcessFigures(Struct):
    """One process.

    Attributes:
        fault: why there is no data; empty if it answered.
        condition: its phase, with the reason if it is not live or not ready.
        stages: figures of the stages that it has.
        closed: number of closed batches by reason, for one process.
        last_errors: as in `/status`, newest last.
    """

    url: str
    fault: str = ""
    version: str = ""
    condition: str = ""
    figures: Figures = {}
    stages: dict[str, Figures] = {}
    closed: dict[str, float] = {}
    models: list[ModelFigures] = []
    sources: list[SourceFigures] = []
    last_errors: list[dict[str, Any]] = []


class Change:
    """Changes between two polls of a process; nothing is known from the first poll alone, nor
    across a restart.
    """

    def __init__(self, earlier: Status | None, later: Status) -> None:
        if earlier is None or earlier.started_at != later.started_at:
            earlier = None
        self._elapsed_s = later.uptime_s - earlier.uptime_s if earlier else 0.0
        self._before = counters(earlier) if earlier else Counter[str]()
        self._after = counters(later)
        # Read positions: only for assignments in both polls.
        self._read_before = positions(earlier) if earlier else {}
        self._read_after = positions(later)

    def by(self, name: str) -> float:
        """Return the growth of a counter."""
        return self._after[name] - self._before[name]

    def rate(self, name: str) -> float | None:
        """Return the growth of a counter per second."""
        return self.by(name) / self._elapsed_s if self._elapsed_s > 0 else None

    def ratio(self, above: str, below: str) -> float | None:
        """Return the ratio of the growths of two counters."""
        if self._elapsed_s <= 0 or self.by(below) <= 0:
            return None
        return self.by(above) / self.by(below)

    def mean_s(self, name: str) -> float | None:
        """Return the mean of a duration between the polls."""
        return self.ratio(f"{name} seconds", f"{name} count")

    def read_per_s(self, topic: str) -> float | None:
        """Return the offsets of a topic that were read per second."""
        kept = [key for key in self._read_after if key[0] == topic and key in self._read_before]
        if self._elapsed_s <= 0 or not kept:
            return None
        moved = sum(self._read_after[key] - self._read_before[key] for key in kept)
        return moved / self._elapsed_s


def counters(status: Status) -> Counter[str]:
    """Return all totals as one flat mapping, summed over unused labels."""
    found: Counter[str] = Counter()
    totals = status.totals
    for request in totals.requests:
        found[request.outcome] += request.count
        found["answers"] += request.count
        found[f"answers {request.model}/{request.version}"] += request.count
    for batch in totals.batches:
        found["batches"] += batch.count
        found[f"closed {batch.reason}"] += batch.count
    for row in totals.rows:
        found["rows"] += row.count
        found[f"rows {row.model}"] += row.count
    seconds: dict[str, float] = {}
    for name, times in totals.times.items():
        for each in times:
            for key in (name, f"{name} {each.model}"):
                found[f"{key} count"] += each.count
                seconds[f"{key} seconds"] = seconds.get(f"{key} seconds", 0.0) + each.seconds
    found.update(seconds)
    return found


def positions(status: Status) -> dict[tuple[str, int, int], int]:
    """Return the next offset to read, for each assignment: topic, partition and epoch."""
    return {
        (source.topic, each.partition, each.epoch): each.base + each.span_records
        for source in status.sources
        for each in source.partitions
        if each.topic == source.topic
    }


def figures_of(url: str, earlier: Status | None, later: Status) -> ProcessFigures:
    """Return the displayed figures of a process, from the last two polls."""
    change = Change(earlier, later)
    stages = _stage_figures(change, later)
    reason = later.live.reason or later.ready.reason
    return ProcessFigures(
        url=url,
        version=later.version,
        condition=f"{_condition(later)}: {reason}" if reason else _condition(later),
        figures={"uptime_s": later.uptime_s, "event_loop_lag_s": later.event_loop_lag_s},
        stages={stage: stages[stage] for stage in later.stages if stage in stages},
        closed=_closed(change, later),
        models=[_model_figures(change, model) for model in later.models],
        sources=[_source_figures(change, source) for source in later.sources],
        last_errors=later.last_errors,
    )


def _condition(status: Status) -> str:
    if not status.live.live:
        return f"{status.phase}, stuck"
    return "not ready" if status.phase == "ready" and not status.ready.ready else status.phase


def _stage_figures(change: Change, status: Status) -> Mapping[str, Figures]:
    first = status.sources[0] if status.sources else None
    waiting = status.waiting
    ages_s = [source.commit.age_s for source in status.sources if source.commit.commits]
    return {
        "ingest": {
            "read_per_s": change.read_per_s(first.topic) if first else None,
            "log_wait_s": change.mean_s("log_wait"),
            "backlog": first.backlog_records if first else None,
            "oldest_age_s": first.oldest_age_s if first else None,
            "time_to_drain_s": first.time_to_drain_s if first else None,
        },
        "batcher": {
            "batches_per_s": change.rate("batches"),
            "queue_wait_s": change.mean_s("queue_wait"),
            "waiting": waiting.requests if waiting else None,
            "nearest_deadline_s": waiting.deadline_slack_s if waiting else None,
        },
        "executor": {
            "rows_per_s": change.rate("rows"),
            "runs_per_s": change.rate("compute_duration count"),
            "rows_of_a_run": change.ratio("rows", "compute_duration count"),
            "batch_wait_s": change.mean_s("batch_wait"),
            "copies_s": change.mean_s("copy_duration"),
            "run_s": change.mean_s("compute_duration"),
        },
        "responder": {
            "answers_per_s": change.rate("answers"),
            **{f"{outcome}_per_s": change.rate(outcome) for outcome in OUTCOMES[1:]},
            "end_to_end_s": change.mean_s("request_duration"),
            "answer_s": change.mean_s("answer_duration"),
            "commit_age_s": max(ages_s, default=None),
        },
    }


def _closed(change: Change, status: Status) -> dict[str, float]:
    reasons = sorted({batch.reason for batch in status.totals.batches})
    shares = {reason: change.ratio(f"closed {reason}", "batches") for reason in reasons}
    return {reason: share for reason, share in shares.items() if share}


def _model_figures(change: Change, model: Model) -> ModelFigures:
    off = f"batching off: {model.batching_off}" if model.batching_off else ""
    rows, runs = f"rows {model.name}", f"compute_duration {model.name}"
    ready = model.state == "ready"
    return ModelFigures(
        name=model.name,
        version=model.version,
        state=model.state,
        remarks=[remark for remark in (model.reason, off, model.contradiction) if remark],
        figures={
            "answers_per_s": change.rate(f"answers {model.name}/{model.version}"),
            "rows_per_s": change.rate(rows) if ready else None,
            "rows_of_a_run": change.ratio(rows, f"{runs} count") if ready else None,
            "run_s": change.mean_s(runs) if ready else None,
            "largest_batch": model.max_batch_size,
        },
    )


def _source_figures(change: Change, source: Source) -> SourceFigures:
    commit = source.commit
    remarks = [
        f"paused: {source.paused}" if source.paused else "",
        f"{commit.failures} commits failed, at last: {commit.last_failure}"
        if commit.failures
        else "",
        "" if commit.commits else "does not commit",
    ]
    return SourceFigures(
        topic=source.topic,
        remarks=[remark for remark in remarks if remark],
        figures={
            "read_per_s": change.read_per_s(source.topic),
            "in_flight": source.in_flight_records,
            "in_flight_bytes": source.in_flight_bytes,
            "limit_bytes": source.limit_bytes,
            "backlog": source.backlog_records,
            "throughput_per_s": source.throughput_per_s,
            "time_to_drain_s": source.time_to_drain_s,
            "commit_age_s": commit.age_s if commit.commits else None,
            "last_contact_s": source.last_contact_s,
        },
    )
