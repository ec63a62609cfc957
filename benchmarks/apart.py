"""What a request costs where the stages are in processes of their own: digits on a local broker.

    python -m benchmarks.apart

Processes that are warm get a backlog, and their processor time counts until all of it is answered.
So every request passed every stage, however far one of them was ahead of the others meanwhile; a
window of time, as the tables of docs/performance.md have it, counts what the first stages do ahead.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from statistics import median
from typing import NamedTuple

import click
import msgspec
import uvloop

from benchmarks.__main__ import RESULTS
from benchmarks.campaign import SCRATCH
from benchmarks.cluster import Cluster, Counter
from benchmarks.contestants import Contestant, Place, headrace_as
from benchmarks.machine import describe_machine
from benchmarks.processes import ProgramFailed, Running
from benchmarks.saturation import LOOK_EVERY_S, prepare
from benchmarks.subjects import SUBJECTS, Subject
from headrace.topics import STAGES

REQUESTS = 100_000
WARM_REQUESTS = 2000
ROUNDS = 5
DEADLINE_S = 240.0

FORMS: dict[str, tuple[str, ...]] = {
    "one process": (",".join(STAGES),),
    "three processes": ("ingest", "batcher,executor", "responder"),
    "four processes": tuple(STAGES),
}


class Drained(NamedTuple):
    """One backlog, answered: processor microseconds for each request, and requests a second."""

    cpu_us: dict[str, float]
    broker_us: float
    per_s: float


async def drain(cluster: Cluster, form: Contestant, subject: Subject) -> Drained:
    """Have a backlog answered. Raises `ProgramFailed`."""
    run = f"apart.{secrets.token_hex(4)}"
    place = Place(cluster.bootstrap_servers, f"{run}.requests", run)
    await cluster.create_plain(place.requests)
    topics = await prepare(cluster, form, subject, place)
    try:
        async with cluster.counting(place.responses) as answers:
            with Running(form.programs(subject, place)) as running:
                await cluster.fill(place.requests, subject.values, WARM_REQUESTS)
                await _answered(running, answers, WARM_REQUESTS)
                running.signal(signal.SIGSTOP)
                await cluster.fill(place.requests, subject.values, REQUESTS)
                before, broker_s, began_s = running.cpu_each_s(), cluster.cpu_s(), time.monotonic()
                running.signal(signal.SIGCONT)
                await _answered(running, answers, WARM_REQUESTS + REQUESTS)
                took_s = time.monotonic() - began_s
                spent = [
                    (now_s - then_s) / REQUESTS * 1e6
                    for now_s, then_s in zip(running.cpu_each_s(), before, strict=True)
                ]
                broker_us = (cluster.cpu_s() - broker_s) / REQUESTS * 1e6
    finally:
        await cluster.delete([*topics, place.requests])
    return Drained(dict(zip(FORMS[form.name], spent, strict=True)), broker_us, REQUESTS / took_s)


async def _answered(running: Running, answers: Counter, count: int) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while (now := await answers.now()) < count:
        running.check()
        if time.monotonic() > give_up_s:
            raise ProgramFailed(f"{now} of {count} answered: {running.last_words()}")
        await asyncio.sleep(LOOK_EVERY_S)


def _summary(rounds: list[Drained]) -> dict[str, object]:
    """Medians."""
    stages = {stage: median(each.cpu_us[stage] for each in rounds) for stage in rounds[0].cpu_us}
    return {
        "cpu_us": median(sum(each.cpu_us.values()) for each in rounds),
        "cpu_us_of": stages,
        "broker_us": median(each.broker_us for each in rounds),
        "per_s": median(each.per_s for each in rounds),
        "rounds": len(rounds),
    }


async def measure() -> dict[str, object]:
    """All forms in turns, on one broker."""
    subject = SUBJECTS["digits"](SCRATCH)
    rounds: dict[str, list[Drained]] = {}
    async with Cluster() as cluster:
        for _ in range(ROUNDS):
            for name, stages in FORMS.items():
                found = await drain(cluster, headrace_as(name, *stages), subject)
                rounds.setdefault(name, []).append(found)
                each = " + ".join(f"{us:.1f}" for us in found.cpu_us.values())
                click.echo(
                    f"{name}: {sum(found.cpu_us.values()):.1f} us ({each}), broker "
                    f"{found.broker_us:.1f} us, {found.per_s:,.0f}/s",
                    err=True,
                )
    forms = {name: _summary(each) for name, each in rounds.items()}
    return {"machine": describe_machine(), "requests": REQUESTS, "forms": forms}


if __name__ == "__main__":
    results = uvloop.run(measure())
    text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
    (RESULTS / "apart.json").write_text(text + "\n", encoding="utf-8")
