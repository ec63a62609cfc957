"""The whole state of a process in one place: for `/status`, and for the gauges of `/metrics`.

Nothing is stored here. Each component is queried when the state is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headrace import __version__
from headrace.telemetry.health import Health
from headrace.telemetry.loop_lag import LoopLag
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.recent_errors import RecentErrors
from headrace.telemetry.snapshots import (
    DeviceSnapshot,
    PartitionSnapshot,
    SourceSnapshot,
    WaitingSnapshot,
)
from headrace.telemetry.watchdog import Activity, LoopWatchdog
from headrace.tuning import TUNING, RuntimeTuning


class Place(NamedTuple):
    """Identity of this process among those of several machines and namespaces.

    Attributes:
        broker: the configured addresses; empty for a log in its own memory.
    """

    namespace: str = ""
    host: str = ""
    broker: str = ""


class ProcessState:
    """The state that a process exposes.

    Args:
        stages: the stages of the process.
        health: its phase; given checks here for stuck activities and silent brokers.
        metrics: its counters.
        max_unanswered_s: after this long with records waiting, and none answered, the process is
            not ready; 0 disables this.
        models: the entries of its models, see `headrace.models.registry.Models.status`.

    Attributes:
        sources, activities, waiting: queried for their state; the composition root adds them.
        place: the identity of the process; the composition root sets it.
        log_lines_suppressed: by kind, see `headrace.telemetry.flood.LogRateLimiter`.
    """

    def __init__(
        self,
        stages: Sequence[str],
        health: Health,
        metrics: Metrics,
        models: Callable[[], list[dict[str, Any]]],
        max_unanswered_s: float = 0.0,
        tuning: RuntimeTuning = TUNING.runtime,
    ) -> None:
        self.stages = tuple(str(stage) for stage in stages)
        self.health = health
        self.metrics = metrics
        self.models = models
        self.sources: list[Callable[[], SourceSnapshot]] = []
        self.activities: list[Callable[[], Sequence[Activity]]] = []
        self.devices: list[Callable[[], Sequence[DeviceSnapshot]]] = []
        self.waiting: Callable[[], WaitingSnapshot | None] = lambda: None
        self.recent_errors = RecentErrors(tuning)
        self.loop_lag = LoopLag(metrics.loop_lag, tuning.loop_lag_interval_s)
        self.place = Place()
        self.log_lines_suppressed: dict[str, int] = {}
        self._max_unanswered_s = max_unanswered_s
        self._tuning = tuning
        self._started_at = datetime.now(UTC)
        self._started_s = time.monotonic()
        health.watch_live(self._stuck)
        health.watch_ready(self._silence)
        health.watch_ready(self._stuck_base)
        if max_unanswered_s:
            health.watch_ready(self._no_progress)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the event loop and the log while the context lasts."""
        with LoopWatchdog(self._tuning) as watch, self.recent_errors.listening():
            self.activities.append(lambda: [watch.turns])
            lag = asyncio.create_task(self.loop_lag.run(), name="loop-lag")
            try:
                yield
            finally:
                lag.cancel()
                await asyncio.wait([lag])

    def _stuck(self) -> str:
        faults = (each.fault() for asked in self.activities for each in asked())
        return next(filter(None, faults), "")

    def _silence(self) -> str:
        for asked in self.sources:
            source = asked()
            if source.last_contact_s > self._tuning.broker_silence_s:
                return f"the broker was last heard of {source.last_contact_s:.0f} s ago"
        return ""

    def _no_progress(self) -> str:
        for asked in self.sources:
            source, limit_s = asked(), self._max_unanswered_s
            if source.assigning_s > limit_s:
                return (
                    f"{source.topic}: its partitions could not be taken up for "
                    f"{source.assigning_s:.0f} s; partitions.assignment_delayed in the log says why"
                )
            if source.stalled_s > limit_s:
                return (
                    f"{source.topic}: {source.backlog_records} records wait, and none was answered "
                    f"for {source.stalled_s:.0f} s"
                )
        return ""

    def _stuck_base(self) -> str:
        stuck = [each for asked in self.sources for each in asked().partitions if each.is_stuck]
        if not stuck:
            return ""
        first = stuck[0]
        return (
            f"{first.topic}/{first.partition}: its base has not moved for "
            f"{first.base_age_s:.0f} s, though that request was passed on: it may be lost between "
            "the stages; restart this process to pass it on again"
        )

    def status(self) -> dict[str, Any]:
        """Return the body of `/status`; `docs/health.md` describes its content."""
        health = self.health
        waiting = self.waiting()
        return {
            "version": __version__,
            **self.place._asdict(),
            "stages": list(self.stages),
            "started_at": self._started_at.isoformat(timespec="milliseconds")[:-6] + "Z",
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "phase": str(health.phase),
            "live": {"live": health.live, "reason": health.live_fault()},
            "ready": {"ready": health.ready, "reason": health.ready_fault()},
            "event_loop_lag_s": self.loop_lag.last_s,
            "activities": [
                {
                    "name": each.name,
                    "begun": each.begun,
                    "for_s": each.for_s(),
                    "limit_s": each.limit_s,
                }
                for asked in self.activities
                for each in asked()
            ],
            "sources": [_source(asked()) for asked in self.sources],
            "waiting": None if waiting is None else waiting._asdict(),
            "models": self.models(),
            "totals": self.metrics.totals(),
            "last_errors": self.recent_errors.entries(),
        }


def _source(source: SourceSnapshot) -> dict[str, Any]:
    return {
        **source._asdict(),
        "commit": source.commit._asdict(),
        "partitions": [_partition(each, source.paused) for each in source.partitions],
    }


def _partition(partition: PartitionSnapshot, paused: str) -> dict[str, Any]:
    paused = paused or partition.paused
    return {**partition._asdict(), "lag_records": partition.lag_records, "paused": paused}
