"""Models change on the control topic under load: answers, agreement of the processes, latency.

    python -m benchmarks.model_changes [--rate 1000] [--rounds 50] [--form four] [--out FILE]

A local Kafka, four processes with stages and a gateway serve a model with the names `digits`,
`digits@stable` and `digits@canary`, which an open loop calls in turns through the gateway.
A round loads a version that no process has had, moves the label `canary` to it, makes it the
default, rolls back, and unloads it. Rounds alternate with equally long periods without a change;
every other pair of periods begins with that one, so that what becomes faster or slower on the way,
such as the broker's code that is compiled meanwhile, counts to both.

The operator shares the machine with the processes, which it does not elsewhere. So it keeps what it
has read between two changes, looks at announcements twenty times a second, and asks the gateway for
its status only when the other processes have followed.

Exits with 1 if a request was refused or not answered, if an answer came from a version that its
name did not have at any moment between request and answer, if the processes did not agree within
two seconds of readiness, if the unloaded versions were not gone in the end, or if the p99 of the
periods with changes is more than 1.5 times that of the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.cluster import a_port
from benchmarks.machine import describe_machine
from benchmarks.named_load import REFUSED, LoadPlan, NamedLoad, Note, NoteColumns
from benchmarks.results import RESULTS, record
from headrace.config import Settings, make_settings
from headrace.control.topic import ControlTopic
from headrace.errors import Rejected
from headrace.log.port import Log, TopicPartition
from headrace.models.wanted import (
    Author,
    Change,
    Wanted,
    load,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.models.wanted import Deployment as WantedState
from headrace.protocol.codec.events import decode_event
from headrace.protocol.events import NOT_CONTROLLED, ExecutorEvent
from headrace.runtime.log_factory import open_log
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import STAGES, Stage, Topic
from tests.support.conditions import eventually
from tests.support.models import add_version, digits
from tests.support.processes import Process, environment, headrace

MODEL = "digits"
NAMES = ("digits", "digits@stable", "digits@canary")
BASE = "1"
FORMS: dict[str, Sequence[str]] = {
    "fused": [",".join(STAGES)] * 4,
    "four": [str(stage) for stage in STAGES],
}
"""Stages of each process; either way there are four, and a gateway."""
AGREEMENT_S = 2.0
P99_RATIO = 1.5
START_S = 180.0
FOLLOW_DEADLINE_S = 120.0
GONE_DEADLINE_S = 60.0
LOOK_AGAIN_S = 0.05
POLL_S = 0.05
POLL_RECORDS = 1000
SHOWN = 5


class Plan(NamedTuple):
    """The plan of a measurement.

    Attributes:
        form: see `FORMS`.
        per_s: requests per second.
        rounds: of five changes each.
        periods: with changes, and as many without; the rounds are shared among them.
        pause_s: after each change that was followed.
        quiet_share: length of a period without changes, as a share of the last one with changes.
        warm_s: of load before the first period.
        trial_load: versions are loaded in a child process first, as they are by default.
        keep_replaced_s: a process keeps a version so long after its last request, one stage after
            the other.
    """

    form: str = "four"
    per_s: float = 1000.0
    rounds: int = 50
    periods: int = 5
    pause_s: float = 0.5
    quiet_share: float = 1.0
    warm_s: float = 30.0
    trial_load: bool = True
    keep_replaced_s: float = 10.0


class Made(msgspec.Struct, frozen=True):
    """One change; times are seconds after it was to be written.

    Attributes:
        action: a word.
        written_s: until it was committed.
        ready_s: until the last executor had everything ready.
        agreed_s: until the last process, the gateway included, was seen to have followed.
        from_s: when it was to be written, by the monotonic clock.
    """

    action: str
    written_s: float
    ready_s: float
    agreed_s: float
    from_s: float = 0.0

    @property
    def agreement_s(self) -> float:
        """Time from readiness until all processes agreed."""
        return max(0.0, self.agreed_s - max(self.written_s, self.ready_s))


class Period(msgspec.Struct, frozen=True):
    """A period with changes, or one without: seconds of the monotonic clock, and latencies."""

    changes: int
    from_s: float
    until_s: float
    requests: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class During(msgspec.Struct, frozen=True):
    """Latencies of requests that were due during all changes of one kind, pauses included.

    Attributes:
        action: a word.
        mean_s: of one change, without the pause.
    """

    action: str
    mean_s: float
    requests: int
    p50_ms: float
    p99_ms: float


class Found(msgspec.Struct):
    """The results of a measurement.

    Attributes:
        refusals: what was said instead of answers, by their beginnings.
        wrong: answers from a version that their name did not have then.
        left: versions that processes still had in the end, besides the first one.
    """

    plan: dict[str, Any]
    sent: int
    answered: int
    refusals: dict[str, int]
    wrong: list[str]
    made: list[Made]
    periods: list[Period]
    left: list[str]
    during: list[During] = []

    @property
    def p99_ratio(self) -> float:
        """Median of the ratios of neighbouring periods, with changes to without."""
        changing = [each.p99_ms for each in self.periods if each.changes]
        quiet = [each.p99_ms for each in self.periods if not each.changes]
        return median(with_ms / ms for with_ms, ms in zip(changing, quiet, strict=True))

    @property
    def slowest(self) -> Made:
        """The change after which the processes needed longest to agree."""
        return max(self.made, key=lambda each: each.agreement_s)

    def faults(self) -> list[str]:
        """Return what is wrong on a machine of any speed."""
        found = {
            f"{self.sent - self.answered} of {self.sent} requests were not answered, such as "
            f"{list(self.refusals)[:SHOWN]}": self.sent != self.answered,
            f"{len(self.wrong)} answers came from a wrong version: "
            f"{self.wrong[:SHOWN]}": self.wrong,
            f"not unloaded: {self.left}": self.left,
        }
        return [text for text, is_fault in found.items() if is_fault]

    def missed_times(self) -> list[str]:
        """Return which limits of time were missed."""
        slowest = self.slowest
        found = {
            f"after a {slowest.action} the processes agreed only {slowest.agreement_s:.2f} s "
            "after readiness": slowest.agreement_s > AGREEMENT_S,
            f"p99 with changes is {self.p99_ratio:.2f} times that without": (
                self.p99_ratio > P99_RATIO
            ),
        }
        return [text for text, is_missed in found.items() if is_missed]


# --- the processes -------------------------------------------------------------------------------


def add_models(repository: Path, rounds: int) -> None:
    """Write the version of each round, besides the first; version n multiplies by n."""
    for number in range(1, rounds + 2):
        add_version(repository, MODEL, number, digits(number))


def settings_of(plan: Plan, bootstrap_servers: str, namespace: str, repository: Path) -> Settings:
    """Settings of all processes."""
    return make_settings(
        {
            "namespace": namespace,
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "models": {
                "repository": repository,
                "mode": "explicit",
                "trial_load": plan.trial_load,
                "keep_replaced_s": plan.keep_replaced_s,
            },
        }
    )


class Deployment(NamedTuple):
    """Processes that run.

    Attributes:
        processes: those with stages.
        gateway: in front of them.
        port: of the gateway's door.
    """

    processes: list[Process]
    gateway: Process
    port: int


@asynccontextmanager
async def deployment(plan: Plan, settings: Settings) -> AsyncIterator[Deployment]:
    """Start a process for each part of the form, and a gateway."""
    assert settings.kafka is not None
    port = a_port()
    variables = environment(
        settings.kafka.bootstrap_servers,
        settings.namespace,
        Path(settings.models.locations[0]),
        MODELS__MODE="explicit",
        MODELS__TRIAL_LOAD=json.dumps(plan.trial_load),
        MODELS__KEEP_REPLACED_S=str(plan.keep_replaced_s),
        GATEWAY__HTTP_PORT=str(port),
        GATEWAY__GRPC_PORT="off",
    )
    await headrace(["topics", "create"], variables)
    async with AsyncExitStack() as stack:
        processes = [Process(stages, variables, (), START_S) for stages in FORMS[plan.form]]
        gateway = Process("", variables, (), START_S)
        await asyncio.gather(*map(stack.enter_async_context, (*processes, gateway)))
        yield Deployment(processes, gateway, port)


async def control_of(process: Process) -> tuple[int, list[str]]:
    """Return how far a process has followed, and what it waits for, by its status."""
    control = json.loads(await process.get("/status")).get("control") or {}
    return control.get("generation", 0), control.get("unready", [])


async def versions_of(process: Process) -> set[str]:
    """Return the versions that a process has, in any state."""
    status = json.loads(await process.get("/status"))
    return {each["version"] for each in status["models"] if each["name"] == MODEL}


# --- the operator --------------------------------------------------------------------------------


class Announcements:
    """Events that the processes announce on `events`, each with the timestamp of its record."""

    def __init__(self) -> None:
        self.processes: dict[str, list[tuple[float, ExecutorEvent]]] = {}
        self.changed = asyncio.Event()

    async def follow(self, log: Log, settings: Settings) -> None:
        """Read announcements; never returns."""
        name = settings.topic(Topic.EVENTS)
        info = (await log.describe_topics([name]))[name]
        assert info is not None
        partitions = [TopicPartition(name, number) for number in range(info.partitions)]
        async with log.reader(partitions) as reader:
            while True:
                polled = await reader.poll(POLL_S, POLL_RECORDS)
                for each in (one for records in polled.values() for one in records):
                    try:
                        event = decode_event(each.value or b"")
                    except Rejected:
                        continue
                    if event.generation != NOT_CONTROLLED:
                        heard = self.processes.setdefault(event.executor, [])
                        heard.append((each.timestamp / 1e3, event))
                        self.changed.set()
                # The records have times of their own; a fetch for each would cost the broker time.
                await asyncio.sleep(POLL_S)

    def followed_s(self, generation: int, *, executors: bool = False) -> list[float | None]:
        """Return when each process had followed a change, by its clock; None if it has not yet."""
        return [
            next(
                (
                    at_s
                    for at_s, event in heard
                    if event.generation >= generation and not event.unready
                ),
                None,
            )
            for heard in self.processes.values()
            if not executors or Stage.EXECUTOR in heard[-1][1].stages
        ]

    def forget(self) -> None:
        """Keep the last announcement of each process alone."""
        self.processes = {name: heard[-1:] for name, heard in self.processes.items()}


class Meaning(NamedTuple):
    """A period in which a name may have meant a version; times of the monotonic clock."""

    name: int
    version: int
    from_ns: int
    until_ns: int


class Meanings:
    """Versions that each name may have meant, and when.

    A name may mean its new version from when the change is written, and its old one until all
    processes have followed.
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, int]] = {}
        self.past: list[Meaning] = []

    def written(self, wanted: Mapping[str, str], at_ns: int) -> dict[str, tuple[str, int]]:
        """Note what the names are to mean; return the meanings that they lose."""
        lost = {
            name: self._now[name]
            for name, version in wanted.items()
            if name in self._now and self._now[name][0] != version
        }
        for name, version in wanted.items():
            if name not in self._now or name in lost:
                self._now[name] = version, at_ns
        return lost

    def followed(self, lost: Mapping[str, tuple[str, int]], at_ns: int) -> None:
        """Note that no process gives these names these meanings any more."""
        self.past += [
            Meaning(NAMES.index(name), int(version), from_ns, at_ns)
            for name, (version, from_ns) in lost.items()
        ]

    def all(self, now_ns: int) -> list[Meaning]:
        """Return all periods; those that last end now."""
        last = [
            Meaning(NAMES.index(name), int(version), from_ns, now_ns)
            for name, (version, from_ns) in self._now.items()
        ]
        return self.past + last


