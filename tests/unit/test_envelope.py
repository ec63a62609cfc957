"""Headers of requests, answers and dead letters."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from headrace.errors import Code
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import (
    answer_content_type,
    answer_headers,
    dead_letter_headers,
    parse_envelope,
    travels,
)
from headrace.protocol.messages import Envelope, Failure, Request

NOW_MS = 1_700_000_000_000
TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Headers = list[tuple[str, bytes | None]]


def parse(*headers: tuple[str, bytes | None], default_timeout_ms: int = 0) -> Envelope:
    """The envelope of a record written at `NOW_MS`."""
    return parse_envelope(headers, NOW_MS, default_timeout_ms)


def request_with(*headers: tuple[str, bytes | None]) -> Request:
    """A request at offset 7 of partition 2."""
    return Request(NULL_ACK, 2, 7, 6, NOW_MS, b"key", b"value", headers, parse(*headers))


def test_record_without_headers_has_empty_envelope() -> None:
    """Everything is optional."""
    assert parse() == Envelope()


def test_envelope_reads_every_header() -> None:
    """Each finds its field."""
    envelope = parse(
        ("content-type", b"application/json"),
        ("kafka_correlationId", b"\x00\xff"),
        ("kafka_replyTopic", b"headrace.client.replies"),
        ("kafka_replyPartition", b"\x00\x00\x01\x02"),
        ("x-deadline-ms", b"1700000000500"),
        ("x-priority", b"-5"),
        ("x-tenant", "Grün".encode()),
        ("x-model", b"digits/3"),
        ("traceparent", TRACEPARENT),
        ("tracestate", b"k=v"),
        ("unknown", b"passed on"),
    )

    assert envelope == Envelope(
        content_type="application/json",
        correlation_id=b"\x00\xff",
        reply_topic="headrace.client.replies",
        reply_partition=258,
        deadline_ms=1_700_000_000_500,
        priority=-5,
        tenant="Grün",
        model="digits",
        version="3",
        traceparent=TRACEPARENT,
        tracestate=b"k=v",
        fault=None,
    )


@pytest.mark.parametrize(
    "value", [b"Application/JSON", b"application/json; charset=utf-8", b" application/json ;x=y"]
)
def test_content_types_match_without_case_and_parameters(value: bytes) -> None:
    """The type alone is left, in lower case."""
    assert parse(("content-type", value)).content_type == "application/json"


def test_last_value_of_repeated_header_counts() -> None:
    """Kafka's own clients read headers this way."""
    assert parse(("x-model", b"a"), ("x-model", b"b")).model == "b"


def test_null_value_is_absent_header() -> None:
    """A null also hides an earlier value."""
    assert parse(("x-model", b"a"), ("x-model", None)) == Envelope()


@pytest.mark.parametrize(
    ("headers", "default_timeout_ms", "deadline_ms"),
    [
        ([("x-timeout-ms", b"100")], 0, NOW_MS + 100),
        ([("x-deadline-ms", b"%d" % (NOW_MS + 50)), ("x-timeout-ms", b"100")], 0, NOW_MS + 50),
        ([("x-deadline-ms", b"%d" % (NOW_MS + 200)), ("x-timeout-ms", b"100")], 0, NOW_MS + 100),
        ([], 300, NOW_MS + 300),
        ([("x-tenant", b"t")], 300, NOW_MS + 300),
        ([("x-timeout-ms", b"100")], 50, NOW_MS + 100),
        ([("x-deadline-ms", b"%d" % (NOW_MS + 400))], 300, NOW_MS + 400),
        ([("x-timeout-ms", b"0")], 0, NOW_MS),
        ([("x-deadline-ms", b"0")], 0, 1),
    ],
)
def test_earliest_deadline_counts_and_default_only_without_any(
    headers: Headers, default_timeout_ms: int, deadline_ms: int
) -> None:
    """0 in an envelope means none, so a deadline of 0 becomes 1, which has passed as well."""
    assert parse(*headers, default_timeout_ms=default_timeout_ms).deadline_ms == deadline_ms


@pytest.mark.parametrize("timestamp_ms", [NOW_MS * 10**6, 2**63 - 1], ids=["nanoseconds", "most"])
def test_timeout_from_far_timestamp_is_latest_deadline(timestamp_ms: int) -> None:
    """No deadline is later than a header may say, so that calculations with it stay in range."""
    envelope = parse_envelope([("x-timeout-ms", b"100")], timestamp_ms, 0)

    assert envelope.deadline_ms == parse(("x-deadline-ms", b"9" * 15)).deadline_ms


