"""How a process ends under load, on a real Kafka, and what its successor finds."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from headrace.cli.outcome import Exit
from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.processes import Process, create_topics, environment
from tests.support.traffic import VALUE

MODELS = Path(__file__).parents[2] / "headrace" / "tools" / "demo" / "models"
REQUESTS = 30_000
PARTITIONS = 4
FUSED = ("ingest,batcher,executor,responder",)
FOUR = ("ingest", "batcher", "executor", "responder")


async def _produce(bootstrap_servers: str, topic: str) -> None:
    """Send requests, numbered by their correlation ids."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap_servers, linger_ms=5, enable_idempotence=True
    ) as producer:
        sent = [
            await producer.send(
                topic,
                VALUE,
                partition=number % PARTITIONS,
                headers=[("kafka_correlationId", str(number).encode())],
            )
            for number in range(REQUESTS)
        ]
        await asyncio.gather(*sent)


class Answers:
    """Counts answers by correlation id as they come."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self.counts: collections.Counter[str] = collections.Counter()

    async def read_until(self, distinct: int) -> None:
        """Read until so many requests have an answer."""
        async with asyncio.timeout(60):
            while len(self.counts) < distinct:
                await self.read(0.2)

    async def read(self, timeout_s: float) -> None:
        """Return the records that come within the time."""
        polled = await self._consumer.getmany(timeout_ms=int(timeout_s * 1000))
        for records in polled.values():
            for record in records:
                headers = dict(record.headers)
                assert headers["x-status"] == b"ok"
                self.counts[headers["kafka_correlationId"].decode()] += 1


@asynccontextmanager
async def _answers(bootstrap_servers: str, topic: str) -> AsyncIterator[Answers]:
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        yield Answers(consumer)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("stages", "number"),
    [(FUSED, signal.SIGINT), (FOUR, signal.SIGTERM)],
    ids=["fused-SIGINT", "four-processes-SIGTERM"],
)
async def test_stop_signal_under_load_neither_loses_nor_repeats_answers(
    kafka: LocalKafka, unique_name: str, stages: tuple[str, ...], number: signal.Signals
) -> None:
    """All processes drain and exit with 0; those started next answer the rest, each once."""
    # However busy the machine is, the drain is complete: an incomplete one may repeat answers.
    settings = environment(
        kafka.bootstrap_servers, unique_name, MODELS, LIMITS__DRAIN_TIMEOUT_S="60"
    )
    await create_topics(settings)
    await _produce(kafka.bootstrap_servers, f"{unique_name}.requests")
    async with _answers(kafka.bootstrap_servers, f"{unique_name}.responses") as answers:
        first = [Process(each, settings) for each in stages]
        async with AsyncExitStack() as stack:
            for process in reversed(first):
                await stack.enter_async_context(process)
            await answers.read_until(REQUESTS // 20)
            for process in first:
                process.send(number)
            codes = [await process.wait(90) for process in first]
            printed = "\n".join(process.output[-4000:] for process in first)
        await answers.read(1.0)
        answered_before = len(answers.counts)

        async with AsyncExitStack() as stack:
            second = [Process(each, settings) for each in stages]
            await asyncio.gather(*[stack.enter_async_context(process) for process in second])
            await answers.read_until(REQUESTS)
        await answers.read(1.0)

    assert codes == [0] * len(stages)
    assert answered_before < REQUESTS, "the signal came too late to show anything"
    assert len(answers.counts) == REQUESTS
    repeated = {name for name, count in answers.counts.items() if count > 1}
    assert repeated == set(), printed


@pytest.mark.timeout(120)
async def test_second_signal_ends_at_once_and_loses_no_request(
    kafka: LocalKafka, unique_name: str
) -> None:
    """After two signals the process is gone without draining; its successor answers the rest."""
    settings = environment(
        kafka.bootstrap_servers, unique_name, MODELS, LIMITS__DRAIN_TIMEOUT_S="60"
    )
    await create_topics(settings)
    await _produce(kafka.bootstrap_servers, f"{unique_name}.requests")
    async with _answers(kafka.bootstrap_servers, f"{unique_name}.responses") as answers:
        async with Process(FUSED[0], settings) as process:
            await answers.read_until(REQUESTS // 20)
            process.send(signal.SIGTERM)
            process.send(signal.SIGTERM)
            await process.wait()
        async with Process(FUSED[0], settings):
            await answers.read_until(REQUESTS)

    assert len(answers.counts) == REQUESTS


@pytest.mark.timeout(120)
async def test_killed_replica_is_replaced_and_all_drain(
    kafka: LocalKafka, unique_name: str
) -> None:
    """Nothing is lost when one of two dies under load; SIGTERM to their parent drains both."""
    settings = environment(kafka.bootstrap_servers, unique_name, MODELS)
    await create_topics(settings)
    async with (
        _answers(kafka.bootstrap_servers, f"{unique_name}.responses") as answers,
        Process(FUSED[0], settings, ("--replicas", "2")) as replicas,
    ):

        def logged(event: str, field: str) -> list[object]:
            return [line[field] for line in replicas.events if line["event"] == event]

        await eventually(lambda: len(logged("process.ready", "pid")) == 2, recheck_s=0.05)
        producing = asyncio.create_task(
            _produce(kafka.bootstrap_servers, f"{unique_name}.requests")
        )
        await answers.read_until(REQUESTS // 20)
        os.kill(int(str(logged("worker.started", "pid")[0])), signal.SIGKILL)
        answered_before = len(answers.counts)
        await producing
        await answers.read_until(REQUESTS)
        await eventually(lambda: len(logged("process.ready", "pid")) == 3, recheck_s=0.05)
        code = await replicas.terminate()
        ports, exits = logged("process.starting", "http_port"), logged("worker.ended", "exit_code")

    assert answered_before < REQUESTS, "the kill came too late to show anything"
    assert len(answers.counts) == REQUESTS
    assert len(set(ports)) == len(ports)
    assert (code, exits) == (0, [-signal.SIGKILL, 0, 0])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes outlive a killed parent")
@pytest.mark.timeout(120)
async def test_killed_parent_of_replicas_lets_them_drain(
    kafka: LocalKafka, unique_name: str
) -> None:
    """A supervisor starts it again, and would have two sets of replicas otherwise."""
    settings = environment(kafka.bootstrap_servers, unique_name, MODELS)
    await create_topics(settings)
    async with Process(FUSED[0], settings, ("--replicas", "2")) as parent:

        def count(event: str) -> int:
            return sum(line["event"] == event for line in parent.events)

        await eventually(lambda: count("process.ready") == 2, recheck_s=0.05)
        await parent.kill()
        await eventually(lambda: count("process.stopped") == 2, recheck_s=0.05)


@pytest.mark.timeout(120)
async def test_second_signal_while_brokers_are_away_ends_within_two_seconds(
    kafka_installed: None, unique_name: str
) -> None:
    """Nothing that closes waits for a broker that does not answer; the exit code says that the
    process has not drained.
    """
    async with LocalKafka() as cluster:
        settings = environment(
            cluster.bootstrap_servers, unique_name, MODELS, LIMITS__DRAIN_TIMEOUT_S="60"
        )
        await create_topics(settings)
        async with Process(FUSED[0], settings) as process:
            cluster.pause_node()
            process.send(signal.SIGTERM)
            await eventually(lambda: bool(process.logged("process.draining", "event")))
            began_s = time.monotonic()
            process.send(signal.SIGTERM)
            code = await process.wait()
            ended_after_s = time.monotonic() - began_s
        cluster.resume_node()

    assert ended_after_s < 2.0
    assert code == Exit.NOT_DRAINED
