"""Kills and outages at every step of changes of models: `python -m tests.chaos.model_changes`.

A seed has one step of a change, as the topics show it, and one process or the broker, which is
killed there: see `pair_of`. Then it makes random changes on the control topic. At a random moment
of each one, a process is killed, the log is unavailable for a while, the operator is killed, or a
second operator makes another change at once. Callers of the default and of labels go on all the
time. In the end the topic has the changes that were reported as made, each once, every process has
the wanted state, and no call was refused because of a change.

The embedded log stands for a broker, and tasks for processes, unless `--kafka` says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import numpy as np
import structlog

from headrace.client import Client, InferenceError, InferenceTimeout
from headrace.config import Settings, make_settings
from headrace.control.topic import ChangeOvertaken, ControlTopic
from headrace.errors import Code, Retriable
from headrace.log.memory import MemoryLog
from headrace.log.port import Log, TopicPartition
from headrace.models.wanted import Author, Change, fold, load, set_default, set_label, unload
from headrace.protocol.control import ControlRecord, WantedModel
from headrace.protocol.events import ExecutorEvent
from headrace.runtime.log_factory import open_log
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import STAGES, Stage, Topic
from headrace.transport.heartbeat import ExecutorEventReader
from tests.chaos.history import History
from tests.chaos.members import Member
from tests.support.conditions import eventually
from tests.support.models import add_version, digits

FORMS: dict[str, Sequence[Sequence[Stage]]] = {
    "fused": [STAGES, STAGES],
    "four": [(stage,) for stage in STAGES],
}
BROKER = "broker"
VICTIMS = (
    *(("four", stage.value) for stage in STAGES),
    ("four", BROKER),
    ("fused", "process"),
    ("fused", BROKER),
)
"""What is killed at a step, with the form of the trial."""
STEPS = ("written", "loading", "ready", "followed", "unloaded")
"""Steps of a change that the topics show: it is in the history; a process says that it still lacks
the version; an executor has it; all processes have followed; a removed version has been unloaded.
"""
LIMIT_S = 600.0
"""The longest that a trial may take. On a real broker, one with 8 changes takes about a minute, and
two on a machine that is short of cores; the step `unloaded` takes up to 80 s more.
"""
VERSIONS = ("1", "2", "3", "4")
LABELS = ("stable", "canary")
NAMES = ("digits", *(f"digits@{label}" for label in LABELS))
TURNS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 100)
CALL_TIMEOUT_S = 20.0
KEEP_REPLACED_S = 20.0
"""As long as requests wait in a trial. Ingest, batcher and executor unload one after the other."""
CALL_PAUSE_S = 0.02
RECHECK_S = 0.05
RETRY_S = 0.05
STEP_RECHECK_S = 0.001
RESTART_AFTER_S = 0.05
HELD_S = 0.5
REAL_MOMENTS_S = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)
"""Moments within a change on a real broker, which takes a tenth of a second without load."""
NOTHING_WRONG = (Code.DEADLINE_EXCEEDED, Code.OVERLOADED)
"""Answers that processes or a broker that were unavailable explain."""


class Pair(NamedTuple):
    """A victim, a process by its stage or the broker, and the step at which it is killed."""

    form: str
    victim: str
    step: str


def pair_of(seed: int) -> Pair:
    """Return the pair of a seed. Any 35 consecutive seeds have all pairs, since 7 and 5 have no
    common factor; any 7 have all victims, and any 5 all steps.
    """
    return Pair(*VICTIMS[seed % len(VICTIMS)], STEPS[seed % len(STEPS)])


class Trial(NamedTuple):
    """One run.

    Attributes:
        seed: decides the changes, and what happens when.
        form: stages of each process; see `FORMS`.
        changes: their number.
        moments_s: from a change, or from a strike, to the next thing that happens; before it, some
            turns of the event loop, which the steps of a change take on the embedded log.
        follow_s: the longest that the processes need in the end.
        swap: of `model.toml`, where versions are also loaded instead of each other; empty: they are
            not.
        verbose: say what happens while it does.
        pair: what is killed at which step of the first change; None if nothing is.
        limit_s: the longest that it may take in all.
    """

    seed: int
    form: str
    changes: int = 15
    moments_s: Sequence[float] = (0.0, 0.0, 0.0, 0.001, 0.02, 0.1)
    follow_s: float = 60.0
    swap: str = ""
    verbose: bool = False
    pair: Pair | None = None
    limit_s: float = LIMIT_S


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        faults: what is wrong; empty if nothing is.
        strikes: what was done, in its order.
        answers: calls that were answered.
        unanswered: calls that ended because processes or the log were unavailable.
        is_cut: it did not end within its limit; its broker may be unavailable.
    """

    faults: list[str]
    strikes: list[str]
    answers: int = 0
    unanswered: int = 0
    is_cut: bool = False


