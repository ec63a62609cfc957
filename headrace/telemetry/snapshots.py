"""Snapshots of a source, as plain numbers, for metrics and for `/status`.

The source creates them on demand; telemetry does not depend on in-flight tracking or logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.protocol.events import UnreadyVersion


class WantedSnapshot(NamedTuple):
    """Models of a process, compared with those that the control topic wants.

    Attributes:
        generation: the last change that the process has read.
        unready: wanted versions that are not ready.
        is_following: False if it has stopped following, since records cannot be followed.
    """

    generation: int
    unready: Sequence[UnreadyVersion]
    is_following: bool = True


class PartitionSnapshot(NamedTuple):
    """One assigned partition.

    Attributes:
        epoch: counts the assignments of this process; 0 if another partition carries this one.
        base: the lowest unanswered offset.
        committed: the last committed offset; None before the first commit.
        end: the end offset at the last query; None before the first answer.
        span_records: offsets from the base up to the last one read.
        answered_records: how many offsets above the base are answered, in how many ranges.
        metadata_characters: length of the metadata committed last.
        paused: why this partition alone is not read: `metadata`, `order` or `share`; otherwise
            empty.
        base_age_s: how long the base has not moved since its request was passed on to the process
            that answers; 0 if this process answers.
        is_stuck: True if that is longer than passed-on records are retained.
        deferred_records: left in the log until their model has room in its share of the budget.
    """

    topic: str
    partition: int
    epoch: int
    base: int
    committed: int | None
    end: int | None
    in_flight: int
    span_records: int
    answered_records: int
    answered_ranges: int
    metadata_characters: int
    paused: str = ""
    base_age_s: float = 0.0
    is_stuck: bool = False
    deferred_records: int = 0

    @property
    def lag_records(self) -> int | None:
        """Return the end offset minus the committed offset; None while the end is not known."""
        if self.end is None:
            return None
        return max(0, self.end - (self.base if self.committed is None else self.committed))

    @property
    def backlog_records(self) -> int:
        """Return the number of unanswered records, read or not."""
        end = max(self.end or 0, self.base + self.span_records)
        return max(0, end - self.base - self.answered_records)


class CommitSnapshot(NamedTuple):
    """State of committing.

    Attributes:
        commits: whether this source commits at all.
        age_s: how long answered work has been waiting for its commit.
        failures: since the start.
        last_failure: the message of the last failure.
    """

    commits: bool
    age_s: float
    failures: int
    last_failure: str


class SourceSnapshot(NamedTuple):
    """One source: its topic, its budget, its partitions.

    Attributes:
        last_contact_s: seconds since the log's last answer; 0 before the source is open.
        paused: why nothing is read: `budget` or `drain`; otherwise empty.
        stalled_s: how long records have been waiting while none was answered.
        assigning_s: how long assigned partitions could not be taken up.
        model_bytes: the bytes of the budget that each model uses; empty if models have no shares.
        oldest_age_s: the age of the oldest record that was read and is unanswered.
        throughput_per_s: learned; None before anything was.
    """

    topic: str
    group: str
    last_contact_s: float
    in_flight_records: int
    in_flight_bytes: int
    limit_bytes: int
    paused: str
    oldest_age_s: float
    backlog_records: int
    throughput_per_s: float | None
    time_to_drain_s: float | None
    commit: CommitSnapshot
    partitions: tuple[PartitionSnapshot, ...]
    model_bytes: Mapping[str, int] = {}
    stalled_s: float = 0.0
    assigning_s: float = 0.0


class DeviceSnapshot(NamedTuple):
    """Recent memory use of a device other than the host: bytes by kind or pool."""

    device: str
    memory_bytes: Mapping[str, int]


class ModelMemorySnapshot(NamedTuple):
    """Budget for the host memory of the loaded versions, and what they hold of it."""

    limit_bytes: int
    held_bytes: int


class QueueSnapshot(NamedTuple):
    """Requests that wait for a batch.

    Attributes:
        deadline_slack_s: the least time to a deadline; None if no request has one.
    """

    requests: int
    deadline_slack_s: float | None


class GatewaySnapshot(NamedTuple):
    """State of the gateway of a process.

    Attributes:
        requests: taken and not answered, at most `limit_requests`; `size_bytes` is the size of
            their bodies, and of answers in streams that wait for their callers.
        refused: number of requests that one of these two limits refused: requests or bytes.
        late_answers: answers that were dropped because their callers had stopped waiting.
        regions: of shared memory that callers have registered.
        callers: whose requests are counted against limits of their own.
        limited: number of requests that such a limit refused, by limit.
        connections: open ones of the door for HTTP.
        connections_closed: number of those that the limits of connections closed.
        untaken_bytes: by door, size of the answers that their callers have not taken.
        topic: of the answers that it reads.
        last_contact_s: seconds since the log's last answer; 0 before the gateway is open.
    """

    requests: int
    limit_requests: int
    size_bytes: int
    limit_bytes: int
    refused: Mapping[str, int]
    late_answers: int
    regions: int
    callers: int
    limited: Mapping[str, int]
    connections: int
    connections_closed: int
    untaken_bytes: Mapping[str, int]
    topic: str
    last_contact_s: float
