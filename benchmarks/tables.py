"""The tables of docs/performance.md, in Markdown; pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from benchmarks.contestants import (
    ALL_CORES,
    BARE,
    FASTSTREAM,
    FOUR,
    FUSED,
    LEARNING,
    OVERLAPPED,
    QUIX,
    TRACED,
)
from benchmarks.results import Contest, OpenLoopLatency, Results, SubjectResults

EXACTLY_ONCE = "Headrace, exactly once"


class PerformanceGoal(NamedTuple):
    """One line of the table of performance goals: the goal, the result, and where its `limit` is
    tested.
    """

    name: str
    asked: str
    found: float | None
    limit: float
    at_most: bool = False

    def row(self) -> str:
        """Return the row of the table."""
        if self.found is None:
            return f"| {self.name} | {self.asked} | not measured | |"
        holds = self.found <= self.limit if self.at_most else self.found >= self.limit
        verdict = "holds" if holds else "**missed**"
        return f"| {self.name} | {self.asked} | {self.found:.2f} | {verdict} |"


def render(results: Results) -> str:
    """Return everything between the marks of the page."""
    parts = [*_machine(results), "", *_budgets(results)]
    for subject in results.subjects:
        parts += ["", *_subject(subject)]
    return "\n".join(parts)


def _machine(results: Results) -> Iterator[str]:
    machine = results.machine
    packages = {**machine["packages"], **machine.get("peers", {})}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    yield (
        f"Measured {results.date} at commit `{machine['commit']}` on {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python "
        f"{machine['python']}; {versions}. Up to {results.rounds} rounds of "
        f"{results.window_s:g} s for each; medians, with the lowest and the highest in brackets. "
        f"Load average of the machine before {results.load_average[0]:.1f}."
    )


# --- budgets -----------------------------------------------------------------------------------


def _budgets(results: Results) -> Iterator[str]:
    yield "## Budgets"
    yield ""
    yield "| budget | goal | measured | |"
    yield "|---|---|---:|---|"
    for subject in results.subjects:
        for budget in budgets(subject, results.machine["cores"]):
            yield budget.row()


def budgets(subject: SubjectResults, cores: int) -> list[PerformanceGoal]:
    """Return the performance goals for a model's results, on a machine with this many cores."""
    name = subject.name
    found: list[PerformanceGoal] = []
    if name == "digits":
        found += _overhead(subject)
    elif subject.threads:
        found += _computing(subject, cores)
    once = ratio(subject, EXACTLY_ONCE, FUSED)
    found.append(PerformanceGoal(f"{name}: exactly once against at least once", "0.90", once, 0.9))
    if subject.unloaded is not None:
        times = subject.unloaded
        whole = times.headrace_p50_ms / (times.two_hops_p50_ms + times.run_ms)
        what = f"{name}: unloaded latency against two hops and the run"
        found.append(PerformanceGoal(what, "at most 1.30", whole, 1.3, at_most=True))
        if times.three_processes_p50_ms:
            apart = times.three_processes_p50_ms / times.headrace_p50_ms
            what = f"{name}: unloaded latency of three processes against one"
            found.append(PerformanceGoal(what, "at most 2.20", apart, 2.2, at_most=True))
    return found


def _overhead(subject: SubjectResults) -> Iterator[PerformanceGoal]:
    """Compare a model that computes almost nothing with loops that do little else."""
    what = f"{subject.name}: throughput against the overlapped bulk loop"
    yield PerformanceGoal(what, "0.50, aim 0.70", ratio(subject, FUSED, OVERLAPPED), 0.5)
    yield PerformanceGoal(f"{what}, traced at 1 %", "0.50", ratio(subject, TRACED, OVERLAPPED), 0.5)
    for peer, times in ((FASTSTREAM, 6.0), (QUIX, 1.2)):
        share = ratio(subject, TRACED, peer)
        yield PerformanceGoal(
            f"{subject.name}: against {peer}, traced at 1 %", f"{times:g}", share, times
        )
    what = f"{subject.name}: CPU per answer of four processes against one"
    cost = ratio(subject, FOUR, FUSED, "cpu_us")
    yield PerformanceGoal(what, "at most 3", cost, 3.0, at_most=True)