class Processes(Protocol):
    """Processes that are started again whenever they end, and the log that they share."""

    log: Log

    @property
    def count(self) -> int: ...
    async def kill(self, number: int) -> None: ...
    async def take_log_away(self) -> None: ...
    async def bring_log_back(self) -> None: ...
    async def disturb_log(self, requests: int) -> None: ...
    async def unfollowed(self, generation: int) -> list[str]: ...
    def crashes(self) -> list[str]: ...


def add_models(repository: Path, swap: str = "") -> None:
    """Write all versions; version n multiplies by n."""
    config = "probe = false" + (f'\nswap = "{swap}"' if swap else "")
    for number in map(int, VERSIONS):
        add_version(repository, "digits", number, digits(number), config)


def settings_of(repository: Path, namespace: str, servers: str, **kafka: Any) -> Settings:
    """Settings of all processes, and of the operators."""
    return make_settings(
        {
            "namespace": namespace,
            "kafka": {"bootstrap_servers": servers, **kafka},
            "topics": {"partitions": 4},
            "models": {
                "repository": repository,
                "mode": "explicit",
                "keep_replaced_s": KEEP_REPLACED_S,
                "trial_load": False,  # each takes a second
            },
        }
    )


# --- the embedded log ----------------------------------------------------------------------------


