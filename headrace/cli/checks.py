"""Checks of `headrace doctor`: each yields findings, and raises no errors of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.broker_checks import (
    check_broker_settings,
    check_quotas,
    check_release,
    check_replicas,
    check_rights,
    transactional_id,
)
from headrace.cli.findings import Finding, Severity
from headrace.config import KafkaSettings, Settings
from headrace.errors import ConfigurationError, Fatal, HeadraceError, describe_error
from headrace.log.errors import LogAuthenticationFailed
from headrace.log.port import Log, TopicInfo, TopicPartition
from headrace.models.backends.onnx_session import find_runtime
from headrace.runtime.log_factory import open_log
from headrace.runtime.topic_plan import compare, plan_topics, required_topics
from headrace.topics import Topic
from headrace.tuning import TUNING

if TYPE_CHECKING:
    from headrace.models.repository import FoundModel
    from headrace.models.schema_registry import SchemaRegistry

CUDA = "CUDAExecutionProvider"

SLACK_S = 10.0
"""Time allowed for the broker check in addition to the log's own request timeout."""

LONGEST_TRANSACTION_S = 60.0
"""Age from which an open transaction is reported: the default timeout of producers in Java."""


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Check for values that are allowed individually, but not together."""
    faulty = False
    overhead_bytes = TUNING.runtime.record_overhead_bytes
    needed = settings.limits.max_request_bytes + overhead_bytes
    if settings.topics.max_message_bytes < needed:
        faulty = True
        yield Finding(
            "configuration",
            Severity.ERROR,
            f"topics.max_message_bytes: expected at least {needed} "
            f"(limits.max_request_bytes and {overhead_bytes} for headers), "
            f"got {settings.topics.max_message_bytes}",
            "raise topics.max_message_bytes or lower limits.max_request_bytes",
        )
    if settings.kafka is not None and _shows_password(settings.kafka):
        faulty = True
        yield Finding(
            "configuration",
            Severity.WARNING,
            "kafka.security_protocol SASL_PLAINTEXT sends the password readable with PLAIN",
            "use SASL_SSL, or a SCRAM mechanism",
        )
    if not faulty:
        log = settings.kafka.bootstrap_servers if settings.kafka else "the embedded log"
        yield Finding("configuration", Severity.OK, f"namespace {settings.namespace} on {log}")


def _shows_password(kafka: KafkaSettings) -> bool:
    return kafka.security_protocol == "SASL_PLAINTEXT" and kafka.sasl_mechanism == "PLAIN"


def unreadable_settings(error: ConfigurationError) -> Iterator[Finding]:
    """Yield the faults of settings that could not be read."""
    for line in str(error).splitlines():
        yield Finding(
            "configuration", Severity.ERROR, line, "fix this first; the other checks need it"
        )


async def check_log(settings: Settings) -> list[Finding]:
    """Check that a broker answers, and that its topics are right."""
    if settings.kafka is None:
        return [Finding("broker", Severity.OK, "none configured: the embedded log is used")]
    # Without a broker configured, nothing here needs aiokafka.
    from headrace.log.kafka.cluster import survey

    deadline_s = settings.kafka.request_timeout_ms / 1000 + SLACK_S
    try:
        async with asyncio.timeout(deadline_s), open_log(settings) as log:
            names = [settings.topic(topic) for topic in Topic]
            found = await survey(
                settings.kafka, names, settings.namespace, transactional_id(settings)
            )
            topics = await _described(log, [*found.topics])
            open_transactions = await check_transactions(settings, log, topics or {}, time.time())
    except TimeoutError:
        return [_unreachable(settings.kafka, f"no answer within {deadline_s:g} s")]
    except LogAuthenticationFailed as error:
        return [
            Finding(
                "broker",
                Severity.ERROR,
                str(error),
                "check kafka.security_protocol, kafka.sasl_* and kafka.ssl_*",
            )
        ]
    except ConfigurationError as error:
        return [Finding("broker", Severity.ERROR, str(error), "fix this setting")]
    except HeadraceError as error:
        return [_unreachable(settings.kafka, str(error))]
    return [
        check_release(settings, found.release),
        *check_broker_settings(settings, found.settings),
        *check_quotas(settings, found.quotas),
        *check_rights(settings, found),
        *check_topics(settings, topics, found.forbidden_topics),
        *check_replicas(found, topics or {}),
        *open_transactions,
    ]


async def _described(log: Log, names: Sequence[str]) -> Mapping[str, TopicInfo | None] | None:
    """Return the topics' partitions and settings; None if we may not read those."""
    try:
        return await log.describe_topics(names)
    except LogAuthenticationFailed:  # of a topic: the survey was authenticated before
        return None


async def check_transactions(
    settings: Settings, log: Log, topics: Mapping[str, TopicInfo | None], now_s: float
) -> list[Finding]:
    """Find open transactions that hide what is written behind their first records.

    What cannot be read within some seconds is left out, since other checks report that.

    Args:
        settings: have the names of the topics; stages write the others without transactions.
        log: holds the topics.
        topics: those that exist, by name.
        now_s: seconds since the epoch.
    """
    names = [settings.topic(each) for each in (Topic.REQUESTS, Topic.RESPONSES, Topic.DEAD_LETTERS)]
    partitions = [
        TopicPartition(name, number)
        for name in names
        if (info := topics.get(name)) is not None
        for number in range(info.partitions)
    ]
    findings: list[Finding] = []
    try:
        async with asyncio.timeout(SLACK_S / 2), log.reader(partitions) as reader:
            written = await log.written_ends(partitions)  # before the ends, which may go on
            ends = await reader.end_offsets(partitions)
            for each in partitions:
                if written[each] > (end := ends[each]):
                    for first in (await log.fetch(each, end, end, max_bytes=1))[:1]:
                        age_s = now_s - first.timestamp / 1000
                        if age_s >= LONGEST_TRANSACTION_S:
                            findings.append(_open_transaction(each, end, age_s))
    except (TimeoutError, HeadraceError):
        pass
    return findings


