"""The page of metrics, the specs and the registry: one truth in three places."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from headrace.telemetry.metric_specs import METRIC_SPECS, MetricSpec
from headrace.telemetry.metrics import Metrics
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(headrace_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| (.+) \|$", re.MULTILINE)


class Row(NamedTuple):
    """A line of one of the page's tables."""

    type: str
    labels: tuple[str, ...]
    meaning: str


ROWS = {
    name: Row(kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
    for name, kind, _, labels, meaning in ROW.findall(PAGE)
}


def test_metrics_page_lists_exactly_metrics_of_code() -> None:
    """No metric is missing on the page, and none is there that the code does not have."""
    assert set(ROWS) == {spec.exposed_name for spec in METRIC_SPECS.values()}


@pytest.mark.parametrize("spec", METRIC_SPECS.values(), ids=lambda spec: spec.name)
def test_metrics_page_rows_match_catalogue(spec: MetricSpec) -> None:
    """Type, labels and meaning are the same."""
    assert ROWS[spec.exposed_name] == Row(spec.type, spec.labels, spec.meaning)


@pytest.mark.parametrize("spec", METRIC_SPECS.values(), ids=lambda spec: spec.name)
def test_metric_names_follow_conventions(spec: MetricSpec) -> None:
    """Ours begin with `headrace_`; units are base units in full; only counters end in `_total`."""
    assert re.fullmatch(r"headrace(_[a-z]+)+", spec.name)
    assert not re.search(r"_(ms|us|milliseconds|kb|mb|total|count|sum|bucket)$", spec.name)


@pytest.mark.parametrize(
    "query", re.findall(r"headrace_\w+", PAGE[PAGE.index("```promql") :]), ids=lambda name: name
)
def test_queries_of_metrics_page_name_existing_metrics(query: str) -> None:
    """Each query on the page can be copied."""
    assert query.removesuffix("_bucket") in ROWS


def test_every_registered_metric_has_spec() -> None:
    """Metrics in the registry of a process have the name and type of their specs."""
    registry = CollectorRegistry()
    Metrics(registry)
    families = {family.name: family for family in registry.collect()}
    assert families.keys() <= METRIC_SPECS.keys()
    assert {name: family.type for name, family in families.items()} == {
        name: METRIC_SPECS[name].type for name in families
    }
