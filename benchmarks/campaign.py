"""A whole benchmark run: every model and every contestant, in rounds, so that other load on the
machine affects all equally.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from aiokafka.errors import KafkaError

from benchmarks.cluster import Cluster, a_port
from benchmarks.contestants import (
    ALL_CORES,
    AWAITED,
    BARE,
    COMPUTING,
    CONTESTANTS,
    ENOUGH_FOR_SLOW_MODELS,
    LEARNING,
    PEERS_PYTHON,
    THREE,
    Contestant,
    ContestantMissing,
    Endpoints,
)
from benchmarks.latency import LatencyRun, median_of
from benchmarks.machine import describe_machine, versions_of
from benchmarks.processes import SHOWN_CHARACTERS, ProgramFailed, without_directories
from benchmarks.results import Contest, Results, SubjectResults
from benchmarks.saturation import run_bare, saturate
from benchmarks.subjects import SUBJECTS, BenchmarkModel, SubjectMissing
from headrace.errors import HeadraceError

SCRATCH = Path("build/benchmarks")
LATENCY_SHARE_S = 90.0
UNLOADED_RUNS = 3
SHARES = {"digits": 0.35, "magika": 0.64, "resnet50": 1.0}
"""Share of the whole run at which each model must be done."""

SWEEP = (1, 2, 4, 8, 16, 32)
Say = Callable[[str], None]
FAILURES = (
    *(ContestantMissing, ProgramFailed, HeadraceError, KafkaError, OSError, EOFError),
    ExceptionGroup,
    subprocess.SubprocessError,
)
"""Errors of one contestant or one model, which do not end the run."""

FORGETFUL = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Forget(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Forget)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Campaign(NamedTuple):
    """Parameters of a run.

    Attributes:
        window_s: of one saturated run; a model that computes for long has twice as much.
        named: contestants whose name has one of these in it; all when empty.
        latency_s: of one open-loop run.
        warm_s: of transactions before the first round. A broker that has just started takes three
            times as much processor time for each, until its compiler has seen enough of them.
        limit_s: of the whole run: a model whose share of it is over gets no further round.
    """

    subjects: tuple[str, ...]
    rounds: int
    window_s: float
    latency_s: float
    sweep_s: float
    parts: tuple[str, ...] = ("saturation", "latency")
    warm_s: float = 30.0
    limit_s: float = 1180.0
    named: tuple[str, ...] = ()


DEFAULT = Campaign(tuple(SUBJECTS), rounds=3, window_s=4.0, latency_s=5.0, sweep_s=1.0)
QUICK = Campaign(tuple(SUBJECTS), rounds=1, window_s=1.5, latency_s=2.0, sweep_s=0.3, warm_s=0.0)


async def measure(plan: Campaign, say: Say) -> Results:
    """Measure everything. Failures are recorded in the results and do not end the run."""
    machine = describe_machine()
    machine["peers"] = versions_of(PEERS_PYTHON, ("faststream", "quixstreams", "confluent-kafka"))
    results = Results(
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine,
        plan.rounds,
        plan.window_s,
        (os.getloadavg()[0], 0.0),
    )
    began_s = time.monotonic()
    with _collector() as collector:
        for name in plan.subjects:
            try:
                subject = SUBJECTS[name](SCRATCH)
            except SubjectMissing as error:
                say(f"{name}: left out: {error}")
                results.subjects.append(SubjectResults(name, "", 0, failures=[str(error)]))
                continue
            # A broker of its own for each model: what the one before has written is gone.
            measured = SubjectResults(subject.name, subject.kind, subject.batch, subject.threads)
            results.subjects.append(measured)
            try:
                async with Cluster() as cluster:
                    measuring = _Measuring(plan, cluster, (subject, measured), collector, say)
                    await measuring.run(began_s + SHARES[name] * plan.limit_s)
            except FAILURES as error:
                say(f"{name}: {error}")
                measured.failures.append(_describe_error(error))
    results.load_average = (results.load_average[0], os.getloadavg()[0])
    return results


class _Measuring:
    """Measurement of one model, on one broker."""

    def __init__(
        self,
        plan: Campaign,
        cluster: Cluster,
        subject: tuple[BenchmarkModel, SubjectResults],
        collector: str,
        say: Say,
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._subject, self._results = subject
        self._collector = collector
        self._say = say
        self._requests = f"bench.{self._subject.name}.requests"

    async def run(self, until_s: float) -> None:
        """Measure the model; start further rounds only before `until_s` (monotonic seconds)."""
        if self._subject.slow:
            self._sweep()
        if "saturation" in self._plan.parts:
            await self._saturation(until_s - LATENCY_SHARE_S)
        if "latency" in self._plan.parts:
            await self._latency()

    def _sweep(self) -> None:
        """Run the bare model at several batch sizes; all contestants use the best one."""
        for batch in SWEEP:
            try:
                found = run_bare(self._subject._replace(batch=batch), self._plan.sweep_s)
            except FAILURES as error:
                self._say(f"{self._subject.name}, batches of {batch}: {_describe_error(error)}")
                continue
            self._results.sweep[str(batch)] = found.per_s
        if not self._results.sweep:
            raise ProgramFailed("the bare model did not run at any batch size")
        best = max(self._results.sweep, key=self._results.sweep.__getitem__)
        self._say(f"{self._subject.name}: best batch size {best}")
        self._subject = self._subject.with_batch(int(best))
        self._results.batch = int(best)

    # --- throughput ------------------------------------------------------------------------

    async def _saturation(self, until_s: float) -> None:
        plan, subject = self._plan, self._subject
        more = COMPUTING if subject.threads else []
        contestants = [each for each in [*CONTESTANTS, *more] if self._is_in(each)]
        settle_s = max((each.settle_s for each in contestants), default=0.0)
        seconds = self._window_s + settle_s + 1.0
        count = int(subject.fastest_per_s * seconds) + 10 * subject.batch
        await self._cluster.create_plain(self._requests)
        began_s = time.monotonic()
        await self._cluster.fill(self._requests, subject.values, count)
        self._say(f"{subject.name}: {count} requests in {time.monotonic() - began_s:.1f} s")
        contests = [Contest(each.name, each.family) for each in contestants]
        bare = [(Contest(BARE, "bare"), subject)]
        if more:
            bare.append((Contest(BARE + ALL_CORES, "bare"), subject.with_all_cores()))
        self._results.contests = [contest for contest, _ in bare] + contests
        await self._warm_up(contestants)
        round_s = 0.0
        for number in range(plan.rounds):
            round_began_s = time.monotonic()
            if number and round_began_s + round_s > until_s:
                self._say(f"{subject.name}: no time for round {number + 1}")
                break
            for contest, varied in bare:
                self._bare(contest, varied)
            # The other way round every second time: no one always follows the same one.
            pairs = list(zip(contestants, contests, strict=True))
            for contestant, contest in pairs if number % 2 == 0 else reversed(pairs):
                if not (contest.failures and not contest.runs):
                    await self._contest(contestant, contest)
            round_s = time.monotonic() - round_began_s

    async def _warm_up(self, contestants: Sequence[Contestant]) -> None:
        """Let the broker answer transactions, where the broker's time counts."""
        contestant = next((each for each in contestants if each.in_transactions), None)
        if contestant is None or self._subject.slow or not self._plan.warm_s:
            return
        try:
            found = await saturate(
                self._cluster, contestant, self._subject, self._place(), self._plan.warm_s
            )
        except FAILURES as error:
            self._say(f"{self._subject.name}, warm-up: {_describe_error(error)}")
            return
        self._say(f"{self._subject.name}, warm-up: broker {found.broker_us:.1f} us")

    @property
    def _window_s(self) -> float:
        return self._plan.window_s * (2 if self._subject.fastest_per_s < 1000 else 1)

    def _is_in(self, contestant: Contestant) -> bool:
        enough = not self._subject.slow or contestant.name in ENOUGH_FOR_SLOW_MODELS
        if not enough and contestant not in COMPUTING:
            return False
        if self._subject.name == "resnet50" and contestant.name in (THREE, AWAITED):
            return False  # they differ by what small requests cost
        named = self._plan.named
        return not named or any(part.lower() in contestant.name.lower() for part in named)

    def _bare(self, contest: Contest, subject: BenchmarkModel) -> None:
        try:
            contest.runs.append(run_bare(subject, self._window_s))
        except FAILURES as error:
            contest.failures.append(_describe_error(error))

    async def _contest(self, contestant: Contestant, contest: Contest) -> None:
        try:
            place = self._place()
            if contestant.name == LEARNING:
                place = place._replace(http_port=a_port())
            subject = contestant.vary(self._subject)
            found = await saturate(self._cluster, contestant, subject, place, self._window_s)
        except FAILURES as error:
            contest.failures.append(_describe_error(error))
            self._say(f"{self._subject.name}, {contestant.name}: {error}")
            return
        contest.runs.append(found)
        self._say(
            f"{self._subject.name}, {contestant.name}: {found.per_s:,.1f}/s, "
            f"{found.cpu_us:.1f} us (broker {found.broker_us:.1f}), {found.memory_mib:.0f} MiB"
        )

    def _place(self) -> Endpoints:
        return Endpoints(
            self._cluster.bootstrap_servers,
            self._requests,
            f"bench.{self._subject.name}.{secrets.token_hex(4)}",
            self._collector,
        )

    # --- latency ---------------------------------------------------------------------------

    async def _latency(self) -> None:
        results, cluster = self._results, self._cluster
        subject = self._subject.with_all_cores()  # as it is served unless somebody says otherwise
        try:
            run = LatencyRun(cluster, subject, self._private_place())
            results.capacity_per_s, results.latencies = await run.loaded(self._plan.latency_s)
            for each in results.latencies:
                self._say(
                    f"{subject.name} at {each.load:.0%}, {each.offered_per_s:,.0f}/s: p50 "
                    f"{each.p50_ms:.1f} ms, p99 {each.p99_ms:.1f} ms, p99.9 {each.p999_ms:.1f} ms"
                )
            # Three processes differ from one by what small requests cost, and need a port each.
            is_small = subject.name == "digits"
            found = []
            for _ in range(UNLOADED_RUNS):
                run = LatencyRun(cluster, subject, self._private_place())
                apart = self._private_place()._replace(http_port=0) if is_small else None
                found.append(await run.unloaded(self._private_place(), apart))
                self._say(f"{subject.name} unloaded: {found[-1]}")
            results.unloaded = median_of(found)
        except FAILURES as error:
            results.failures.append(f"latency: {_describe_error(error)}")
            self._say(f"{subject.name}, latency: {error}")

    def _private_place(self) -> Endpoints:
        """Return addresses with a requests topic that no other run reads."""
        place = self._place()
        return place._replace(requests=f"{place.run}.requests", http_port=a_port())


def _describe_error(error: BaseException) -> str:
    """Describe the error in a line without this machine's directories."""
    text = without_directories(str(error) or repr(error))
    return " / ".join(text.split("\n"))[:SHOWN_CHARACTERS]


@contextmanager
def _collector() -> Iterator[str]:
    """Run a process that accepts and discards traces; yields its address."""
    process = subprocess.Popen([sys.executable, "-c", FORGETFUL], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()
