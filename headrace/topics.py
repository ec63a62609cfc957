"""The map: every topic of Headrace, what travels on it, who writes it and who reads it.

```
 requests ▶ ingest ▶ items ▶ batcher ▶ batches ▶ executor ▶ results ▶ responder ▶ responses
              │                │      (ends found early)                  └──▶ dead-letters
              └────────────────┴──────────────────────▶ results
```

Two neighbouring stages in one process are joined by a memory channel instead of the topic
between them.
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
"""Consumer groups of a namespace are called after it; what stands behind the dot in their names."""


class Topic(StrEnum):
    """Headrace's own topics, by their part of the name."""

    REQUESTS = "requests"
    ITEMS = "items"
    BATCHES = "batches"
    RESULTS = "results"
    RESPONSES = "responses"
    DEAD_LETTERS = "dead-letters"
    EVENTS = "events"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What one topic is for.

    Attributes:
        message: the type of the record's value, in `headrace.protocol.messages`, or what it is in
            words.
        key: what the record's key is.
        partition: how a record finds its partition.
        writers: the stages that write it; empty for the outside.
        readers: the stages that read it; empty for the outside.
        like_requests: whether it must have exactly the partitions of `requests`.
        cleanup_policy: Kafka's `cleanup.policy`.
    """

    topic: Topic
    message: str
    key: str
    partition: str
    writers: tuple[Stage, ...]
    readers: tuple[Stage, ...]
    like_requests: bool = False
    cleanup_policy: str = "delete"


TOPICS: dict[Topic, TopicSpec] = {
    spec.topic: spec
    for spec in (
        TopicSpec(
            Topic.REQUESTS,
            message="InferenceRequest, or a raw payload",
            key="any bytes, the producer's",
            partition="the producer's choice",
            writers=(),
            readers=(Stage.INGEST,),
        ),
        TopicSpec(
            Topic.ITEMS,
            message="ItemRecord",
            key="none",
            partition="the request's source partition",
            writers=(Stage.INGEST,),
            readers=(Stage.BATCHER,),
            like_requests=True,
        ),
        TopicSpec(
            Topic.BATCHES,
            message="BatchRecord",
            key="none",
            partition="one that a free executor reads; round robin while none is known",
            writers=(Stage.BATCHER,),
            readers=(Stage.EXECUTOR,),
        ),
        TopicSpec(
            Topic.RESULTS,
            message="ResultRecord",
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
            key="the executor's process",
            partition="by key",
            writers=(Stage.EXECUTOR,),
            readers=(Stage.BATCHER,),
        ),
    )
}
