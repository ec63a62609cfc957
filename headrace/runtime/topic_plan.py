"""Plan the topics, and compare the existing ones with the plan.

The plan follows from the settings. The comparison accepts a broker's own value where it is
harmless (more retention, larger records), and is strict where an answer could be lost or sent to
the wrong place. `items` and `results` must have as many partitions as `requests` really has,
whatever the settings say, because they use the source partition's number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.config import Settings
from headrace.log.port import Log, TopicInfo
from headrace.topics import TOPICS, Stage, Topic, TopicSpec
from headrace.tuning import TUNING, RuntimeTuning

CLEANUP_POLICY = "cleanup.policy"
MAX_MESSAGE_BYTES = "max.message.bytes"
MIN_INSYNC_REPLICAS = "min.insync.replicas"
RETENTION_BYTES = "retention.bytes"
RETENTION_MS = "retention.ms"
SEGMENT_MS = "segment.ms"


class Fault(NamedTuple):
    """Fault of a topic, and how to fix it.

    Attributes:
        blocking: True if `headrace run` refuses to start with the fault.
    """

    topic: str
    problem: str
    fix: str
    blocking: bool

    def __str__(self) -> str:
        return f"{self.topic}: {self.problem}; {self.fix}"


def plan_topics(
    settings: Settings,
    requests: TopicInfo | None = None,
    tuning: RuntimeTuning = TUNING.runtime,
) -> dict[Topic, TopicInfo]:
    """Return all topics as `headrace topics create` creates them.

    Args:
        settings: give partitions, retention and sizes.
        requests: the topic of requests, if it exists: others take its number of partitions.
        tuning: gives the size of segments.
    """
    segments = tuning.segments_per_retention
    return {topic: _plan(spec, settings, requests, segments) for topic, spec in TOPICS.items()}


def _plan(
    spec: TopicSpec, settings: Settings, requests: TopicInfo | None, segments_per_retention: int
) -> TopicInfo:
    wanted = settings.topics
    internal = bool(spec.writers and spec.readers)
    retention_ms = wanted.internal_retention_ms if internal else wanted.retention_ms
    if spec.kept_forever:
        retention_ms = -1
    largest = wanted.max_message_bytes
    if spec.topic is Topic.BATCHES:
        # A batch contains the tensors of its requests and the values that they came in.
        largest += settings.batching.max_batch_bytes
    config = {
        CLEANUP_POLICY: spec.cleanup_policy,
        RETENTION_MS: str(retention_ms),
        MAX_MESSAGE_BYTES: str(largest),
    }
    if spec.readers:
        # What a stage has not read, or not answered, is kept for the time above, whatever its size.
        config[RETENTION_BYTES] = "-1"
    if internal:
        # Retention deletes whole closed segments, and by default one stays open for a week.
        config[SEGMENT_MS] = str(max(1, retention_ms // segments_per_retention))
    if wanted.replication_factor >= 3:
        # An acknowledged record is then on at least two brokers.
        config[MIN_INSYNC_REPLICAS] = "2"
    partitions = requests.partitions if requests and spec.like_requests else wanted.partitions
    partitions = spec.partitions or partitions
    return TopicInfo(settings.topic(spec.topic), partitions, config)


def topics_in_use(stages: Collection[Stage], *, controlled: bool = False) -> list[Topic]:
    """Return the topics that a process with these stages reads or writes.

    The others are memory channels in it. `requests` is always included: offsets are committed on
    it, and other topics must have its number of partitions.

    Args:
        stages: of the process.
        controlled: the control topic says which models it serves; see `is_controlled`.
    """
    return [
        topic
        for topic, spec in TOPICS.items()
        if topic is Topic.REQUESTS
        or (controlled and topic in (Topic.CONTROL, Topic.EVENTS))
        or (topic is not Topic.CONTROL and _leaves_process(spec, stages))
    ]


def is_controlled(settings: Settings) -> bool:
    """Return whether the control topic says which models are served."""
    return settings.models.mode == "explicit"


def required_topics(settings: Settings) -> list[Topic]:
    """Return the topics whose absence is a fault, in whatever form a deployment runs."""
    return [topic for topic in Topic if topic is not Topic.CONTROL or is_controlled(settings)]


def _leaves_process(spec: TopicSpec, stages: Collection[Stage]) -> bool:
    ends = (*spec.writers, *spec.readers)
    inside = [stage in stages for stage in ends]
    to_outside = not (spec.writers and spec.readers)
    return any(inside) and (to_outside or not all(inside))


def compare(
    plan: Mapping[Topic, TopicInfo],
    existing: Mapping[str, TopicInfo | None],
    needed: Collection[Topic] = tuple(Topic),
) -> list[Fault]:
    """Return the faults of the topics in the order of the plan.

    Args:
        plan: from `plan_topics`.
        existing: the log's description of each planned name; a missing name does not exist.
        needed: topics whose absence is a fault.
    """
    requests = existing.get(plan[Topic.REQUESTS].name)
    faults: list[Fault] = []
    for topic, planned in plan.items():
        found = existing.get(planned.name)
        if found is None:
            if topic in needed:
                faults.append(
                    Fault(planned.name, "does not exist", "run `headrace topics create`", True)
                )
            continue
        faults += _partition_faults(topic, planned, found, requests)
        faults += _config_faults(planned, found)
    return faults


def _partition_faults(
    topic: Topic, planned: TopicInfo, found: TopicInfo, requests: TopicInfo | None
) -> Iterator[Fault]:
    if TOPICS[topic].like_requests and requests is not None:
        if found.partitions != requests.partitions:
            fix = (
                f"add partitions to {requests.name} until it has {found.partitions}; or delete "
                f"this one while it is empty, and create it with {requests.partitions}"
            )
            if found.partitions < requests.partitions:
                fix = f"add partitions until it has {requests.partitions}"
            yield Fault(
                planned.name,
                f"expected the {requests.partitions} partitions of {requests.name}, "
                f"got {found.partitions}",
                fix,
                True,
            )
    elif TOPICS[topic].partitions:
        if found.partitions != planned.partitions:
            yield Fault(
                planned.name,
                f"expected {planned.partitions} partition, got {found.partitions}",
                "delete it and create it anew; its records are lost",
                True,
            )
    elif found.partitions != planned.partitions:
        yield Fault(
            planned.name,
            f"has {found.partitions} partitions, topics.partitions says {planned.partitions}",
            "make the two agree",
            False,
        )


def _config_faults(planned: TopicInfo, found: TopicInfo) -> Iterator[Fault]:
    for name, wanted in planned.config.items():
        value = found.config.get(name)
        if value is None or _is_good(name, value, wanted):
            continue
        yield Fault(
            planned.name,
            f"{name}: expected {_expectation(name, wanted)}, got {value}",
            f"set {name}={wanted} with `kafka-configs --alter`",
            # Compaction deletes requests that share a key before they are answered, and what is
            # to be kept forever is lost by retention.
            (name == CLEANUP_POLICY and "compact" in value)
            or (name == RETENTION_MS and int(wanted) < 0),
        )


def _is_good(name: str, value: str, wanted: str) -> bool:
    if name == CLEANUP_POLICY:
        return value == wanted
    if name == SEGMENT_MS:
        return int(value) <= int(wanted)
    if name in (RETENTION_MS, RETENTION_BYTES) and int(value) < 0:
        return True  # unlimited
    if int(wanted) < 0:
        return False
    return int(value) >= int(wanted)


def _expectation(name: str, wanted: str) -> str:
    if name == CLEANUP_POLICY or wanted == "-1":
        return wanted
    return f"at most {wanted}" if name == SEGMENT_MS else f"at least {wanted}"


async def check_topics(log: Log, settings: Settings, stages: Sequence[Stage]) -> list[str]:
    """Return why a process with these stages must not start, one line for each reason.

    Raises:
        LogUnavailable: no broker answered.
    """
    plan = plan_topics(settings)
    existing = await log.describe_topics([planned.name for planned in plan.values()])
    in_use = topics_in_use(stages, controlled=is_controlled(settings))
    if Topic.CONTROL not in in_use:
        # What is wrong with a topic that nothing reads is no reason to stand still.
        existing = dict(existing)
        del existing[plan[Topic.CONTROL].name]
    faults = compare(plan, existing, needed=in_use)
    return [str(fault) for fault in faults if fault.blocking]
