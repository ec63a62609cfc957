"""The metrics that a text names, held against those that exist."""

from __future__ import annotations

import re

from headrace.telemetry.metric_specs import METRIC_SPECS

_PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_count", "_sum")}

EXPOSED = {name + part for name, spec in METRIC_SPECS.items() for part in _PARTS[spec.type]}
"""All names that a query can have; a histogram's own name stands for all of it."""


def unknown_metrics(text: str) -> list[str]:
    """The names in a query, or in prose, that look like one of Headrace's metrics and are none."""
    return [name for name in re.findall(r"\bheadrace_\w+", text) if name not in EXPOSED]
