"""The parts of a dashboard: rows of panels, and the queries of each panel."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Query(NamedTuple):
    """PromQL, and how its series are called."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel.

    Attributes:
        unit: of Grafana's own list.
        width: of 24 columns.
        limits: from which value on a stat is orange, and red; the other way round where
            `low_is_bad`.
        exemplars: show points that lead to traces.
        signed: values may be below 0, so the axis does not begin there.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["stat", "timeseries", "table"] = "timeseries"
    width: int = 8
    stack: Literal["", "normal", "percent"] = ""
    limits: tuple[float, ...] = ()
    low_is_bad: bool = False
    logarithmic: bool = False
    exemplars: bool = False
    signed: bool = False


class Row(NamedTuple):
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False
