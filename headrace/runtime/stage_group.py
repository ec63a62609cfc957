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
from operator import attrgetter
from typing import Any, Protocol

from headrace.claims.fetcher import ClaimFetcher
from headrace.claims.putter import ClaimPutter
from headrace.config import Settings
from headrace.consumer.source import Source
from headrace.consumer.source_settings import SourceSettings
from headrace.delivery.source_offsets import SourceOffsets
from headrace.errors import ConfigurationError, Rejected
from headrace.log.port import Log, Producer, TopicPartition
from headrace.models.catalog import RequestedVersions
from headrace.models.registry import Models
from headrace.protocol.codec import has_inputs_in_source
from headrace.protocol.headers import is_payload
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.services.batcher.service import BatcherService
from headrace.services.executor.postprocessing import PostprocessOptions
from headrace.services.executor.service import ExecutorService
from headrace.services.executor.trial import make_trials
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.decode_cache import DecodeCache
from headrace.services.ingest.service import IngestService
from headrace.services.responder.routing import Routes
from headrace.services.responder.service import Delivery, ResponderService
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.snapshots import DeviceSnapshot, QueueSnapshot
from headrace.telemetry.watchdog import Activity
from headrace.topics import Stage, Topic
from headrace.transforms.process import TransformProcess
from headrace.transforms.workers import TransformPool, TransformThread
from headrace.transport.batch_io import BatchReceiver, BatchWriter
from headrace.transport.channels import ModelKey, SendStream
from headrace.transport.dispatcher import BatchDispatcher
from headrace.transport.heartbeat import ExecutorEventReader, ExecutorHeartbeat, ExecutorIdentity
from headrace.transport.rebinding import Rebinder
from headrace.transport.shared_values import SharedValuesReader, SharedValuesWriter
from headrace.transport.source_values import SourceValues
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

_KINDS = {
    "at_least_once": "at_least_once",
    # 2: since transactions are shared by partitions, a member must wait for those of others before
    # it reads committed offsets. Members of the first kind do not wait.
    "exactly_once": "exactly_once-2",
}

Chunk = list[Request]
TaskFunction = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine function of a task, such as the `run` of a stage."""


class _HasWriters(Protocol):
    """A stage or a topic with writers."""

    def writer(self) -> SendStream[Chunk]: ...


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
        kind=f"{_INPUT[stages[0]]}-{_KINDS[settings.delivery.guarantee]}" if answers else "",
        requests=settings.topic(Topic.REQUESTS) if answers or reads_requests else "",
        exactly_once=settings.delivery.guarantee == "exactly_once" and (answers or reads_requests),
        shares=reads_requests and settings.delivery.order != "none",
        runs=Stage.EXECUTOR in stages,
        model_share=settings.limits.model_share if has_shares else 1.0,
        tenant_share=settings.limits.tenant_share if has_shares else 1.0,
        kept_s=0.0 if answers else settings.topics.internal_retention_ms / 1000,
        chains_keys=reads_requests and settings.delivery.order == "key",
    )


class _Stages:
    """The stages of a group that exist in this process, and the functions of their tasks.

    Attributes:
        functions: by the names of their tasks.
        ingest, batcher, executor, responder: None without that stage.
        source_values: those that read the values of requests here.
    """

    def __init__(self) -> None:
        self.functions: dict[str, TaskFunction] = {}
        self.ingest: IngestService | None = None
        self.batcher: BatcherService | None = None
        self.executor: ExecutorService | None = None
        self.responder: ResponderService | None = None
        self.source_values: list[SourceValues] = []

    def refusal(self, envelope: Envelope, rows: int = 0) -> Failure | None:
        """Return the failure of a request that would be late behind those that wait."""
        assert self.batcher is not None
        return self.batcher.refusal(envelope, rows)

    def drop_revoked(self) -> None:
        """Notify the stages that partitions were revoked, or are leaving."""
        if self.ingest is not None:
            self.ingest.drop_revoked()
        for values in self.source_values:
            values.drop_revoked()
        if self.responder is not None:
            self.responder.drop_revoked()


class StageGroup:
    """Group of adjacent stages of a process.

    It ends when its source has stopped reading and everything that was read is answered.

    Args:
        ready_to_read: awaited before it reads; None if it can read once its executor has loaded.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        stages: Sequence[Stage],
        models: Models,
        instruments: Instruments,
        ready_to_read: Callable[[], Coroutine[Any, Any, None]] | None,
        tuning: Tuning = TUNING,
    ) -> None:
        self._settings = settings
        self._log = log
        self._ready_to_read = ready_to_read
        self._producer: Producer | None = None
        self._stages = _Stages()
        source_offsets = (
            SourceOffsets(log, settings.topic(Topic.REQUESTS), tuning.delivery)
            if stages[0] is Stage.RESPONDER
            else None
        )
        reading = source_settings(settings, stages)
        self.source = Source(
            log,
            reading,
            instruments.metrics,
            source_offsets,
            self._stages.refusal if Stage.BATCHER in stages else None,
            self._stages.drop_revoked,
            tuning,
        )
        if instruments.tracing is not None:
            instruments.tracing.reads(stages[0], reading.topic, reading.group)
        self._composition = _Composition(
            settings, log, stages, models, instruments, self.source, source_offsets, tuning
        )

    async def run(self, joined: Callable[[], None]) -> None:
        """Read, process and answer until `stop_reading` has taken effect, then commit and leave.

        Reading begins when the models have loaded, so that no request is refused because its
        model is still loading.

        Args:
            joined: called when this member has got its first assignment from the group.
        """
        stages = self._stages
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(self._log.producer())
            self._producer = producer
            await self._composition.open_claims(stack)
            self._composition.open_shared_values(stack)
            await self._composition.add_stages(stages, producer)
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(function(), name=name)
                    for name, function in stages.functions.items()
                ]
                if stages.executor is not None:
                    await stages.executor.loaded.wait()
                if self._ready_to_read is not None:
                    await self._ready_to_read()
                async with self.source:
                    reading = tasks.create_task(self.source.run(), name="source")
                    await self.source.assigned.wait()
                    joined()
                    await asyncio.wait(work)
                    await self.source.close_down(self._settings.limits.drain_timeout_s)
                    await reading

    def activities(self) -> list[Activity]:
        """Return the activities that must make progress: the reader and the model instances."""
        executor = self._stages.executor
        return [self.source.reading, *([] if executor is None else executor.activities())]

    def devices(self) -> list[DeviceSnapshot]:
        """Return the memory of the devices that models run on, without the host."""
        executor = self._stages.executor
        return [] if executor is None else executor.devices()

    def waiting(self) -> QueueSnapshot | None:
        """Return what waits for a batch; None without a batcher."""
        batcher = self._stages.batcher
        return None if batcher is None else batcher.waiting()

    def has_waiting(self, key: ModelKey) -> bool:
        """Return whether requests for a model and version wait for a batch."""
        batcher = self._stages.batcher
        return batcher is not None and batcher.batch_queue.has_waiting(key)

    async def abandon(self, flush_timeout_s: float) -> None:
        """Send nothing more, and commit what is acknowledged; another process repeats what is still
        in flight.

        Args:
            flush_timeout_s: time for acknowledgements of what was sent.
        """
        # Flush before the last commit: what is written after it is written again by the next owner.
        if self._producer is not None:
            await self._producer.finish(flush_timeout_s)
        await self.source.close_down(0)


