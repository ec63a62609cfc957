"""Every metric of a process: its name, type, labels and meaning. Metrics are created from these.

Names follow Prometheus (https://prometheus.io/docs/practices/naming/): base units, the unit at the
end of the name, `_total` for counters. `docs/metrics.md` shows the same table to users.

Labels are bounded: topics are Headrace's own, partitions are limited in number, models and versions
are the repository's (empty if a request named an unknown one), and all others are fixed sets. The
series of a version that is no longer loaded are removed some time after its last request.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    *(0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Upper bounds of the buckets of all durations."""

ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class MetricSpec(NamedTuple):
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


_MODEL = ("model", "version")
_TOPIC = ("topic",)
_PARTITION = ("topic", "partition")

REQUESTS = (
    MetricSpec(
        "headrace_requests",
        "counter",
        ("model", "version", "outcome", "code"),
        "Requests whose answer is acknowledged. Outcome: ok, expired, refused or failed.",
    ),
    MetricSpec(
        "headrace_request_duration_seconds",
        "histogram",
        _MODEL,
        "Time from the request record's timestamp, or from ingest if it has none, until its answer "
        "is acknowledged.",
    ),
    MetricSpec(
        "headrace_log_wait_seconds",
        "histogram",
        _MODEL,
        "Time from the request record's timestamp until ingest read it.",
    ),
    MetricSpec(
        "headrace_queue_wait_seconds",
        "histogram",
        _MODEL,
        "Time from ingest until the request's batch closed.",
    ),
    MetricSpec(
        "headrace_answer_duration_seconds",
        "histogram",
        _MODEL,
        "Time from the start of encoding an answer until it was acknowledged.",
    ),
    MetricSpec(
        "headrace_answer_slack_seconds",
        "histogram",
        _MODEL,
        "Time left to the deadline when the answer was acknowledged; 0 for late ones.",
    ),
    MetricSpec(
        "headrace_expired_requests",
        "counter",
        ("stage",),
        "Requests answered with DEADLINE_EXCEEDED, by the stage that found it.",
    ),
    MetricSpec(
        "headrace_refused_requests",
        "counter",
        ("stage", "code"),
        "Requests refused because they are invalid or cannot be run now, by stage and code.",
    ),
)

RUNS = (
    MetricSpec(
        "headrace_batches",
        "counter",
        ("model", "version", "reason"),
        "Batches formed, by the reason for closing.",
    ),
    MetricSpec("headrace_batch_rows", "histogram", _MODEL, "Rows in a batch when it closed."),
    MetricSpec("headrace_runs", "counter", _MODEL, "Runs of a model that succeeded."),
    MetricSpec("headrace_rows", "counter", _MODEL, "Rows in these runs."),
    MetricSpec(
        "headrace_batch_wait_seconds",
        "histogram",
        _MODEL,
        "Time from the closing of a batch until an executor began with it.",
    ),
    MetricSpec(
        "headrace_copy_duration_seconds",
        "histogram",
        _MODEL,
        "Time to gather the inputs of one run into its arrays.",
    ),
    MetricSpec(
        "headrace_compute_duration_seconds",
        "histogram",
        _MODEL,
        "Duration of one run of a model.",
    ),
    MetricSpec("headrace_bisections", "counter", (), "Batches that failed and were divided."),
    MetricSpec(
        "headrace_rebound_requests",
        "counter",
        (),
        "Requests that name no version, or a label, and were bound to another version here, "
        "because the one that ingest chose was missing.",
    ),
    MetricSpec(
        "headrace_batch_comparisons",
        "counter",
        ("model", "version", "outcome"),
        "Comparisons of requests run alone and together, while the verdict on batching is "
        "undecided: agreed, differed or inconclusive.",
    ),
    MetricSpec(
        "headrace_deadline_slack_seconds",
        "gauge",
        (),
        "Least time left to a deadline among the requests that wait for a batch; not shown while "
        "none of them has one.",
    ),
    MetricSpec(
        "headrace_known_executors",
        "gauge",
        (),
        "Executors in other processes that this batcher knows; 0 if it needs none.",
    ),
    MetricSpec("headrace_waiting_requests", "gauge", (), "Requests that wait for a batch."),
    MetricSpec(
        "headrace_device_memory_bytes",
        "gauge",
        ("device", "kind"),
        "Memory of a GPU that models run on: free, total, or held by this process's pool.",
    ),
    MetricSpec(
        "headrace_model_state",
        "gauge",
        ("model", "version", "state"),
        "1 for the state that a model version is in, 0 for the others.",
    ),
    MetricSpec(
        "headrace_model_load_seconds",
        "gauge",
        _MODEL,
        "Time to load a version that is loaded: all instances, the probe and the warm-up.",
    ),
    MetricSpec(
        "headrace_model_cache_bytes",
        "gauge",
        (),
        "Files in models.cache_dir when this process last read its store.",
    ),
    MetricSpec(
        "headrace_model_cache_limit_bytes", "gauge", (), "Limit of these files: models.cache_bytes."
    ),
    MetricSpec(
        "headrace_model_memory_bytes",
        "gauge",
        (*_MODEL, "device"),
        "Memory that the instances of a loaded version took when they were loaded: of the host, or "
        "of a GPU.",
    ),
    MetricSpec(
        "headrace_model_memory_budget_bytes",
        "gauge",
        ("kind",),
        "Host memory for all loaded versions with models.memory_bytes: the limit, or what they "
        "hold of it.",
    ),
    MetricSpec(
        "headrace_control_generation",
        "gauge",
        (),
        'Last change on the control topic that the process has read, with models.mode "explicit".',
    ),
    MetricSpec(
        "headrace_control_unready_versions",
        "gauge",
        (),
        "Versions that the control topic wants and that are not ready in the process.",
    ),
    MetricSpec(
        "headrace_control_following",
        "gauge",
        (),
        "1 while the process follows the control topic; 0 after records that it cannot follow: its "
        "models stay as they are.",
    ),
)

