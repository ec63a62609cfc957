"""`headrace doctor`: faults and their fixes, one line each."""

from __future__ import annotations

import json

import click

from headrace.cli.checks import (
    check_device,
    check_log,
    check_models,
    check_settings,
    unreadable_settings,
)
from headrace.cli.event_loop import run
from headrace.cli.findings import Finding, Severity
from headrace.cli.options import json_option
from headrace.cli.outcome import Unsuccessful
from headrace.cli.output import say
from headrace.cli.settings import Invocation, pass_invocation
from headrace.config import KafkaSettings
from headrace.errors import ConfigurationError

HIDDEN = "**********"


@click.command()
@json_option
@pass_invocation
def command(invocation: Invocation, in_json: bool) -> None:
    """Find what is wrong, and say how to fix it.

    Looks at configuration, broker, topics, models and device. Exit code 1 when one of them is
    wrong; a warning is none.
    """
    findings = _examine(invocation)
    if in_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            say(_line(finding))
    if any(finding.health is Severity.ERROR for finding in findings):
        raise Unsuccessful


def _examine(invocation: Invocation) -> list[Finding]:
    try:
        settings = invocation.settings
    except ConfigurationError as error:
        return list(unreadable_settings(error))
    findings = [
        *check_settings(settings),
        *run(check_log(settings)),
        *check_models(settings),
        *check_device(settings),
    ]
    return [without_secrets(finding, settings.kafka) for finding in findings]


def without_secrets(finding: Finding, kafka: KafkaSettings | None) -> Finding:
    """Return the finding without secrets that a broker or a library may have quoted."""
    if kafka is None:
        return finding
    for secret in (kafka.sasl_password, kafka.ssl_key_password):
        value = secret.get_secret_value()
        if value:
            finding = finding._replace(
                text=finding.text.replace(value, HIDDEN), fix=finding.fix.replace(value, HIDDEN)
            )
    return finding


def _line(finding: Finding) -> str:
    fix = f" -> {finding.fix}" if finding.fix else ""
    text = " ".join(finding.text.split())
    return f"{finding.health:<7} {finding.subject:<13} {text}{fix}"
