"""The rows about requests: how many, how fast, at which doors, in which batches and models."""

from __future__ import annotations

from tools.dashboard.panels import Panel, Query, Row
from tools.dashboard.queries import (
    count,
    least,
    mean,
    quantile,
    quantiles,
    rate,
    selected,
    share,
    total,
    worst,
)


def _stat(
    title: str,
    description: str,
    unit: str,
    expression: str,
    limits: tuple[float, ...] = (),
    *,
    low_is_bad: bool = False,
) -> Panel:
    return Panel(
        title,
        description,
        unit,
        (Query(expression),),
        kind="stat",
        width=3,
        limits=limits,
        low_is_bad=low_is_bad,
    )


GLANCE = Row(
    "At a glance",
    (
        _stat(
            "Answers", "Acknowledged, whatever their outcome.", "reqps", rate("headrace_requests")
        ),
        _stat(
            "Expired", "DEADLINE_EXCEEDED, of all.", "percentunit", share("expired"), (0.001, 0.01)
        ),
        _stat(
            "Failed",
            "MODEL_FAILED and INTERNAL, of all.",
            "percentunit",
            share("failed"),
            (0.001, 0.01),
        ),
        _stat(
            "End to end, p99",
            "From the request record's timestamp to the acknowledged answer.",
            "s",
            quantile(0.99, "headrace_request_duration_seconds"),
        ),
        _stat(
            "Time to drain",
            "Of the process that needs longest: backlog over learned throughput.",
            "s",
            worst("headrace_time_to_drain_seconds"),
            (10, 60),
        ),
        _stat(
            "Oldest unanswered",
            "Age of the oldest record that was read.",
            "s",
            worst("headrace_oldest_record_age_seconds"),
            (10, 60),
        ),
        _stat(
            "Budget in use",
            "Bytes in flight, of the process that has used most of its limit.",
            "percentunit",
            f"max({selected('headrace_in_flight_bytes')}"
            f" / {selected('headrace_in_flight_limit_bytes')})",
            (0.8, 0.95),
        ),
        _stat(
            "Processes ready",
            "Of those that can be scraped.",
            "percentunit",
            f"avg({selected('headrace_ready')})",
            (0.5, 1),
            low_is_bad=True,
        ),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Answers by model",
            "",
            "reqps",
            (Query(rate("headrace_requests", "model"), "{{model}}"),),
        ),
        Panel(
            "Answers that are errors",
            "By code; the contract explains them.",
            "reqps",
            (Query(rate("headrace_requests", "code", 'code!="ok"'), "{{code}}"),),
            stack="normal",
        ),
        Panel(
            "Late and refused, by who found it",
            "A request that is late costs least where it is found early.",
            "reqps",
            (
                Query(rate("headrace_expired_requests", "stage"), "expired at {{stage}}"),
                Query(rate("headrace_refused_requests", "stage, code"), "{{code}} at {{stage}}"),
            ),
        ),
        Panel(
            "End to end",
            "Points are sampled requests, and lead to their traces.",
            "s",
            quantiles("headrace_request_duration_seconds", "model"),
            logarithmic=True,
            exemplars=True,
        ),
        Panel(
            "Where the time goes",
            "Means of the waits and the work of a request, on top of each other. Copies and runs "
            "are those of its batch.",
            "s",
            tuple(
                Query(mean(metric), legend)
                for metric, legend in (
                    ("headrace_log_wait_seconds", "in the log"),
                    ("headrace_queue_wait_seconds", "for a batch"),
                    ("headrace_batch_wait_seconds", "for an instance"),
                    ("headrace_copy_duration_seconds", "copies"),
                    ("headrace_compute_duration_seconds", "run"),
                    ("headrace_answer_duration_seconds", "answer"),
                )
            ),
            stack="normal",
        ),
        Panel(
            "Time left to the deadline",
            "Of a request in a hundred less than p1 was left when its answer was acknowledged.",
            "s",
            tuple(
                Query(
                    quantile(part, "headrace_answer_slack_seconds", "model"),
                    f"{{{{model}}}} p{part * 100:g}",
                )
                for part in (0.01, 0.5)
            ),
        ),
    ),
)

