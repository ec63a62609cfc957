"""How Grafana writes a dashboard down, schema version 41.

https://grafana.com/docs/grafana/latest/visualizations/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tools.dashboard.panels import Panel, Row

COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHTS = {"stat": 4, "timeseries": 8, "table": 8}


def dashboard(rows: Sequence[Row]) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model has it."""
    return {
        "uid": "headrace",
        "title": "Headrace",
        "description": "Written by tools/dashboard; changes made by hand are lost.",
        "tags": ["headrace", "kafka", "inference"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(_variables())},
        "annotations": {"list": [_firing_alerts()]},
        "panels": list(_placed(rows)),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    for name, label, metric in (
        ("job", "Job", "headrace_build_info"),
        ("instance", "Process", 'headrace_build_info{job=~"$job"}'),
        ("model", "Model", 'headrace_model_state{job=~"$job"}'),
    ):
        query = f"label_values({metric}, {name})"
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            # Also the empty model, of requests that named none that is there.
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _firing_alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Headrace.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
        "step": "30s",
    }


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """All panels with their numbers and places, row by row from the top."""
    number, top = 0, 0
    for row in rows:
        number += 1
        head: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        top += 1
        left, tallest, panels = 0, 0, []
        for panel in row.panels:
            number += 1
            if left + panel.width > COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            height = HEIGHTS[panel.kind]
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            panels.append({"id": number, "gridPos": place} | _drawn(panel))
            left, tallest = left + panel.width, max(tallest, height)
        top += tallest
        # Grafana keeps the panels of a collapsed row inside it, and those of an open one after it.
        if row.collapsed:
            yield head | {"panels": panels}
            top = head["gridPos"]["y"] + 1
        else:
            yield head
            yield from panels


def _drawn(panel: Panel) -> dict[str, Any]:
    draw = {"stat": _stat, "timeseries": _timeseries, "table": _table}[panel.kind]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "targets": list(_targets(panel)),
    } | draw(panel)


def _targets(panel: Panel) -> Iterator[dict[str, Any]]:
    for letter, query in zip("ABCDEFGHIJ", panel.queries, strict=False):
        yield {
            "refId": letter,
            "datasource": SOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "range": panel.kind == "timeseries",
            "instant": panel.kind != "timeseries",
            "exemplar": panel.exemplars,
            "format": "table" if panel.kind == "table" else "time_series",
        }


def _stat(panel: Panel) -> dict[str, Any]:
    colours = ("green", "orange", "red")
    limits: tuple[float | None, ...] = (None, *panel.limits)
    if panel.low_is_bad:
        colours = ("red", "orange", "green")
    steps = [
        {"color": colour, "value": limit} for colour, limit in zip(colours, limits, strict=False)
    ]
    return {
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "noValue": "–",
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {
            "colorMode": "value" if panel.limits else "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _timeseries(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": panel.stack or "none", "group": "A"}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stack else 5,
        "showPoints": "never",
        "stacking": stacking,
        "scaleDistribution": {"type": "log", "log": 10}
        if panel.logarithmic
        else {"type": "linear"},
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if not (panel.logarithmic or panel.signed):
        defaults["min"] = 0
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _table(panel: Panel) -> dict[str, Any]:
    hidden = {"Time": True, "Value": True, "__name__": True}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"showHeader": True},
        "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}],
    }