ENDS = (
    MetricSpec("headrace_dead_letters", "counter", ("code",), "Requests written as dead letters."),
    MetricSpec(
        "headrace_dead_letters_dropped",
        "counter",
        (),
        "Dead letters that were not written, because they are too large for their topic.",
    ),
    MetricSpec(
        "headrace_duplicate_results",
        "counter",
        (),
        "Results whose request had already been answered.",
    ),
    MetricSpec(
        "headrace_model_loads",
        "counter",
        (*_MODEL, "reason"),
        "Versions that were loaded: added, requested after they were unloaded, or restored since "
        "their successors failed.",
    ),
    MetricSpec(
        "headrace_model_load_failures",
        "counter",
        _MODEL,
        "Loads that failed in an executor, trial loads included: each attempt. Versions that "
        "cannot be read are in headrace_model_state.",
    ),
    MetricSpec(
        "headrace_model_unloads",
        "counter",
        (*_MODEL, "reason"),
        "Versions that were unloaded: removed, idle while memory was short for another one, or "
        "first in a swap.",
    ),
    MetricSpec(
        "headrace_cancellations",
        "counter",
        ("outcome",),
        "Records with x-cancel: ended the request that they name, or found none that waits.",
    ),
    MetricSpec(
        "headrace_revoked_requests",
        "counter",
        (),
        "Requests dropped because their partition was revoked.",
    ),
    MetricSpec(
        "headrace_unanswerable_requests",
        "counter",
        (),
        "Requests whose answer topic refused even the smallest error record.",
    ),
    MetricSpec(
        "headrace_transaction_timeouts",
        "counter",
        (),
        "Transactions that took too long: their answers are written again, those of each partition "
        "alone, and then half as many at a time.",
    ),
    MetricSpec(
        "headrace_retries",
        "counter",
        ("operation",),
        "Retries: send (records not acknowledged), run, commit.",
    ),
    MetricSpec(
        "headrace_schema_requests",
        "counter",
        ("outcome",),
        "Requests to the schema registry: ok, refused (by it), unavailable.",
    ),
    MetricSpec(
        "headrace_transforms_waiting",
        "gauge",
        (),
        "Payloads that wait for a transform worker, or are with one.",
    ),
    MetricSpec(
        "headrace_transforms_waiting_bytes",
        "gauge",
        (),
        "Bytes of these payloads, and of the inputs that they are expected to become; the share of "
        "their model bounds them.",
    ),
    MetricSpec(
        "headrace_transform_duration_seconds",
        "histogram",
        ("model",),
        "Time of a transform worker for one payload, with all attempts.",
    ),
    MetricSpec(
        "headrace_transform_bytes",
        "counter",
        ("model",),
        "Bytes of inputs that transform workers made.",
    ),
    MetricSpec(
        "headrace_postprocess_duration_seconds",
        "histogram",
        ("model",),
        "Time of a worker for the postprocess of one request, with all attempts.",
    ),
    MetricSpec(
        "headrace_transform_restarts",
        "counter",
        ("reason",),
        "Child processes of user code that were replaced: crash (it ended), hang (it was killed), "
        "start (it ended before it was ready).",
    ),
    MetricSpec(
        "headrace_claims",
        "counter",
        ("operation", "outcome"),
        "Objects that claims refer to. Operation: fetch or put. Outcome: ok, refused (the object "
        "is not there, or is another one), unavailable (its store is), cancelled (the "
        "deadline passed, or the request was cancelled or revoked).",
    ),
    MetricSpec(
        "headrace_claim_bytes", "counter", ("operation",), "Bytes of these objects, if they are ok."
    ),
    MetricSpec(
        "headrace_claim_seconds",
        "counter",
        ("operation",),
        "Time for these objects, with all attempts.",
    ),
    MetricSpec(
        "headrace_claim_waiting_answer_bytes",
        "gauge",
        (),
        "Bytes of outputs that wait for `answers.claim_store`; over 256 MiB all answers wait.",
    ),
)

