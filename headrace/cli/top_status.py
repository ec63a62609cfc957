"""The part of `/status` that `headrace top` reads; `docs/health.md` describes all of it.

Unknown fields are ignored, so that newer processes can be shown.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Live(Struct):
    """Whether the process makes progress, and otherwise what is stuck."""

    live: bool
    reason: str


class Ready(Struct):
    """Whether it reads requests now, and otherwise what it waits for."""

    ready: bool
    reason: str


class Partition(Struct):
    """One partition: `base + span_records` is the next offset to read."""

    topic: str
    partition: int
    epoch: int
    base: int
    span_records: int


class Commit(Struct):
    """State of committing."""

    commits: bool
    age_s: float
    failures: int
    last_failure: str


class Source(Struct):
    """Sources of a stage group of the process, and its budget."""

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
    """Requests waiting for a batch."""

    requests: int
    deadline_slack_s: float | None


class Model(Struct):
    """One version of a model; an unreadable version has no batch size."""

    name: str
    version: str
    state: str
    reason: str = ""
    max_batch_size: int | None = None
    batching_off: str = ""
    contradiction: str = ""


class RequestCount(Struct):
    """Number of answers with one outcome."""

    model: str
    version: str
    outcome: str
    count: int


class BatchCount(Struct):
    """Number of a model's batches that closed for one reason."""

    reason: str
    count: int


class RowCount(Struct):
    """Number of rows that a model has run."""

    model: str
    count: int


class TimeSum(Struct):
    """Number of durations of a model, and their sum."""

    model: str
    count: int
    seconds: float


class Totals(Struct):
    """Totals since the start of the process."""

    requests: list[RequestCount]
    batches: list[BatchCount]
    rows: list[RowCount]
    times: dict[str, list[TimeSum]]


class Status(Struct):
    """One response of `/status`."""

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
