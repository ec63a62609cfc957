"""Every metric of a process: its name, type, labels and meaning. Metrics are created from these.

Names follow Prometheus (https://prometheus.io/docs/practices/naming/): base units, the unit at the
end of the name, `_total` for counters. `docs/metrics.md` shows the same table to users.

Labels are bounded: topics are Headrace's own, partitions are limited in number, models and versions
are the repository's (empty if a request named an unknown one), and all others are fixed sets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    *(0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Upper bounds of the buckets of all durations."""

ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Spec(NamedTuple):
    """One metric; `name` is its family's, so a counter's samples have `_total` appended."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """The base unit at the end of the name; empty for a count of things."""
        last = self.name.rsplit("_", 1)[1]
        return last if last in ("seconds", "bytes") else ""

    @property
    def exposed_name(self) -> str:
        """The name to use in queries."""
        return f"{self.name}_total" if self.type == "counter" else self.name


_MODEL = ("model",)
_TOPIC = ("topic",)
_PARTITION = ("topic", "partition")

REQUESTS = (
    Spec(
        "headrace_requests",
        "counter",
        ("model", "version", "outcome", "code"),
        "Requests whose answer is acknowledged. Outcome: ok, expired, refused or failed.",
    ),
    Spec(
        "headrace_request_duration_seconds",
        "histogram",
        _MODEL,
        "End to end: from the request record's timestamp until its answer is acknowledged.",
    ),
    Spec(
        "headrace_log_wait_seconds",
        "histogram",
        _MODEL,
        "From the request record's timestamp until ingest read it.",
    ),
    Spec(
        "headrace_queue_wait_seconds",
        "histogram",
        _MODEL,
        "From ingest until the request's batch closed.",
    ),
    Spec(
        "headrace_answer_duration_seconds",
        "histogram",
        _MODEL,
        "From when the responder began to encode an answer until it was acknowledged.",
    ),
    Spec(
        "headrace_answer_slack_seconds",
        "histogram",
        _MODEL,
        "Time left to the deadline when the answer was acknowledged; 0 for late ones.",
    ),
    Spec(
        "headrace_expired_requests",
        "counter",
        ("stage",),
        "Requests answered with DEADLINE_EXCEEDED, by the stage that found it.",
    ),
    Spec(
        "headrace_refused_requests",
        "counter",
        ("stage", "code"),
        "Requests that could not be run as they are, or not now, by who refused them and why.",
    ),
)

RUNS = (
    Spec("headrace_batches", "counter", ("model", "reason"), "Batches formed, by why they closed."),
    Spec("headrace_batch_rows", "histogram", _MODEL, "Rows in a batch when it closed."),
    Spec("headrace_runs", "counter", ("model", "version"), "Runs of a model that succeeded."),
    Spec("headrace_rows", "counter", ("model", "version"), "Rows in these runs."),
    Spec(
        "headrace_batch_wait_seconds",
        "histogram",
        _MODEL,
        "From when a batch closed until an executor began with it.",
    ),
    Spec(
        "headrace_copy_duration_seconds",
        "histogram",
        _MODEL,
        "Gathering the inputs of one run into its arrays.",
    ),
    Spec("headrace_compute_duration_seconds", "histogram", _MODEL, "One run of a model."),
    Spec("headrace_bisections", "counter", (), "Batches that failed and were halved."),
    Spec(
        "headrace_rebound_requests",
        "counter",
        (),
        "Requests without a version of their own that were bound to another version here, since "
        "the one that ingest chose was not there.",
    ),
    Spec(
        "headrace_batch_comparisons",
        "counter",
        ("model", "outcome"),
        "Batches of requests run alone and together, while it is open whether the model may: "
        "agreed, differed or inconclusive.",
    ),
    Spec(
        "headrace_deadline_slack_seconds",
        "gauge",
        (),
        "Least time left to a deadline among the requests that wait for a batch; "
        "not shown while none of them has one.",
    ),
    Spec(
        "headrace_known_executors",
        "gauge",
        (),
        "Executors in other processes that this batcher has heard of; 0 where it needs none.",
    ),
    Spec("headrace_waiting_requests", "gauge", (), "Requests that wait for a batch."),
    Spec(
        "headrace_device_memory_bytes",
        "gauge",
        ("device", "kind"),
        "Of a GPU that models run on: free, total, or the pool of ours that holds it.",
    ),
    Spec(
        "headrace_model_state",
        "gauge",
        ("model", "version", "state"),
        "1 for the state that a model version is in, 0 for the others.",
    ),
)

ENDS = (
    Spec("headrace_dead_letters", "counter", ("code",), "Requests kept as dead letters."),
    Spec("headrace_unkept_dead_letters", "counter", (), "Dead letters too large for their topic."),
    Spec("headrace_duplicates", "counter", (), "Results whose request was answered already."),
    Spec(
        "headrace_cancellations",
        "counter",
        ("outcome",),
        "Records with x-cancel: ended the request that they name, or found none that waits.",
    ),
    Spec("headrace_void", "counter", (), "Requests dropped because their partition was revoked."),
    Spec(
        "headrace_unanswered",
        "counter",
        (),
        "Requests whose answer topic takes not even an error record.",
    ),
    Spec(
        "headrace_transaction_timeouts",
        "counter",
        (),
        "Transactions that took too long: their answers are written again, half as many at a time.",
    ),
    Spec(
        "headrace_retries",
        "counter",
        ("operation",),
        "What was tried again: send (records not acknowledged), run, commit.",
    ),
)

READING = (
    Spec("headrace_in_flight_records", "gauge", _TOPIC, "Records read and not yet answered."),
    Spec("headrace_in_flight_bytes", "gauge", _TOPIC, "Bytes charged for what is in flight."),
    Spec("headrace_in_flight_limit_bytes", "gauge", _TOPIC, "The budget for bytes in flight."),
    Spec(
        "headrace_model_in_flight_bytes",
        "gauge",
        ("topic", "model"),
        "Bytes of the budget that a model's requests hold, in a process with the batcher.",
    ),
    Spec(
        "headrace_oldest_record_age_seconds",
        "gauge",
        _TOPIC,
        "Age of the oldest record that was read and is unanswered; 0 when there is none.",
    ),
    Spec(
        "headrace_consumer_lag_records",
        "gauge",
        _PARTITION,
        "End offset minus committed offset, asked every 5 s.",
    ),
    Spec(
        "headrace_backlog_records",
        "gauge",
        _TOPIC,
        "Records of our partitions that are not answered, read or not.",
    ),
    Spec(
        "headrace_throughput_records_per_second",
        "gauge",
        _TOPIC,
        "Learned: what this process answers per second when there is enough to do.",
    ),
    Spec(
        "headrace_time_to_drain_seconds",
        "gauge",
        _TOPIC,
        "Backlog over learned throughput; not shown before any was learned.",
    ),
    Spec("headrace_assigned_partitions", "gauge", _TOPIC, "Partitions that are ours now."),
    Spec("headrace_rebalances", "counter", (), "Assignments received."),
    Spec("headrace_skipped", "counter", (), "Records that retention took before they were read."),
    Spec(
        "headrace_unreadable",
        "counter",
        ("code",),
        "Offsets passed over because nothing there can be read, `TOO_LARGE` or `INVALID_REQUEST`.",
    ),
    Spec(
        "headrace_suspects",
        "gauge",
        (),
        "Offsets that ran when a process ended, and that have not run alone since.",
    ),
    Spec(
        "headrace_suspect_attempts",
        "counter",
        (),
        "Requests that were found to have run alone and marked when their process ended.",
    ),
    Spec(
        "headrace_condemned",
        "counter",
        (),
        "Requests that are not run again, since their process ended each time.",
    ),
    Spec(
        "headrace_stalled_seconds",
        "gauge",
        _TOPIC,
        "For how long records have waited while none was answered; 0 while there is progress.",
    ),
    Spec(
        "headrace_assigning_seconds",
        "gauge",
        _TOPIC,
        "For how long partitions that the group has assigned could not be taken up; 0 otherwise.",
    ),
    Spec(
        "headrace_log_last_contact_seconds",
        "gauge",
        _TOPIC,
        "Time since the log was last heard of.",
    ),
)

COMMITS = (
    Spec(
        "headrace_commit_duration_seconds",
        "histogram",
        (),
        "How long a commit, or a transaction with answers, took; failed ones included.",
    ),
    Spec(
        "headrace_commit_failures",
        "counter",
        ("reason",),
        "Commits that failed: unavailable (no answer in time), fenced (the group has moved on).",
    ),
    Spec(
        "headrace_commit_age_seconds",
        "gauge",
        _TOPIC,
        "For how long answered work has been waiting for its commit; 0 when all is committed.",
    ),
)

PARTITIONS = (
    Spec(
        "headrace_partition_in_flight_records",
        "gauge",
        _PARTITION,
        "Records read and not yet answered.",
    ),
    Spec(
        "headrace_partition_in_flight_span_records",
        "gauge",
        _PARTITION,
        "Offsets from the lowest unanswered one up to the last one read.",
    ),
    Spec(
        "headrace_partition_answered_records",
        "gauge",
        _PARTITION,
        "The answered set: offsets answered above the lowest unanswered one.",
    ),
    Spec(
        "headrace_partition_answered_ranges",
        "gauge",
        _PARTITION,
        "Ranges that the answered set consists of.",
    ),
    Spec(
        "headrace_partition_commit_metadata_characters",
        "gauge",
        _PARTITION,
        "Length of the metadata of the last commit; a broker takes 4096.",
    ),
    Spec(
        "headrace_partition_deferred_records",
        "gauge",
        _PARTITION,
        "Requests left in the log until their model has room in its share of the budget.",
    ),
    Spec(
        "headrace_partition_base_age_seconds",
        "gauge",
        _PARTITION,
        "For how long the base stands though its request was passed on to the process that "
        "answers; 0 where one process does all.",
    ),
    Spec(
        "headrace_partition_paused",
        "gauge",
        ("topic", "partition", "reason"),
        "1 while the partition is not read, by reason: ahead, budget, drain, metadata, order or "
        "share.",
    ),
)

TRACES = (
    Spec("headrace_trace_spans", "counter", (), "Spans that the collector has taken."),
    Spec(
        "headrace_trace_spans_dropped",
        "counter",
        (),
        "Spans lost: the queue was full, or no collector took them.",
    ),
    Spec(
        "headrace_trace_links_dropped",
        "counter",
        (),
        "Links left out of spans, over OTEL_SPAN_LINK_COUNT_LIMIT.",
    ),
    Spec(
        "headrace_trace_export_failures",
        "counter",
        (),
        "Exports of spans that no collector took.",
    ),
    Spec(
        "headrace_traces_rate_limited",
        "counter",
        ("sampled_by",),
        "Requests that got no trace because of a rate in `telemetry`, by what asked for one: "
        "ratio, caller or failure.",
    ),
)

PROCESS = (
    Spec(
        "headrace_event_loop_lag_seconds",
        "histogram",
        (),
        "How late a timer of the event loop ran, measured ten times a second.",
    ),
    Spec(
        "headrace_heap_trimmed_bytes",
        "counter",
        (),
        "Memory that was free in the process and was given back to the system.",
    ),
    Spec("headrace_live", "gauge", (), "1 while /health/live answers 200."),
    Spec("headrace_ready", "gauge", (), "1 while /health/ready answers 200."),
    Spec(
        "headrace_log_lines_suppressed",
        "counter",
        ("event",),
        "Log lines left out because too many of their kind came.",
    ),
    Spec(
        "headrace_build_info",
        "gauge",
        ("version", "python", "stages"),
        "Always 1; the labels say what runs.",
    ),
)

CATALOGUE: dict[str, Spec] = {
    spec.name: spec
    for part in (REQUESTS, RUNS, ENDS, READING, COMMITS, PARTITIONS, TRACES, PROCESS)
    for spec in part
}
"""All of Headrace's own metrics, by family name."""