def test_record_without_timestamp_has_no_timeout() -> None:
    """Kafka's -1 is no time to count from."""
    envelope = parse_envelope([("x-timeout-ms", b"100")], -1, 100)

    assert (envelope.deadline_ms, envelope.fault) == (0, None)


@pytest.mark.parametrize(
    ("header", "value", "fault"),
    [
        (
            "x-deadline-ms",
            b"soon",
            "header x-deadline-ms: expected milliseconds in at most 15 ASCII digits, got 'soon'",
        ),
        (
            "kafka_replyPartition",
            b"\x00\x01",
            "header kafka_replyPartition: expected 4 bytes, big-endian, got 2 bytes",
        ),
        (
            "kafka_replyPartition",
            b"\xff\xff\xff\xff",
            "header kafka_replyPartition: expected a partition of 0 or more, got -1",
        ),
        ("x-model", b"a/b/c", "header x-model: expected a model name or name/version, got 'a/b/c'"),
        ("x-tenant", b"\xff", "header x-tenant: expected UTF-8, got '\\xff'"),
        (
            "content-type",
            b"image/jpeg",
            "header content-type: expected application/msgpack or application/json, or a header "
            "x-model that names the model for this payload, got image/jpeg without x-model",
        ),
        (
            "content-type",
            b"application/cloudevents+json",
            "header content-type: expected CloudEvents in binary mode (ce_* headers), got "
            "structured mode (application/cloudevents+json)",
        ),
    ],
)
def test_envelope_fault_names_header_and_value(header: str, value: bytes, fault: str) -> None:
    """The message is the error's, word for word."""
    assert parse((header, value)).fault == fault


def test_envelope_with_fault_keeps_reply_headers() -> None:
    """The reply topic, the correlation id and the content type are read all the same."""
    envelope = parse(
        ("x-deadline-ms", b"soon"),
        ("kafka_replyTopic", b"headrace.client.replies"),
        ("kafka_correlationId", b"c"),
        ("content-type", b"application/json"),
    )

    assert envelope[:3] == ("application/json", b"c", "headrace.client.replies")
    assert envelope.fault is not None


def test_raw_payload_needs_only_x_model() -> None:
    """The model's configuration says the rest."""
    envelope = parse(("content-type", b"image/jpeg"), ("x-model", b"resnet"))

    assert (envelope.content_type, envelope.model, envelope.fault) == ("image/jpeg", "resnet", None)


def test_cloudevents_headers_are_passed_on_as_headers() -> None:
    """They are no fault, and do not travel on."""
    envelope = parse(("ce_specversion", b"1.0"), ("ce_type", b"t"))

    assert envelope == Envelope()


@pytest.mark.parametrize("parents", [(), (("traceparent", b"00-a-b-01"),)])
def test_tracestate_without_readable_traceparent_is_dropped(
    parents: tuple[tuple[str, bytes], ...],
) -> None:
    """It belongs to a trace that does not go on; the answer would have it beside a new one."""
    assert parse(*parents, ("tracestate", b"k=v")).tracestate is None


# --- answers ----------------------------------------------------------------------------------


def test_answer_carries_headers_of_contract() -> None:
    """Status, identity, correlation and trace, and the caller's own headers."""
    request = request_with(
        ("content-type", b"application/json; charset=utf-8"),
        ("kafka_correlationId", b"c"),
        ("traceparent", TRACEPARENT),
        ("tracestate", b"k=v"),
        ("x-deadline-ms", b"1700000000500"),
        ("x-their-own", b"1"),
        ("empty", None),
        ("twice", b"1"),
        ("twice", b"2"),
    )

    assert answer_headers(request, "ok", "headrace.requests") == [
        ("content-type", b"application/json"),
        ("x-status", b"ok"),
        ("x-request", b"headrace.requests/2/7"),
        ("kafka_correlationId", b"c"),
        ("traceparent", TRACEPARENT),
        ("tracestate", b"k=v"),
        ("x-their-own", b"1"),
        ("twice", b"1"),
        ("twice", b"2"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "content-type", "content-encoding", "ce_id", "kafka_replyTopic", "kafka_dlt-original-topic",
        "retry_topic-attempts", "__TypeId__", "spring_json_header_types", "x-deadline-ms",
        "x-timeout-ms", "x-priority", "x-tenant", "x-model", "x-status", "x-request", "x-stage",
        "x-attempt", "x-replay-id", "traceparent",
    ],
)  # fmt: skip
def test_request_only_headers_are_not_copied_to_answer(name: str) -> None:
    """It would mislead the reader of the answer."""
    assert not travels(name)


