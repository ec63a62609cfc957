"""Choose the target of an answer, and refuse reply topics that are not allowed; no I/O."""

from __future__ import annotations

import re

from headrace.config import Settings
from headrace.errors import Code
from headrace.log.errors import TopicForbidden
from headrace.log.port import TopicPartition
from headrace.protocol.messages import Envelope, Failure, Request
from headrace.topics import Stage, Topic


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

    def default(self, request: Request) -> TopicPartition:
        """Return the partition of `responses` for an answer without a reply topic."""
        return self._defaults[request.partition % self.responses_partitions]

    def dead_letter(self, request: Request) -> TopicPartition:
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


def misrouted(reason: str) -> Failure:
    """Return the failure of a request whose reply topic or partition is refused."""
    return Failure(Code.INVALID_REQUEST, reason, Stage.RESPONDER)
