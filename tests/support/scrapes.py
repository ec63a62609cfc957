"""A scrape as Prometheus reads it, by the parsers of its own client library."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Metric
from prometheus_client import generate_latest as as_text
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

from headrace.telemetry.metric_specs import METRIC_SPECS

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def parse_text(text: str) -> dict[str, Metric]:
    """The families of a scrape in Prometheus' text format, by name."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def parse_openmetrics(text: str) -> dict[str, Metric]:
    """The families of a scrape in OpenMetrics, by name; this parser is strict."""
    families = parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # theirs
    return {family.name: family for family in families}


def scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    """Return the metric families that a scrape of a registry shows."""
    return parse_text(as_text(registry).decode())


def scrape_openmetrics(registry: CollectorRegistry) -> dict[str, Metric]:
    """The same in OpenMetrics."""
    text = exposition.generate_latest(registry)  # type: ignore[no-untyped-call]  # theirs
    return parse_openmetrics(text.decode())


def strangers(families: dict[str, Metric]) -> list[str]:
    """Return the parts of a scrape that differ from the catalogue."""
    faults = []
    for name, family in families.items():
        if name.startswith(("process_", "python_")) or name.endswith("_created"):
            continue  # the client library's own
        spec = METRIC_SPECS.get(name)
        if spec is None:
            faults.append(f"{name}: not in the catalogue")
            continue
        if family.type != spec.type:
            faults.append(f"{name}: expected a {spec.type}, got a {family.type}")
        faults += [
            f"{sample.name}: expected labels {spec.labels}, got {sorted(sample.labels)}"
            for sample in family.samples
            if sample.labels.keys() - {"le"} != set(spec.labels)
            and not sample.name.endswith("_created")
        ]
    return faults
