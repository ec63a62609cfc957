"""Faults made in a running system. Each nemesis strikes once, and leaves everything whole again.

Only a clock that was set back stays so, as it does where somebody puts a wrong one right.

What they choose, they choose with the seed's generator, so that a seed always draws the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aiokafka.errors import KafkaError

from headrace.topics import Stage
from tests.chaos.clients import RawSender, delete_records
from tests.chaos.cluster import Cluster
from tests.chaos.deployment import FORMS, Deployment
from tests.chaos.history import Deleted, Fault, FaultKind, History, Sent
from tests.chaos.members import AFTERMATH_MS, SESSION_TIMEOUT_S, Member, now_ms
from tests.chaos.store import ChaosStore
from tests.chaos.workload import (
    DECOMPRESSED_BYTES,
    INLINE_BYTES,
    PARTITIONS,
    Question,
    ask,
    ask_slow,
    ask_slow_and_large,
)
from tests.support.quotas import limit_producers
from tests.support.raw_records import CODECS, NONE, RawRecord

LONGER_THAN_SESSION_S = SESSION_TIMEOUT_S + 1.5
QUOTA_DEADLINE_S = 60.0
BACKLOG = 2400
BATCHES = 4
ANY_CODEC = (NONE, *CODECS.values())
NOT_UTF8 = (b"caf\xe9", b"\xff\xfe", b"x-model\xc3", b"\xed\xa0\x80", b"\x80" * 300)
"""Names of headers: Latin-1, no text at all, cut short, a lone surrogate, and a long one."""


@dataclass(frozen=True)
class Target:
    """The parts of a running system that a nemesis may use or disturb.

    Attributes:
        raw: writes requests, and what is none, as batches of any form.
        client_id: of all processes of the system, and of nobody else.
        shared: directory of the memory that its processes share.
        store: of claims; None if no request has one.
        held_now: returns the requests that the log holds or held; None before the load.
    """

    deployment: Deployment
    cluster: Cluster
    history: History
    rng: random.Random
    raw: RawSender
    client_id: str
    shared: Path
    store: ChaosStore | None = None
    held_now: Callable[[], Awaitable[list[Sent]]] | None = None

    def victim(self) -> Member:
        """One process."""
        return self.rng.choice(self.deployment.members)


async def kill(target: Target) -> None:
    """A kill -9 of one process, twice in quick succession at times."""
    victim = target.victim()
    await victim.kill()
    if target.rng.random() < 0.3:
        await asyncio.sleep(target.rng.uniform(0.5, 1.5))
        await victim.kill()
    await victim.wait_ready()


async def kill_all(target: Target) -> None:
    """A kill -9 of everything at once: a power failure."""
    await asyncio.gather(*[member.kill() for member in target.deployment.members])
    await asyncio.gather(*[member.wait_ready() for member in target.deployment.members])


async def zombie(target: Target) -> None:
    """A process is held for longer than its session while another takes over; then it goes on."""
    victim = target.victim()
    twin = await target.deployment.join(victim.stages)
    await asyncio.sleep(target.rng.uniform(0.0, 0.5))
    began_ms = now_ms()
    victim.freeze()
    try:
        await asyncio.sleep(LONGER_THAN_SESSION_S)
    finally:
        victim.thaw()
    target.history.add(Fault(began_ms, now_ms() + AFTERMATH_MS, FaultKind.FROZEN, victim.stages))
    await asyncio.sleep(target.rng.uniform(0.5, 1.5))
    await target.deployment.leave(target.rng.choice([victim, twin]))


async def hiccup(target: Target) -> None:
    """A process is held for less than its session: nobody else notices."""
    victim = target.victim()
    victim.freeze()
    try:
        await asyncio.sleep(target.rng.uniform(0.2, 1.5))
    finally:
        victim.thaw()


async def restart_broker(target: Target) -> None:
    """The broker is killed and started again; its files are there."""
    began_ms = now_ms()
    target.cluster.kafka.kill_node()
    await asyncio.sleep(target.rng.uniform(0.1, 1.0))
    await target.cluster.kafka.start_node()
    ended_ms = now_ms() + AFTERMATH_MS
    target.history.add(Fault(began_ms, ended_ms, FaultKind.BROKER_RESTARTED, ()))


async def cut_connections(target: Target) -> None:
    """All connections break, several times, at whatever moment it is."""
    began_ms = now_ms()
    for _ in range(target.rng.randint(1, 5)):
        await target.cluster.proxy.cut()
        await asyncio.sleep(target.rng.uniform(0.05, 0.5))
    ended_ms = now_ms() + AFTERMATH_MS
    target.history.add(Fault(began_ms, ended_ms, FaultKind.CONNECTIONS_CUT, ()))


async def swallow(target: Target) -> None:
    """The network swallows everything for a while; then it gives it back, or connections break."""
    target.cluster.proxy.pause()
    await _hold(target)


async def unheard(target: Target) -> None:
    """For a while the broker does what it is asked, and its answers come late, or never.

    The network is slow at first, so that every kind of request is likely to be the one under way.
    """
    target.cluster.proxy.delay_s = 0.4
    try:
        await asyncio.sleep(target.rng.uniform(0.5, 1.5))
        target.cluster.proxy.pause_answers()
    finally:
        target.cluster.proxy.delay_s = 0.0
    await _hold(target)


async def _hold(target: Target) -> None:
    began_ms = now_ms()
    try:
        await asyncio.sleep(target.rng.uniform(0.5, 5.0))
        if target.rng.random() < 0.7:
            await target.cluster.proxy.cut()
    finally:
        target.cluster.proxy.resume()
    ended_ms = now_ms() + AFTERMATH_MS
    target.history.add(Fault(began_ms, ended_ms, FaultKind.CONNECTIONS_CUT, ()))


async def slow_kill(target: Target) -> None:
    """The network is slow, by another measure for each connection, and a process is killed with
    much on its way: what it wrote last is gone, or what it wrote before that.
    """
    began_ms = now_ms()
    target.cluster.proxy.delay_s = target.rng.uniform(0.1, 0.8)
    try:
        await asyncio.sleep(target.rng.uniform(1.0, 2.5))
        await target.victim().kill()
    finally:
        target.cluster.proxy.delay_s = 0.0
    ended_ms = now_ms() + AFTERMATH_MS
    target.history.add(Fault(began_ms, ended_ms, FaultKind.CONNECTIONS_CUT, ()))


async def crowd(target: Target) -> None:
    """A second and a third instance come and go: rebalance upon rebalance, all in order."""
    victim = target.victim()
    guests = []
    for _ in range(2):
        guests.append(await target.deployment.join(victim.stages))
        await asyncio.sleep(target.rng.uniform(0.0, 0.5))
    target.rng.shuffle(guests)
    for guest in guests:
        await target.deployment.leave(guest)
        await asyncio.sleep(target.rng.uniform(0.0, 0.5))


async def redeploy(target: Target) -> None:
    """Every process is ended and started again, one after the other."""
    for member in list(target.deployment.members):
        await member.redeploy()
        await member.wait_ready()


async def change_form(target: Target) -> None:
    """All processes end, and others that share the stages in another way follow them."""
    began_ms = now_ms()
    others = [form for form in FORMS if form != target.deployment.form]
    await target.deployment.stop()
    await target.deployment.start(target.rng.choice(others))
    target.history.add(Fault(began_ms, now_ms(), FaultKind.REDEPLOYED, ()))


async def raw_names(target: Target) -> None:
    """Requests come whose headers have names that are not UTF-8, between others that are right."""
    rng = target.rng
    for _ in range(BATCHES):
        asked = []
        for _ in range(rng.randint(5, 40)):
            own = random.Random(rng.random())
            asked.append(partial(_ask_oddly if rng.random() < 0.5 else ask, rng=own))
        await target.raw.send(rng.randrange(PARTITIONS), asked, rng.choice(ANY_CODEC))
        await asyncio.sleep(rng.uniform(0.0, 0.5))


def _ask_oddly(number: int, rng: random.Random) -> Question:
    headers = ((rng.choice(NOT_UTF8), b"x"),)
    return ask(number, rng)._replace(statuses=("INVALID_REQUEST",), headers=headers)


async def bombs(target: Target) -> None:
    """Compressed batches come that are small, and large once they are decompressed."""
    rng = target.rng
    for _ in range(BATCHES):
        size_bytes = int(DECOMPRESSED_BYTES * rng.uniform(1.1, 8.0))
        records = rng.randint(1, 4)
        zeros = RawRecord(bytes(size_bytes // records))
        codec = rng.choice(list(CODECS.values()))
        await target.raw.send_records(rng.randrange(PARTITIONS), [zeros] * records, codec)
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def large_keys(target: Target) -> None:
    """Requests come whose keys are much larger than their values, for more than the budget."""
    rng = target.rng
    for _ in range(10 * BATCHES):
        asked = [
            partial(
                _ask_with_large_key,
                size=rng.randrange(100_000, 700_000),
                rng=random.Random(rng.random()),
            )
            for _ in range(rng.randint(1, 4))
        ]
        await target.raw.send(rng.randrange(PARTITIONS), asked, rng.choice(ANY_CODEC))


def _ask_with_large_key(number: int, size: int, rng: random.Random) -> Question:
    return ask(number, rng)._replace(key=f"large-{number}-".ljust(size, "x"))


async def quota(target: Target) -> None:
    """The broker slows the system's producers down for a while, by a quota of bytes a second."""
    began_ms = now_ms()
    bytes_per_s = round(10 ** target.rng.uniform(4.5, 5.5))
    await _limit(target, bytes_per_s)
    try:
        await asyncio.sleep(target.rng.uniform(3.0, 8.0))
    finally:
        await _limit(target, None)
    target.history.add(Fault(began_ms, now_ms(), FaultKind.THROTTLED, ()))


