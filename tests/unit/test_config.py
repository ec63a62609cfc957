"""Errors of wrong settings: the source of a value, and what may have been meant."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headrace.config import check_namespace, load_settings, make_settings
from headrace.errors import ConfigurationError
from tests.support.users import closed_to_us


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)


def _faults(path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(path)
    return str(raised.value).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that is right."""
    path = tmp_path / "headrace.toml"
    path.write_text("[telemetry]\nhttp_port = 9000\n[limits]\ndrain_timeout_s = 5\n")
    return path


def test_environment_overrides_settings_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable overrides one value; the rest of its section stays."""
    monkeypatch.setenv("headrace_telemetry__http_port", "9001")
    monkeypatch.setenv("HEADRACE_LIMITS__MAX_STALL_S", "7")

    settings = load_settings(file)

    assert settings.telemetry.http_port == 9001
    assert (settings.limits.drain_timeout_s, settings.limits.max_stall_s) == (5, 7)


def test_directory_that_is_closed_to_us_has_no_settings_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as root's home, where `sudo -u headrace headrace doctor` runs."""
    monkeypatch.chdir(file.parent)

    with closed_to_us(file.parent):
        settings = load_settings()

    assert settings == make_settings({})


def test_wrong_setting_from_environment_names_variable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody finds it in the file."""
    monkeypatch.setenv("HEADRACE_TELEMETRY__HTTP_PORT", "none")

    (line,) = _faults(file)

    assert line.startswith("HEADRACE_TELEMETRY__HTTP_PORT: Input should be a valid integer")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("HEADRACE_LIMIT__MAX_STALL_S", "there is no such setting; did you mean `limits`?"),
        (
            "HEADRACE_LIMITS__MAX_STAL_S",
            "there is no such setting; did you mean `max_stall_s`?",
        ),
        (
            "HEADRACE_LIMITS_MAX_STALL_S",
            "there is no such setting; did you mean `HEADRACE_LIMITS__MAX_STALL_S`?",
        ),
        (
            "HEADRACE_SCHEMA_REGISTRY_URL",
            "there is no such setting; did you mean `HEADRACE_SCHEMA_REGISTRY__URL`?",
        ),
    ],
)
def test_misspelled_variable_gets_suggestion(
    name: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section's name and the setting's name are both compared; between them are two
    underscores.
    """
    monkeypatch.setenv(name, "7")

    assert _faults() == [f"{name}: {line}"]


@pytest.mark.parametrize("name", ["HEADRACE_PORT_8080_TCP", "HEADRACE_GATEWAY_HTTP_PORT"])
def test_foreign_headrace_variables_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets such variables for services called headrace and headrace-gateway-http."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:8080")

    assert load_settings().namespace == "headrace"