class _Composition:
    """Makes the stages of a group and gives each the next one as the stream to which it sends.

    Where the next stage is in another process, a sender or a receiver of a topic takes its place.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        stages: Sequence[Stage],
        models: Models,
        instruments: Instruments,
        source: Source,
        source_offsets: SourceOffsets | None,
        tuning: Tuning,
    ) -> None:
        self._settings = settings
        self._log = log
        self._here = frozenset(stages)
        self._models = models
        self._instruments = instruments
        self._metrics = instruments.metrics
        self._source = source
        self._source_offsets = source_offsets
        self._tuning = tuning
        self._rebinder = Rebinder(models.catalog, instruments.metrics.rebound.inc)
        limits = settings.limits
        directory = limits.shared_values_dir if limits.shared_values_bytes else None
        self._shared_writer = SharedValuesWriter(
            limits.shared_values_dir, limits.shared_values_bytes, self._metrics, tuning.transport
        )
        self._shared_reader = SharedValuesReader(directory, self._metrics, tuning.transport)
        self._fetcher: ClaimFetcher | None = None
        self._putter: ClaimPutter | None = None

    async def open_claims(self, stack: AsyncExitStack) -> None:
        """Open the stores of claims that the settings name.

        Raises:
            ConfigurationError: a package is missing.
        """
        if self._settings.claims.allowed:
            fetcher = ClaimFetcher(
                self._settings.claims, self._tuning.claims, partial(self._metrics.claimed, "fetch")
            )
            self._fetcher = await stack.enter_async_context(fetcher)
        store = self._settings.answers.claim_store
        if store is not None and Stage.RESPONDER in self._here:
            putter = ClaimPutter(
                store,
                self._settings.claims,
                "answers.claim_store",
                self._tuning.claims,
                partial(self._metrics.claimed, "put"),
            )
            self._putter = await stack.enter_async_context(putter)

    def open_shared_values(self, stack: AsyncExitStack) -> None:
        """Remove the shared memory of this group, and close that of others, when the stack does."""
        stack.enter_context(self._shared_writer)
        stack.enter_context(self._shared_reader)

    async def add_stages(self, stages: _Stages, producer: Producer) -> None:
        """Make the stages, the last one first, since each needs the one to which it sends.

        Raises:
            ConfigurationError: a topic does not exist.
        """
        answers = await self._add_responder(stages, producer)
        if Stage.BATCHER in self._here:
            self._add_batcher(stages, answers)
        if Stage.INGEST in self._here:
            self._add_ingest(stages, producer, answers)
        elif stages.batcher is not None:
            values = self._make_source_values(stages, Stage.BATCHER, self._needs_value)
            items = item_receiver(self._source, answers.writer(), values)
            stages.functions["read-items"] = partial(
                values.pump, items, stages.batcher, answers.writer()
            )
        if Stage.EXECUTOR in self._here:
            await self._add_executor(stages, producer, answers)
        elif stages.batcher is not None:
            await self._add_dispatcher(stages, stages.batcher, producer, answers)

    async def _add_responder(self, stages: _Stages, producer: Producer) -> _HasWriters:
        """Add the responder; return it, or the topic to which others send ended requests."""
        settings = self._settings
        if Stage.RESPONDER not in self._here:
            results = settings.topic(Topic.RESULTS)
            sender = result_sender(
                producer, results, self._metrics, self._tuning.transport, self._tuning.delivery
            )
            stages.functions["write-results"] = sender.run
            return sender
        responses = await self._describe_topic(Topic.RESPONSES)
        values = self._make_source_values(stages, Stage.RESPONDER, attrgetter("keeps_value"))
        responder = ResponderService(
            producer,
            Routes(settings, responses, await self._describe_topic(Topic.DEAD_LETTERS)),
            Delivery(
                self._source.offset_store,
                self._source_offsets,
                self._source.transactions,
                settings.delivery.order,
                self._transaction_timeout_s(),
                self._putter,
                settings.answers,
                self._tuning.delivery,
                values.read,
            ),
            self._instruments,
            self._tuning.responder,
        )
        stages.responder = responder
        stages.functions["responder"] = responder.run
        if self._source_offsets is not None:
            receiver = result_receiver(self._source, values)
            stages.functions["read-results"] = partial(values.pump, receiver, responder.writer())
        return responder

    def _add_batcher(self, stages: _Stages, answers: _HasWriters) -> None:
        stages.batcher = BatcherService(
            answers.writer(),
            self._models.catalog.lookup_bound,
            f"{os.getpid()}-{secrets.token_hex(4)}",  # unique among processes
            self._instruments,
            self._rebinder.rebind,
            self._source.quarantine.end_isolation,
            self._tuning.batcher,
        )
        self._models.lifecycle.subscribe(stages.batcher.apply_change)
        stages.functions["batcher"] = stages.batcher.run

    def _add_ingest(self, stages: _Stages, producer: Producer, answers: _HasWriters) -> None:
        items: SendStream[Chunk]
        if stages.batcher is not None:
            items = stages.batcher
        else:
            topic = self._settings.topic(Topic.ITEMS)
            sender = item_sender(
                producer,
                topic,
                answers.writer(),
                self._metrics,
                self._tuning.transport,
                self._settings.limits.inline_payload_bytes,
                self._shared_writer,
                self._tuning.delivery,
            )
            stages.functions["write-items"] = sender.run
            items = sender.writer()
        tuning = self._tuning.ingest
        rules = IngestRules(
            self._requested_versions(),
            self._settings.limits,
            # A batcher in this process refuses what would be late.
            stages.refusal if stages.batcher is not None else None,
            cache=DecodeCache(tuning),
            copied_tensor_bytes=tuning.copied_tensor_bytes,
            inline_record_bytes=tuning.inline_record_bytes,
            inline_json_bytes=tuning.inline_json_bytes,
            inline_texts_bytes=tuning.inline_texts_bytes,
        )
        ingest = IngestService(
            self._source,
            items,
            answers.writer(),
            rules,
            self._instruments,
            self._tuning,
            self._fetcher,
            self._make_transform_pool(),
        )
        if self._fetcher is not None:
            stages.functions["fetch-claims"] = ingest.fetch_claims
        stages.ingest = ingest
        stages.functions["ingest"] = ingest.run
        if self._settings.schema_registry is not None:
            stages.functions["fetch-schemas"] = ingest.fetch_schemas

    def _make_transform_pool(self) -> TransformPool:
        """Return the workers of transforms. Raises `ConfigurationError`."""
        settings, tuning = self._settings, self._tuning.transforms
        transformed_bytes = self._tuning.ingest.transformed_bytes
        workers = range(settings.ingest.transform_workers)
        if settings.ingest.transform_isolation == "thread":
            return TransformPool([TransformThread(tuning) for _ in workers], transformed_bytes)
        children = [
            TransformProcess(
                settings.delivery.max_attempts,
                settings.limits.max_in_flight_bytes,
                self._metrics,
                tuning,
            )
            for _ in workers
        ]
        return TransformPool(children, transformed_bytes)

    async def _add_executor(
        self, stages: _Stages, producer: Producer, answers: _HasWriters
    ) -> None:
        heartbeat: ExecutorHeartbeat | None = None
        if stages.batcher is not None:
            batch_queue = stages.batcher.batch_queue
        else:
            heartbeat = self._make_heartbeat(producer, await self._describe_topic(Topic.EVENTS))
            requested = self._requested_versions()
            batches = BatchReceiver(
                self._source,
                answers.writer(),
                requested.require_loaded,
                heartbeat,
                self._rebinder.rebind,
                self._make_source_values(stages, Stage.EXECUTOR, self._needs_value),
                self._models.wanted.is_on_its_way,
                self._instruments.clock,
                self._tuning.transport,
                requested.refusal_of_bound,
            )
            self._models.lifecycle.subscribe(batches.apply_change)
            stages.functions["read-batches"] = batches.run
            stages.functions["heartbeat"] = heartbeat.run
            batch_queue = batches.batch_queue
        stages.executor = ExecutorService(
            batch_queue,
            answers.writer(),
            self._models,
            self._instruments,
            heartbeat,
            self._source.quarantine,
            make_trials(self._settings, self._tuning.executor),
            self._tuning.executor,
            PostprocessOptions(
                self._settings.delivery.max_attempts,
                self._settings.limits.max_in_flight_bytes,
                self._tuning.transforms,
            ),
        )
        stages.functions["executor"] = stages.executor.run

    def _requested_versions(self) -> RequestedVersions:
        return RequestedVersions(
            self._models.catalog,
            asyncio.get_running_loop().call_soon_threadsafe,
            self._models.lifecycle.load_again,
            self._tuning.models,
        )

    async def _add_dispatcher(
        self, stages: _Stages, batcher: BatcherService, producer: Producer, answers: _HasWriters
    ) -> None:
        """Add what writes batches to the executors of other processes."""
        tuning = self._tuning.transport
        topic = await self._describe_topic(Topic.BATCHES)
        writer = BatchWriter(
            producer,
            topic,
            answers.writer(),
            self._metrics,
            self._settings.limits.inline_payload_bytes,
            self._shared_writer,
            self._tuning.delivery,
        )
        reader = ExecutorEventReader(self._log, await self._describe_topic(Topic.EVENTS), tuning)
        dispatcher = BatchDispatcher(
            batcher.batch_queue, writer, self._models, reader, self._metrics, tuning
        )
        stages.functions["write-batches"] = dispatcher.run

    def _make_source_values(
        self, stages: _Stages, stage: Stage, is_needed: Callable[[Request], bool]
    ) -> SourceValues:
        values = SourceValues(
            self._log,
            self._settings.topic(Topic.REQUESTS),
            is_needed,
            stage,
            self._source.quarantine.end_isolation,
            self._metrics,
            self._tuning.transport,
            self._fetcher,
            lambda: self._source.is_stopping,
            self._shared_reader,
        )
        stages.source_values.append(values)
        return values

    def _needs_value(self, request: Request) -> bool:
        """Return True if models run here and a request's inputs are in its value, or if the request
        is to be bound to another version, for which its value is read, or answered with it.
        """
        if Stage.EXECUTOR in self._here and has_inputs_in_source(request):
            return True
        try:
            version = self._models.catalog.lookup_bound(request.model, request.version)
        except Rejected:
            return True
        is_used = version.answers_with_payload and is_payload(request.envelope)
        return is_used and Stage.EXECUTOR in self._here

    def _make_heartbeat(self, producer: Producer, events: TopicPartition) -> ExecutorHeartbeat:
        kafka = self._settings.kafka
        silent_after_s = self._tuning.runtime.silent_after_s
        if kafka is not None:
            silent_after_s = kafka.session_timeout_ms / 1000
        return ExecutorHeartbeat(
            producer,
            events,
            ExecutorIdentity(f"{os.getpid()}-{secrets.token_hex(4)}", silent_after_s),
            lambda: sorted(each.partition.partition for each in self._source.tracker.assignments),
            self._models.catalog.servable,
            self._tuning.transport,
            self._tuning.delivery,
        )

    def _transaction_timeout_s(self) -> float:
        kafka = self._settings.kafka
        if kafka is None:
            return self._tuning.responder.transaction_timeout_s
        return kafka.transaction_timeout_ms / 1000

    async def _describe_topic(self, topic: Topic) -> TopicPartition:
        """Return a topic's name and number of partitions."""
        name = self._settings.topic(topic)
        found = (await self._log.describe_topics([name]))[name]
        if found is None:
            raise ConfigurationError(
                f"topic {name}: expected it to exist; `headrace topics create`"
            )
        return TopicPartition(name, found.partitions)