def _computing(subject: SubjectResults, cores: int) -> Iterator[PerformanceGoal]:
    """Compare a model that computes most of the time with the bare one on as many threads."""
    name, threads = subject.name, _threads(subject.threads)
    against = "throughput against the bare model"
    what = f"{name}: {against}, batches of {subject.batch}, {threads} each"
    yield PerformanceGoal(what, "0.97", ratio(subject, FUSED, BARE), 0.97)
    what = f"{name}: {against} at its best batch size, the size learned, {threads} each"
    yield PerformanceGoal(what, "0.97", ratio(subject, LEARNING, BARE), 0.97)
    served = subject.contest(FUSED + ALL_CORES)
    if served is not None and served.runs:
        broker = median(run.broker_us * run.per_s for run in served.runs) / 1e6 / cores
        what = (
            f"{name}: the same with all {cores} cores for both; the broker, which the bare model "
            f"does not need, takes {broker:.1%}"
        )
        yield PerformanceGoal(
            what, "0.97", ratio(subject, FUSED + ALL_CORES, BARE + ALL_CORES), 0.97
        )


def ratio(subject: SubjectResults, name: str, to: str, what: str = "per_s") -> float | None:
    """Return one contestant's throughput relative to another's: the median over the rounds."""
    ours, theirs = subject.contest(name), subject.contest(to)
    if ours is None or theirs is None or not ours.runs or not theirs.runs:
        return None
    pairs = zip(ours.runs, theirs.runs, strict=False)
    return median(getattr(one, what) / getattr(other, what) for one, other in pairs)


# --- one model ---------------------------------------------------------------------------------


def _subject(subject: SubjectResults) -> Iterator[str]:
    yield f"## {subject.name}: {subject.kind}" if subject.kind else f"## {subject.name}"
    yield ""
    if subject.sweep:
        sizes = ", ".join(f"{size}: {per_s:,.1f}/s" for size, per_s in subject.sweep.items())
        yield (
            f"The bare model by batch size, {_threads(subject.threads)} for a run: {sizes}. The "
            f"rows below ran batches of {subject.batch} on as many threads, unless stated "
            "otherwise."
        )
        yield ""
    yield from _throughput(subject)
    yield from _latency(subject)
    for failure in subject.failures:
        yield ""
        yield f"Not measured: {_first_line(failure)}."


def reference(subject: SubjectResults) -> str:
    """Return the contestant with which the others of a model are compared."""
    return OVERLAPPED if subject.name == "digits" else BARE


def _throughput(subject: SubjectResults) -> Iterator[str]:
    if not subject.contests:
        return
    against = reference(subject)
    alike = " with as many threads" if subject.threads else ""
    yield (f"A backlog, answered as fast as possible; a ratio of 1.00 is *{against}*{alike}.")
    yield ""
    yield f"![Throughput of {subject.name}](images/performance-{subject.name}.svg)"
    yield ""
    yield "| | ratio | answers/s | CPU µs per answer | broker µs | memory MiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    for contest in subject.contests:
        yield _contest_row(subject, contest, against)


def _contest_row(subject: SubjectResults, contest: Contest, against: str) -> str:
    per_s = contest.spread("per_s")
    if per_s is None:
        why = _first_line(contest.failures[0]) if contest.failures else "not run"
        return f"| {contest.name} | | {why} | | | |"
    if contest.name.endswith(ALL_CORES):
        against += ALL_CORES
    share = ratio(subject, contest.name, against)
    shown = "" if share is None else f"{share:.2f}" if share >= 0.095 else f"{share:.3f}"
    cells = [contest.name, shown, _range(per_s), _range(contest.spread("cpu_us"))]
    bare = contest.family == "bare"
    cells += ["" if bare else _range(contest.spread(each)) for each in ("broker_us", "memory_mib")]
    rows = contest.spread("rows_per_run")
    if rows is not None and rows[0]:
        cells[0] += f" ({_number(rows[0])} rows a run)"
    return "| " + " | ".join(cells) + " |"


