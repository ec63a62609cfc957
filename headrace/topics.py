"""All topics of Headrace with their messages, writers and readers.

```
 requests ▶ ingest ▶ items ▶ batcher ▶ batches ▶ executor ▶ results ▶ responder ▶ responses
              │                │      (ends found early)                  └──▶ dead-letters
              └────────────────┴──────────────────────▶ results
```

Two adjacent stages in one process are connected by a memory channel instead of the topic between
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """The four services, in the order in which a request passes them."""

    INGEST = "ingest"
    BATCHER = "batcher"
    EXECUTOR = "executor"
    RESPONDER = "responder"


STAGES = tuple(Stage)

GROUP_SUFFIXES = frozenset({*STAGES, "marks", "redrive"})
"""Suffixes of consumer group names, after the namespace and a dot."""


class Topic(StrEnum):
    """Headrace's own topics; the value is the topic's part of the full name."""

    REQUESTS = "requests"
    ITEMS = "items"
    BATCHES = "batches"
    RESULTS = "results"
    RESPONSES = "responses"
    DEAD_LETTERS = "dead-letters"
    EVENTS = "events"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """Description of one topic.

    Attributes:
        message: type of the record's value in `headrace.protocol.messages`, or a description.
        key: meaning of the record's key.
        partition: how a record's partition is chosen.
        writers: stages that write the topic; empty if its writers are outside Headrace.
        readers: stages that read the topic; empty if its readers are outside Headrace.
        controlled: stages that read and write the topic too where the control topic says which
            models are served.
        like_requests: True if it must have exactly as many partitions as `requests`.
        cleanup_policy: Kafka's `cleanup.policy`.
        partitions: number of partitions, if the settings do not choose it; 0: they do.
        kept_forever: True if no record is ever deleted.
    """

    topic: Topic
    message: str
    key: str
    partition: str
    writers: tuple[Stage, ...]
    readers: tuple[Stage, ...]
    controlled: tuple[Stage, ...] = ()
    like_requests: bool = False
    cleanup_policy: str = "delete"
    partitions: int = 0
    kept_forever: bool = False

    def writing(self, *, controlled: bool) -> tuple[Stage, ...]:
        """Return the stages that write the topic.

        Args:
            controlled: the control topic says which models are served.
        """
        return _together(self.writers, self.controlled if controlled else ())

    def reading(self, *, controlled: bool) -> tuple[Stage, ...]:
        """Return the stages that read the topic.

        Args:
            controlled: the control topic says which models are served.
        """
        return _together(self.readers, self.controlled if controlled else ())


def _together(some: tuple[Stage, ...], others: tuple[Stage, ...]) -> tuple[Stage, ...]:
    return tuple(stage for stage in STAGES if stage in some or stage in others)


TOPICS: dict[Topic, TopicSpec] = {
    spec.topic: spec
    for spec in (
        TopicSpec(
            Topic.REQUESTS,
            message="InferenceRequest, or a raw payload",
            key="any bytes, the producer's",
            partition="the producer's choice",
            writers=(),
            # All but ingest read only values that travel by reference.
            readers=(Stage.INGEST, Stage.BATCHER, Stage.EXECUTOR, Stage.RESPONDER),
        ),
        TopicSpec(
            Topic.ITEMS,
            message="ItemRecord or ItemChunkRecord",
            key="none",
            partition="the request's source partition",
            writers=(Stage.INGEST,),
            readers=(Stage.BATCHER,),
            like_requests=True,
        ),
        TopicSpec(
            Topic.BATCHES,
            message="BatchRecord or ChunkedBatchRecord",
            key="none",
            partition="one that a free executor reads; round robin while none is known",
            writers=(Stage.BATCHER,),
            readers=(Stage.EXECUTOR,),
        ),
        TopicSpec(
            Topic.RESULTS,
            message="ResultRecord or ResultChunkRecord",
            key="none",
            partition="the request's source partition",
            writers=(Stage.INGEST, Stage.BATCHER, Stage.EXECUTOR),
            readers=(Stage.RESPONDER,),
            like_requests=True,
        ),
        TopicSpec(
            Topic.RESPONSES,
            message="InferenceResponse or ErrorResponse",
            key="the request's key",
            partition="the request's source partition, modulo; or kafka_replyPartition",
            writers=(Stage.RESPONDER,),
            readers=(),
        ),
        TopicSpec(
            Topic.DEAD_LETTERS,
            message="the request's own value, untouched",
            key="the request's key",
            partition="the request's source partition, modulo",
            writers=(Stage.RESPONDER,),
            readers=(),
        ),
        TopicSpec(
            Topic.EVENTS,
            message="ExecutorEvent",
            key="the writer's process",
            partition="by key",
            writers=(Stage.EXECUTOR,),
            readers=(Stage.BATCHER,),
            # Each process announces which versions it has ready, and those apart need to know it.
            controlled=STAGES,
        ),
        TopicSpec(
            # The order of changes is their meaning, so there is one partition, and the history of
            # the deployment is the topic itself, so nothing is deleted or compacted.
            Topic.CONTROL,
            message="ControlRecord",
            key="none",
            partition="the only one",
            writers=(),
            readers=STAGES,
            partitions=1,
            kept_forever=True,
        ),
    )
}
