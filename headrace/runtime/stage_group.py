"""Stage group: adjacent stages connected by memory channels, with topics at both ends.

Its stages determine the topic and the consumer group that it reads, and what it commits:

- All four stages read `requests` in the group `{namespace}`, and commit the base and the answered
  set.
- Ingest without the responder reads `requests` in the group `{namespace}.ingest` and commits
  nothing: it starts at the answered offsets that the group `{namespace}` has committed.
- A group that starts with the batcher or the executor reads `items` or `batches` in the group
  `{namespace}.{stage}`, and commits an offset once its output is acknowledged.
- The responder alone reads `results` in the group `{namespace}`, and commits its offset there
  together with the base and the answered set of `requests`.

A responder shares memory with the other stages only if all four are in one process. Otherwise
requests that end early reach it from several processes; reading `results`, which has the
partitions of the source, gives each source partition one owner.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol

from headrace.config import Settings
from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.source_offsets import SourceOffsets
from headrace.errors import ConfigurationError
from headrace.log.port import Log, Producer, TopicPartition
from headrace.models.registry import Models
from headrace.models.version import State
from headrace.protocol.messages import Batch, Envelope, Failure, Request
from headrace.services.batcher.service import BatcherService
from headrace.services.executor.service import ExecutorService
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.decode_cache import DecodeCache
from headrace.services.ingest.service import IngestService
from headrace.services.responder.routing import Routes
from headrace.services.responder.service import Delivery, ResponderService
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.snapshots import DeviceSnapshot, QueueSnapshot
from headrace.telemetry.watchdog import Activity
from headrace.topics import Stage, Topic
from headrace.transport.batch_io import BatchReceiver, BatchWriter
from headrace.transport.channels import BatchQueue, Outlet, pump
from headrace.transport.dispatcher import BatchDispatcher
from headrace.transport.executor_registry import ModelKey
from headrace.transport.heartbeat import ExecutorEventReader, ExecutorHeartbeat, ExecutorIdentity
from headrace.transport.rebinding import Rebinder
from headrace.transport.topic_io import (
    item_receiver,
    item_sender,
    result_receiver,
    result_sender,
)
from headrace.tuning import TUNING, Tuning

_INPUT = {
    Stage.INGEST: Topic.REQUESTS,
    Stage.BATCHER: Topic.ITEMS,
    Stage.EXECUTOR: Topic.BATCHES,
    Stage.RESPONDER: Topic.RESULTS,
}

Chunk = list[Request]
TaskFunction = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine function of a task, such as the `run` of a stage."""


class _Stage(Protocol):
    """A stage or a topic with writers."""

    def writer(self) -> Outlet[Chunk]: ...


