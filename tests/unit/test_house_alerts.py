"""Prometheus' configuration and the alert rules: by Prometheus' own tool, and our own rules."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.metric_names import unknown_metrics
from tests.support.tree import ROOT

FOLDER = ROOT / "deploy" / "prometheus"


@cache
def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_has_severity_summary_and_runbook(rule: dict[str, Any]) -> None:
    """Every alert has a severity, a summary, a description and a runbook."""
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert all(rule["annotations"].get(part) for part in ("summary", "description", "runbook"))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_names_only_metrics_that_exist(rule: dict[str, Any]) -> None:
    """The expression, and what the runbook tells to look at, are metrics of the catalogue."""
    assert unknown_metrics(rule["expr"] + rule["annotations"]["runbook"]) == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alert_fires_in_its_rule_test(rule: dict[str, Any]) -> None:
    """The tests of the rules have a case in which the alert fires."""
    cases = (FOLDER / "alerts.test.yaml").read_text(encoding="utf-8")

    assert f'alertname="{rule["alert"]}", alertstate="firing"' in cases


def test_alerts_page_lists_every_alert_with_severity() -> None:
    """The table of the document is the rules', in their order."""
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(Headrace\w+)` \| (\w+) \|", page, flags=re.MULTILINE)

    assert listed == [(rule["alert"], rule["labels"]["severity"]) for rule in rules()]


def test_runbooks_name_only_existing_alerts() -> None:
    """An alert that a runbook names is one of these."""
    named = {name for rule in rules() for name in re.findall(r"\bHeadrace[A-Z]\w+", str(rule))}

    assert named <= {rule["alert"] for rule in rules()}


def test_compose_runs_prometheus_version_of_rule_tests() -> None:
    """The image of the Compose file and the module in `tools/promtool` are one version."""
    compose = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    module = (ROOT / "tools" / "promtool" / "go.mod").read_text(encoding="utf-8")
    (image,) = re.findall(r"image: prom/prometheus:v(\d+)\.(\d+)\.(\d+)", compose)
    (built,) = re.findall(r"github.com/prometheus/prometheus v0\.(\d+)\.(\d+)", module)

    # As a Go module, Prometheus 3.13.5 is v0.313.5.
    assert (f"{image[0]}{image[1]:0>2}", image[2]) == built


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--lint=all", "--lint-fatal", "prometheus.yaml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml"),
        ("test", "rules", "alerts.test.yaml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_alert_rules(promtool: Path, arguments: tuple[str, ...]) -> None:
    """The configuration is valid, and every alert fires when it should and not otherwise."""
    found = subprocess.run(
        [promtool, *arguments], check=False, cwd=FOLDER, capture_output=True, text=True
    )

    assert found.returncode == 0, found.stdout + found.stderr
