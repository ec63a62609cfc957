"""One seed: a system under load, struck as the seed has it, and what the checker says of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from headrace.config import KafkaSettings, Settings, make_settings
from headrace.log.kafka.log import KafkaLog
from headrace.runtime.topic_plan import plan_topics
from headrace.topics import Topic
from tests.chaos import payloads
from tests.chaos.checker import (
    VALUE_LOST,
    Finding,
    Guarantee,
    Order,
    Promise,
    check,
    deleted,
    duplicates,
    unread,
)
from tests.chaos.clients import (
    RawSender,
    Sender,
    read_answers,
    read_back,
    read_kept,
    unheld,
    watch_commits,
)
from tests.chaos.cluster import Cluster
from tests.chaos.deployment import FORMS, Deployment
from tests.chaos.history import FaultKind, History, Identity, Sent
from tests.chaos.members import DRAIN_S, SESSION_TIMEOUT_S
from tests.chaos.nemeses import (
    NEMESES,
    PAYLOAD_NEMESES,
    RETENTION,
    Plan,
    Target,
    draw_plan,
    strike,
)
from tests.chaos.payloads import add_payload_models, asking, excuse, payload_settings
from tests.chaos.store import ChaosStore
from tests.chaos.workload import (
    DECOMPRESSED_BYTES,
    INLINE_BYTES,
    PARTITIONS,
    REPLIES,
    SHARED_BYTES,
    Question,
    add_models,
    ask,
)
from tests.support.conditions import eventually

GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)
ORDERS: tuple[Order, ...] = ("none", "none", "none", "key", "partition")
ANSWERED_DEADLINE_S = 60.0
THROTTLED_DEADLINE_S = 300.0
"""After a quota: a broker that delays a connection for what was written too much does so until the
end, also if the quota is lifted meanwhile. Some MB at 30 kB/s are more than a minute.
"""
COMMITTED_DEADLINE_S = 20.0
LATECOMERS_S = 1.0
"""How long answers are still read after each request has one: a repetition may follow."""
STRIKES_S = 10.0
IN_FLIGHT_BYTES = 16 * 1024 * 1024
"""Less than the large keys of one strike."""
STAMPED_BY_BROKER = {"message.timestamp.type": "LogAppendTime"}
REQUEST_TIMEOUT_S = 2.0
TRANSACTION_TIMEOUT_S = 3.0
"""Both are less than nemeses hold a network up for, so that outcomes become unknown."""


Workload: TypeAlias = Literal["tensors", "payloads"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
REQUESTS: dict[Workload, int] = {"tensors": 5000, "payloads": 2000}
"""Requests in a trial: a payload takes longer, and several of them wait for new child processes."""


class Trial(NamedTuple):
    """One run of random faults.

    Attributes:
        seed: decides what is not said here: the requests, the nemeses, and when they strike.
        workload: requests with tensors; or payloads for transforms in child processes and claims
            as well, see `tests.chaos.payloads`.
        retention: requests are deleted that are not answered yet.
    """

    seed: int
    form: str
    promise: Promise
    requests: int
    workload: Workload = "tensors"
    retention: bool = False

    @property
    def name(self) -> str:
        """Name of the trial's topics, group and files."""
        guarantee = self.promise.guarantee.replace("_", "-")
        order = "" if self.promise.order == "none" else f"-{self.promise.order}"
        return f"chaos-{self.seed}-{self.form}-{guarantee}{order}-{time.time_ns() % 10**6}"


class Outcome(NamedTuple):
    """The result of a trial.

    Attributes:
        crashes: processes that ended, or did not end, without being made to.
        stuck: why the system did not come to rest; empty if it did.
    """

    trial: Trial
    strikes: str
    history: History
    findings: list[Finding]
    crashes: list[str]
    stuck: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not (self.findings or self.crashes or self.stuck)

    def __str__(self) -> str:
        trial = self.trial
        breaches = sorted({finding.breach for finding in self.findings})
        silences = sum(fault.kind is FaultKind.BROKER_SILENT for fault in self.history.faults)
        silent = f", broker silent {silences} times" if silences else ""
        crashes = [f"{len(self.crashes)} crashes, first: {self.crashes[0]}"] if self.crashes else []
        verdict = ", ".join([*breaches, *crashes, *filter(None, [self.stuck])]) or "ok"
        return (
            f"seed {trial.seed:<6} {trial.workload:<8} {trial.form:<6} "
            f"{trial.promise.guarantee:<14} "
            f"order {trial.promise.order:<10} {len(self.history.sent):>6} requests "
            f"{duplicates(self.history):>4} repeated {self.seconds:5.1f} s  "
            f"{verdict}  [{self.strikes}{silent}{_told_deleted(self.history)}]"
        )