def _open_transaction(partition: TopicPartition, offset: int, age_s: float) -> Finding:
    return Finding(
        "topics",
        Severity.WARNING,
        f"{partition}: a transaction that was begun {age_s:.0f} s ago is open and hides the "
        f"offsets from {offset} on",
        "see that its producer ends it, or abort it with `kafka-transactions.sh`",
    )


def _unreachable(kafka: KafkaSettings, reason: str) -> Finding:
    return Finding(
        "broker",
        Severity.ERROR,
        reason,
        f"see that a broker listens on {kafka.bootstrap_servers} "
        f"(kafka.bootstrap_servers) and takes {kafka.security_protocol}",
    )


def check_topics(
    settings: Settings,
    existing: Mapping[str, TopicInfo | None] | None,
    forbidden: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield the faults of the topics that `headrace topics check` reports as well."""
    if existing is None:
        yield Finding(
            "topics",
            Severity.WARNING,
            "their settings may not be read, and were not checked",
            "allow DescribeConfigs on the topics",
        )
        return
    needed = [
        topic for topic in required_topics(settings) if settings.topic(topic) not in forbidden
    ]
    faults = compare(plan_topics(settings), existing, needed)
    for fault in faults:
        health = Severity.ERROR if fault.blocking else Severity.WARNING
        yield Finding("topics", health, f"{fault.topic}: {fault.problem}", fault.fix)
    if not faults:
        yield Finding("topics", Severity.OK, f"all {len(existing)} are as they should be")


def check_models(settings: Settings) -> list[Finding]:
    """Check each model of the repository: its configuration, its files, its signature."""
    from headrace.models.repositories import open_repository

    path = ", ".join(map(str, settings.models.locations))
    try:
        models = open_repository(settings).scan()
    except ConfigurationError as error:
        return [Finding("models", Severity.ERROR, str(error), "set models.repository, or make it")]
    if not models:
        return [
            Finding(
                "models",
                Severity.WARNING,
                f"{path}: no model",
                f"put one at {Path('MODEL', '1', 'model.onnx')} below it",
            )
        ]
    registry = None
    if settings.schema_registry is not None:
        from headrace.models.schema_registry import SchemaRegistry

        registry = SchemaRegistry(settings.schema_registry)
    return [finding for model in models for finding in _check_model(model, registry)]


def _check_model(model: FoundModel, registry: SchemaRegistry | None) -> Iterator[Finding]:
    from headrace.models.version import ModelVersion

    if model.config is None:
        fix = f"see `headrace models check {model.name}`"
        yield Finding("models", Severity.ERROR, f"{model.name}: {model.fault}", fix)
        return
    for found in model.versions:
        name = f"{model.name}/{found.version}"
        try:
            signature = ModelVersion(model, found, registry=registry).signature
        except Exception as error:  # noqa: BLE001 - one surprising model must not hide the others
            fault = str(error) if isinstance(error, HeadraceError) else describe_error(error)
            yield Finding("models", Severity.ERROR, f"{name}: {fault}", f"fix {found.directory}")
            continue
        inputs = ", ".join(
            f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in signature.inputs
        )
        yield Finding("models", Severity.OK, f"{name}: {inputs}")


def check_device(settings: Settings) -> list[Finding]:
    """Check that ONNX Runtime is installed, and supports the device in the settings."""
    try:
        release, providers = find_runtime()
    except ImportError as error:
        fix = 'install "headrace[cpu]" or "headrace[gpu]"'
        return [Finding("device", Severity.ERROR, f"onnxruntime: {error}", fix)]
    found = f"onnxruntime {release} with {', '.join(providers)}"
    device = settings.executor.device
    if device != "cpu" and CUDA not in providers:
        return [
            Finding(
                "device",
                Severity.ERROR,
                f"executor.device {device} needs {CUDA}, got {found}",
                'install "headrace[gpu]" in place of "headrace[cpu]", or use the device "cpu"',
            )
        ]
    if device != "cpu":
        return _check_gpu(settings, found)
    return [Finding("device", Severity.OK, f"{device}: {found}")]


def _check_gpu(settings: Settings, found: str) -> list[Finding]:
    """Check the GPU itself, since ONNX Runtime lists its providers even without one."""
    from headrace.device.cuda import CudaDevice

    device = settings.executor.device
    if not settings.executor.experimental_cuda:
        fix = 'set executor.experimental_cuda = true, or use the device "cpu"'
        return [Finding("device", Severity.ERROR, f"executor.device {device} is experimental", fix)]
    try:
        memory = CudaDevice(int(device.removeprefix("cuda:"))).memory()
    except (ConfigurationError, Fatal) as error:
        return [Finding("device", Severity.ERROR, str(error), 'fix that, or use the device "cpu"')]
    free, total = (size >> 20 for size in (memory.free_bytes, memory.total_bytes))
    return [Finding("device", Severity.OK, f"{device}: {free} of {total} MiB free, {found}")]
