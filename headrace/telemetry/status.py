"""The state of a process: the body of `/status`, and the gauges of `/metrics`.

Nothing is stored here. Each component is queried when the state is read.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace import __version__
from headrace.models.stores.cache import CacheSize
from headrace.models.version import State
from headrace.telemetry.health import Health
from headrace.telemetry.logs import Event, RecentErrors
from headrace.telemetry.metric_specs import METRIC_SPECS
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import (
    DeviceSnapshot,
    GatewaySnapshot,
    ModelMemorySnapshot,
    PartitionSnapshot,
    QueueSnapshot,
    SourceSnapshot,
    WantedSnapshot,
)
from headrace.telemetry.watchdog import Activity, LoopLag, LoopWatchdog
from headrace.tuning import TUNING, RuntimeTuning


class ProcessIdentity(NamedTuple):
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
        models: the entries of its models, see `headrace.models.catalog.ModelCatalog.status`.

    Attributes:
        sources, activities, devices, queue, wanted, gateway, cache: called for a snapshot of their
            state; the composition root adds them.
        identity: of the process; the composition root sets it.
        log_lines_suppressed: by kind, see `headrace.telemetry.logs.LogRateLimiter`.
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
        self.queue: Callable[[], QueueSnapshot | None] = lambda: None
        self.wanted: Callable[[], WantedSnapshot | None] = lambda: None
        self.model_memory: Callable[[], ModelMemorySnapshot | None] = lambda: None
        self.gateway: Callable[[], GatewaySnapshot | None] = lambda: None
        self.cache: Callable[[], CacheSize | None] = lambda: None
        self.recent_errors = RecentErrors(tuning)
        self.loop_lag = LoopLag(metrics.loop_lag, tuning.loop_lag_interval_s)
        self.identity = ProcessIdentity()
        self.log_lines_suppressed: dict[str, int] = {}
        self._max_unanswered_s = max_unanswered_s
        self._tuning = tuning
        self._started_at = datetime.now(UTC)
        self._started_s = time.monotonic()
        health.watch_live(self._find_stuck_activity)
        health.watch_ready(self._find_silent_broker)
        health.watch_ready(self._find_stuck_base)
        if max_unanswered_s:
            health.watch_ready(self._find_stalled_source)

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

    def _find_stuck_activity(self) -> str:
        faults = (each.fault() for snapshot in self.activities for each in snapshot())
        return next(filter(None, faults), "")

    def _find_silent_broker(self) -> str:
        readers = _readers([snapshot() for snapshot in self.sources], self.gateway())
        silent_s = max((each.last_contact_s for each in readers), default=0.0)
        if silent_s <= self._tuning.broker_silence_s:
            return ""
        return f"the broker was last heard of {silent_s:.0f} s ago"

    def _find_stalled_source(self) -> str:
        for snapshot in self.sources:
            source, limit_s = snapshot(), self._max_unanswered_s
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

    def _find_stuck_base(self) -> str:
        stuck = [
            each for snapshot in self.sources for each in snapshot().partitions if each.is_stuck
        ]
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
        queue, wanted, gateway = self.queue(), self.wanted(), self.gateway()
        budget = self.model_memory()
        return {
            "version": __version__,
            **self.identity._asdict(),
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
                for snapshot in self.activities
                for each in snapshot()
            ],
            "sources": [_source_entry(snapshot()) for snapshot in self.sources],
            "waiting": None if queue is None else queue._asdict(),
            "models": self.models(),
            "model_memory": None if budget is None else budget._asdict(),
            "control": None
            if wanted is None
            else {
                "generation": wanted.generation,
                "unready": [each.line for each in wanted.unready],
            },
            "gateway": None
            if gateway is None
            else {**gateway._asdict(), **self.metrics.gateway_totals()},
            "totals": self.metrics.totals(),
            "last_errors": self.recent_errors.entries(),
        }


def _readers(
    sources: Sequence[SourceSnapshot], gateway: GatewaySnapshot | None
) -> list[SourceSnapshot | GatewaySnapshot]:
    """Return what reads topics; in a process with a gateway alone, only that does."""
    return [*sources] if gateway is None else [*sources, gateway]


def _source_entry(source: SourceSnapshot) -> dict[str, Any]:
    return {
        **source._asdict(),
        "commit": source.commit._asdict(),
        "partitions": [_partition_entry(each, source.paused) for each in source.partitions],
    }


def _partition_entry(partition: PartitionSnapshot, paused: str) -> dict[str, Any]:
    paused = paused or partition.paused
    return {**partition._asdict(), "lag_records": partition.lag_records, "paused": paused}


# --- gauges --------------------------------------------------------------------------------------

Value: TypeAlias = float | None
Series: TypeAlias = tuple[tuple[str, ...], Value]

PAUSES = ("ahead", "budget", "drain", "metadata", "order", "share")
_SOURCE_GAUGES = {
    "in_flight_records": "in_flight_records",
    "in_flight_bytes": "in_flight_bytes",
    "in_flight_limit_bytes": "limit_bytes",
    "oldest_record_age_seconds": "oldest_age_s",
    "backlog_records": "backlog_records",
    "throughput_records_per_second": "throughput_per_s",
    "time_to_drain_seconds": "time_to_drain_s",
    "stalled_seconds": "stalled_s",
    "assigning_seconds": "assigning_s",
}
_PARTITION_GAUGES = {
    "consumer_lag_records": "lag_records",
    "partition_in_flight_records": "in_flight",
    "partition_in_flight_span_records": "span_records",
    "partition_answered_records": "answered_records",
    "partition_answered_ranges": "answered_ranges",
    "partition_commit_metadata_characters": "metadata_characters",
    "partition_base_age_seconds": "base_age_s",
    "partition_deferred_records": "deferred_records",
}
_OWN_EVENTS = frozenset(str(event) for event in Event)


def register_gauges(state: ProcessState) -> None:
    """Add the state of the process to its metrics."""
    state.metrics.registry.register(StateGauges(state))


def register_interpreter_metrics(registry: CollectorRegistry) -> None:
    """Add CPU, memory, files and garbage collection to the metrics; call it once in a process.

    The client library's `_created` series are left out: they would double the rare counters.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


