"""Snapshot of a source: plain numbers from its in-flight tracker, read on demand."""

from __future__ import annotations

import time
from typing import NamedTuple

from headrace.consumer.backpressure import Backpressure
from headrace.consumer.deferring import Deferral
from headrace.consumer.lag import LagMonitor, StalledOffsetMonitor
from headrace.delivery.committer import Committer
from headrace.delivery.inflight import NEVER_COMMITTED, AssignedPartition, InFlightTracker
from headrace.delivery.source_offsets import SourceOffsets
from headrace.log.port import TopicPartition
from headrace.telemetry.snapshots import CommitSnapshot, PartitionSnapshot, SourceSnapshot


class SourceParts(NamedTuple):
    """Parts of a source that a snapshot reads.

    Attributes:
        waiting_bytes: bytes of the records that were read and are not admitted yet.
        commits: True if this source commits offsets.
        backpressure: the paused partitions and the reasons.
        stalled: monitor of the offsets that do not advance.
        assigning_since_s: monotonic time at which a pending assignment began; None if none is.
        deferral: requests left in the log; None without shares of the budget.
    """

    topic: str
    group: str
    tracker: InFlightTracker
    source_offsets: SourceOffsets | None
    committer: Committer
    lag: LagMonitor
    waiting_bytes: int
    commits: bool
    backpressure: Backpressure
    stalled: StalledOffsetMonitor
    last_contact_s: float
    deferral: Deferral | None
    assigning_since_s: float | None


def source_snapshot(parts: SourceParts) -> SourceSnapshot:
    """Return the snapshot of a source."""
    reasons = parts.backpressure.reasons
    now_s = time.monotonic()
    partitions = [
        each._replace(
            paused=reasons.get(where, ""),
            base_age_s=parts.stalled.age_s(where, now_s),
            is_stuck=parts.stalled.is_stuck(where, now_s),
        )
        for each in partition_snapshots(parts.tracker, parts.lag)
        for where in (TopicPartition(each.topic, each.partition),)
    ]
    lag = sum(each.backlog_records for each in partitions)
    throughput = parts.lag.throughput
    elsewhere = () if parts.source_offsets is None else tuple(parts.source_offsets.snapshots())
    budget = parts.tracker.budget
    return SourceSnapshot(
        topic=parts.topic,
        group=parts.group,
        last_contact_s=parts.last_contact_s,
        in_flight_records=parts.tracker.in_flight(),
        in_flight_bytes=budget.used_bytes + parts.waiting_bytes,
        limit_bytes=budget.limit_bytes,
        paused=parts.backpressure.reason,
        oldest_age_s=_oldest_age_s(parts.tracker),
        backlog_records=lag,
        throughput_per_s=throughput.per_s,
        time_to_drain_s=throughput.time_to_drain_s(lag),
        commit=CommitSnapshot(
            commits=parts.commits,
            age_s=parts.committer.age_s(),
            failures=parts.committer.failures,
            last_failure=parts.committer.last_failure,
        ),
        partitions=(*partitions, *elsewhere),
        stalled_s=parts.lag.stall.for_s(now_s, parts.lag.acked),
        assigning_s=0.0 if parts.assigning_since_s is None else now_s - parts.assigning_since_s,
        model_bytes={} if parts.deferral is None else parts.deferral.shares.model_bytes(),
    )


def partition_snapshots(tracker: InFlightTracker, lag: LagMonitor) -> list[PartitionSnapshot]:
    """Return the snapshots of the assigned partitions, in order."""
    return [
        _partition(assignment, lag)
        for assignment in sorted(tracker.assignments, key=lambda each: each.partition)
    ]


def _partition(assignment: AssignedPartition, lag: LagMonitor) -> PartitionSnapshot:
    progress, committed = assignment.progress, assignment.committed
    answered, ranges = progress.answered_above
    return PartitionSnapshot(
        *assignment.partition,
        epoch=assignment.epoch,
        base=progress.base,
        committed=None if committed == NEVER_COMMITTED else committed.offset,
        end=lag.ends.get(assignment.partition),
        in_flight=assignment.in_flight,
        span_records=max(0, assignment.last_delivered + 1 - progress.base),
        answered_records=answered,
        answered_ranges=ranges,
        metadata_characters=len(committed.metadata),
        deferred_records=len(assignment.deferred),
    )


def _oldest_age_s(tracker: InFlightTracker) -> float:
    """Return the age of the oldest record in flight; 0 if nothing is.

    Timestamps of records that were put back may be left in a partition without any in flight.
    """
    oldest_ms = [
        timestamp_ms
        for each in tracker.assignments
        if each.in_flight and (timestamp_ms := each.ages.oldest_ms(each.progress.base)) is not None
    ]
    return max(0.0, time.time() - min(oldest_ms) / 1000) if oldest_ms else 0.0
