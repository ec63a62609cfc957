"""Findings of `headrace doctor` without a broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.broker_checks import check_release
from headrace.cli.checks import check_settings
from headrace.cli.doctor import HIDDEN, without_secrets
from headrace.cli.findings import Finding, Severity
from headrace.cli.outcome import Exit
from headrace.config import make_settings
from headrace.log.kafka.cluster import oldest_release
from tests.support.command_line import Call
from tests.support.fake_cupy import FakeCupy
from tests.support.models import add_version, digits


def findings(call: Call, *arguments: str) -> dict[str, dict[str, str]]:
    """The findings by their subject; the last one of each."""
    shown = json.loads(call(*arguments, "doctor", "--json").stdout)
    return {finding["subject"]: finding for finding in shown}


def test_doctor_escapes_control_characters(call: Call, tmp_path: Path) -> None:
    """A repository may come from elsewhere, and its names could change the terminal."""
    (tmp_path / "models" / "bell\x07" / "1").mkdir(parents=True)
    result = call("doctor")
    assert "bell\\x07" in result.stdout
    assert "\x07" not in result.stdout


def test_doctor_without_findings_exits_with_0(call: Call, tmp_path: Path) -> None:
    """With the embedded log and an empty repository there is nothing to fix but a warning."""
    (tmp_path / "models").mkdir()
    result = call("doctor")
    assert result.exit_code == Exit.DONE
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["ok", "configuration"],
        ["ok", "broker"],
        ["warning", "models"],
        ["ok", "device"],
    ]


def test_wrong_settings_are_doctor_findings(call: Call, tmp_path: Path) -> None:
    """A settings file that cannot be read is a finding, and the end of the examination."""
    (tmp_path / "headrace.toml").write_text("namespace = 1\n")
    result = call("doctor")
    assert result.exit_code == Exit.FAILED
    assert result.stdout.startswith("error   configuration headrace.toml: namespace:")


def test_missing_repository_is_doctor_error_with_fix(call: Call) -> None:
    """A repository that is not there is told with what to do."""
    finding = findings(call)["models"]
    assert finding["health"] == "error"
    assert finding["fix"] == "set models.repository, or make it"


def test_broken_model_is_doctor_error(call: Call, tmp_path: Path) -> None:
    """A version whose file is no ONNX model is told by its name."""
    version = tmp_path / "models" / "digits" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"nothing of the kind")
    finding = findings(call)["models"]
    assert finding["health"] == "error"
    assert finding["text"].startswith("digits/1: ")


def test_missing_device_is_doctor_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device without its execution provider is told with the fix."""
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setenv("HEADRACE_EXECUTOR__DEVICE", "cuda:0")
    finding = findings(call)["device"]
    assert finding["health"] == "error"
    assert "executor.device cuda:0 needs CUDAExecutionProvider" in finding["text"]


@pytest.mark.parametrize(
    ("experimental", "devices", "health", "told"),
    [
        ("false", 1, "error", "executor.device cuda:0 is experimental"),
        ("true", 0, "error", "cuda:0: expected a GPU of this number, got 0"),
        ("true", 1, "ok", "cuda:0: 0 of 0 MiB free, onnxruntime"),
    ],
    ids=["not asked for", "not there", "there"],
)
def test_doctor_checks_gpu(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    experimental: str,
    devices: int,
    health: str,
    told: str,
) -> None:
    """The provider is listed where there is no GPU as well."""
    FakeCupy(monkeypatch, lambda *_: None).devices = devices
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setenv("HEADRACE_EXECUTOR__DEVICE", "cuda:0")
    monkeypatch.setenv("HEADRACE_EXECUTOR__EXPERIMENTAL_CUDA", experimental)
    finding = findings(call)["device"]
    assert finding["health"] == health
    assert told in finding["text"]


def test_topic_too_small_for_request_is_doctor_error() -> None:
    """Records must be allowed to be as large as requests are."""
    settings = make_settings({"topics": {"max_message_bytes": 4 * 1024 * 1024}})
    (finding,) = check_settings(settings)
    assert finding.health is Severity.ERROR
    assert "expected at least 4259840" in finding.text


def test_readable_password_is_doctor_warning() -> None:
    """PLAIN without TLS sends the password as it is."""
    settings = make_settings(
        {
            "kafka": {
                "bootstrap_servers": "broker:9092",
                "security_protocol": "SASL_PLAINTEXT",
                "sasl_username": "svc",
                "sasl_password": "hunter2",
            }
        }
    )
    (finding,) = check_settings(settings)
    assert finding.health is Severity.WARNING
    assert "hunter2" not in repr(finding)


def test_doctor_findings_show_no_secret() -> None:
    """Should an error's text quote the password, it is not printed."""
    kafka = make_settings(
        {
            "kafka": {
                "bootstrap_servers": "broker:9092",
                "security_protocol": "SASL_SSL",
                "sasl_username": "svc",
                "sasl_password": "hunter2",
            }
        }
    ).kafka
    finding = Finding("broker", Severity.ERROR, "refused hunter2", "not hunter2")
    assert without_secrets(finding, kafka) == Finding(
        "broker", Severity.ERROR, f"refused {HIDDEN}", f"not {HIDDEN}"
    )


@pytest.mark.parametrize(
    ("versions", "release"),
    [
        ({0: (0, 13), 1: (4, 18), 65: (0, 0)}, (4, 0)),
        ({0: (0, 11), 1: (0, 17), 65: (0, 0)}, (3, 0)),
        ({0: (0, 9), 1: (0, 12)}, (0, 0)),
    ],
)
def test_broker_release_is_derived_from_api_versions(
    versions: dict[int, tuple[int, int]], release: tuple[int, int]
) -> None:
    """The oldest forms of requests went with 4.0; a request that came with 3.0 tells it."""
    assert oldest_release(versions) == release


@pytest.mark.parametrize(
    ("release", "health"), [((4, 0), Severity.OK), ((3, 0), Severity.OK), ((0, 0), Severity.ERROR)]
)
def test_old_broker_is_doctor_error(release: tuple[int, int], health: Severity) -> None:
    """At-least-once delivery needs Kafka 3.0."""
    settings = make_settings({"kafka": {"bootstrap_servers": "broker:9092"}})
    assert check_release(settings, release).health is health


@pytest.mark.parametrize(
    ("name", "config"),
    [("1/model.py", 'backend = "python"'), ("transform.py", 'transform = "python"')],
)
def test_model_exiting_at_import_is_doctor_finding(
    call: Call, tmp_path: Path, name: str, config: str
) -> None:
    """An exception of a user's code is reported with its file, and the examination goes on."""
    directory = add_version(tmp_path / "models", "exits", 1, digits(), config).parent
    (directory / name).write_text("import sys; sys.exit(0)", encoding="utf-8")
    found = findings(call)
    assert f"exits/{name}: SystemExit: 0" in found["models"]["text"]
    assert found["device"]["health"] == "ok"
