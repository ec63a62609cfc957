"""Choose the target of an answer, and refuse reply topics that are not allowed.

Only `ReplyTopics` does I/O: it looks up the partition counts of callers' topics.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import structlog

from headrace.config import Settings
from headrace.errors import Code, Retriable
from headrace.log.errors import TopicForbidden
from headrace.log.port import Producer, TopicPartition
from headrace.primitives.bounded_cache import BoundedCache
from headrace.primitives.stage_tasks import StageTasks
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.telemetry.logs import Event
from headrace.topics import Stage, Topic
from headrace.tuning import TUNING, ResponderTuning

log = structlog.get_logger(__name__)


class Routes:
    """Targets of answers and dead letters, and the reply topics that the settings allow.

    Args:
        responses: the topic of default answers, and its number of partitions.
        dead_letters: the topic of dead letters, and its number of partitions.

    Attributes:
        requests: the topic that requests are read from; part of their identity.
    """

    def __init__(
        self, settings: Settings, responses: TopicPartition, dead_letters: TopicPartition
    ) -> None:
        self.requests = settings.topic(Topic.REQUESTS)
        self.responses, self.responses_partitions = responses
        self._defaults = [
            TopicPartition(self.responses, number) for number in range(self.responses_partitions)
        ]
        self._dead_letters, self._dead_letter_partitions = dead_letters
        self._own = frozenset(settings.topic(topic) for topic in Topic) - {self.responses}
        namespace = re.escape(settings.namespace)
        self._allowed = [
            re.compile(pattern.replace("{namespace}", namespace))
            for pattern in settings.topics.reply_allowed
        ]

    def default_target(self, request: Request) -> TopicPartition:
        """Return the partition of `responses` for an answer without a reply topic."""
        return self._defaults[request.partition % self.responses_partitions]

    def dead_letter_target(self, request: Request) -> TopicPartition:
        """Return the partition for the request's dead letter."""
        return TopicPartition(self._dead_letters, request.partition % self._dead_letter_partitions)

    def refusal(self, topic: str) -> str | None:
        """Return why a topic is not allowed as a reply topic; None if it is."""
        if topic == self.responses:
            return None
        if topic in self._own:
            return f"kafka_replyTopic: expected a topic of the caller's, got {topic}, which is ours"
        if not any(pattern.fullmatch(topic) for pattern in self._allowed):
            allowed = " or ".join(pattern.pattern for pattern in self._allowed)
            return (
                f"kafka_replyTopic: expected a match of {allowed} "
                f"(topics.reply_allowed), got {topic}"
            )
        return None


def choose_partition(
    envelope: Envelope, source_partition: int, topic: str, partitions: int | TopicForbidden | None
) -> TopicPartition | str:
    """Return the partition of a reply topic, or an error text; `partitions` None: no such topic."""
    if isinstance(partitions, TopicForbidden):
        return f"kafka_replyTopic: {partitions.message}"
    if partitions is None:
        return f"kafka_replyTopic: expected a topic that exists, got {topic}"
    wanted = envelope.reply_partition
    if wanted is None:
        return TopicPartition(topic, source_partition % partitions)
    if wanted >= partitions:
        return (
            f"kafka_replyPartition: expected 0 to {partitions - 1} of topic {topic}, got {wanted}"
        )
    return TopicPartition(topic, wanted)


def wrong_reply_topic(reason: str) -> Failure:
    """Return the failure of a request whose reply topic or partition is refused."""
    return Failure(Code.INVALID_REQUEST, reason, Stage.RESPONDER)


Resolved = Callable[[list[Request], int | TopicForbidden | None], Awaitable[None]]
"""Called with the waiting requests and the number of partitions; None if there is no such topic."""


class ReplyTopics:
    """Cache of the partition counts of callers' topics.

    An unknown topic is looked up in its own task, at most once at a time; only the requests for
    that topic wait.

    Args:
        on_resolved: continues with the requests that waited.
    """

    def __init__(
        self, producer: Producer, on_resolved: Resolved, tuning: ResponderTuning = TUNING.responder
    ) -> None:
        self._producer = producer
        self._on_resolved = on_resolved
        self._tuning = tuning
        self._cached: BoundedCache[str, tuple[int, float]] = BoundedCache(
            tuning.max_cached_reply_topics
        )
        self._waiting: dict[str, list[Request]] = {}
        self._permits = asyncio.Semaphore(tuning.max_reply_topic_lookups)

    def cached_partitions(self, topic: str) -> int | None:
        """Return the number of partitions; None if it is not cached."""
        entry = self._cached.get(topic)
        if entry is None or entry[1] < time.monotonic():
            return None
        return entry[0]

    def look_up(self, topic: str, request: Request, tasks: StageTasks) -> None:
        """Look up the topic, then continue with the request through `on_resolved`."""
        waiting = self._waiting.get(topic)
        if waiting is not None:
            waiting.append(request)
            return
        self._waiting[topic] = [request]
        tasks.start(self._look_up(topic), "responder-lookup")

    async def _look_up(self, topic: str) -> None:
        async with self._permits:
            partitions = await self._describe(topic)
        if isinstance(partitions, int):
            expires_s = time.monotonic() + self._tuning.reply_topic_cache_s
            self._cached.add(topic, (partitions, expires_s))
        await self._on_resolved(self._waiting.pop(topic), partitions)

    async def _describe(self, topic: str) -> int | TopicForbidden | None:
        while True:
            try:
                return await self._producer.partitions_for(topic)
            except TopicForbidden as error:
                return error
            except Retriable as error:
                # Retry forever: without a broker, a refusal cannot be sent either.
                log.warning(Event.REPLY_TOPIC_UNKNOWN, topic=topic, reason=str(error))
                await asyncio.sleep(self._tuning.reply_topic_retry_s)
