"""The metrics that a text names, held against those that exist."""

from __future__ import annotations

import re

from headrace.telemetry.metric_specs import METRIC_SPECS

_PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_count", "_sum")}

EXPOSED = {name + part for name, spec in METRIC_SPECS.items() for part in _PARTS[spec.type]}
"""All names that a query can have; a histogram's own name stands for all of it."""

SHOWN_ONLY_WHEN = {
    "headrace_deadline_slack_seconds",  # a request with a deadline waits
    "headrace_broker_requests",  # the log is Kafka
    "headrace_model_cache_bytes",  # models.repository has a store
    "headrace_model_cache_limit_bytes",
    "headrace_control_generation",  # models.mode is explicit
    "headrace_control_unready_versions",
    "headrace_control_following",
    "headrace_model_memory_budget_bytes",  # models.memory_bytes is set
    "headrace_certificate_expiry_timestamp_seconds",  # a server speaks TLS
    "headrace_gateway_in_flight_requests",  # the process has a gateway
    "headrace_gateway_in_flight_limit_requests",
    "headrace_gateway_in_flight_bytes",
    "headrace_gateway_in_flight_limit_bytes",
    "headrace_gateway_full_requests",
    "headrace_gateway_late_answers",
    "headrace_gateway_shared_memory_regions",
    "headrace_gateway_limited_requests",
    "headrace_gateway_limited_callers",
    "headrace_gateway_connections",
    "headrace_gateway_connections_closed",
    "headrace_gateway_untaken_bytes",
}
"""Metrics that a process shows only under a condition."""


def unknown_metrics(text: str) -> list[str]:
    """The names in a query, or in prose, that look like one of Headrace's metrics and are none."""
    return [name for name in re.findall(r"\bheadrace_\w+", text) if name not in EXPOSED]
