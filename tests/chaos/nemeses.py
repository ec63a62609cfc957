"""What is done to a running system. Each nemesis strikes once, and leaves everything whole again.

What they choose, they choose with the seed's generator, so that a seed always draws the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.chaos.cluster import Cluster
from tests.chaos.deployment import FORMS, Deployment
from tests.chaos.history import Fault, FaultKind, History
from tests.chaos.members import Member, now_ms

SESSION_TIMEOUT_S = 4.0
LONGER_THAN_SESSION_S = SESSION_TIMEOUT_S + 1.5
AFTERMATH_MS = int(SESSION_TIMEOUT_S * 1000)
"""For so long after a frozen process goes on, or a broker is back, somebody may not know yet that
its partitions are another's: a member learns of it with its next heartbeat, or is expelled.
"""


@dataclass(frozen=True)
class Target:
    """What a nemesis may lay hands on."""

    deployment: Deployment
    cluster: Cluster
    history: History
    rng: random.Random

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


class Nemesis(NamedTuple):
    """Something to strike with.

    Attributes:
        takes_s: about how long, which paces the load.
        alone: it replaces processes, so that no other may strike at the same time.
    """

    name: str
    strike: Callable[[Target], Awaitable[None]]
    takes_s: float
    alone: bool = False


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
)

Plan = list[tuple[Nemesis, ...]]
"""Rounds, one after the other; the nemeses of one round strike together."""


def draw_plan(rng: random.Random, budget_s: float) -> Plan:
    """Rounds that together take about so long; at times two that go together strike at once."""
    plan: Plan = []
    while budget_s > 0:
        first = rng.choice(NEMESES)
        together = [each for each in NEMESES if not each.alone and each is not first]
        pair = not first.alone and rng.random() < 0.4
        plan.append((first, rng.choice(together)) if pair else (first,))
        budget_s -= max(each.takes_s for each in plan[-1])
    return plan


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