class StateGauges(Collector):
    """Exports a `ProcessState`; register it once."""

    def __init__(self, state: ProcessState) -> None:
        self._state = state

    def describe(self) -> Iterable[Any]:
        """Describe nothing at registration, when there is no state to read yet."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Return the current samples, for a scrape; runs on the event loop."""
        sources = [snapshot() for snapshot in self._state.sources]
        yield from _source_gauges(sources)
        gateway = self._state.gateway()
        heard = [((each.topic,), each.last_contact_s) for each in _readers(sources, gateway)]
        yield _gauge("log_last_contact_seconds", heard)
        yield from _partition_gauges(sources)
        yield from self._process_gauges()
        yield self._device_gauge()
        yield self._model_gauge()
        yield _gauge(
            "model_load_seconds",
            [
                ((entry["name"], entry["version"]), entry.get("load_s"))
                for entry in self._state.models()
            ],
        )
        yield from self._memory_gauges()
        yield self._suppressed_counter()
        if gateway is not None:
            yield from _gateway_metrics(gateway)

    def _process_gauges(self) -> Iterator[GaugeMetricFamily]:
        state = self._state
        yield _gauge("live", [((), state.health.live)])
        yield _gauge("ready", [((), state.health.ready)])
        labels = (__version__, platform.python_version(), ",".join(state.stages))
        yield _gauge("build_info", [(labels, 1)])
        queue = state.queue()
        if queue is not None:
            yield _gauge("waiting_requests", [((), queue.requests)])
            yield _gauge("deadline_slack_seconds", [((), queue.deadline_slack_s)])
        wanted = state.wanted()
        if wanted is not None:
            yield _gauge("control_generation", [((), wanted.generation)])
            yield _gauge("control_unready_versions", [((), len(wanted.unready))])
            yield _gauge("control_following", [((), int(wanted.is_following))])
        cache = state.cache()
        if cache is not None:
            yield _gauge("model_cache_bytes", [((), cache.size_bytes)])
            yield _gauge("model_cache_limit_bytes", [((), cache.limit_bytes)])

    def _memory_gauges(self) -> Iterator[GaugeMetricFamily]:
        yield _gauge(
            "model_memory_bytes",
            [
                ((entry["name"], entry["version"], device), sum(sizes))
                for entry in self._state.models()
                for device, sizes in entry.get("memory_bytes", {}).items()
            ],
        )
        budget = self._state.model_memory()
        if budget is not None:
            yield _gauge(
                "model_memory_budget_bytes",
                [(("limit",), budget.limit_bytes), (("held",), budget.held_bytes)],
            )

    def _device_gauge(self) -> GaugeMetricFamily:
        memory = {
            (each.device, kind): size
            for snapshot in self._state.devices
            for each in snapshot()
            for kind, size in each.memory_bytes.items()
        }
        return _gauge("device_memory_bytes", memory.items())

    def _model_gauge(self) -> GaugeMetricFamily:
        return _gauge(
            "model_state",
            [
                ((entry["name"], entry["version"], str(state)), entry["state"] == state)
                for entry in self._state.models()
                for state in State
            ],
        )

    def _suppressed_counter(self) -> CounterMetricFamily:
        counts: dict[str, int] = {}
        for kind, count in self._state.log_lines_suppressed.items():
            event = kind if kind in _OWN_EVENTS else "library"
            counts[event] = counts.get(event, 0) + count
        return _counter(
            "log_lines_suppressed", [((event,), count) for event, count in counts.items()]
        )


