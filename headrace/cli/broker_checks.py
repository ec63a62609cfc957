"""Checks of `headrace doctor` on a survey of the cluster: settings, rights, replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.cli.findings import Finding, Severity
from headrace.config import KafkaSettings, Settings
from headrace.log.port import TopicInfo
from headrace.runtime.topic_plan import MIN_INSYNC_REPLICAS, is_controlled, required_topics
from headrace.topics import TOPICS, Topic
from headrace.tuning import TUNING

if TYPE_CHECKING:
    from headrace.log.kafka.cluster import ClientQuota, ClusterInfo, DescribedTopic

OLDEST_RELEASE: Final = {"at_least_once": (3, 0), "exactly_once": (4, 0)}

_MINUTE_S: Final = 60
_REPLICATED: Final = 3
_LONGEST_LINGER_MS: Final = 100


class _Judgement(NamedTuple):
    """A broker setting and its requirement.

    Attributes:
        is_good: whether a value is acceptable.
        expected: the acceptable values, in words.
        reason: why.
    """

    setting: str
    is_good: Callable[[int], bool]
    expected: str
    reason: str
    health: Severity = Severity.ERROR


def check_release(settings: Settings, release: tuple[int, int]) -> Finding:
    """Check whether the broker is new enough for the guarantees of the settings."""
    assert settings.kafka is not None
    where = settings.kafka.bootstrap_servers
    needed = OLDEST_RELEASE[settings.delivery.guarantee]
    major, minor = release
    if release < needed:
        shown = f"{major}.{minor} or newer, below 4.0" if major else "older than 3.0"
        return Finding(
            "broker",
            Severity.ERROR,
            f"{where}: Kafka {shown}; {settings.delivery.guarantee} needs {needed[0]}.{needed[1]}",
            "upgrade the brokers",
        )
    return Finding("broker", Severity.OK, f"{where} answers: Kafka {major}.{minor} or newer")


def check_broker_settings(settings: Settings, found: Mapping[str, str] | None) -> Iterator[Finding]:
    """Check the broker settings that Headrace depends on; settings not reported are skipped."""
    if found is None:
        yield Finding(
            "broker",
            Severity.WARNING,
            "its settings may not be read, and were not checked",
            "allow DescribeConfigs on the cluster, or compare them with docs/operations.md",
        )
        return
    for judgement in _judgements(settings):
        value = found.get(judgement.setting)
        if value is None or judgement.is_good(int(value)):
            continue
        yield Finding(
            "broker",
            judgement.health,
            f"{judgement.setting}: expected {judgement.expected}, got {value}: {judgement.reason}",
            f"set {judgement.setting} on the brokers",
        )


def _judgements(settings: Settings) -> Iterator[_Judgement]:
    assert settings.kafka is not None
    yield _Judgement(
        "offset.metadata.max.bytes",
        lambda value: value >= TUNING.delivery.metadata_characters,
        f"at least {TUNING.delivery.metadata_characters}",
        "a commit says in so many characters which offsets above the base are answered",
    )
    yield from _retention_judgements(settings)
    yield from _session_judgements(settings.kafka)
    yield _Judgement(
        "group.coordinator.append.linger.ms",
        lambda value: value <= _LONGEST_LINGER_MS,
        f"at most {_LONGEST_LINGER_MS}",
        "each commit waits so long on the broker, and a crash repeats the answers of that time",
        Severity.WARNING,
    )
    if settings.delivery.guarantee == "exactly_once":
        longest_ms = settings.kafka.transaction_timeout_ms
        yield _Judgement(
            "transaction.max.timeout.ms",
            lambda value: value >= longest_ms,
            f"at least {longest_ms} (kafka.transaction_timeout_ms)",
            "no transactional producer could start",
        )
    if settings.topics.replication_factor >= _REPLICATED:
        for internal in ("offsets.topic", "transaction.state.log"):
            yield _Judgement(
                f"{internal}.replication.factor",
                lambda value: value >= _REPLICATED,
                f"at least {_REPLICATED}, as topics.replication_factor",
                "with one broker down nobody could commit",
                Severity.WARNING,
            )


def _retention_judgements(settings: Settings) -> Iterator[_Judgement]:
    name = "offsets.retention.minutes"
    again = 2 * int(TUNING.delivery.commit_refresh_interval_s) // _MINUTE_S
    yield _Judgement(
        name,
        lambda value: value >= again,
        f"at least {again}",
        "a deployment would lose its place while it runs; it commits again every hour",
    )
    kept = settings.topics.retention_ms // (1000 * _MINUTE_S)
    yield _Judgement(
        name,
        lambda value: value < again or value >= kept,
        f"at least {kept}, as topics.retention_ms",
        "a deployment that is stopped for longer would answer again what is still held",
        Severity.WARNING,
    )


def _session_judgements(kafka: KafkaSettings) -> Iterator[_Judgement]:
    wanted_ms = kafka.session_timeout_ms
    reason = "no process could join its group"
    yield _Judgement(
        "group.min.session.timeout.ms",
        lambda value: value <= wanted_ms,
        f"at most {wanted_ms} (kafka.session_timeout_ms)",
        reason,
    )
    yield _Judgement(
        "group.max.session.timeout.ms",
        lambda value: value >= wanted_ms,
        f"at least {wanted_ms} (kafka.session_timeout_ms)",
        reason,
    )


_QUOTAS: Final = {
    "producer_byte_rate": "bytes a second",
    "consumer_byte_rate": "bytes a second",
    "request_percentage": "% of the time of one thread",
}


def check_quotas(settings: Settings, quotas: Sequence[ClientQuota]) -> Iterator[Finding]:
    """Yield the quotas that apply to our user and client id: over them, brokers delay us."""
    assert settings.kafka is not None
    ours = {"user": _user(settings.kafka), "client-id": settings.kafka.client_id}
    applying = sorted(
        (
            each
            for each in quotas
            if all(name in (None, ours.get(kind)) for kind, name in each.entity.items())
        ),
        key=_precedence,
    )
    found = {limit: (value, each) for each in applying for limit, value in each.limits.items()}
    for limit, unit in _QUOTAS.items():
        if limit in found:
            value, quota = found[limit]
            whom = ", ".join(f"{kind} {name or '<default>'}" for kind, name in quota.entity.items())
            text = f"quota of {whom}: {limit} is {value:.15g} {unit}, on each broker"
            yield Finding("broker", Severity.OK, text)


def _precedence(quota: ClientQuota) -> tuple[int, ...]:
    """Return what is greater if Kafka prefers this quota to another one that applies too."""
    return tuple(
        0 if kind not in quota.entity else 1 if quota.entity[kind] is None else 2
        for kind in ("user", "client-id")
    )


def _user(kafka: KafkaSettings) -> str | None:
    """Return the name that brokers give us; None if it depends on a certificate or a token."""
    if kafka.security_protocol.startswith("SASL"):
        return kafka.sasl_username or None
    return None if kafka.ssl_cert_file else "ANONYMOUS"


def check_rights(settings: Settings, survey: ClusterInfo) -> Iterator[Finding]:
    """Yield the rights that access rules deny us, and the stages that need them.

    A process has all rights that its own stages need, so a denied right is only a warning, except
    for the groups and ids that answers depend on.
    """
    group = settings.namespace
    if not survey.may_join:
        yield Finding(
            "rights",
            Severity.ERROR,
            f"group {group}: Read is not allowed",
            f"allow Read on the groups that begin with {group}",
        )
    if settings.delivery.guarantee == "exactly_once" and not survey.may_transact:
        yield Finding(
            "rights",
            Severity.ERROR,
            f"transactional ids {transactional_id(settings)} and its like: Write is not allowed",
            f"allow Write on the transactional ids that begin with {group}.",
        )
    for topic in required_topics(settings):
        yield from _topic_rights(settings, topic, survey)


def transactional_id(settings: Settings) -> str:
    """Return the transactional id of the first source partition."""
    return f"{settings.namespace}.{settings.topic(Topic.REQUESTS)}.0"


def _topic_rights(settings: Settings, topic: Topic, survey: ClusterInfo) -> Iterator[Finding]:
    name, spec = settings.topic(topic), TOPICS[topic]
    found = survey.topics.get(name)
    if found is not None and found.rights is None:
        return
    if found is None and name not in survey.forbidden_topics:
        return
    rights = {right.name for right in found.rights} if found and found.rights else set()
    controlled = is_controlled(settings)
    needed = (
        ("READ", spec.reading(controlled=controlled)),
        ("WRITE", spec.writing(controlled=controlled)),
    )
    for right, stages in needed:
        if stages and right not in rights:
            yield Finding(
                "rights",
                Severity.WARNING,
                f"{name}: {right.capitalize()} is not allowed, which "
                f"{' and '.join(stages)} {'needs' if len(stages) == 1 else 'need'}",
                f"allow {right.capitalize()} on {name} to whom these stages run as",
            )


def check_replicas(
    survey: ClusterInfo, existing: Mapping[str, TopicInfo | None]
) -> Iterator[Finding]:
    """Check that acknowledged records survive the loss of a broker, and that a restart of one
    broker does not stop the service.
    """
    for name, found in survey.topics.items():
        info = existing.get(name)
        if info is not None:
            yield from _replica_findings(name, found, int(info.config.get(MIN_INSYNC_REPLICAS, 1)))


def _replica_findings(name: str, found: DescribedTopic, needed: int) -> Iterator[Finding]:
    least = f"{MIN_INSYNC_REPLICAS} is {needed}"
    if found.replicas < needed:
        yield Finding(
            "topics",
            Severity.ERROR,
            f"{name}: {least} with {found.replicas} replicas: nothing can be written",
            f"lower {MIN_INSYNC_REPLICAS}, or add replicas",
        )
    elif found.in_sync < needed:
        yield Finding(
            "topics",
            Severity.ERROR,
            f"{name}: {least}, and {found.in_sync} are in sync: nothing can be written now",
            "see which brokers are down",
        )
    elif found.replicas == needed > 1:
        yield Finding(
            "topics",
            Severity.WARNING,
            f"{name}: {least} with as many replicas: every restart of a broker stops writing",
            f"lower {MIN_INSYNC_REPLICAS}, or add a replica",
        )