READING = (
    MetricSpec("headrace_in_flight_records", "gauge", _TOPIC, "Records read and not yet answered."),
    MetricSpec("headrace_in_flight_bytes", "gauge", _TOPIC, "Bytes charged for what is in flight."),
    MetricSpec(
        "headrace_in_flight_limit_bytes", "gauge", _TOPIC, "The budget for bytes in flight."
    ),
    MetricSpec(
        "headrace_model_in_flight_bytes",
        "gauge",
        ("topic", "model"),
        "Bytes of the budget that a model's requests hold, in a process with the batcher.",
    ),
    MetricSpec(
        "headrace_oldest_record_age_seconds",
        "gauge",
        _TOPIC,
        "Age of the oldest record that was read and is unanswered; 0 when there is none.",
    ),
    MetricSpec(
        "headrace_consumer_lag_records",
        "gauge",
        _PARTITION,
        "End offset minus committed offset, queried every 5 s.",
    ),
    MetricSpec(
        "headrace_backlog_records",
        "gauge",
        _TOPIC,
        "Records of the assigned partitions that are not answered, read or not.",
    ),
    MetricSpec(
        "headrace_throughput_records_per_second",
        "gauge",
        _TOPIC,
        "Estimate of what this process answers per second when there is enough to do.",
    ),
    MetricSpec(
        "headrace_time_to_drain_seconds",
        "gauge",
        _TOPIC,
        "Backlog over learned throughput; not shown before any was learned.",
    ),
    MetricSpec(
        "headrace_assigned_partitions", "gauge", _TOPIC, "Partitions assigned to this process."
    ),
    MetricSpec("headrace_rebalances", "counter", (), "Assignments received."),
    MetricSpec(
        "headrace_skipped_records",
        "counter",
        (),
        "Records deleted by retention before they were read.",
    ),
    MetricSpec(
        "headrace_source_values",
        "counter",
        ("outcome",),
        "Values of requests that travel through no topic between stages, as they were read. "
        "Outcome: shared (from shared memory), read (from its source record), kept (it came with "
        "another one) or lost (the record is gone).",
    ),
    MetricSpec(
        "headrace_source_value_bytes",
        "counter",
        (),
        "Bytes of these values.",
    ),
    MetricSpec(
        "headrace_shared_values",
        "counter",
        ("outcome",),
        "Values of requests to be passed to other processes of this machine. Outcome: written (to "
        "shared memory) or full (there was no room).",
    ),
    MetricSpec(
        "headrace_shared_values_bytes",
        "gauge",
        (),
        "Shared memory that holds such values; at most `limits.shared_values_bytes`.",
    ),
    MetricSpec(
        "headrace_unreadable_records",
        "counter",
        ("code",),
        "Offsets skipped because their records cannot be read: `TOO_LARGE` or `INVALID_REQUEST`.",
    ),
    MetricSpec(
        "headrace_quarantined_records",
        "gauge",
        (),
        "Records that were running when a process crashed, and that have not run alone since.",
    ),
    MetricSpec(
        "headrace_isolated_crashes",
        "counter",
        (),
        "Requests that were running alone when their process crashed.",
    ),
    MetricSpec(
        "headrace_poisoned_requests",
        "counter",
        (),
        "Requests that are not run again, because their process crashed each time.",
    ),
    MetricSpec(
        "headrace_stalled_seconds",
        "gauge",
        _TOPIC,
        "Time that records have waited while none was answered; 0 while there is progress.",
    ),
    MetricSpec(
        "headrace_assigning_seconds",
        "gauge",
        _TOPIC,
        "Time that assigned partitions could not be started; 0 otherwise.",
    ),
    MetricSpec(
        "headrace_log_last_contact_seconds",
        "gauge",
        _TOPIC,
        "Time since the last response of the log.",
    ),
)