class Operator:
    """Makes changes, and measures when the processes have followed.

    Args:
        deployment: the processes that must follow.
        announcements: of these processes.
    """

    def __init__(
        self, log: Log, settings: Settings, deployment: Deployment, announcements: Announcements
    ) -> None:
        self._topic = ControlTopic(log, settings)
        self._deployment = deployment
        self._announcements = announcements
        self._state = WantedState()
        self.meanings = Meanings()
        self.made: list[Made] = []

    async def change(self, change: Change) -> Wanted:
        """Make a change, wait until all have followed, and return what is wanted now."""
        seen = self._state.generation
        names = _names_after(change.apply(self._state.models))
        self._announcements.forget()
        from_s, began_s = time.monotonic(), time.time()
        lost = self.meanings.written(names, time.monotonic_ns())
        made = await self._topic.write(change, seen, Author("benchmark"), round(began_s * 1e3))
        assert made is not None
        written_s = time.time()
        self._state = self._state.after(made)
        try:
            async with asyncio.timeout(FOLLOW_DEADLINE_S):
                await self._all_followed()
                gateway_s = await self._gateway_followed()
        except (TimeoutError, AssertionError):
            raise TimeoutError(await self._describe()) from None
        self.meanings.followed(lost, time.monotonic_ns())
        heard_s = [each or 0.0 for each in self._announcements.followed_s(made.generation)]
        executors_s = self._announcements.followed_s(made.generation, executors=True)
        self.made.append(
            Made(
                change.action,
                written_s - began_s,
                max(each or 0.0 for each in executors_s) - began_s,
                max(gateway_s, *heard_s) - began_s,
                from_s,
            )
        )
        return self._state.models

    async def _all_followed(self) -> None:
        while True:
            self._announcements.changed.clear()
            found = self._announcements.followed_s(self._state.generation)
            if len(found) >= len(self._deployment.processes) and None not in found:
                return
            await self._announcements.changed.wait()

    async def _gateway_followed(self) -> float:
        async def has_followed() -> bool:
            return await control_of(self._deployment.gateway) == (self._state.generation, [])

        await eventually(has_followed, deadline_s=FOLLOW_DEADLINE_S, recheck_s=LOOK_AGAIN_S)
        return time.time()

    async def _describe(self) -> str:
        """Return what each process says, when one of them does not follow."""
        processes = [*self._deployment.processes, self._deployment.gateway]
        found = [await control_of(each) for each in processes]
        return f"generation {self._state.generation} was not followed: {found}"


