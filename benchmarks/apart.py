"""Costs of a request when the stages run in separate processes, by request size: CPU time, and
bytes written to the broker.

    python -m benchmarks.apart      digits, 4 KB and 150 KB, on a local broker

Warm processes get a backlog, and their CPU time counts until all of it is answered. So every
request has passed every stage, even if one stage was far ahead of the others. A period of time, as
in the tables of docs/performance.md, also counts work that the first stages do in advance.

The floor of a size is what aiokafka alone takes to pass on the records between four processes.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from statistics import median
from typing import Any, NamedTuple

import click
import msgspec
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.campaign import SCRATCH
from benchmarks.cluster import PARTITIONS, Cluster, Counter
from benchmarks.contestants import Contestant, Endpoints, headrace_as
from benchmarks.machine import describe_machine
from benchmarks.payloads import PAYLOADS
from benchmarks.processes import ProgramFailed, Running
from benchmarks.results import RESULTS, record
from benchmarks.saturation import LOOK_EVERY_S, prepare
from benchmarks.subjects import SUBJECTS, BenchmarkModel
from headrace.topics import STAGES

DIGITS_REQUESTS = 100_000
WARM = 0.05
"""Share of the backlog that is answered before counting begins."""
ROUNDS = 5
DEADLINE_S = 240.0

APART = RESULTS / "apart.json"

FORMS: dict[str, tuple[str, ...]] = {
    "one process": (",".join(STAGES),),
    "three processes": ("ingest", "batcher,executor", "responder"),
    "four processes": tuple(STAGES),
}


class Hop(NamedTuple):
    """Records between two processes, as counted in a backlog: their size, the requests of each, and
    how many of them are in a produce request.
    """

    record_bytes: int
    requests: int
    records: int


HOPS: dict[str, tuple[Hop, ...]] = {
    "digits": (Hop(80_000, 238, 5), Hop(10_900, 32, 12), Hop(10_300, 146, 2)),
    "4 KB": (Hop(3_100, 213, 2), Hop(520, 32, 11), Hop(8_000, 117, 2)),
    "150 KB": (Hop(255, 6, 2), Hop(425, 8, 5), Hop(600, 11, 2)),
}
"""Between the four processes."""


class Drained(NamedTuple):
    """Costs of one answered backlog: CPU microseconds and written bytes per request, and requests
    per second.
    """

    cpu_us: dict[str, float]
    broker_us: float
    written_bytes: float
    per_s: float


class Form(msgspec.Struct, frozen=True):
    """Medians over the rounds for one division of the stages.

    Attributes:
        cpu_us: of all processes, for each answer.
        cpu_us_of: of each process, by its stages.
        broker_us: of the broker, for each answer.
        written_bytes: to all topics, each record once, with the request and its answer.
    """

    cpu_us: float
    cpu_us_of: dict[str, float]
    broker_us: float
    written_bytes: float
    per_s: float
    rounds: int


class OfSize(msgspec.Struct, frozen=True):
    """Costs of requests of one size, by the division of the stages.

    Attributes:
        value_bytes: of a request record's value.
        requests: of the backlog of each round.
        floor_us: CPU of the three hops, if nothing but aiokafka did them.
    """

    name: str
    value_bytes: int
    requests: int
    forms: dict[str, Form]
    floor_us: float = 0.0


class Apart(msgspec.Struct, frozen=True):
    """The recorded results."""

    machine: dict[str, Any]
    sizes: list[OfSize]


async def drain(
    cluster: Cluster, form: Contestant, subject: BenchmarkModel, requests: int
) -> Drained:
    """Serve a backlog until it is answered. Raises `ProgramFailed`."""
    warm = int(WARM * requests)
    run = f"apart.{secrets.token_hex(4)}"
    place = Endpoints(cluster.bootstrap_servers, f"{run}.requests", run)
    await cluster.create_plain(place.requests)
    topics = await prepare(cluster, form, subject, place)
    try:
        async with cluster.counting(place.responses) as answers:
            with Running(form.programs(subject, place)) as running:
                await cluster.fill(place.requests, subject.values, warm)
                await answered(running, answers, warm)
                running.signal(signal.SIGSTOP)
                warm_bytes = cluster.written_bytes([*topics, place.requests])
                await cluster.fill(place.requests, subject.values, requests)
                before, broker_s, began_s = running.cpu_each_s(), cluster.cpu_s(), time.monotonic()
                running.signal(signal.SIGCONT)
                await answered(running, answers, warm + requests)
                took_s = time.monotonic() - began_s
                spent = [
                    (now_s - then_s) / requests * 1e6
                    for now_s, then_s in zip(running.cpu_each_s(), before, strict=True)
                ]
                broker_us = (cluster.cpu_s() - broker_s) / requests * 1e6
                all_bytes = cluster.written_bytes([*topics, place.requests])
                written_bytes = (all_bytes - warm_bytes) / requests
    finally:
        await cluster.delete([*topics, place.requests])
    cpu_us = dict(zip(FORMS[form.name], spent, strict=True))
    return Drained(cpu_us, broker_us, written_bytes, requests / took_s)


async def answered(running: Running, answers: Counter, count: int) -> None:
    """Wait until there are that many answers. Raises `ProgramFailed`."""
    give_up_s = time.monotonic() + DEADLINE_S
    while (now := await answers.now()) < count:
        running.check()
        if time.monotonic() > give_up_s:
            raise ProgramFailed(f"{now} of {count} answered: {running.last_words()}")
        await asyncio.sleep(LOOK_EVERY_S)


async def copy(cluster: Cluster, hop: Hop, requests: int) -> float:
    """Read records and write them again; return the CPU microseconds for each request."""
    source, target = (f"hop.{secrets.token_hex(4)}" for _ in range(2))
    await cluster.create_plain(source)
    await cluster.create_plain(target)
    left = requests // hop.requests
    await cluster.fill(source, [bytes(hop.record_bytes)], left)
    servers = cluster.bootstrap_servers
    # Headrace has checksums of its own where it reads.
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, auto_offset_reset="earliest", check_crcs=False
    )
    producer = AIOKafkaProducer(
        bootstrap_servers=servers, acks="all", enable_idempotence=True, max_batch_size=1 << 20
    )
    async with consumer, producer:
        consumer.assign([TopicPartition(source, number) for number in range(PARTITIONS)])
        began_s = time.process_time()
        while left > 0:
            polled = await consumer.getmany(timeout_ms=100, max_records=hop.records)
            for partition, records in polled.items():
                left -= len(records)
                batch = producer.create_batch()
                for one in records:
                    batch.append(key=None, value=one.value, timestamp=None, headers=[])
                await (await producer.send_batch(batch, target, partition=partition.partition))
        spent_s = time.process_time() - began_s
    await cluster.delete([source, target])
    return spent_s / requests * 1e6


def _summary(rounds: list[Drained]) -> Form:
    """Return the medians."""
    return Form(
        cpu_us=median(sum(each.cpu_us.values()) for each in rounds),
        cpu_us_of={
            stages: median(each.cpu_us[stages] for each in rounds) for stages in rounds[0].cpu_us
        },
        broker_us=median(each.broker_us for each in rounds),
        written_bytes=median(each.written_bytes for each in rounds),
        per_s=median(each.per_s for each in rounds),
        rounds=len(rounds),
    )


async def _of_size(cluster: Cluster, name: str, subject: BenchmarkModel, requests: int) -> OfSize:
    """Measure all divisions alternately."""
    rounds: dict[str, list[Drained]] = {}
    floors: list[float] = []
    for _ in range(ROUNDS):
        floors.append(sum([await copy(cluster, hop, requests) for hop in HOPS[name]]))
        click.echo(f"{name}, floor of four processes: {floors[-1]:.1f} us", err=True)
        for form, stages in FORMS.items():
            found = await drain(cluster, headrace_as(form, *stages), subject, requests)
            rounds.setdefault(form, []).append(found)
            each = " + ".join(f"{us:.1f}" for us in found.cpu_us.values())
            click.echo(
                f"{name}, {form}: {sum(found.cpu_us.values()):.1f} us ({each}), broker "
                f"{found.broker_us:.1f} us, {found.written_bytes:,.0f} bytes, {found.per_s:,.0f}/s",
                err=True,
            )
    forms = {form: _summary(each) for form, each in rounds.items()}
    return OfSize(name, len(subject.values[0]), requests, forms, median(floors))


async def measure() -> Apart:
    """Measure all sizes, one after the other, on one broker."""
    digits = SUBJECTS["digits"](SCRATCH)
    async with Cluster() as cluster:
        sizes = [await _of_size(cluster, "digits", digits, DIGITS_REQUESTS)]
        for payload in PAYLOADS:
            subject = payload.subject(SCRATCH)
            sizes.append(await _of_size(cluster, payload.name, subject, payload.requests))
    return Apart(describe_machine(), sizes)


if __name__ == "__main__":
    record(APART, uvloop.run(measure()))
