"""PromQL, made from the specs of the metrics, so that no query names one that is not there."""

from __future__ import annotations

from headrace.telemetry.metric_specs import METRIC_SPECS
from tools.dashboard.panels import Query

_CHOSEN = 'job=~"$job", instance=~"$instance"'
_INTERVAL = "$__rate_interval"
_OF_THE_CLIENT = {"process_cpu_seconds": "counter", "process_resident_memory_bytes": "gauge"}


def selected(metric: str, more: str = "", part: str = "") -> str:
    """A metric's series of the chosen processes and, where it has the label, models.

    Raises:
        KeyError: there is no such metric.
    """
    if metric in _OF_THE_CLIENT:
        labels: tuple[str, ...] = ()
        name = f"{metric}_total" if _OF_THE_CLIENT[metric] == "counter" else metric
    else:
        labels, name = METRIC_SPECS[metric].labels, METRIC_SPECS[metric].exposed_name
    chosen = [
        _CHOSEN,
        *(['model=~"$model"'] if "model" in labels else []),
        *([more] if more else []),
    ]
    return f"{name}{part}{{{', '.join(chosen)}}}"


def rate(metric: str, by: str = "", more: str = "", part: str = "") -> str:
    """Events per second."""
    return f"{_over('sum', by)} (rate({selected(metric, more, part)}[{_INTERVAL}]))"


def count(metric: str, by: str = "") -> str:
    """Events of one step of the graph, for those that are rare."""
    return f"{_over('sum', by)} (increase({selected(metric)}[{_INTERVAL}]))"


def mean(metric: str, by: str = "") -> str:
    """The mean of a histogram's observations."""
    return f"{rate(metric, by, part='_sum')} / {rate(metric, by, part='_count')}"


def quantile(part: float, metric: str, by: str = "") -> str:
    """A quantile of a histogram's observations."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, {rate(metric, labels, part='_bucket')})"


def worst(metric: str, by: str = "") -> str:
    """The highest value of a gauge."""
    return f"{_over('max', by)} ({selected(metric)})"


def least(metric: str, by: str = "") -> str:
    """The lowest value of a gauge."""
    return f"{_over('min', by)} ({selected(metric)})"


def total(metric: str, by: str = "") -> str:
    """The values of a gauge together."""
    return f"{_over('sum', by)} ({selected(metric)})"


def _over(operation: str, by: str) -> str:
    return f"{operation} by ({by})" if by else operation


def quantiles(metric: str, by: str) -> tuple[Query, ...]:
    """The median and the 99th percentile for each value of a label, or of `some, labels`."""
    name = "/".join(f"{{{{{each}}}}}" for each in by.split(", "))
    return tuple(
        Query(quantile(part, metric, by), f"{name} p{part * 100:g}") for part in (0.5, 0.99)
    )


def share(outcome: str) -> str:
    """The part of all answers that has this outcome."""
    some = rate("headrace_requests", more=f'outcome="{outcome}"')
    return f"({some} or vector(0)) / {rate('headrace_requests')}"
