"""Metrics of answered requests, and their labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from headrace.errors import Code
from headrace.log.errors import Fenced, LogUnavailable
from headrace.log.port import Gap, TopicPartition
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import BatchSummary, Envelope, Failure, Request
from headrace.protocol.trace_context import Trace, new_trace
from headrace.telemetry.metrics import Metrics
from headrace.topics import Stage

WRITTEN_MS = 1_700_000_000_000
INGESTED_US = WRITTEN_MS * 1000 + 2_000
FORMED_US = INGESTED_US + 30_000
ANSWERED_US = FORMED_US + 400_000


@pytest.fixture
def registry() -> CollectorRegistry:
    """Make the registry of one process."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    """Make the metrics of the same process."""
    return Metrics(registry)


def request(
    model: str = "digits",
    version: str = "1",
    *,
    deadline_ms: int = 0,
    code: Code | None = None,
    written_ms: int = WRITTEN_MS,
) -> Request:
    """A request on its way out."""
    envelope = Envelope(deadline_ms=deadline_ms)
    made = Request(NULL_ACK, 0, 7, 6, written_ms, None, None, (), envelope)
    made.model, made.version = model, version
    made.ingested_us, made.batch = INGESTED_US, BatchSummary(FORMED_US)
    if code is not None:
        made.failure = Failure(code, "told", Stage.INGEST)
    return made


def answer(metrics: Metrics, *requests: Request) -> None:
    """All of them in one chunk."""
    metrics.answered(requests, ANSWERED_US - 5_000, ANSWERED_US)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (None, "ok"),
        (Code.DEADLINE_EXCEEDED, "expired"),
        (Code.INVALID_TENSOR, "refused"),
        (Code.OVERLOADED, "refused"),
        (Code.MODEL_FAILED, "failed"),
        (Code.INTERNAL, "failed"),
    ],
)
def test_request_metrics_have_outcome_and_code(
    metrics: Metrics, registry: CollectorRegistry, code: Code | None, outcome: str
) -> None:
    """Each code belongs to one outcome."""
    answer(metrics, request(code=code), request(code=code))
    labels = {"model": "digits", "version": "1", "outcome": outcome, "code": code or "ok"}
    assert registry.get_sample_value("headrace_requests_total", labels) == 2


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("request_duration", 0.432),
        ("log_wait", 0.002),
        ("queue_wait", 0.03),
        ("answer_duration", 0.005),
    ],
)
def test_request_metrics_have_time_of_each_stage(
    metrics: Metrics, registry: CollectorRegistry, name: str, seconds: float
) -> None:
    """Every request counts, those of one chunk together."""
    answer(metrics, request(), request(), request())
    labels = {"model": "digits", "version": "1"}
    assert registry.get_sample_value(f"headrace_{name}_seconds_count", labels) == 3
    total = registry.get_sample_value(f"headrace_{name}_seconds_sum", labels)
    assert total == pytest.approx(3 * seconds)


@pytest.mark.parametrize(
    ("written_ms", "duration_s"),
    [(-1, 0.43), (WRITTEN_MS * 10**6, 0.0), (2**63 - 1, 0.0)],
    ids=["none", "nanoseconds", "most"],
)
def test_duration_of_record_without_usable_timestamp_is_no_age_of_epoch(
    metrics: Metrics, registry: CollectorRegistry, written_ms: int, duration_s: float
) -> None:
    """Without a timestamp it begins when ingest has read the record; one ahead of the clock counts
    as now.
    """
    sampled = request(written_ms=written_ms)
    sampled.trace = Trace(new_trace())
    answer(metrics, sampled)
    labels = {"model": "digits", "version": "1"}
    for name, seconds in (("request_duration", duration_s), ("log_wait", 0.0)):
        total = registry.get_sample_value(f"headrace_{name}_seconds_sum", labels)
        assert total == pytest.approx(seconds)
    (exemplar,) = [
        sample.exemplar
        for family in registry.collect()
        if family.name == "headrace_request_duration_seconds"
        for sample in family.samples
        if sample.exemplar
    ]
    assert exemplar.value == pytest.approx(duration_s)


def test_unknown_model_name_is_no_label(metrics: Metrics, registry: CollectorRegistry) -> None:
    """However many names callers make up, there is one series for them."""
    answer(
        metrics,
        *(request(f"made-up-{number}", "", code=Code.UNKNOWN_MODEL) for number in range(100)),
    )
    labels = {"model": "", "version": "", "outcome": "refused", "code": "UNKNOWN_MODEL"}
    assert registry.get_sample_value("headrace_requests_total", labels) == 100
    names = {
        sample.labels["model"]
        for family in registry.collect()
        for sample in family.samples
        if "model" in sample.labels
    }
    assert names == {""}


def versions_in(registry: CollectorRegistry) -> set[tuple[str, str]]:
    """Models and versions that any series names."""
    return {
        (sample.labels["model"], sample.labels["version"])
        for family in registry.collect()
        for sample in family.samples
        if "version" in sample.labels
    }


def test_series_of_unloaded_version_are_removed_once_they_rest(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """A version that is loaded keeps its series, however long no request comes for it."""
    answer(metrics, request(version="1"), request(version="2", code=Code.TOO_LARGE))
    for version in ("1", "2"):
        metrics.ran(("digits", version), 1, wait_us=1, copy_us=1, compute_us=1)
        metrics.tried_together("digits", version, "agreed")
    for _ in range(2):
        metrics.forget_versions(lambda key: key == ("digits", "2"))
    assert versions_in(registry) == {("digits", "2")}


def test_series_of_unloaded_version_stay_while_requests_are_answered(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """Requests that were read before it was unloaded end later."""
    for _ in range(3):
        answer(metrics, request())
        metrics.forget_versions(lambda _: False)
    labels = {"model": "digits", "version": "1", "outcome": "ok", "code": "ok"}
    assert registry.get_sample_value("headrace_requests_total", labels) == 3
    metrics.forget_versions(lambda _: False)
    assert versions_in(registry) == set()


def test_series_of_unknown_models_are_not_removed(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """Their labels are empty, so there is only one of each code."""
    answer(metrics, request("made-up", "", code=Code.UNKNOWN_MODEL))
    for _ in range(2):
        metrics.forget_versions(lambda _: False)
    assert versions_in(registry) == {("", "")}


def test_expiry_and_refusal_metrics_name_stage(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """The stage that found it tells where time is lost."""
    answer(metrics, request(code=Code.DEADLINE_EXCEEDED), request(code=Code.TOO_LARGE))
    value = registry.get_sample_value
    assert value("headrace_expired_requests_total", {"stage": "ingest"}) == 1
    labels = {"stage": "ingest", "code": "TOO_LARGE"}
    assert value("headrace_refused_requests_total", labels) == 1


def test_slack_metric_is_time_left_to_deadline(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """Only requests with a deadline have some; a late one has none."""
    late, early = ANSWERED_US // 1000 - 50, ANSWERED_US // 1000 + 250
    answer(metrics, request(), request(deadline_ms=late), request(deadline_ms=early))
    labels = {"model": "digits", "version": "1"}
    assert registry.get_sample_value("headrace_answer_slack_seconds_count", labels) == 2
    total = registry.get_sample_value("headrace_answer_slack_seconds_sum", labels)
    assert total == pytest.approx(0.25)


@pytest.mark.parametrize("code", [Code.TOO_LARGE, Code.INVALID_REQUEST])
def test_unreadable_records_are_counted_from_zero(
    metrics: Metrics, registry: CollectorRegistry, code: Code
) -> None:
    """A series that begins with the first of them does not increase, so no alert would fire."""
    assert registry.get_sample_value("headrace_unreadable_records_total", {"code": code}) == 0

    metrics.unreadable(Gap(TopicPartition("requests", 0), 5, 8, code, "too large"))

    assert registry.get_sample_value("headrace_unreadable_records_total", {"code": code}) == 3


def test_sampled_request_becomes_exemplar(metrics: Metrics, registry: CollectorRegistry) -> None:
    """Its trace leads from the bucket to what happened."""
    sampled = request()
    sampled.trace = Trace(new_trace())
    answer(metrics, request(), sampled)
    found = {
        family.name: sample.exemplar.labels["trace_id"]
        for family in registry.collect()
        for sample in family.samples
        if sample.exemplar
    }
    trace_id = f"{sampled.trace.trace_id:032x}"
    assert found == {
        f"headrace_{name}_seconds": trace_id
        for name in ("request_duration", "queue_wait", "compute_duration")
    }


@pytest.mark.parametrize(
    ("error", "reason"), [(Fenced("moved on"), "fenced"), (LogUnavailable("away"), "unavailable")]
)
def test_failed_commit_is_timed_and_counted(
    metrics: Metrics, registry: CollectorRegistry, error: Exception, reason: str
) -> None:
    """It counts as a retry as well, since the next commit makes up for it."""
    with pytest.raises(type(error)), metrics.commit():
        raise error
    value = registry.get_sample_value
    assert value("headrace_commit_duration_seconds_count") == 1
    assert value("headrace_commit_failures_total", {"reason": reason}) == 1
    assert value("headrace_retries_total", {"operation": "commit"}) == 1


def test_transform_metrics_are_counted_by_model_alone(
    metrics: Metrics, registry: CollectorRegistry
) -> None:
    """A scrape fails where a series has other labels than its family."""
    metrics.transformed("digits", 0.5, 7)
    metrics.postprocessed("digits", 0.5)
    value = registry.get_sample_value
    assert value("headrace_transform_bytes_total", {"model": "digits"}) == 7
    assert value("headrace_transform_duration_seconds_count", {"model": "digits"}) == 1
    assert value("headrace_postprocess_duration_seconds_count", {"model": "digits"}) == 1