@pytest.mark.parametrize(
    ("name", "kind"), [("HEADRACE_TOPICS", "a table"), ("HEADRACE_CLAIMS__ALLOWED", "a list")]
)
def test_variable_of_invalid_json_is_named(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole section, or a list, in one variable has to be JSON."""
    monkeypatch.setenv(name, "partitions=3")

    assert _faults() == [f"{name}: expected {kind}, got text; in a variable it is JSON"]


@pytest.mark.parametrize("name", ["headrace.requests", "answers"])
def test_topics_of_same_name_are_refused(name: str) -> None:
    """Answers on `requests` would be read as requests, and answered, without end."""
    names = {"responses": name, "dead-letters": "answers"}
    others = "requests, responses" if name == "headrace.requests" else "responses, dead-letters"
    reason = f"settings: .*topics.names: expected a topic for each of {others}, got {name}"
    with pytest.raises(ConfigurationError, match=reason):
        make_settings({"topics": {"names": names}})


@pytest.mark.parametrize("name", ["", "a b", "..", "x" * 250])
def test_name_that_no_topic_can_have_is_refused(name: str) -> None:
    """Kafka would have no such topic, and creating it as advised would fail."""
    with pytest.raises(ConfigurationError, match="expected a topic name of 1 to 249 letters"):
        make_settings({"topics": {"names": {"requests": name}}})


@pytest.mark.parametrize("suffix", ["ingest", "batcher", "executor", "marks", "redrive"])
def test_namespace_with_name_of_group_is_refused(suffix: str) -> None:
    """The batcher of a namespace `prod` is in the group `prod.batcher`."""
    reason = f"namespace: expected a name that does not end in .{suffix}, got prod.{suffix}: "
    with pytest.raises(ConfigurationError, match=reason):
        make_settings({"namespace": f"prod.{suffix}"})
    with pytest.raises(ConfigurationError, match=reason):
        check_namespace(f"prod.{suffix}")


@pytest.mark.parametrize("namespace", ["prod.eu", "batcher", "prod.batcher2", "prod.batcher.eu"])
def test_namespace_with_dots_is_taken(namespace: str) -> None:
    """The namespace is accepted if no group has its name."""
    assert make_settings({"namespace": namespace}).namespace == namespace


def test_misspelled_section_gets_suggestion(tmp_path: Path) -> None:
    """A misspelled setting gets one as well; an unlike name gets none."""
    path = tmp_path / "wrong.toml"
    path.write_text("[limit]\nmax_stall_s = 1\n[kafka]\nbootstrap_server = 'a:1'\nxyz = 1\n")

    assert set(_faults(path)) >= {
        f"{path}: limit: there is no such setting; did you mean `limits`?",
        f"{path}: kafka.bootstrap_server: there is no such setting; "
        "did you mean `bootstrap_servers`?",
        f"{path}: kafka.xyz: there is no such setting",
    }


@pytest.mark.parametrize(
    ("kafka", "text"),
    [
        (
            {"ssl_ca_file": "ca.pem", "ssl_cert_file": "client.pem"},
            "expected SSL or SASL_SSL with ssl_ca_file, ssl_cert_file, got PLAINTEXT",
        ),
        (
            {"security_protocol": "SSL", "sasl_username": "svc", "sasl_password": "hunter2"},
            "expected SASL_PLAINTEXT or SASL_SSL with sasl_username, sasl_password, got SSL",
        ),
    ],
)
def test_security_that_protocol_does_not_have_is_refused(kafka: dict[str, str], text: str) -> None:
    """Connections would be without the TLS, or the login, that is expected of these settings."""
    with pytest.raises(ConfigurationError, match=f"kafka: security_protocol: {text}$"):
        make_settings({"kafka": {"bootstrap_servers": "broker:9092", **kafka}})


def test_defaults_of_security_may_stand_beside_any_protocol() -> None:
    """Charts write all settings, and those that are not needed with their defaults."""
    kafka = {"bootstrap_servers": "broker:9092", "sasl_mechanism": "PLAIN", "sasl_password": ""}
    settings = make_settings({"kafka": {**kafka, "ssl_check_hostname": True}})
    assert settings.kafka is not None


@pytest.mark.parametrize(
    "servers",
    [
        "",
        "broker:",
        ":9092",
        "broker:99999",
        "broker:9092,",
        "one:9092 two:9092",
        "SASL_SSL://broker:9092",
    ],
)
def test_bootstrap_servers_that_are_no_addresses_are_refused(servers: str) -> None:
    """Often a variable in them was not set; to look up what is left would say less."""
    text = f"expected HOST:PORT, or several with commas between them, got {servers!r}"
    with pytest.raises(ConfigurationError, match=f"kafka.bootstrap_servers: {re.escape(text)}$"):
        make_settings({"kafka": {"bootstrap_servers": servers}})


@pytest.mark.parametrize("servers", ["broker", "one:9092, two:9092", "[::1]:9092", "127.0.0.1:1"])
def test_bootstrap_servers_may_be_names_and_addresses(servers: str) -> None:
    """As Kafka's clients take them."""
    settings = make_settings({"kafka": {"bootstrap_servers": servers}})
    assert settings.kafka is not None


def test_trusted_keys_that_check_nothing_are_refused() -> None:
    """Versions that nobody has signed would be served where signatures are expected to count."""
    with pytest.raises(ConfigurationError, match="require_signature: expected true with trusted_k"):
        make_settings({"models": {"trusted_keys": ["release.pub"]}})


def test_burst_of_callers_without_any_rate_is_refused() -> None:
    """Nothing would be limited where a limit is expected."""
    with pytest.raises(ConfigurationError, match="caller_burst: expected caller_requests_per_sec"):
        make_settings({"gateway": {"caller_burst": 5}})


@pytest.mark.parametrize("beside", [{"caller_requests_per_second": 2}, {"keys_file": "keys.toml"}])
def test_burst_of_callers_beside_rate_is_taken(beside: dict[str, object]) -> None:
    """A key may have a rate of its own in the file, without a burst of its own."""
    assert make_settings({"gateway": {"caller_burst": 5, **beside}}).gateway.caller_burst == 5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"url": "http://registry", "tls_ca_file": "ca.pem"}, "expected https:// with tls_ca_file"),
        ({"url": "https://registry", "password": "hunter2"}, "expected username beside it"),
    ],
)
def test_security_of_schema_registry_without_effect_is_refused(
    settings: dict[str, str], text: str
) -> None:
    """Requests would be without the TLS, or the login, that is expected of these settings."""
    with pytest.raises(ConfigurationError, match=text):
        make_settings({"schema_registry": settings})


def test_keep_replaced_s_of_true_is_refused() -> None:
    """Like every other number: true would be taken as one second."""
    with pytest.raises(
        ConfigurationError, match=r"models\.keep_replaced_s: expected a number, got"
    ):
        make_settings({"models": {"keep_replaced_s": True}})
