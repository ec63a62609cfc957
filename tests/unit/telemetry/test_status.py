"""Gauges that a scrape asks the process for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from headrace.models.stores.cache import CacheSize
from headrace.telemetry.health import Health
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.snapshots import DeviceSnapshot
from headrace.telemetry.status import ProcessState, StateGauges


def test_status_shows_device_memory_once() -> None:
    """Memory is listed by kind and pool, for any number of instances that report it."""
    state = ProcessState(["executor"], Health(), Metrics(CollectorRegistry()), list)
    seen = DeviceSnapshot("cuda:0", {"free": 5, "total": 8, "cupy": 2})
    state.devices.append(lambda: [seen, seen])
    registry = CollectorRegistry()
    registry.register(StateGauges(state))

    samples = {
        tuple(sample.labels.items()): sample.value
        for family in registry.collect()
        if family.name == "headrace_device_memory_bytes"
        for sample in family.samples
    }
    assert samples == {
        (("device", "cuda:0"), ("kind", kind)): size for kind, size in seen.memory_bytes.items()
    }


def test_status_without_gpu_shows_no_device_memory() -> None:
    """The metric is explained, and has no values."""
    state = ProcessState(["executor"], Health(), Metrics(CollectorRegistry()), list)
    registry = CollectorRegistry()
    registry.register(StateGauges(state))

    [family] = [
        family for family in registry.collect() if family.name == "headrace_device_memory_bytes"
    ]
    assert family.samples == []


def test_cache_of_models_is_shown_where_store_is_used() -> None:
    """There is no series where models come from directories."""
    state = ProcessState(["executor"], Health(), Metrics(CollectorRegistry()), list)
    registry = CollectorRegistry()
    registry.register(StateGauges(state))
    names = ("headrace_model_cache_bytes", "headrace_model_cache_limit_bytes")
    assert [registry.get_sample_value(name) for name in names] == [None, None]

    state.cache = lambda: CacheSize(7, 9)
    assert [registry.get_sample_value(name) for name in names] == [7, 9]
