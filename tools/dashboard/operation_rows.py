"""The rows about what runs: reading, commits, partitions, ends out of the ordinary, processes."""

from __future__ import annotations

from tools.dashboard.panels import Panel, Query, Row
from tools.dashboard.queries import quantile, rate, total, worst

READING = Row(
    "Reading and commits",
    (
        Panel(
            "Backlog",
            "Records that are not answered, read or not.",
            "short",
            (Query(total("headrace_backlog_records", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Learned throughput",
            "What the processes answer when there is enough to do.",
            "reqps",
            (Query(total("headrace_throughput_records_per_second", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Time to drain",
            "What an autoscaler should look at.",
            "s",
            (Query(worst("headrace_time_to_drain_seconds", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Bytes in flight, and the budget",
            "",
            "bytes",
            (
                Query(
                    total("headrace_in_flight_bytes", "topic, instance"), "{{instance}} {{topic}}"
                ),
                Query(worst("headrace_in_flight_limit_bytes", "instance"), "{{instance}} limit"),
            ),
        ),
        Panel(
            "Records in flight",
            "Read and not answered; a record of batches is a whole batch.",
            "short",
            (Query(total("headrace_in_flight_records", "topic"), "{{topic}}"),),
        ),
        Panel(
            "Commits",
            "How long one takes.",
            "s",
            (
                Query(quantile(0.5, "headrace_commit_duration_seconds"), "p50"),
                Query(quantile(0.99, "headrace_commit_duration_seconds"), "p99"),
            ),
        ),
        Panel(
            "Answered work that waits for its commit",
            "A curve that climbs is a commit that is stuck.",
            "s",
            (
                Query(
                    worst("headrace_commit_age_seconds", "instance, topic"),
                    "{{instance}} {{topic}}",
                ),
            ),
        ),
        Panel(
            "Failed commits and assignments",
            "",
            "ops",
            (
                Query(rate("headrace_commit_failures", "reason"), "commit {{reason}}"),
                Query(rate("headrace_rebalances", "instance"), "{{instance}} assigned"),
            ),
        ),
        Panel(
            "Partitions of each process",
            "",
            "short",
            (
                Query(
                    total("headrace_assigned_partitions", "instance, topic"),
                    "{{instance}} {{topic}}",
                ),
            ),
        ),
        Panel(
            "Silence of the log",
            "Time since the log was last heard of.",
            "s",
            (Query(worst("headrace_log_last_contact_seconds", "instance"), "{{instance}}"),),
        ),
    ),
)


def _by_partition(title: str, description: str, metric: str, unit: str = "short") -> Panel:
    query = Query(worst(metric, "topic, partition"), "{{topic}}/{{partition}}")
    return Panel(title, description, unit, (query,))


PARTITIONS = Row(
    "Partitions",
    (
        _by_partition("Lag", "End offset minus committed offset.", "headrace_consumer_lag_records"),
        _by_partition(
            "In flight", "Read and not answered.", "headrace_partition_in_flight_records"
        ),
        _by_partition(
            "Span in flight",
            "From the lowest unanswered offset to the last one read.",
            "headrace_partition_in_flight_span_records",
        ),
        _by_partition(
            "Answered above the lowest unanswered one", "", "headrace_partition_answered_records"
        ),
        _by_partition(
            "Ranges of the answered set",
            "They are what the commit's metadata lists.",
            "headrace_partition_answered_ranges",
        ),
        _by_partition(
            "Metadata of the commit",
            "Characters; a broker takes 4096.",
            "headrace_partition_commit_metadata_characters",
        ),
        _by_partition(
            "Age of the base",
            "Time since it moved, where its request was passed on to another process.",
            "headrace_partition_base_age_seconds",
            "s",
        ),
        Panel(
            "Partitions that are not read",
            "By reason.",
            "short",
            (Query(total("headrace_partition_paused", "reason"), "{{reason}}"),),
        ),
    ),
    collapsed=True,
)

ENDS = Row(
    "Other ends",
    (
        Panel(
            "Dead letters",
            "By code.",
            "ops",
            (Query(rate("headrace_dead_letters", "code"), "{{code}}"),),
        ),
        Panel(
            "Tried again",
            "",
            "ops",
            (
                Query(rate("headrace_retries", "operation"), "{{operation}}"),
                Query(rate("headrace_bisections"), "batches halved"),
                Query(rate("headrace_rebound_requests"), "bound to another version"),
            ),
        ),
        Panel(
            "Duplicates, void and lost",
            "A rebalance revokes requests that do not finish within limits.drain_timeout_s. There "
            "should be no unanswerable requests, dropped dead letters and skipped records.",
            "ops",
            tuple(
                Query(rate(f"headrace_{metric}"), metric.replace("_", " "))
                for metric in (
                    *("duplicate_results", "revoked_requests", "unanswerable_requests"),
                    *("dead_letters_dropped", "skipped_records"),
                )
            ),
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Event loop lag",
            "How late timers run.",
            "s",
            (
                Query(
                    quantile(0.99, "headrace_event_loop_lag_seconds", "instance"),
                    "{{instance}} p99",
                ),
            ),
            width=6,
        ),
        Panel(
            "CPU",
            "Cores in use.",
            "short",
            (Query(rate("process_cpu_seconds", "instance"), "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Resident memory",
            "",
            "bytes",
            (Query(total("process_resident_memory_bytes", "instance"), "{{instance}}"),),
            width=6,
        ),
        Panel(
            "What runs",
            "",
            "none",
            (Query(worst("headrace_build_info", "instance, version, stages, python")),),
            kind="table",
            width=6,
        ),
        Panel(
            "Live",
            "0 where the watchdog sees no progress.",
            "short",
            (Query(worst("headrace_live", "instance"), "{{instance}}"),),
        ),
        Panel("Ready", "", "short", (Query(worst("headrace_ready", "instance"), "{{instance}}"),)),
        Panel(
            "Traces",
            "Spans that the collector has taken, and what was lost.",
            "ops",
            (
                *(
                    Query(rate(f"headrace_trace_{metric}"), metric.replace("_", " "))
                    for metric in ("spans", "spans_dropped", "links_dropped", "export_failures")
                ),
                Query(
                    rate("headrace_traces_rate_limited", "sampled_by"),
                    "rate limited: {{sampled_by}}",
                ),
            ),
        ),
        Panel(
            "Log lines left out",
            "Too many of their kind came.",
            "ops",
            (Query(rate("headrace_log_lines_suppressed", "event"), "{{event}}"),),
        ),
    ),
    collapsed=True,
)