@pytest.mark.parametrize("name", ["x-customer", "X-Model", "__half", "baggage", "b3", "kafka", ""])
def test_foreign_headers_are_copied_to_answer(name: str) -> None:
    """`x-*` that Headrace gives no meaning belong to others."""
    assert travels(name)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("", "application/msgpack"),
        ("application/x-msgpack", "application/x-msgpack"),
        ("application/json", "application/json"),
        ("image/jpeg", "application/json"),
    ],
)
def test_answer_has_content_type_of_its_request(asked: str, answered: str) -> None:
    """Raw payloads are answered in JSON."""
    assert answer_content_type(asked) == answered


def test_dead_letter_keeps_headers_and_adds_error() -> None:
    """The added headers have the forms that Spring for Apache Kafka reads."""
    request = request_with(("x-model", None), ("trace", b"1"), ("trace", b"2"))
    failure = Failure(Code.INVALID_TENSOR, "inputs[0].shape: expected …", "ingest")

    assert dead_letter_headers(request, failure, "headrace.requests") == [
        ("x-model", None),
        ("trace", b"1"),
        ("trace", b"2"),
        ("kafka_dlt-original-topic", b"headrace.requests"),
        ("kafka_dlt-original-partition", b"\x00\x00\x00\x02"),
        ("kafka_dlt-original-offset", struct.pack(">q", 7)),
        ("kafka_dlt-original-timestamp", struct.pack(">q", NOW_MS)),
        ("kafka_dlt-exception-fqcn", b"INVALID_TENSOR"),
        ("kafka_dlt-exception-message", "inputs[0].shape: expected …".encode()),
        ("x-stage", b"ingest"),
        ("x-attempt", b"1"),
    ]


@pytest.mark.parametrize("name", ["caf\udce9", "x-model\udcff", "\udc80" * 500])
def test_header_name_of_other_encoding_than_utf8_is_fault(name: str) -> None:
    """It says which name, in characters that can be written anywhere, and not all of a long one."""
    fault = parse((name, b"x"), ("x-tenant", b"t")).fault

    assert fault is not None
    assert "expected a name in UTF-8" in fault
    assert fault.isascii()
    assert len(fault) < 500


@pytest.mark.parametrize("name", ["x-tenant", "caf\udce9"])
def test_header_name_that_is_not_utf8_is_fault_beside_null_value(name: str) -> None:
    """Null values are passed over, but not that name: no record between the stages can hold it."""
    fault = parse(("caf\udce9", None), ("x-tenant", b"t"), (name, None), ("x-model", None)).fault

    assert fault is not None
    assert "expected a name in UTF-8" in fault


def test_header_name_outside_of_ascii_is_accepted() -> None:
    """UTF-8 is."""
    assert parse(("größe", b"x")).fault is None
    assert travels("größe")


def test_cache_of_header_names_is_bounded() -> None:
    """Callers choose them, and they may be as long as a record."""
    tracemalloc.start()
    try:
        for number in range(200):
            assert travels(f"{number}" * 50_000)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held_bytes < 1_000_000


def test_dead_letter_of_second_failure_replaces_headers() -> None:
    """Headers of the earlier failure are replaced."""
    failure = Failure(Code.MODEL_FAILED, "again", "executor")
    first = dead_letter_headers(request_with(("a", b"1")), failure, "t")

    again = dead_letter_headers(request_with(*first), failure, "t")

    assert again == first


@pytest.mark.parametrize(
    ("given", "kept"), [(b"3", b"3"), (b"", b"1"), (b"many", b"1"), (b"12345", b"1")]
)
def test_dead_letter_of_second_failure_counts_attempts(given: bytes, kept: bytes) -> None:
    """The count continues that of the redrive; an unreadable count starts at the first."""
    failure = Failure(Code.MODEL_FAILED, "again", "executor")

    headers = dead_letter_headers(request_with(("x-attempt", given)), failure, "t")

    assert headers[-1] == ("x-attempt", kept)