def _names_after(wanted: Wanted) -> dict[str, str]:
    model = wanted[MODEL]
    return {MODEL: model.default} | {
        f"{MODEL}@{label}": version for label, version in model.labels.items()
    }


async def make_round(operator: Operator, version: str, pause_s: float) -> None:
    """Make the five changes of a round."""
    loaded = await operator.change(load(MODEL, version))
    for change in (
        set_label(MODEL, "canary", version),
        set_default(MODEL, version),
        roll_back(loaded, MODEL),
        unload(MODEL, version),
    ):
        await asyncio.sleep(pause_s)
        await operator.change(change)
    await asyncio.sleep(pause_s)


# --- the measurement -----------------------------------------------------------------------------


async def measure(plan: Plan, bootstrap_servers: str, namespace: str, scratch: Path) -> Found:
    """Run the plan on a broker. Raises `TimeoutError` if a change is not followed."""
    repository = scratch / "models"
    add_models(repository, plan.rounds)
    settings = settings_of(plan, bootstrap_servers, namespace, repository)
    async with (
        open_log(settings) as log,
        deployment(plan, settings) as running,
        asyncio.TaskGroup() as tasks,
    ):
        announcements = Announcements()
        following = tasks.create_task(announcements.follow(log, settings), name="announcements")
        operator = Operator(log, settings, running, announcements)
        await operator.change(load(MODEL, BASE))
        for label in ("stable", "canary"):
            await operator.change(set_label(MODEL, label, BASE))
        operator.made.clear()
        async with NamedLoad(LoadPlan(running.port, NAMES, plan.per_s)) as called:
            periods = await _alternate(plan, operator, called)
            notes = await called.stop()
        left = await _left_versions(running)
        following.cancel()
    meanings = operator.meanings.all(time.monotonic_ns())
    return Found(
        plan=plan._asdict(),
        sent=called.sent,
        answered=int((NoteColumns(*notes.T).version != REFUSED).sum()),
        refusals=_count(called.refusals),
        wrong=find_wrong_answers(notes, meanings),
        made=operator.made,
        periods=[_with_latencies(each, notes) for each in periods],
        left=left,
        during=find_latencies(operator.made, notes, plan.pause_s),
    )