GATEWAYS = Row(
    "Gateways",
    (
        Panel(
            "Requests by door",
            "Whatever their status.",
            "reqps",
            (Query(rate("headrace_gateway_requests", "door"), "{{door}}"),),
        ),
        Panel(
            "Statuses that are errors",
            "499 and CANCELLED: the caller had gone.",
            "reqps",
            (
                Query(
                    rate("headrace_gateway_requests", "door, status", 'status!~"200|OK"'),
                    "{{door}} {{status}}",
                ),
            ),
            stack="normal",
        ),
        Panel(
            "Time at a door",
            "From the head of a request until its answer is ready. Refusals count and take no "
            "time: many of them lower the median.",
            "s",
            quantiles("headrace_gateway_duration_seconds", "door"),
            logarithmic=True,
        ),
        Panel(
            "Requests under way, and connections",
            "At most gateway.max_in_flight (1,024) requests; the next one gets 503 or UNAVAILABLE. "
            "Connections are those over HTTP, at most gateway.max_connections (4,096).",
            "short",
            (
                Query(total("headrace_gateway_in_flight_requests", "instance"), "{{instance}}"),
                Query(
                    total("headrace_gateway_connections", "instance"), "{{instance}} connections"
                ),
            ),
        ),
        Panel(
            "Bytes under way",
            "Of bodies, and of answers in streams that wait for their callers; at most "
            "gateway.max_in_flight_bytes.",
            "bytes",
            (Query(total("headrace_gateway_in_flight_bytes", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Refused by limits, dropped and closed",
            "Full: the gateway was at a limit. Refused: their callers were over one. Late: answers "
            "whose callers had gone; when requests end with 504 and this stands still, nothing "
            "answers. Closed: connections over HTTP that were idle or too many.",
            "ops",
            (
                Query(rate("headrace_gateway_full_requests", "reason"), "full: {{reason}}"),
                Query(rate("headrace_gateway_limited_requests", "reason"), "refused: {{reason}}"),
                Query(rate("headrace_gateway_late_answers"), "late answers"),
                Query(rate("headrace_gateway_connections_closed"), "closed connections"),
            ),
        ),
    ),
    collapsed=True,
)

BATCHES = Row(
    "Batches and models",
    (
        Panel("Rows run", "", "rowsps", (Query(rate("headrace_rows", "model"), "{{model}}"),)),
        Panel(
            "Rows of a batch",
            "Means when it closed.",
            "short",
            (Query(mean("headrace_batch_rows", "model"), "{{model}}"),),
        ),
        Panel(
            "Why batches close",
            "full and bytes: busy. idle: an instance was free. delay: the model's delay was over.",
            "ops",
            (Query(rate("headrace_batches", "reason"), "{{reason}}"),),
            stack="percent",
        ),
        Panel(
            "One run",
            "Points are batches of sampled requests.",
            "s",
            quantiles("headrace_compute_duration_seconds", "model, version"),
            logarithmic=True,
            exemplars=True,
        ),
        Panel(
            "Copies and the wait for an instance",
            "Means.",
            "s",
            (
                Query(mean("headrace_copy_duration_seconds", "model"), "{{model}} copies"),
                Query(mean("headrace_batch_wait_seconds", "model"), "{{model}} waits"),
            ),
        ),
        Panel(
            "Requests that wait for a batch",
            "",
            "short",
            (Query(total("headrace_waiting_requests", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Nearest deadline of what waits for a batch",
            "Below 0, it is late already.",
            "s",
            (Query(least("headrace_deadline_slack_seconds", "instance"), "{{instance}}"),),
            signed=True,
        ),
        Panel(
            "Models",
            "The state of each version in each process.",
            "none",
            (Query(f"{worst('headrace_model_state', 'model, version, state, instance')} == 1"),),
            kind="table",
            width=16,
        ),
        Panel(
            "Time to load",
            "Of each loaded version, in the process where it took longest.",
            "s",
            (
                Query(
                    worst("headrace_model_load_seconds", "model, version"),
                    "{{model}}/{{version}}",
                ),
            ),
        ),
        Panel(
            "Memory of models",
            "What the instances of each version took when they were loaded, in the process where "
            "it was most.",
            "bytes",
            (
                Query(
                    worst("headrace_model_memory_bytes", "model, version, device"),
                    "{{model}}/{{version}} {{device}}",
                ),
            ),
        ),
        Panel(
            "Last change of models that was read",
            "Where models.mode is explicit. All processes should show the same.",
            "none",
            (Query(worst("headrace_control_generation", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Cache of models",
            "Where models are read from a store. Versions that no process has loaded make room.",
            "bytes",
            (
                Query(worst("headrace_model_cache_bytes", "instance"), "{{instance}}"),
                Query(worst("headrace_model_cache_limit_bytes", "instance"), "{{instance}} limit"),
            ),
        ),
        Panel(
            "Loads and unloads",
            "Requested and memory: idle versions that make room for each other. Restored: a swap "
            "that failed. A load that fails is counted with each attempt; the table of models has "
            "the state, and the page of the process the reason.",
            "none",
            (
                Query(count("headrace_model_loads", "reason"), "loaded: {{reason}}"),
                Query(count("headrace_model_unloads", "reason"), "unloaded: {{reason}}"),
                Query(
                    count("headrace_model_load_failures", "model, version"),
                    "failed: {{model}}/{{version}}",
                ),
            ),
        ),
        Panel(
            "Memory budget of models",
            "Where models.memory_bytes is set: the bound, and what the loaded versions hold of it, "
            "which is the larger of the size of their files and what was measured.",
            "bytes",
            (
                Query(
                    worst("headrace_model_memory_budget_bytes", "instance, kind"),
                    "{{instance}} {{kind}}",
                ),
            ),
        ),
    ),
)
