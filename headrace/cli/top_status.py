"""The part of `/status` that `headrace top` reads; `docs/health.md` has all of it.

Fields that are not known here are ignored, so that a newer process can be looked at.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Live(Struct):
    """Whether the process gets on, and what is stuck otherwise."""

    live: bool
    reason: str


class Ready(Struct):
    """Whether it reads requests now, and what it waits for otherwise."""

    ready: bool
    reason: str


class Partition(Struct):
    """One partition: `base + span_records` is the offset that is read next."""

    topic: str
    partition: int
    epoch: int
    base: int
    span_records: int


class Commit(Struct):
    """How committing goes."""

    commits: bool
    age_s: float
    failures: int
    last_failure: str


class Source(Struct):
    """What a segment of the process reads, and its budget."""

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
    commit: Commit
    partitions: list[Partition]


class Waiting(Struct):
    """What waits for a batch."""

    requests: int
    deadline_slack_s: float | None


class Model(Struct):
    """One version of a model; a version that could not be read has no batch size."""

    name: str
    version: str
    state: str
    reason: str = ""
    max_batch_size: int | None = None
    batching_off: str = ""
    contradiction: str = ""


class RequestCount(Struct):
    """Answers with one outcome."""

    model: str
    version: str
    outcome: str
    count: int


class BatchCount(Struct):
    """Batches of a model that closed for one reason."""

    reason: str
    count: int


class RowCount(Struct):
    """Rows that a model has run."""

    model: str
    count: int


class TimeSum(Struct):
    """So many times of a model, and their sum."""

    model: str
    count: int
    seconds: float


class Totals(Struct):
    """Counted from the start of the process."""

    requests: list[RequestCount]
    batches: list[BatchCount]
    rows: list[RowCount]
    times: dict[str, list[TimeSum]]


class Status(Struct):
    """One answer of `/status`."""

    version: str
    stages: list[str]
    started_at: str
    uptime_s: float
    phase: str
    live: Live
    ready: Ready
    event_loop_lag_s: float
    sources: list[Source]
    waiting: Waiting | None
    models: list[Model]
    totals: Totals
    last_errors: list[dict[str, Any]]