def group_stages(stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Divide the stages of a process into groups whose stages call each other."""
    if Stage.RESPONDER in stages and Stage.INGEST not in stages and len(stages) > 1:
        return [tuple(stages[:-1]), (Stage.RESPONDER,)]
    return [tuple(stages)]


def source_settings(settings: Settings, stages: Sequence[Stage]) -> SourceSettings:
    """Return the topic and the group that these stages read, and what they commit."""
    answers = Stage.RESPONDER in stages
    reads_requests = stages[0] is Stage.INGEST
    # Only the batcher queues requests by model; with an order, a deferred request would block
    # all later ones.
    has_shares = Stage.BATCHER in stages and settings.delivery.order == "none"
    group = settings.namespace if answers else f"{settings.namespace}.{stages[0]}"
    return SourceSettings(
        topic=settings.topic(_INPUT[stages[0]]),
        group=group,
        progress_group=settings.namespace if reads_requests else group,
        commits=answers or not reads_requests,
        budget_bytes=settings.limits.max_in_flight_bytes,
        drain_timeout_s=settings.limits.drain_timeout_s,
        # A responder runs no model, and could not answer a request that crashed it.
        max_attempts=0 if stages[0] is Stage.RESPONDER else settings.delivery.max_attempts,
        # Kinds keep out members with another topic or guarantee: they would overwrite each
        # other's commits.
        kind=f"{_INPUT[stages[0]]}-{settings.delivery.guarantee}" if answers else "",
        requests=settings.topic(Topic.REQUESTS) if answers or reads_requests else "",
        exactly_once=settings.delivery.guarantee == "exactly_once" and (answers or reads_requests),
        shares=reads_requests and settings.delivery.order != "none",
        runs=Stage.EXECUTOR in stages,
        model_share=settings.limits.model_share if has_shares else 1.0,
        tenant_share=settings.limits.tenant_share if has_shares else 1.0,
        kept_s=0.0 if answers else settings.topics.internal_retention_ms / 1000,
        chains_keys=reads_requests and settings.delivery.order == "key",
    )


class StageGroup:
    """Group of adjacent stages of a process.

    It ends when its source has stopped reading and everything that was read is answered.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        stages: Sequence[Stage],
        models: Models,
        instruments: Instruments,
        tuning: Tuning = TUNING,
    ) -> None:
        self._tuning = tuning
        self._settings = settings
        self._log = log
        self._stages = tuple(stages)
        self._models = models
        self._instruments = instruments
        self._metrics = instruments.metrics
        self._rebinder = Rebinder(models.catalog, instruments.metrics.rebound.inc)
        self._task_functions: dict[str, TaskFunction] = {}
        self._batcher: BatcherService | None = None
        self._executor: ExecutorService | None = None
        self._responder: ResponderService | None = None
        self._source_offsets = (
            SourceOffsets(log, settings.topic(Topic.REQUESTS), tuning.delivery)
            if stages[0] is Stage.RESPONDER
            else None
        )
        reading = source_settings(settings, self._stages)
        refusal = self._deferred_refusal if Stage.BATCHER in stages else None
        self.source = Source(
            log,
            reading,
            instruments.metrics,
            self._source_offsets,
            refusal,
            self._on_revoked,
            tuning,
        )
        if instruments.tracing is not None:
            instruments.tracing.reads(self._stages[0], reading.topic, reading.group)

    async def run(self, joined: Callable[[], None]) -> None:
        """Read, process and answer until `stop_reading` has taken effect, then commit and leave.

        Reading begins when the models have loaded, so that no request is refused because its
        model is still loading.

        Args:
            joined: called when this member has got its first assignment from the group.
        """
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(self._log.producer())
            await self._wire(producer)
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(function(), name=name)
                    for name, function in self._task_functions.items()
                ]
                if self._executor is not None:
                    await self._executor.loaded.wait()
                async with self.source:
                    reading = tasks.create_task(self.source.run(), name="source")
                    await self.source.assigned.wait()
                    joined()
                    await asyncio.wait(work)
                    await self.source.close_down(self._settings.limits.drain_timeout_s)
                    await reading

    def activities(self) -> list[Activity]:
        """Return the activities that must make progress: the reader and the model instances."""
        running = [] if self._executor is None else self._executor.activities()
        return [self.source.reading, *running]

    def devices(self) -> list[DeviceSnapshot]:
        """Return the memory of the devices that models run on, without the host."""
        return [] if self._executor is None else self._executor.devices()

    def waiting(self) -> QueueSnapshot | None:
        """Return what waits for a batch; None without a batcher."""
        return None if self._batcher is None else self._batcher.waiting()

    async def abandon(self) -> None:
        """Commit what is acknowledged; another process repeats what is still in flight."""
        await self.source.close_down(0)

    # --- wiring ----------------------------------------------------------------------------

    async def _wire(self, producer: Producer) -> None:
        answers = await self._wire_responder(producer)
        batch_queue: BatchQueue[ModelKey, Batch] | None = None
        if Stage.BATCHER in self._stages:
            self._batcher = self._make_batcher(answers)
            self._task_functions["batcher"] = self._batcher.run
            batch_queue = self._batcher.batch_queue
        if Stage.INGEST in self._stages:
            self._wire_ingest(producer, answers)
        elif self._batcher is not None:
            items = item_receiver(self.source, answers.writer())
            self._task_functions["read-items"] = partial(pump, items, self._batcher)
        if Stage.EXECUTOR in self._stages:
            events = None if batch_queue is not None else await self._describe_topic(Topic.EVENTS)
            self._wire_executor(batch_queue, answers, producer, events)
        elif batch_queue is not None:
            topic = await self._describe_topic(Topic.BATCHES)
            writer = BatchWriter(producer, topic, answers.writer(), self._metrics)
            tuning = self._tuning.transport
            events = await self._describe_topic(Topic.EVENTS)
            reader = ExecutorEventReader(self._log, events, tuning)
            dispatcher = BatchDispatcher(
                batch_queue, writer, self._models, reader, self._metrics, tuning
            )
            self._task_functions["write-batches"] = dispatcher.run

    def _wire_ingest(self, producer: Producer, answers: _Stage) -> None:
        items: Outlet[Chunk]
        if self._batcher is not None:
            items = self._batcher
        else:
            topic = self._settings.topic(Topic.ITEMS)
            sender = item_sender(
                producer, topic, answers.writer(), self._metrics, self._tuning.transport
            )
            self._task_functions["write-items"] = sender.run
            items = sender.writer()
        ingest = IngestService(
            self.source,
            items,
            answers.writer(),
            self._ingest_rules(),
            self._instruments,
            self._tuning.ingest,
        )
        self._task_functions["ingest"] = ingest.run

    def _ingest_rules(self) -> IngestRules:
        """Return the rules of ingest; a batcher in this process refuses what would be too late."""
        has_batcher = Stage.BATCHER in self._stages
        tuning = self._tuning.ingest
        return IngestRules(
            self._models.catalog,
            self._settings.limits,
            self._refusal if has_batcher else None,
            cache=DecodeCache(tuning),
            copied_tensor_bytes=tuning.copied_tensor_bytes,
        )

    def _refusal(self, envelope: Envelope) -> Failure | None:
        assert self._batcher is not None
        return self._batcher.refusal(envelope)

    def _on_revoked(self) -> None:
        if self._responder is not None:
            self._responder.revoked()

    def _deferred_refusal(self, envelope: Envelope, rows: int) -> Failure | None:
        assert self._batcher is not None
        return self._batcher.refusal(envelope, rows)

    def _make_batcher(self, answers: _Stage) -> BatcherService:
        prefix = f"{os.getpid()}-{secrets.token_hex(4)}"  # unique among processes
        return BatcherService(
            answers.writer(),
            self._models.catalog.lookup_bound,
            prefix,
            self._instruments,
            self._rebinder.rebind,
            self.source.quarantine.has_run,
            self._tuning.batcher,
        )

    def _wire_executor(
        self,
        batch_queue: BatchQueue[ModelKey, Batch] | None,
        answers: _Stage,
        producer: Producer,
        events: TopicPartition | None,
    ) -> None:
        heartbeat: ExecutorHeartbeat | None = None
        if batch_queue is None:
            assert events is not None
            heartbeat = self._make_heartbeat(producer, events)
            feed = BatchReceiver(
                self.source,
                answers.writer(),
                self._models.catalog.lookup_bound,
                heartbeat,
                self._rebinder.rebind,
            )
            self._task_functions["read-batches"] = feed.run
            self._task_functions["heartbeat"] = heartbeat.run
            batch_queue = feed.batch_queue
        executor = ExecutorService(
            batch_queue,
            answers.writer(),
            self._models,
            self._instruments,
            heartbeat,
            self.source.quarantine,
            self._tuning.executor,
        )
        self._task_functions["executor"] = executor.run
        self._executor = executor

    def _make_heartbeat(self, producer: Producer, events: TopicPartition) -> ExecutorHeartbeat:
        kafka = self._settings.kafka
        silent_after_s = self._tuning.runtime.silent_after_s
        if kafka is not None:
            silent_after_s = kafka.session_timeout_ms / 1000
        return ExecutorHeartbeat(
            producer,
            events,
            ExecutorIdentity(f"{os.getpid()}-{secrets.token_hex(4)}", silent_after_s),
            lambda: sorted(each.partition.partition for each in self.source.tracker.assignments),
            lambda: self._models.catalog.versions(State.READY),
            self._tuning.transport,
        )

    def _transaction_timeout_s(self) -> float:
        kafka = self._settings.kafka
        if kafka is None:
            return self._tuning.responder.transaction_timeout_s
        return kafka.transaction_timeout_ms / 1000

    async def _wire_responder(self, producer: Producer) -> _Stage:
        """Wire the responder; return it, or the topic to which others send ended requests."""
        if Stage.RESPONDER not in self._stages:
            outlet = result_sender(
                producer, self._settings.topic(Topic.RESULTS), self._metrics, self._tuning.transport
            )
            self._task_functions["write-results"] = outlet.run
            return outlet
        responses = await self._describe_topic(Topic.RESPONSES)
        responder = ResponderService(
            producer,
            Routes(self._settings, responses, await self._describe_topic(Topic.DEAD_LETTERS)),
            Delivery(
                self.source.offset_store,
                self._source_offsets,
                self.source.transactions,
                self._settings.delivery.order,
                self._transaction_timeout_s(),
            ),
            self._instruments,
            self._tuning.responder,
        )
        self._responder = responder
        self._task_functions["responder"] = responder.run
        if self._source_offsets is not None:
            results = result_receiver(self.source)
            self._task_functions["read-results"] = partial(pump, results, responder.writer())
        return responder

    async def _describe_topic(self, topic: Topic) -> TopicPartition:
        """Return a topic's name and number of partitions."""
        name = self._settings.topic(topic)
        found = (await self._log.describe_topics([name]))[name]
        if found is None:
            raise ConfigurationError(
                f"topic {name}: expected it to exist; `headrace topics create`"
            )
        return TopicPartition(name, found.partitions)