def _source_gauges(sources: list[SourceSnapshot]) -> Iterator[GaugeMetricFamily]:
    for name, attribute in _SOURCE_GAUGES.items():
        yield _gauge(name, [((one.topic,), getattr(one, attribute)) for one in sources])
    held = [
        ((one.topic, model), size) for one in sources for model, size in one.model_bytes.items()
    ]
    yield _gauge("model_in_flight_bytes", held)
    committing = [one for one in sources if one.commit.commits]
    yield _gauge("commit_age_seconds", [((one.topic,), one.commit.age_s) for one in committing])
    yield _gauge(
        "assigned_partitions",
        [((one.topic,), sum(p.topic == one.topic for p in one.partitions)) for one in sources],
    )


def _partition_gauges(sources: list[SourceSnapshot]) -> Iterator[GaugeMetricFamily]:
    partitions = [one for source in sources for one in source.partitions]
    for name, attribute in _PARTITION_GAUGES.items():
        yield _gauge(name, [(_labels(one), getattr(one, attribute)) for one in partitions])
    yield _gauge(
        "partition_paused",
        [
            ((*_labels(one), reason), reason in (source.paused, one.paused))
            for source in sources
            for one in source.partitions
            if one.topic == source.topic
            for reason in PAUSES
        ],
    )


def _labels(partition: PartitionSnapshot) -> tuple[str, str]:
    return (partition.topic, str(partition.partition))


def _gateway_metrics(gateway: GatewaySnapshot) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    yield _gauge("gateway_in_flight_requests", [((), gateway.requests)])
    yield _gauge("gateway_in_flight_limit_requests", [((), gateway.limit_requests)])
    yield _gauge("gateway_in_flight_bytes", [((), gateway.size_bytes)])
    yield _gauge("gateway_in_flight_limit_bytes", [((), gateway.limit_bytes)])
    refused = [((limit,), count) for limit, count in gateway.refused.items()]
    yield _counter("gateway_full_requests", refused)
    yield _gauge("gateway_shared_memory_regions", [((), gateway.regions)])
    yield _gauge("gateway_limited_callers", [((), gateway.callers)])
    yield _gauge("gateway_connections", [((), gateway.connections)])
    yield _counter("gateway_connections_closed", [((), gateway.connections_closed)])
    untaken = [((door,), size_bytes) for door, size_bytes in gateway.untaken_bytes.items()]
    yield _gauge("gateway_untaken_bytes", untaken)
    yield _counter("gateway_late_answers", [((), gateway.late_answers)])
    limited = [((reason,), count) for reason, count in gateway.limited.items()]
    yield _counter("gateway_limited_requests", limited)


def _counter(name: str, series: Iterable[tuple[Sequence[str], int]]) -> CounterMetricFamily:
    spec = METRIC_SPECS[f"headrace_{name}"]
    family = CounterMetricFamily(spec.name, spec.meaning, labels=spec.labels)
    for labels, value in series:
        family.add_metric(labels, value)
    return family


def _gauge(name: str, series: Iterable[Series]) -> GaugeMetricFamily:
    """Return a metric family, without unknown values."""
    spec = METRIC_SPECS[f"headrace_{name}"]
    family = GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels, unit=spec.unit)
    for labels, value in series:
        if value is not None:
            family.add_metric(labels, float(value))
    return family