def _told_deleted(history: History) -> str:
    """Return how many requests were deleted, and what became of them; empty if none was."""
    gone = deleted(history)
    if not gone:
        return ""
    failed = {each.identity for each in history.answered if each.status == VALUE_LOST}
    return f", {len(gone)} deleted: {len(gone & failed)} failed, {len(unread(history))} unread"


def draw_trial(
    seed: int,
    guarantee: Guarantee | None = None,
    form: str | None = None,
    order: Order | None = None,
    workload: Workload | None = None,
    retention: bool | None = None,
) -> Trial:
    """Draw from the seed what the caller leaves open; guarantees alternate from seed to seed.

    Only values that travel by reference are lost with their records: of stages apart.
    """
    drawn_form = random.Random(f"form {seed}").choice(list(FORMS))
    drawn_order = random.Random(f"order {seed}").choice(ORDERS)
    promise = Promise(guarantee or GUARANTEES[seed % 2], order or drawn_order)
    drawn_workload = random.Random(f"workload {seed}").choices(WORKLOADS, (2, 1))[0]
    workload = workload or drawn_workload
    form = form or drawn_form
    if retention is None:
        retention = form != "fused" and random.Random(f"retention {seed}").random() < 0.3
    return Trial(seed, form, promise, REQUESTS[workload], workload, retention)


async def run_trial(trial: Trial, cluster: Cluster, directory: Path) -> Outcome:
    """Start, load, strike, let it come to rest, stop and check."""
    began_s = time.monotonic()
    rng = random.Random(trial.seed)
    has_payloads = trial.workload == "payloads"
    plan = draw_plan(rng, STRIKES_S, PAYLOAD_NEMESES if has_payloads else NEMESES)
    if trial.retention:
        plan.insert(random.Random(f"deletion {trial.seed}").randint(0, len(plan)), (RETENTION,))
    history = History()
    async with AsyncExitStack() as stack:
        store = ChaosStore(random.Random(f"store {trial.seed}"))
        await stack.enter_async_context(store)
        (directory / "shared").mkdir(parents=True)
        (add_payload_models if has_payloads else add_models)(directory / "models")
        settings = _settings(trial, cluster, directory, store)
        await stack.enter_async_context(_watched(cluster, settings, history, store))
        supervisors = await stack.enter_async_context(asyncio.TaskGroup())
        deployment = Deployment(_environment(settings), directory, history, supervisors)
        try:
            await deployment.start(trial.form)
            topic = settings.topic(Topic.REQUESTS)
            raw = RawSender(cluster.direct, topic, first_number=trial.requests)
            shared = settings.limits.shared_values_dir
            target = Target(
                deployment, cluster, history, rng, raw, settings.namespace, shared, store
            )
            stuck = await _load_and_strike(trial, target, plan, settings)
            stuck = stuck or await _come_to_rest(history, trial)
            if stuck:
                await deployment.save_status()
            await deployment.stop()
            history.kept += await read_kept(cluster.direct, settings.topic(Topic.DEAD_LETTERS))
        finally:
            deployment.abandon()
    history.sent = [excuse(each, store) for each in history.sent]
    return Outcome(
        trial,
        " ".join("+".join(each.name for each in round_) for round_ in plan),
        history,
        check(history, trial.promise),
        deployment.crashes,
        stuck,
        time.monotonic() - began_s,
    )


def _settings(trial: Trial, cluster: Cluster, directory: Path, store: ChaosStore) -> Settings:
    name = trial.name
    more = payload_settings(store) if trial.workload == "payloads" else {}
    return make_settings(
        {
            **more,
            "namespace": name,
            "kafka": {
                "bootstrap_servers": cluster.proxied,
                "client_id": name,
                "session_timeout_ms": int(SESSION_TIMEOUT_S * 1000),
                "request_timeout_ms": int(REQUEST_TIMEOUT_S * 1000),
                "transaction_timeout_ms": int(TRANSACTION_TIMEOUT_S * 1000),
            },
            "topics": {"partitions": PARTITIONS},
            "delivery": {"guarantee": trial.promise.guarantee, "order": trial.promise.order},
            "limits": {
                "drain_timeout_s": DRAIN_S,
                "max_decompressed_bytes": DECOMPRESSED_BYTES,
                "max_in_flight_bytes": IN_FLIGHT_BYTES,
                "inline_payload_bytes": INLINE_BYTES,
                "shared_values_bytes": SHARED_BYTES,
                "shared_values_dir": directory / "shared",
            },
            "models": {"repository": directory / "models"},
        }
    )