class _Task:
    """A process as a task: killed by cancelling it, and then started again."""

    def __init__(
        self, settings: Settings, log: Log, stages: Sequence[Stage], tasks: asyncio.TaskGroup
    ) -> None:
        self._settings = settings
        self._log = log
        self._stages = stages
        self._stop = Stop()
        self._life: asyncio.Task[None] | None = None
        self.pipeline: Pipeline | None = None
        self.crashes: list[str] = []
        tasks.create_task(self._supervise(), name=f"supervisor-{stages[0]}")

    async def _supervise(self) -> None:
        while not self._stop.requested.is_set():
            self.pipeline = Pipeline(self._settings, self._log, self._stages)
            self._life = asyncio.create_task(self.pipeline.run(self._stop), name="process")
            await asyncio.wait([self._life])
            if not self._life.cancelled() and (error := self._life.exception()) is not None:
                self._note(error)
                await asyncio.sleep(RESTART_AFTER_S)

    def _note(self, error: BaseException) -> None:
        """Note a crash; a process that cannot reach the log at its start ends, which is none."""
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                self._note(each)
        elif not isinstance(error, Retriable):
            self.crashes.append(f"{self._stages[0]}: {type(error).__name__}: {error}")

    async def kill(self) -> None:
        """End this life without a drain."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    def control(self) -> dict[str, Any]:
        """Return how far it has followed."""
        assert self.pipeline is not None
        found: dict[str, Any] = self.pipeline.state.status().get("control") or {}
        return found if self.pipeline.ready.is_set() else {}

    def end(self) -> None:
        """Let it drain."""
        self._stop.request()


class EmbeddedProcesses:
    """Tasks on an embedded log."""

    def __init__(self, log: MemoryLog, members: Sequence[_Task]) -> None:
        self.log: Log = log
        self._memory = log
        self._members = members

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._members)

    async def kill(self, number: int) -> None:
        """Kill one."""
        await self._members[number].kill()

    async def take_log_away(self) -> None:
        """Let requests to the log fail."""
        self._memory.faults.brokers.take_down()

    async def bring_log_back(self) -> None:
        """Let them succeed."""
        self._memory.faults.brokers.bring_back()

    async def disturb_log(self, requests: int) -> None:
        """Let the next requests to it fail, whoever makes them."""
        self._memory.faults.brokers.fail_requests(requests)

    async def unfollowed(self, generation: int) -> list[str]:
        """Return what the processes say that have not followed a change."""
        return [
            f"process {number}: {control}"
            for number, each in enumerate(self._members)
            if (control := each.control()) != {"generation": generation, "unready": []}
        ]

    def crashes(self) -> list[str]:
        """Return why processes ended that nobody had killed."""
        return [crash for each in self._members for crash in each.crashes]


@asynccontextmanager
async def embedded(trial: Trial, directory: Path) -> AsyncIterator[tuple[Settings, Processes]]:
    """Processes on an embedded log."""
    settings = settings_of(directory / "models", "embedded", "127.0.0.1:1")
    log = MemoryLog()
    await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
    async with asyncio.TaskGroup() as tasks:
        members = [_Task(settings, log, stages, tasks) for stages in FORMS[trial.form]]
        try:
            yield settings, EmbeddedProcesses(log, members)
        finally:
            for each in members:
                each.end()


# --- a real broker -------------------------------------------------------------------------------


class RealProcesses:
    """Processes on a broker."""

    def __init__(self, kafka: LocalKafka, log: Log, members: Sequence[Member]) -> None:
        self.log = log
        self._kafka = kafka
        self._members = members

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._members)

    async def kill(self, number: int) -> None:
        """Kill one (SIGKILL)."""
        await self._members[number].kill()

    async def take_log_away(self) -> None:
        """Kill the broker (SIGKILL)."""
        self._kafka.kill_node()

    async def bring_log_back(self) -> None:
        """Start the broker, and wait until it serves."""
        await self._kafka.start_node()

    async def disturb_log(self, requests: int) -> None:
        """Hold the broker (SIGSTOP) for longer the more requests it is to delay."""
        self._kafka.pause_node()
        await asyncio.sleep(requests * HELD_S)
        self._kafka.resume_node()

    async def unfollowed(self, generation: int) -> list[str]:
        """Return what the processes say that have not followed a change."""
        found = []
        for number, each in enumerate(self._members):
            status = await each.status() if each.is_ready else {}
            control = status.get("control")
            if control != {"generation": generation, "unready": []}:
                found.append(f"process {number}: {control}")
        return found

    def crashes(self) -> list[str]:
        """Return the lives that nobody ended."""
        return [crash for each in self._members for crash in each.crashes]


@asynccontextmanager
async def on_kafka(
    trial: Trial, directory: Path, kafka: LocalKafka
) -> AsyncIterator[tuple[Settings, Processes]]:
    """Processes on a broker that is not used by others."""
    name = f"changes-{trial.seed}-{trial.form}-{directory.name}"
    settings = settings_of(
        directory / "models",
        name,
        kafka.bootstrap_servers,
        session_timeout_ms=6000,
        request_timeout_ms=5000,
    )
    variables = {
        "HEADRACE_NAMESPACE": name,
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "HEADRACE_KAFKA__SESSION_TIMEOUT_MS": "6000",
        "HEADRACE_KAFKA__REQUEST_TIMEOUT_MS": "5000",
        "HEADRACE_TOPICS__PARTITIONS": "4",
        "HEADRACE_MODELS__REPOSITORY": str(directory / "models"),
        "HEADRACE_MODELS__MODE": "explicit",
        "HEADRACE_MODELS__KEEP_REPLACED_S": str(KEEP_REPLACED_S),
        "HEADRACE_MODELS__TRIAL_LOAD": "false",
    }
    history = History()
    async with open_log(settings) as log, AsyncExitStack() as stack:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        members = [
            Member(",".join(stages), variables, directory / f"{number}-{stages[0]}", history)
            for number, stages in enumerate(FORMS[trial.form])
        ]
        running = [tasks.create_task(each.run(), name="supervisor") for each in members]
        try:
            await asyncio.gather(*[each.wait_ready() for each in members])
            yield settings, RealProcesses(kafka, log, members)
            await asyncio.gather(*[each.stop() for each in members])
        finally:
            for task in running:
                task.cancel()


# --- operators -----------------------------------------------------------------------------------


def random_change(chooser: random.Random, model: WantedModel, *, replaces: bool = False) -> Change:
    """A change that is allowed and changes something; all names keep a version.

    Args:
        chooser: of the change.
        model: before the change.
        replaces: it may load a version instead of another one.
    """
    named = {model.default, *model.labels.values()}
    changes = [load("digits", each) for each in VERSIONS if each not in model.versions]
    changes += [unload("digits", each) for each in model.versions if each not in named]
    if replaces:
        changes += [
            load("digits", new, instead_of=old)
            for old in model.versions
            for new in VERSIONS
            if new != old
        ]
    for version in model.versions:
        if version != model.default:
            changes += [set_default("digits", version)] * 2
        changes += [
            set_label("digits", label, version)
            for label in LABELS
            if model.labels[label] != version
        ]
    return chooser.choice(changes)


class Steps:
    """Steps that a change to one version of the model has reached, as the topics show them.

    Attributes:
        reached: those so far.
        heard: set once the events topic is read.
    """

    def __init__(self, processes: int, generation: int, version: str) -> None:
        self._processes = processes
        self._generation = generation
        self._version = version
        self._followed: set[str] = set()
        self.reached: set[str] = set()
        self.heard = asyncio.Event()

    def apply(self, events: Sequence[ExecutorEvent]) -> None:
        """Apply what processes announce."""
        self.heard.set()
        for event in events:
            if event.generation < self._generation or not event.stages:
                continue
            self.reached.add("written")
            if event.unready:
                self.reached.add("loading")
                continue
            self._followed.add(event.executor)
            has_version = any(each.version == self._version for each in event.models)
            if Stage.EXECUTOR in event.stages:
                self.reached.add("ready" if has_version else "unloaded")
            if len(self._followed) >= self._processes:
                self.reached.add("followed")

    def is_past(self, step: str) -> bool:
        """Return True if a step, or a later one, was reached.

        A version that is loaded between two announcements of its process is never said to load.
        """
        later = STEPS[STEPS.index(step) : STEPS.index("followed") + 1] or (step,)
        return not self.reached.isdisjoint(later)


class Operators:
    """Make changes whatever happens, and compare what they are told with the topic."""

    def __init__(
        self, trial: Trial, settings: Settings, processes: Processes, strikes: list[str]
    ) -> None:
        self._trial = trial
        self._chooser = random.Random(trial.seed)
        self._processes = processes
        self._topic = ControlTopic(processes.log, settings)
        self.strikes = strikes
        self.faults: list[str] = []

    async def begin(self) -> None:
        """Load a version, and give it both labels."""
        changes = [load("digits", "1"), *(set_label("digits", each, "1") for each in LABELS)]
        for generation, change in enumerate(changes):
            await self._topic.write(change, generation, Author("first"), 0)

    async def read(self) -> list[ControlRecord]:
        """Return the history, however often the log fails."""
        while True:
            try:
                return await self._topic.read()
            except Retriable:
                await asyncio.sleep(RETRY_S)

    async def make_change_in_steps(self, pair: Pair, settings: Settings) -> None:
        """Load a version, and kill something at a step of it; or unload it, if that is the step."""
        before = await self.read()
        is_unload = pair.step == "unloaded"
        if is_unload:
            await self._make(before, {"one": load("digits", "2")})
            before = await self.read()
        change = (unload if is_unload else load)("digits", "2")
        steps = Steps(self._processes.count, len(before) + 1, "2")
        events = settings.topic(Topic.EVENTS)
        info = (await self._processes.log.describe_topics([events]))[events]
        assert info is not None
        reader = ExecutorEventReader(self._processes.log, TopicPartition(events, info.partitions))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(reader.run(steps.apply), name="read-steps")
            await steps.heard.wait()

            async def strike(_: Sequence[asyncio.Task[Any]]) -> None:
                await self._strike_at(pair, steps, len(before))

            await self._make(before, {"one": change}, strike)
            reading.cancel()

    async def _strike_at(self, pair: Pair, steps: Steps, seen: int) -> None:
        async def is_reached() -> bool:
            if pair.step == "written" and len(await self.read()) > seen:
                steps.reached.add("written")
            return steps.is_past(pair.step)

        told = f"{pair.victim} at {pair.step}"
        deadline_s = self._trial.follow_s + len(STAGES) * KEEP_REPLACED_S
        try:
            await eventually(is_reached, deadline_s=deadline_s, recheck_s=STEP_RECHECK_S)
        except AssertionError:
            self.faults.append(f"{told}: not reached, but {sorted(steps.reached)}")
        self._note(f"kill {told}, after {', '.join(sorted(steps.reached, key=STEPS.index))}")
        if pair.victim == BROKER:
            await self._processes.take_log_away()
            await self._moment()
            await self._processes.bring_log_back()
        else:
            alone = pair.form == "fused"
            await self._processes.kill(0 if alone else STAGES.index(Stage(pair.victim)))

    async def make_change(self) -> None:
        """Make one change while something happens; repeat it until the history shows it."""
        before = await self.read()
        model = fold(before).models["digits"]
        strikes = [self._kill, self._interrupt, self._disturb, self._kill_operator, None]
        strike = self._chooser.choice(strikes)
        replaces = bool(self._trial.swap)
        change = random_change(self._chooser, model, replaces=replaces)
        other = None
        if self._chooser.random() < 0.3:
            other = random_change(self._chooser, model, replaces=replaces)
        writers = {"one": change} if other is None else {"one": change, "other": other}
        await self._make(before, writers, strike)

    async def _make(
        self,
        before: Sequence[ControlRecord],
        writers: Mapping[str, Change],
        strike: Callable[[Sequence[asyncio.Task[Any]]], Awaitable[None]] | None = None,
    ) -> None:
        """Let operators write changes at once until the history shows one of them."""
        while len(after := await self.read()) == len(before):
            writing = {
                who: asyncio.create_task(
                    self._topic.write(each, len(before), Author(who), 0), name=f"operator-{who}"
                )
                for who, each in writers.items()
            }
            if strike is not None:
                await strike(list(writing.values()))
                strike = None  # once for each change
            await asyncio.wait(writing.values())
            self._say(f"generation {len(before)}: {list(writing.values())}"[:500])
            self._compare(len(before), writing, await self.read())
        if len(after) > len(before) + 1:
            self.faults.append(f"generation {len(before)}: {len(after) - len(before)} changes")

    def _compare(
        self,
        seen: int,
        writing: dict[str, asyncio.Task[ControlRecord | None]],
        after: Sequence[ControlRecord],
    ) -> None:
        """Compare what each operator was told with the history."""
        authors = [each.who for each in after[seen:]]
        for who, task in writing.items():
            if task.cancelled():
                continue
            error = task.exception()
            if error is None and who not in authors:
                self.faults.append(f"generation {seen}: {who} was told that it is made: {authors}")
            elif isinstance(error, ChangeOvertaken):
                if authors == [who]:
                    self.faults.append(f"generation {seen}: {who} won, and was told: {error}")
                elif authors and f"got generation {seen + 1}, " not in str(error):
                    self.faults.append(f"generation {seen}: {who} was not told the winner: {error}")
            elif error is not None and not isinstance(error, Retriable):
                self.faults.append(f"generation {seen}: {who}: {error!r}")

    def _note(self, strike: str) -> None:
        self.strikes.append(strike)
        self._say(strike)

    def _say(self, text: str) -> None:
        if self._trial.verbose:
            click.echo(f"{time.monotonic():.1f} {text}")

    async def _moment(self) -> None:
        for _ in range(self._chooser.choice(TURNS)):
            await asyncio.sleep(0)
        await asyncio.sleep(self._chooser.choice(self._trial.moments_s))

    async def _kill(self, writing: Sequence[asyncio.Task[Any]]) -> None:
        """Kill a process at a moment of the change, or several."""
        for _ in range(self._chooser.choice([1, 1, 2])):
            number = self._chooser.randrange(self._processes.count)
            self._note(f"kill {number}")
            await self._moment()
            await self._processes.kill(number)

    async def _interrupt(self, writing: Sequence[asyncio.Task[Any]]) -> None:
        """Let the log be unavailable for a while, during which a process may be killed as well."""
        await self._moment()
        self._note("log unavailable")
        await self._processes.take_log_away()
        await self._moment()
        if self._chooser.random() < 0.3:
            await self._kill(writing)
        await self._processes.bring_log_back()

    async def _disturb(self, writing: Sequence[asyncio.Task[Any]]) -> None:
        """Let some requests to the log fail, or take long."""
        await self._moment()
        self._note("log disturbed")
        await self._processes.disturb_log(self._chooser.randrange(1, 12))

    async def _kill_operator(self, writing: Sequence[asyncio.Task[Any]]) -> None:
        """End an operator without a word."""
        await self._moment()
        self._note("kill operator")
        self._chooser.choice(writing).cancel()


# --- callers -------------------------------------------------------------------------------------


class Callers:
    """Call each name, one request after another, while the context lasts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stopping = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self.answers = 0
        self.unanswered = 0
        self.faults: list[str] = []

    async def call(self, name: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the version that answers."""
        pixels = np.ones((1, 64), np.float32)
        response = await self._client.infer(name, {"pixels": pixels}, timeout_s=timeout_s)
        computed = f"{response.outputs['scores'][0][1] / 64:.0f}"
        if computed != response.model_version:
            self.faults.append(f"{name}: outputs of {computed} by {response.model_version}")
        return response.model_version

    async def run(self, name: str) -> None:
        """Call a name until `stop`."""
        while not self._stopping.is_set():
            try:
                await self.call(name)
                self.answers += 1
            except InferenceError as error:
                self.unanswered += 1
                if error.code not in NOTHING_WRONG:
                    self.faults.append(f"{name}: {error.code}: {error}")
            except (InferenceTimeout, Retriable):
                self.unanswered += 1
            await asyncio.sleep(CALL_PAUSE_S)

    def stop(self) -> None:
        """End the calls after those that are under way."""
        self._stopping.set()


# --- the trial -----------------------------------------------------------------------------------


async def run_trial(trial: Trial, directory: Path, kafka: LocalKafka | None = None) -> Outcome:
    """Run a trial; on the embedded log, or on a broker that is not used by others."""
    strikes: list[str] = []
    try:
        async with asyncio.timeout(trial.limit_s) as limit:
            return await _run_trial(trial, directory, kafka, strikes)
    except TimeoutError:
        if not limit.expired():
            raise
        return Outcome([f"not ended within {trial.limit_s:g} s"], strikes, is_cut=True)


async def _run_trial(
    trial: Trial, directory: Path, kafka: LocalKafka | None, strikes: list[str]
) -> Outcome:
    add_models(directory / "models", trial.swap)
    start = embedded(trial, directory) if kafka is None else on_kafka(trial, directory, kafka)
    async with start as (settings, processes):
        operators = Operators(trial, settings, processes, strikes)
        await operators.begin()
        await _require_followed(trial, processes, 1 + len(LABELS))
        async with Client(log=processes.log, settings=settings) as client:
            callers = Callers(client)
            async with asyncio.TaskGroup() as calling:
                for name in NAMES:
                    calling.create_task(callers.run(name), name=f"calls-{name}")
                if trial.pair is not None:
                    await operators.make_change_in_steps(trial.pair, settings)
                made = len(await operators.read())
                for _ in range(trial.changes):
                    await operators.make_change()
                records = await operators.read()
                stuck = await _wait_until_followed(trial, processes, len(records))
                callers.stop()
            model = fold(records).models["digits"]
            wanted = {"digits": model.default} | {
                f"digits@{label}": version for label, version in model.labels.items()
            }
            found = {} if stuck else {name: await callers.call(name, 60.0) for name in NAMES}
        faults = [*operators.faults, *callers.faults, *processes.crashes(), *stuck]
        if not stuck and found != wanted:
            faults.append(f"wanted {wanted}, found {found}")
        if len(records) != made + trial.changes:
            faults.append(f"{len(records)} records after {trial.changes} changes")
    return Outcome(faults, strikes, callers.answers, callers.unanswered)


async def _require_followed(trial: Trial, processes: Processes, generation: int) -> None:
    stuck = await _wait_until_followed(trial, processes, generation)
    assert not stuck, stuck


async def _wait_until_followed(trial: Trial, processes: Processes, generation: int) -> list[str]:
    """Return what the processes say that do not follow."""
    behind: list[str] = []

    async def all_have() -> bool:
        behind[:] = await processes.unfollowed(generation)
        return not behind

    try:
        await eventually(all_have, deadline_s=trial.follow_s, recheck_s=RECHECK_S)
    except AssertionError:
        return [f"generation {generation} was not followed: {'; '.join(behind)}"]
    return []


@click.command()
@click.option("--seeds", default=20, show_default=True, help="How many.")
@click.option("--first-seed", default=1, show_default=True, help="The others follow it.")
@click.option("--form", type=click.Choice(list(FORMS)), help="Only seeds of this form.")
@click.option("--kafka", is_flag=True, help="On a real broker, with real processes.")
@click.option(
    "--swap",
    type=click.Choice(["beside", "unload_first"]),
    help="Load versions instead of each other, too, in this way.",
)
@click.option("--changes", type=int, help="Random ones of each seed; 15, or 8 on a real broker.")
@click.option("--verbose", is_flag=True, help="Say what happens while it does.")
def main(
    seeds: int,
    first_seed: int,
    form: str | None,
    kafka: bool,
    swap: str | None,
    changes: int | None,
    verbose: bool,
) -> None:
    """Run seeds; exit code 1 if anything was wrong."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    pairs = {seed: pair_of(seed) for seed in range(first_seed, first_seed + seeds)}
    trials = [
        Trial(seed, pair.form, swap=swap or "", pair=pair)
        for seed, pair in pairs.items()
        if form in {None, pair.form}
    ]
    if kafka:
        trials = [
            each._replace(changes=8, moments_s=REAL_MOMENTS_S, follow_s=120.0) for each in trials
        ]
    if changes is not None:
        trials = [each._replace(changes=changes) for each in trials]
    trials = [each._replace(verbose=verbose) for each in trials]
    failed = asyncio.run(_run_all(trials, kafka=kafka))
    click.echo(f"{len(trials)} seeds, failed: {', '.join(map(str, failed)) or 'none'}")
    sys.exit(1 if failed else 0)


async def _run_all(trials: Sequence[Trial], *, kafka: bool) -> list[int]:
    """Run trials, one after the other; return the seeds that failed."""
    failed = []
    async with AsyncExitStack() as stack:
        broker = None
        for trial in trials:
            if kafka and broker is None:
                broker = await stack.enter_async_context(LocalKafka())
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                outcome = await run_trial(trial, Path(directory), broker)
            took_s = time.monotonic() - began_s
            if outcome.is_cut:  # the next one gets a broker of its own
                await stack.aclose()
                broker = None
            verdict = "; ".join(outcome.faults[:3]) or "ok"
            click.echo(
                f"seed {trial.seed:<5} {trial.form:<6} {took_s:>4.0f} s "
                f"{outcome.answers:>5} answers, {outcome.unanswered} without: {verdict} "
                f"[{', '.join(outcome.strikes)}]"
            )
            if outcome.faults:
                failed.append(trial.seed)
    return failed


if __name__ == "__main__":
    main()