def _latency(subject: SubjectResults) -> Iterator[str]:
    if subject.latencies:
        yield ""
        yield (
            "Latency from a request's due time until its answer was read: Poisson arrivals, load "
            f"from the same machine, with a capacity of {subject.capacity_per_s:,.0f} answers per "
            "second:"
        )
        yield ""
        yield "| load | requests/s | p50 ms | p99 ms | p99.9 ms | sent late, p99 ms | unanswered |"
        yield "|---:|---:|---:|---:|---:|---:|---:|"
        for each in subject.latencies:
            yield (
                f"| {each.load:.0%} | {each.offered_per_s:,.0f} | {each.p50_ms:.1f} | "
                f"{each.p99_ms:.1f} | {each.p999_ms:.1f} | {each.late_ms:.1f} | "
                f"{each.unanswered} |"
            )
        yield from _parts(subject.latencies)
    unloaded = subject.unloaded
    if unloaded is not None:
        yield ""
        yield (
            f"One request at a time: {unloaded.headrace_p50_ms:.2f} ms at the median "
            f"({unloaded.headrace_p99_ms:.1f} ms at the 99th percentile); two hops through Kafka "
            f"{unloaded.two_hops_p50_ms:.2f} ms ({unloaded.two_hops_p99_ms:.1f} ms); the run alone "
            f"{unloaded.run_ms:.2f} ms."
        )
        if unloaded.headrace_cpu_us:
            yield (
                f"By Headrace's own timing, with a pause before each request, the run took "
                f"{unloaded.computing_ms:.2f} ms. A request cost Headrace "
                f"{unloaded.headrace_cpu_us:,.0f} µs of processor time, all threads and commits "
                f"included, and the loop that only copies {unloaded.two_hops_cpu_us:,.0f} µs."
            )
        if unloaded.three_processes_p50_ms:
            yield (
                f"Through three processes, four hops, it took "
                f"{unloaded.three_processes_p50_ms:.2f} ms "
                f"({unloaded.three_processes_p99_ms:.1f} ms) and "
                f"{unloaded.three_processes_cpu_us:,.0f} µs of processor time."
            )


def _parts(latencies: list[OpenLoopLatency]) -> Iterator[str]:
    """Describe the time per stage of the same requests, and the busy cores."""
    if not any(each.stages and each.cores for each in latencies):
        return
    yield ""
    yield (
        "Where the time of the same requests went, in mean milliseconds by Headrace's own "
        "metrics, and how many cores each process kept busy:"
    )
    yield ""
    yield (
        "| load | all | sent late | in the log | queued | run | answered | read | Headrace "
        "| broker | sender | reader |"
    )
    yield "|---:|" + "---:|" * 11
    for each in latencies:
        if each.stages and each.cores:
            stages, cores = each.stages, each.cores
            within = stages.in_log + stages.queued + stages.running + stages.answering
            cells = [each.mean_ms, each.late_mean_ms, stages.in_log, stages.queued, stages.running]
            cells += [stages.answering, max(0.0, each.mean_ms - each.late_mean_ms - within)]
            times = [f"{cell:.1f}" for cell in cells]
            busy = [cores.headrace, cores.broker, cores.sender, cores.reader]
            row = [f"{each.load:.0%}", *times, *(f"{cell:.2f}" for cell in busy)]
            yield "| " + " | ".join(row) + " |"


def _threads(count: int) -> str:
    return "a thread for each core" if not count else f"{count} thread{'s' if count > 1 else ''}"


def _range(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return ""
    if spread[1] == spread[2]:
        return _number(spread[0])
    return f"{_number(spread[0])} ({_number(spread[1])}–{_number(spread[2])})"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].rstrip(".")[:120].replace("|", "/")