def _environment(settings: Settings) -> dict[str, str]:
    """The same settings for a process, as variables."""
    changed = settings.model_dump(mode="json", exclude_unset=True)
    variables = {"HEADRACE_NAMESPACE": settings.namespace}
    for group, values in changed.items():
        if isinstance(values, dict):
            for name, value in values.items():
                variable = f"HEADRACE_{group}__{name}".upper()
                is_list = isinstance(value, list)
                variables[variable] = json.dumps(value) if is_list else str(value)
    return variables


@asynccontextmanager
async def _watched(
    cluster: Cluster, settings: Settings, history: History, store: ChaosStore
) -> AsyncIterator[None]:
    """The topics are there, and answers and commits are written down."""
    topics = plan_topics(settings)
    # The checker goes by the stamps of answers, and processes may have clocks that were set back.
    responses = topics[Topic.RESPONSES]
    responses = responses._replace(config={**responses.config, **STAMPED_BY_BROKER})
    topics[Topic.RESPONSES] = responses
    replies = responses._replace(name=f"{settings.namespace}.{REPLIES}")
    async with KafkaLog(KafkaSettings(bootstrap_servers=cluster.direct)) as log:
        await log.create_topics([*topics.values(), replies], replication_factor=1)
    answers = [responses.name, replies.name]
    requests = topics[Topic.REQUESTS].name
    async with asyncio.TaskGroup() as tasks:
        watching = [
            tasks.create_task(
                read_answers(cluster.direct, answers, history, store.resolve), name="chaos-reader"
            ),
            tasks.create_task(
                watch_commits(cluster.direct, settings.namespace, requests, history),
                name="chaos-commits",
            ),
        ]
        yield
        for task in watching:
            task.cancel()


def _asking(trial: Trial, target: Target) -> Callable[[int], Question]:
    """Return what makes the question of each number."""
    if trial.workload == "payloads" and target.store is not None:
        return asking(trial.seed, trial.requests, target.store)
    return lambda number: ask(number, random.Random(f"{trial.seed} {number}"))


async def _load_and_strike(trial: Trial, target: Target, plan: Plan, settings: Settings) -> str:
    """Both at once; then the history is told what the log holds. Returns what went wrong."""
    make = _asking(trial, target)
    questions = [make(number) for number in range(trial.requests)]
    takes_s = sum(max(each.takes_s for each in round_) for round_ in plan)
    topic = settings.topic(Topic.REQUESTS)
    sender = Sender(target.cluster.direct, topic, f"{settings.namespace}.{REPLIES}")
    sending = sender.send(questions, trial.requests / takes_s, random.Random(trial.seed))
    raw = target.raw

    async def held_now() -> list[Sent]:
        acknowledged = sender.acknowledged | raw.acknowledged
        asked = [*questions, *raw.questions]
        deleted = target.history.sent
        return await read_back(target.cluster.direct, topic, asked, acknowledged, deleted)

    target = replace(target, held_now=held_now)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sending, name="chaos-sender")
        striking = tasks.create_task(strike(target, plan), name="chaos-strikes")

    held = await held_now()
    if lost := unheld(questions, held):  # with a producer that was given up
        await sender.send(lost, trial.requests / takes_s, random.Random(trial.seed))
        held = await held_now()
    target.history.sent[:] = held
    return striking.result()


async def _come_to_rest(history: History, trial: Trial) -> str:
    """Wait until each request has its answer and the commits say so; return the reason if they
    never do.
    """
    sent = {request.identity for request in history.sent}
    readable = {request.identity for request in history.sent if request.statuses}

    def unanswered() -> set[Identity]:
        return readable - {answer.identity for answer in history.answered} - unread(history)

    def uncommitted() -> set[Identity]:
        last = {commit.partition: commit for commit in history.committed}
        return {
            each
            for each in sent
            if each.partition not in last or not last[each.partition].covers(each.offset)
        }

    has_payloads = trial.workload == "payloads"
    deadline_s = payloads.ANSWERED_DEADLINE_S if has_payloads else ANSWERED_DEADLINE_S
    if any(fault.kind is FaultKind.THROTTLED for fault in history.faults):
        deadline_s = max(deadline_s, THROTTLED_DEADLINE_S)
    stuck = await _until_none(unanswered, deadline_s)
    stuck = stuck or await _until_none(uncommitted, COMMITTED_DEADLINE_S)
    await asyncio.sleep(LATECOMERS_S)
    return stuck


async def _until_none(wanting: Callable[[], set[Identity]], deadline_s: float) -> str:
    try:
        await eventually(lambda: not wanting(), deadline_s=deadline_s, recheck_s=0.1)
    except AssertionError:
        left = sorted(wanting())
        if left:
            return f"{len(left)} {wanting.__name__} after {deadline_s:.0f} s, first {left[0]}"
    return ""