COMMITS = (
    MetricSpec(
        "headrace_commit_duration_seconds",
        "histogram",
        (),
        "Duration of a commit, or of a transaction and the wait for it; failed ones included.",
    ),
    MetricSpec(
        "headrace_commit_failures",
        "counter",
        ("reason",),
        "Commits that failed: unavailable (no answer in time), fenced (the group has moved on).",
    ),
    MetricSpec(
        "headrace_commit_age_seconds",
        "gauge",
        _TOPIC,
        "Time that acknowledged answers have waited for their commit; 0 when all is committed.",
    ),
)

PARTITIONS = (
    MetricSpec(
        "headrace_partition_in_flight_records",
        "gauge",
        _PARTITION,
        "Records read and not yet answered.",
    ),
    MetricSpec(
        "headrace_partition_in_flight_span_records",
        "gauge",
        _PARTITION,
        "Offsets from the lowest unanswered one up to the last one read.",
    ),
    MetricSpec(
        "headrace_partition_answered_records",
        "gauge",
        _PARTITION,
        "Offsets answered above the lowest unanswered one.",
    ),
    MetricSpec(
        "headrace_partition_answered_ranges",
        "gauge",
        _PARTITION,
        "Ranges of the offsets answered above the lowest unanswered one.",
    ),
    MetricSpec(
        "headrace_partition_commit_metadata_characters",
        "gauge",
        _PARTITION,
        "Length of the metadata of the last commit; a broker takes 4096.",
    ),
    MetricSpec(
        "headrace_partition_deferred_records",
        "gauge",
        _PARTITION,
        "Requests left in the log until their model has room in its share of the budget.",
    ),
    MetricSpec(
        "headrace_partition_base_age_seconds",
        "gauge",
        _PARTITION,
        "Time that the base has not moved although its request was passed on to the "
        "responder's process; 0 if one process has all stages.",
    ),
    MetricSpec(
        "headrace_partition_paused",
        "gauge",
        ("topic", "partition", "reason"),
        "1 while the partition is not read, by reason: ahead, budget, drain, metadata, order or "
        "share.",
    ),
)

TRACES = (
    MetricSpec("headrace_trace_spans", "counter", (), "Spans that the collector has accepted."),
    MetricSpec(
        "headrace_trace_spans_dropped",
        "counter",
        (),
        "Spans lost: the queue was full, or no collector accepted them.",
    ),
    MetricSpec(
        "headrace_trace_links_dropped",
        "counter",
        (),
        "Links left out of spans, over OTEL_SPAN_LINK_COUNT_LIMIT.",
    ),
    MetricSpec(
        "headrace_trace_export_failures",
        "counter",
        (),
        "Exports of spans that no collector accepted.",
    ),
    MetricSpec(
        "headrace_traces_rate_limited",
        "counter",
        ("sampled_by",),
        "Requests that got no trace because of a rate limit in `telemetry`, by the reason to "
        "sample them: ratio, caller or failure.",
    ),
)

