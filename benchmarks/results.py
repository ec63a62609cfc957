"""Results of the benchmarks, in the form of their JSON."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct, field

RESULTS = Path("benchmarks/results")
LATEST = RESULTS / "latest.json"
"""Results of a complete run, from which the pages are written."""


def record(path: Path, found: object) -> None:
    """Write results as JSON."""
    path.parent.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    path.write_text(text + "\n", encoding="utf-8")


class Saturated(Struct):
    """One run of a contestant over records that were written before.

    Attributes:
        per_s: answers per second.
        cpu_us: processor microseconds for each answer, of all the contestant's processes.
        broker_us: likewise, of the broker.
        memory_mib: resident, of all its processes, at the end.
        rows_per_run: of Headrace where it was asked; 0 elsewhere.
    """

    per_s: float
    cpu_us: float
    broker_us: float = 0.0
    memory_mib: float = 0.0
    rows_per_run: float = 0.0


class Contest(Struct):
    """A contestant's runs, one per round, and its failures."""

    name: str
    family: str
    runs: list[Saturated] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def spread(self, what: str) -> tuple[float, float, float] | None:
        """Return median, minimum and maximum of a field; None without runs."""
        values = [getattr(run, what) for run in self.runs]
        return (median(values), min(values), max(values)) if values else None


class Stages(Struct):
    """Time that requests spent in each stage of Headrace, in mean milliseconds.

    Attributes:
        in_log: from the record's timestamp, which has whole milliseconds, until ingest read it.
        queued: from there until its batch closed.
        running: from there until the responder began with its answer.
        answering: from there until the answer was acknowledged.
    """

    in_log: float
    queued: float
    running: float
    answering: float


class BusyCores(Struct):
    """Average number of cores that each process kept busy."""

    headrace: float
    broker: float
    sender: float
    reader: float


class OpenLoopLatency(Struct):
    """Open-loop latency at one rate, in milliseconds from when a request was due.

    Attributes:
        load: as a share of the capacity.
        late_ms: the 99th percentile of how much later than due requests were sent.
        unanswered: when the time to wait for answers was over.
        mean_ms, late_mean_ms: of all of it, and of how much later than due requests were sent.
        stages, cores: of the time in between.
    """

    load: float
    offered_per_s: float
    answered_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    late_ms: float
    unanswered: int
    mean_ms: float = 0.0
    late_mean_ms: float = 0.0
    stages: Stages | None = None
    cores: BusyCores | None = None

    @property
    def on_time(self) -> bool:
        """True if nearly all requests were sent when they were due."""
        return self.late_ms <= 10.0


class Unloaded(Struct):
    """One request at a time, in milliseconds: medians and 99th percentiles, of which the median
    over the rounds of a run is taken, and then that over the runs.

    Attributes:
        run_ms: of the bare model, one run after the other.
        computing_ms: of the run, as Headrace timed it, which rests between two of them.
        headrace_cpu_us, two_hops_cpu_us: processor time of a process for each request.
        three_processes_p50_ms: as `headrace_p50_ms`, with the stages in three processes; 0 if not
            measured. Their 99th percentile and processor time together follow.
    """

    two_hops_p50_ms: float
    two_hops_p99_ms: float
    run_ms: float
    headrace_p50_ms: float
    headrace_p99_ms: float
    computing_ms: float = 0.0
    headrace_cpu_us: float = 0.0
    two_hops_cpu_us: float = 0.0
    three_processes_p50_ms: float = 0.0
    three_processes_p99_ms: float = 0.0
    three_processes_cpu_us: float = 0.0


class SubjectResults(Struct):
    """All results for one model.

    Attributes:
        threads: of a run, for all but those that had as many as there are cores; 0: all had.
    """

    name: str
    kind: str
    batch: int
    threads: int = 0
    sweep: dict[str, float] = field(default_factory=dict)
    contests: list[Contest] = field(default_factory=list)
    capacity_per_s: float = 0.0
    latencies: list[OpenLoopLatency] = field(default_factory=list)
    unloaded: Unloaded | None = None
    failures: list[str] = field(default_factory=list)

    def contest(self, name: str) -> Contest | None:
        """Return the contest of a contestant, by its name."""
        return next((each for each in self.contests if each.name == name), None)


class Results(Struct):
    """A whole run of the benchmarks."""

    date: str
    machine: dict[str, Any]
    rounds: int
    window_s: float
    load_average: tuple[float, float]
    subjects: list[SubjectResults] = field(default_factory=list)
