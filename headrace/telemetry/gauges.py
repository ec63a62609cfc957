"""The gauges of `/metrics`, read from the state of the process at each scrape."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace import __version__
from headrace.models.version import State
from headrace.telemetry.catalogue import CATALOGUE
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import PartitionSnapshot, SourceSnapshot
from headrace.telemetry.state import ProcessState

Value: TypeAlias = float | None
Series: TypeAlias = tuple[tuple[str, ...], Value]

PAUSES = ("ahead", "budget", "drain", "metadata", "order", "share")
_OURS = frozenset(str(event) for event in Event)


def show(state: ProcessState) -> None:
    """Add the state of the process to its metrics."""
    state.metrics.registry.register(StateGauges(state))


def show_interpreter(registry: CollectorRegistry) -> None:
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
        """Called at registration; reads no state."""
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called by a scrape, on the event loop."""
        sources = [asked() for asked in self._state.sources]
        yield from _of_sources(sources)
        yield from _of_partitions(sources)
        yield from self._of_process()
        yield self._devices()
        yield self._models()
        yield self._suppressed()

    def _of_process(self) -> Iterator[GaugeMetricFamily]:
        state = self._state
        yield _gauge("live", [((), state.health.live)])
        yield _gauge("ready", [((), state.health.ready)])
        labels = (__version__, platform.python_version(), ",".join(state.stages))
        yield _gauge("build_info", [(labels, 1)])
        waiting = state.waiting()
        if waiting is not None:
            yield _gauge("waiting_requests", [((), waiting.requests)])
            yield _gauge("deadline_slack_seconds", [((), waiting.deadline_slack_s)])

    def _devices(self) -> GaugeMetricFamily:
        memory = {
            (each.device, kind): size
            for asked in self._state.devices
            for each in asked()
            for kind, size in each.memory_bytes.items()
        }
        return _gauge("device_memory_bytes", memory.items())

    def _models(self) -> GaugeMetricFamily:
        return _gauge(
            "model_state",
            [
                ((entry["name"], entry["version"], str(state)), entry["state"] == state)
                for entry in self._state.models()
                for state in State
            ],
        )

    def _suppressed(self) -> CounterMetricFamily:
        spec = CATALOGUE["headrace_log_lines_suppressed"]
        family = CounterMetricFamily(spec.name, spec.meaning, labels=spec.labels)
        counts: dict[str, int] = {}
        for kind, count in self._state.log_lines_suppressed.items():
            event = kind if kind in _OURS else "library"
            counts[event] = counts.get(event, 0) + count
        for event, count in counts.items():
            family.add_metric((event,), count)
        return family


def _of_sources(sources: list[SourceSnapshot]) -> Iterator[GaugeMetricFamily]:
    def each(name: str, attribute: str) -> GaugeMetricFamily:
        return _gauge(name, [((one.topic,), getattr(one, attribute)) for one in sources])

    yield each("in_flight_records", "in_flight_records")
    yield each("in_flight_bytes", "in_flight_bytes")
    yield each("in_flight_limit_bytes", "limit_bytes")
    yield each("oldest_record_age_seconds", "oldest_age_s")
    yield each("backlog_records", "backlog_records")
    yield each("throughput_records_per_second", "throughput_per_s")
    yield each("time_to_drain_seconds", "time_to_drain_s")
    yield each("stalled_seconds", "stalled_s")
    yield each("assigning_seconds", "assigning_s")
    yield each("log_last_contact_seconds", "last_contact_s")
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


def _of_partitions(sources: list[SourceSnapshot]) -> Iterator[GaugeMetricFamily]:
    partitions = [one for source in sources for one in source.partitions]

    def each(name: str, attribute: str) -> GaugeMetricFamily:
        series = [(_labels(one), getattr(one, attribute)) for one in partitions]
        return _gauge(name, series)

    yield each("consumer_lag_records", "lag_records")
    yield each("partition_in_flight_records", "in_flight")
    yield each("partition_in_flight_span_records", "span_records")
    yield each("partition_answered_records", "answered_records")
    yield each("partition_answered_ranges", "answered_ranges")
    yield each("partition_commit_metadata_characters", "metadata_characters")
    yield each("partition_base_age_seconds", "base_age_s")
    yield each("partition_deferred_records", "deferred_records")
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


def _gauge(name: str, series: Iterable[Series]) -> GaugeMetricFamily:
    """Return a metric family of the catalogue, without unknown values."""
    spec = CATALOGUE[f"headrace_{name}"]
    family = GaugeMetricFamily(spec.name, spec.meaning, labels=spec.labels, unit=spec.unit)
    for labels, value in series:
        if value is not None:
            family.add_metric(labels, float(value))
    return family