async def _alternate(plan: Plan, operator: Operator, called: NamedLoad) -> list[Period]:
    """Make the rounds; beside each period with changes is one without, after or before it."""
    await asyncio.sleep(plan.warm_s)
    versions = iter(range(2, plan.rounds + 2))
    periods: list[Period] = []
    changing_s = 0.0

    async def make_changes(rounds: int) -> None:
        nonlocal changing_s
        began_s, made = time.monotonic(), len(operator.made)
        for _ in range(rounds):
            await make_round(operator, str(next(versions)), plan.pause_s)
        periods.append(Period(len(operator.made) - made, began_s, time.monotonic()))
        changing_s = periods[-1].until_s - began_s

    async def make_none() -> None:
        began_s = time.monotonic()
        await asyncio.sleep(changing_s * plan.quiet_share)
        periods.append(Period(0, began_s, time.monotonic()))

    for number in range(plan.periods):
        rounds = (plan.rounds * (number + 1)) // plan.periods
        rounds -= (plan.rounds * number) // plan.periods
        if number % 2:
            await make_none()
            await make_changes(rounds)
        else:
            await make_changes(rounds)
            await make_none()
        slowest = max(each.agreement_s for each in operator.made)
        click.echo(
            f"{len(operator.made)} changes in {sum(p.until_s - p.from_s for p in periods):.0f} s, "
            f"{called.count} requests, {len(called.refusals)} refused, "
            f"agreement within {slowest:.2f} s",
            err=True,
        )
    return periods