async def _limit(target: Target, bytes_per_s: float | None) -> None:
    """Change the quota, as soon as the broker, which another nemesis may have killed, is there."""
    async with asyncio.timeout(QUOTA_DEADLINE_S):
        while True:
            try:
                return await limit_producers(target.cluster.direct, target.client_id, bytes_per_s)
            except KafkaError:
                await asyncio.sleep(0.25)


async def handover(target: Target) -> None:
    """In the middle of a backlog a second instance joins, and one of the two leaves: in order."""
    rng = target.rng
    for partition in range(PARTITIONS):
        asked = [partial(ask_slow, partition=partition)] * (BACKLOG // PARTITIONS)
        await target.raw.send(partition, asked)
    victim = target.victim()
    twin = await target.deployment.join(victim.stages)
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    await target.deployment.leave(rng.choice([victim, twin]))


async def retention(target: Target) -> None:
    """Requests of one partition are deleted in the middle of a backlog, up to one that is not yet
    answered. At times what runs models is held meanwhile, so that it needs their values later; and
    at times a process is killed at once, so that what it had read is read again.
    """
    rng = target.rng
    partition = rng.randrange(PARTITIONS)
    ask_one = [partial(each, partition=partition) for each in (ask_slow, ask_slow_and_large)]
    runners = [each for each in target.deployment.members if Stage.EXECUTOR in each.stages]
    with _held(target, runners if rng.random() < 0.7 else []):
        await target.raw.send(partition, rng.choices(ask_one, (1, 3), k=BACKLOG // PARTITIONS))
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        await _delete_some(target, partition)
    if rng.random() < 0.5:
        victim = target.victim()
        await victim.kill()
        await victim.wait_ready()


@contextmanager
def _held(target: Target, members: Sequence[Member]) -> Iterator[None]:
    """Hold processes, on a busy machine for longer than their sessions."""
    began_ms = now_ms()
    for member in members:
        member.freeze()
    try:
        yield
    finally:
        for member in members:
            member.thaw()
            ended_ms = now_ms() + AFTERMATH_MS
            target.history.add(Fault(began_ms, ended_ms, FaultKind.FROZEN, member.stages))


async def _delete_some(target: Target, partition: int) -> None:
    """Delete requests up to one without an answer, after they are written down."""
    assert target.held_now is not None
    history = target.history
    held = [each for each in await target.held_now() if each.partition == partition]
    answered = {each.identity for each in history.answered}
    waiting = sorted(each.offset for each in held if each.identity not in answered)
    end = target.rng.choice(waiting or [0]) + 1
    known = {each.identity for each in history.sent}
    gone = [each for each in held if each.offset < end and each.identity not in known]
    history.sent += gone
    from_bytes = None if target.deployment.form == "fused" else INLINE_BYTES
    history.add(Deleted(now_ms(), partition, end, from_bytes))
    await delete_records(target.cluster.direct, target.raw.topic, partition, end)


async def clock_back(target: Target) -> None:
    """The wall clock of one process, or of all, is set back by minutes, and stays there."""
    by_s = target.rng.uniform(120.0, 3600.0)
    alone = target.rng.random() < 0.5
    for member in [target.victim()] if alone else target.deployment.members:
        member.set_clock_back(by_s)
    await asyncio.sleep(target.rng.uniform(0.5, 1.5))


async def shared_memory_gone(target: Target) -> None:
    """All files of shared memory are removed, several times, as by somebody who tidies up."""
    for _ in range(target.rng.randint(1, 5)):
        for path in target.shared.iterdir():
            path.unlink(missing_ok=True)
        await asyncio.sleep(target.rng.uniform(0.05, 0.5))


async def kill_children(target: Target) -> None:
    """Children with transforms are killed, one after the other, as the kernel's OOM killer does."""
    for _ in range(target.rng.randint(1, 4)):
        began_ms = now_ms()
        if child := _child(target):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            target.history.add(Fault(began_ms, now_ms(), FaultKind.CHILD_KILLED, ()))
        await asyncio.sleep(target.rng.uniform(0.2, 1.0))


async def freeze_child(target: Target) -> None:
    """A child with transforms is held for a while, shorter than a transform may take."""
    began_ms = now_ms()
    child = _child(target)
    if child is None:
        return
    with suppress(ProcessLookupError):  # another nemesis may have killed it, or its parent
        os.kill(child, signal.SIGSTOP)
        try:
            await asyncio.sleep(target.rng.uniform(0.5, 2.0))
        finally:
            os.kill(child, signal.SIGCONT)
        target.history.add(Fault(began_ms, now_ms(), FaultKind.CHILD_FROZEN, ()))


def _child(target: Target) -> int | None:
    """Return a child that transforms payloads; None if there is none now."""
    members = target.deployment.members
    children = [child for member in members for child in member.transform_children()]
    return target.rng.choice(children) if children else None


async def store_unavailable(target: Target) -> None:
    """The store refuses everything for a while."""
    assert target.store is not None
    began_ms = now_ms()
    target.store.is_unavailable = True
    try:
        await asyncio.sleep(target.rng.uniform(1.0, 5.0))
    finally:
        target.store.is_unavailable = False
    target.history.add(Fault(began_ms, now_ms(), FaultKind.STORE_UNAVAILABLE, ()))


async def store_slow(target: Target) -> None:
    """The store answers late for a while, and then it is killed: all its connections break."""
    assert target.store is not None
    began_ms = now_ms()
    target.store.pause_s = target.rng.uniform(0.5, 3.0)
    try:
        await asyncio.sleep(target.rng.uniform(1.0, 4.0))
        target.store.abort_connections()
    finally:
        target.store.pause_s = 0.0
    target.history.add(Fault(began_ms, now_ms(), FaultKind.STORE_UNAVAILABLE, ()))


class Nemesis(NamedTuple):
    """Something to strike with.

    Attributes:
        takes_s: about how long, which paces the load.
        alone: it replaces processes, so that no other may strike at the same time.
        weight: how often it is drawn, compared with others.
    """

    name: str
    strike: Callable[[Target], Awaitable[None]]
    takes_s: float
    alone: bool = False
    weight: int = 1


NEMESES = (
    Nemesis("kill", kill, 3.0),
    Nemesis("kill-all", kill_all, 3.0),
    Nemesis("zombie", zombie, 10.0, alone=True),
    Nemesis("hiccup", hiccup, 1.5),
    Nemesis("broker", restart_broker, 6.0),
    Nemesis("cut", cut_connections, 1.5),
    Nemesis("swallow", swallow, 2.0),
    Nemesis("unheard", unheard, 3.0),
    Nemesis("slow-kill", slow_kill, 3.0),
    Nemesis("crowd", crowd, 6.0, alone=True),
    Nemesis("redeploy", redeploy, 4.0),
    Nemesis("change-form", change_form, 5.0, alone=True),
    Nemesis("raw-names", raw_names, 2.0, weight=2),
    Nemesis("bombs", bombs, 2.0, weight=2),
    Nemesis("large-keys", large_keys, 4.0, weight=2),
    Nemesis("quota", quota, 6.0, weight=2),
    Nemesis("handover", handover, 6.0, alone=True, weight=2),
    Nemesis("clock-back", clock_back, 1.5, weight=2),
    Nemesis("shared-memory", shared_memory_gone, 1.5, weight=2),
)

PAYLOAD_NEMESES = (
    *(each for each in NEMESES if each.strike not in (raw_names, bombs, large_keys, quota)),
    Nemesis("kill-children", kill_children, 2.5, weight=4),
    Nemesis("freeze-child", freeze_child, 2.0, weight=2),
    Nemesis("store-unavailable", store_unavailable, 3.0, weight=3),
    Nemesis("store-slow", store_slow, 3.0, weight=3),
)
"""Those of trials with transforms in children and claims."""

RETENTION = Nemesis("retention", retention, 4.0, alone=True)
"""Of trials that delete requests which are not answered yet."""

Plan = list[tuple[Nemesis, ...]]
"""Rounds, one after the other; the nemeses of one round strike together."""


def draw_plan(rng: random.Random, budget_s: float, nemeses: Sequence[Nemesis] = NEMESES) -> Plan:
    """Rounds that together take about so long; at times two that go together strike at once."""
    plan: Plan = []
    while budget_s > 0:
        first = _draw(rng, nemeses)
        together = [each for each in nemeses if not each.alone and each is not first]
        pair = not first.alone and rng.random() < 0.4
        plan.append((first, _draw(rng, together)) if pair else (first,))
        budget_s -= max(each.takes_s for each in plan[-1])
    return plan


def _draw(rng: random.Random, nemeses: Sequence[Nemesis]) -> Nemesis:
    return rng.choices(nemeses, [each.weight for each in nemeses])[0]


async def strike(target: Target, plan: Plan) -> str:
    """Carry a plan out; what the system did not do that it should have, or nothing."""
    for round_ in plan:
        await asyncio.sleep(target.rng.uniform(0.1, 0.8))
        # Each gets a generator of its own: which of two goes first is not the seed's to say.
        own = [replace(target, rng=random.Random(target.rng.random())) for _ in round_]
        outcomes = await asyncio.gather(
            *[nemesis.strike(each) for nemesis, each in zip(round_, own, strict=True)],
            return_exceptions=True,
        )
        for nemesis, outcome in zip(round_, outcomes, strict=True):
            if isinstance(outcome, AssertionError | TimeoutError):
                return f"after {nemesis.name}: {outcome}"
            if outcome is not None:
                raise outcome
    return ""
