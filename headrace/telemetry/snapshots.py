"""What a source shows of itself, as plain numbers, for metrics and for `/status`.

The source makes these when it is asked; telemetry knows nothing of ledgers and logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PartitionSnapshot(NamedTuple):
    """One partition that is ours.

    Attributes:
        epoch: counts the assignments of this process; 0 where another partition carries this one.
        base: the lowest unanswered offset.
        committed: the offset committed last; None before the first commit.
        end: the end offset as last asked for; None before the first answer.
        span_records: offsets from the base up to the last one read.
        answered_records: how many offsets above the base are answered, in how many ranges.
        metadata_characters: length of the metadata committed last.
        paused: why it alone is not read: `metadata`, `order` or `share`; otherwise empty.
        base_age_s: for how long the base stands, though its request was passed on to the process
            that answers; 0 where the process itself does.
        is_stuck: that is longer than what is passed on is kept.
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
        """End offset minus committed offset; None while the end is not known."""
        if self.end is None:
            return None
        return max(0, self.end - (self.base if self.committed is None else self.committed))

    @property
    def backlog_records(self) -> int:
        """What is not answered, read or not."""
        end = max(self.end or 0, self.base + self.span_records)
        return max(0, end - self.base - self.answered_records)


class CommitSnapshot(NamedTuple):
    """How committing goes.

    Attributes:
        commits: whether this source commits at all.
        age_s: for how long answered work has been waiting for its commit.
        failures: from the beginning.
        last_failure: what the last of them said.
    """

    commits: bool
    age_s: float
    failures: int
    last_failure: str


class SourceSnapshot(NamedTuple):
    """One source: its topic, its budget, its partitions.

    Attributes:
        last_contact_s: since the log was last heard of; 0 before the source is open.
        paused: why nothing is read: `budget` or `drain`; otherwise empty.
        stalled_s: for how long records have been waiting while none was answered.
        assigning_s: for how long partitions that the group has assigned could not be taken up.
        model_bytes: what each model holds of the budget; empty where models have no shares.
        oldest_age_s: of the oldest record that was read and is unanswered.
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
    """The memory of a device that is not the host's, a moment ago: bytes by kind or pool."""

    device: str
    memory_bytes: Mapping[str, int]


class WaitingSnapshot(NamedTuple):
    """What waits for a batch; the slack is the least time left to a deadline, None without one."""

    requests: int
    deadline_slack_s: float | None
