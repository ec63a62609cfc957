"""The Grafana dashboard: made by the code, and asking for nothing that is not there."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.telemetry.metric_specs import METRIC_SPECS
from tests.support.metric_names import unknown_metrics
from tests.support.tree import ROOT
from tools.dashboard.__main__ import FILE, main
from tools.dashboard.queries import selected

VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, rows and the panels of collapsed rows included."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """All queries of the panels."""
    return [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", ())]


def test_dashboard_file_matches_code() -> None:
    """`python -m tools.dashboard` would change nothing."""
    assert main(["--check"]) == 0


def test_dashboard_names_only_metrics_that_exist(dashboard: dict[str, Any]) -> None:
    """Every name in a query or a variable is exposed by a metric."""
    assert unknown_metrics(FILE.read_text(encoding="utf-8")) == []
    assert len(expressions(dashboard)) > 50


def test_dashboard_queries_group_by_labels_of_their_metrics(dashboard: dict[str, Any]) -> None:
    """A label that a metric has not would sum everything into one nameless series."""
    wrong = [
        expression
        for expression in expressions(dashboard)
        for grouped in re.findall(r" by \(([\w, ]+)\)", expression)
        for metric in re.findall(r"\bheadrace_\w+(?=\{)", expression)
        if not set(grouped.split(", ")) <= {"le", "instance", *labels_of(metric)}
    ]

    assert not wrong


def test_dashboard_legends_use_labels_of_their_queries(dashboard: dict[str, Any]) -> None:
    """A series is called by a label that its query groups by."""
    wrong = [
        target
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        if not re.search(rf" by \((?:[\w, ]*\W)?{label}\b", target["expr"])
    ]

    assert not wrong


def test_dashboard_shows_gauges_in_their_units(dashboard: dict[str, Any]) -> None:
    """Grafana writes 5400 of no unit as 5.4 K, and as seconds as 1.5 hours."""
    units = {"seconds": "s", "bytes": "bytes"}
    wrong = [
        panel["title"]
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
        for metric in re.findall(r"^\w+ by \(.*\) \((headrace_\w+)\{[^/]*$", target["expr"])
        if (spec := METRIC_SPECS.get(metric)) is not None and spec.unit
        if panel["fieldConfig"]["defaults"]["unit"] != units[spec.unit]
    ]

    assert not wrong


def test_query_of_unknown_metric_is_refused() -> None:
    """A name that was changed stops the writing of the dashboard."""
    with pytest.raises(KeyError):
        selected("headrace_requests_per_second")


def test_dashboard_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    """Every panel has a number and a place of its own, within the 24 columns."""
    numbers = [panel["id"] for panel in panels(dashboard)]
    open_panels = [panel["gridPos"] for panel in dashboard["panels"]]

    assert len(numbers) == len(set(numbers))
    assert all(place["x"] + place["w"] <= 24 for place in open_panels)
    assert not [pair for pair in combinations(open_panels, 2) if overlap(*pair)]


def test_dashboard_declares_variables_of_its_queries(dashboard: dict[str, Any]) -> None:
    """Each `$name` is a variable of the dashboard, or one of Grafana's own."""
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {
        name
        for text in [*expressions(dashboard), json.dumps(dashboard["templating"])]
        for name in VARIABLE.findall(text)
        if not name.startswith("__")
    }

    assert used <= declared


def test_compose_mounts_dashboard(dashboard: dict[str, Any]) -> None:
    """Grafana finds the file and a data source where the Compose file and its settings say."""
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    grafana = compose["services"]["grafana"]
    mounts = dict(volume.removesuffix(":ro").split(":") for volume in grafana["volumes"])
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (provider,) = read(provisioning / "dashboards" / "headrace.yaml")["providers"]
    sources = read(provisioning / "datasources" / "headrace.yaml")["datasources"]

    assert mounts[f"./grafana/{FILE.name}"] == home
    assert Path(home).parent == Path(provider["options"]["path"])
    assert {source["type"] for source in sources} == {"prometheus", "jaeger"}
    assert all(re.split(r"[/:]+", source["url"])[1] in compose["services"] for source in sources)


@pytest.mark.slow
def test_promtool_parses_every_dashboard_query(
    promtool: Path, dashboard: dict[str, Any], tmp_path: Path
) -> None:
    """Each query is valid PromQL, once Grafana has put its variables in."""
    rules = [
        {"record": f"query:{number}", "expr": filled(expression)}
        for number, expression in enumerate(expressions(dashboard))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    read = subprocess.run(
        [promtool, "check", "rules", file], check=False, capture_output=True, text=True
    )

    assert read.returncode == 0, read.stdout + read.stderr


def filled(expression: str) -> str:
    """A query as Prometheus gets it."""
    return VARIABLE.sub(".*", expression.replace("$__rate_interval", "1m"))


def labels_of(name: str) -> tuple[str, ...]:
    """The labels of the metric that has this exposed name."""
    family = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
    return METRIC_SPECS[name if name in METRIC_SPECS else family].labels


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two places have a cell in common."""
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or below)


def read(path: Path) -> dict[str, Any]:
    """A YAML file."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