async def _left_versions(running: Deployment) -> list[str]:
    """Return the versions that processes still have some time after the last unload."""
    left: list[str] = []

    async def are_gone() -> bool:
        processes = {f"process {number}": one for number, one in enumerate(running.processes, 1)}
        processes["gateway"] = running.gateway
        left[:] = [
            f"{name}: {MODEL}/{version}"
            for name, process in processes.items()
            for version in sorted(await versions_of(process) - {BASE})
        ]
        return not left

    try:
        await eventually(are_gone, deadline_s=GONE_DEADLINE_S, recheck_s=0.5)
    except AssertionError:
        return left
    return []


def find_wrong_answers(notes: NDArray[np.int64], meanings: Sequence[Meaning]) -> list[str]:
    """Return the answers from versions that their names did not have between request and answer.

    Args:
        notes: rows of `Note`.
        meanings: periods in which names may have had versions.
    """
    columns = NoteColumns(*notes.T)
    right = columns.version == REFUSED  # those are counted elsewhere
    for each in meanings:
        right |= (
            (columns.name == each.name)
            & (columns.version == each.version)
            & (columns.done_ns >= each.from_ns)
            & (columns.sent_ns <= each.until_ns)
        )
    return [
        f"{NAMES[note.name]} by version {note.version}, sent at {note.sent_ns / 1e9:.3f} s, "
        f"answered at {note.done_ns / 1e9:.3f} s"
        for note in (Note(*row) for row in notes[~right].tolist())
    ]