PROCESS = (
    MetricSpec(
        "headrace_event_loop_lag_seconds",
        "histogram",
        (),
        "Lateness of a timer of the event loop, measured ten times a second.",
    ),
    MetricSpec(
        "headrace_broker_requests",
        "counter",
        ("api",),
        "Requests sent to brokers, by their name in Kafka's protocol.",
    ),
    MetricSpec(
        "headrace_heap_trimmed_bytes",
        "counter",
        (),
        "Free memory of the process that was returned to the system.",
    ),
    MetricSpec(
        "headrace_certificate_expiry_timestamp_seconds",
        "gauge",
        ("server",),
        "Unix time at which the first certificate in the chain of a server expires, with TLS.",
    ),
    MetricSpec("headrace_live", "gauge", (), "1 while /health/live answers 200."),
    MetricSpec("headrace_ready", "gauge", (), "1 while /health/ready answers 200."),
    MetricSpec(
        "headrace_log_lines_suppressed",
        "counter",
        ("event",),
        "Log lines left out by the rate limit of their kind.",
    ),
    MetricSpec(
        "headrace_build_info",
        "gauge",
        ("version", "python", "stages"),
        "Always 1; the labels describe the process.",
    ),
)

GATEWAY = (
    MetricSpec(
        "headrace_gateway_requests",
        "counter",
        ("door", "status"),
        "Inference requests that a gateway ended, by door and by the status that it answered; "
        "499 and CANCELLED: the caller had gone.",
    ),
    MetricSpec(
        "headrace_gateway_duration_seconds",
        "histogram",
        ("door",),
        "From the head of an inference request until its answer was ready to be sent.",
    ),
    MetricSpec(
        "headrace_gateway_in_flight_requests",
        "gauge",
        (),
        "Inference requests that a gateway has taken and not answered.",
    ),
    MetricSpec(
        "headrace_gateway_in_flight_limit_requests",
        "gauge",
        (),
        "The most of them: gateway.max_in_flight.",
    ),
    MetricSpec(
        "headrace_gateway_in_flight_bytes",
        "gauge",
        (),
        "The bytes of their bodies, decompressed, and of answers in gRPC streams that wait for "
        "their callers to read them.",
    ),
    MetricSpec(
        "headrace_gateway_in_flight_limit_bytes",
        "gauge",
        (),
        "The most of these bytes: gateway.max_in_flight_bytes.",
    ),
    MetricSpec(
        "headrace_gateway_full_requests",
        "counter",
        ("reason",),
        "Requests that a gateway refused with 503 or UNAVAILABLE because one of these limits was "
        "reached: requests, bytes.",
    ),
    MetricSpec(
        "headrace_gateway_late_answers",
        "counter",
        (),
        "Answers that a gateway dropped, because no caller waited for them any more.",
    ),
    MetricSpec(
        "headrace_gateway_shared_memory_regions",
        "gauge",
        (),
        "Regions of shared memory that callers of a gateway have registered; at most 256.",
    ),
    MetricSpec(
        "headrace_gateway_limited_requests",
        "counter",
        ("reason",),
        "Inference requests that a gateway refused because their caller was over one of its "
        "limits: rate, concurrency, bytes.",
    ),
    MetricSpec(
        "headrace_gateway_limited_callers",
        "gauge",
        (),
        "Callers whose requests a gateway counts against limits of their own; those without a "
        "request under way are at most 10,000.",
    ),
    MetricSpec(
        "headrace_gateway_connections",
        "gauge",
        (),
        "Open connections of a gateway's door for HTTP, TLS handshakes included.",
    ),
    MetricSpec(
        "headrace_gateway_connections_closed",
        "counter",
        (),
        "Connections of that door that were closed because there were too many, or because no "
        "request came in time or an answer was not taken.",
    ),
    MetricSpec(
        "headrace_gateway_untaken_bytes",
        "gauge",
        ("door",),
        "The bytes of the answers that wait for their callers to take them; over gRPC twice "
        "these, and their requests.",
    ),
)

METRIC_SPECS: dict[str, MetricSpec] = {
    spec.name: spec
    for part in (REQUESTS, RUNS, ENDS, READING, COMMITS, PARTITIONS, TRACES, PROCESS, GATEWAY)
    for spec in part
}
"""All of Headrace's own metrics, by family name."""