def find_latencies(made: Sequence[Made], notes: NDArray[np.int64], pause_s: float) -> list[During]:
    """Return the latencies during the changes of each kind.

    Args:
        made: the changes.
        notes: rows of `Note`.
        pause_s: after each change.
    """
    columns = NoteColumns(*notes.T)
    due_s, times_ms = columns.due_ns / 1e9, (columns.done_ns - columns.due_ns) / 1e6
    found = []
    for action in dict.fromkeys(each.action for each in made):
        these = [each for each in made if each.action == action]
        within = np.zeros(len(notes), bool)
        for each in these:
            until_s = each.from_s + each.agreed_s + pause_s
            within |= (due_s >= each.from_s) & (due_s < until_s)
        if within.any():
            mean_s = sum(each.agreed_s for each in these) / len(these)
            p50_ms, p99_ms = np.percentile(times_ms[within], [50, 99])
            found.append(During(action, mean_s, int(within.sum()), float(p50_ms), float(p99_ms)))
    return found


def _with_latencies(period: Period, notes: NDArray[np.int64]) -> Period:
    columns = NoteColumns(*notes.T)
    due_s = columns.due_ns / 1e9
    within = (due_s >= period.from_s) & (due_s < period.until_s)
    times_ms = (columns.done_ns - columns.due_ns)[within] / 1e6
    if not times_ms.size:
        return period
    p50_ms, p99_ms = np.percentile(times_ms, [50, 99])
    return msgspec.structs.replace(
        period, requests=times_ms.size, p50_ms=float(p50_ms), p99_ms=float(p99_ms)
    )


def _count(refusals: Sequence[str]) -> dict[str, int]:
    """Count refusals by their text, without the ids and times in it."""
    counts: dict[str, int] = {}
    for each in refusals:
        kind = re.sub(r"\d+", "N", each)[:200]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


# --- the command ---------------------------------------------------------------------------------


def describe(found: Found) -> list[str]:
    """Return the results as lines."""
    agreement_s = [each.agreement_s for each in found.made]
    loads_s = [each.ready_s for each in found.made if each.action == "load"]
    lines = [
        f"{found.sent} requests, {found.sent - found.answered} not answered, "
        f"{len(found.wrong)} by a wrong version",
        f"{len(found.made)} changes; agreement after readiness: median "
        f"{median(agreement_s):.2f} s, longest {max(agreement_s):.2f} s ({found.slowest.action})",
        f"loads: ready after median {median(loads_s):.2f} s, longest {max(loads_s):.2f} s",
    ]
    for each in found.periods:
        what = f"{each.changes} changes" if each.changes else "no changes"
        lines.append(
            f"{what}, {each.until_s - each.from_s:.0f} s, {each.requests} requests: "
            f"p50 {each.p50_ms:.2f} ms, p99 {each.p99_ms:.2f} ms"
        )
    lines += [
        f"during a {each.action} ({each.mean_s:.2f} s), {each.requests} requests: "
        f"p50 {each.p50_ms:.2f} ms, p99 {each.p99_ms:.2f} ms"
        for each in found.during
    ]
    lines.append(f"p99 with changes / without: {found.p99_ratio:.2f}")
    return lines


@click.command()
@click.option("--rate", type=click.FloatRange(min=1), default=1000.0, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--periods", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--form", type=click.Choice(list(FORMS)), default="four", show_default=True)
@click.option("--pause", "pause_s", type=float, default=0.5, show_default=True)
@click.option("--trial-load/--no-trial-load", default=True, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "model_changes.json")
def main(
    rate: float,
    rounds: int,
    periods: int,
    form: str,
    pause_s: float,
    trial_load: bool,
    out: Path,
) -> None:
    """Change models under load, and check answers, agreement and latency."""
    plan = Plan(form, rate, rounds, min(periods, rounds), pause_s, trial_load=trial_load)

    async def run() -> Found:
        with tempfile.TemporaryDirectory() as scratch:
            async with LocalKafka() as kafka:
                name = f"changes-{os.getpid()}"
                return await measure(plan, kafka.bootstrap_servers, name, Path(scratch))

    found = uvloop.run(run())
    record(out, {"machine": describe_machine(), "found": found})
    for line in describe(found):
        click.echo(line)
    faults = found.faults() + found.missed_times()
    for fault in faults:
        click.echo(f"MISSED {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
