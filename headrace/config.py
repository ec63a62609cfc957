"""The settings: one TOML file, environment variables over it, read once into frozen types.

`load_settings` looks for `--config FILE`, then `HEADRACE_CONFIG`, then `./headrace.toml`, and
falls back to the defaults, which mean the embedded log. An environment variable overrides one
value: `HEADRACE_KAFKA__BOOTSTRAP_SERVERS=127.0.0.1:9092`. All faults are reported at once, each
with where its value comes from.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from headrace.errors import ConfigurationError
from headrace.topics import GROUP_SUFFIXES, Topic
from headrace.urls import parse_address


def _refuse_name_of_group(namespace: str) -> str:
    first, dot, last = namespace.rpartition(".")
    if dot and last in GROUP_SUFFIXES:
        raise ValueError(
            f"expected a name that does not end in .{last}, got {namespace}: the namespace {first} "
            "has a consumer group of that name"
        )
    return namespace


Namespace = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9._-]{1,100}$"), AfterValidator(_refuse_name_of_group)
]


def _require_topic_name(name: str) -> str:
    if not _TOPIC_NAME.fullmatch(name):
        raise ValueError(
            "expected a topic name of 1 to 249 letters, digits, dots, underscores and hyphens, "
            f"got {name!r}"
        )
    return name


TopicName = Annotated[str, AfterValidator(_require_topic_name)]
_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
"""Names that Kafka accepts. Source: `org.apache.kafka.common.internals.Topic`."""
_DAY_S = 24 * 3600
_HOUR_MS = 3600 * 1000
_KAFKA_INT = 2**31 - 1
_KAFKA_LONG = 2**63 - 1


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        text = str(value).lower()
        raise ValueError(f"expected a number, got {text}")  # noqa: TRY004 - pydantic tells it
    return value


Real = Annotated[float, Field(allow_inf_nan=False)]
NOT_BOOL = BeforeValidator(_refuse_bool)
"""Validator for numbers: pydantic would accept `true` as 1."""

Rate = Annotated[Real, Field(ge=0, le=1_000_000), NOT_BOOL]
JwtAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
Port = Annotated[int, Field(ge=0, le=65535), NOT_BOOL]
Timeout = Annotated[Real, Field(ge=0.001, le=_DAY_S), NOT_BOOL]
MOST_ROWS: Final = 1_000_000
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS), NOT_BOOL]
MOST_QUEUE_DELAY_MS: Final = _HOUR_MS
QueueDelayMs = Annotated[Real, Field(ge=0, le=MOST_QUEUE_DELAY_MS), NOT_BOOL]
BatchBytes = Annotated[int, Field(ge=1, le=2**32), NOT_BOOL]
MOST_INSTANCES: Final = 256
Instances = Annotated[int, Field(ge=1, le=MOST_INSTANCES), NOT_BOOL]
Threads = Annotated[int, Field(ge=0, le=256), NOT_BOOL]
DeviceBytes = Annotated[int, Field(ge=0, le=2**44), NOT_BOOL]
ALL_CORES: Final = "1/1"


def _check_part(text: str) -> str:
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(f"expected a part such as 1/4 or 4/4, got {text}")
    return text


Part = Annotated[str, Field(pattern=r"^\d{1,4}/\d{1,4}$"), AfterValidator(_check_part)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


_SERVER = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+)(:([0-9]{1,5}))?")


def _check_servers(text: str) -> str:
    for server in text.split(","):
        found = _SERVER.fullmatch(server.strip())
        if found is None or not 1 <= int(found[3] or 1) <= 65535:
            raise ValueError(
                f"expected HOST:PORT, or several with commas between them, got {text!r}"
            )
    return text


BootstrapServers = Annotated[str, AfterValidator(_check_servers)]


class KafkaSettings(_Section):
    """Connection to the brokers. The SASL and TLS names are Kafka's own."""

    bootstrap_servers: BootstrapServers
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "PLAIN"
    sasl_username: str = ""
    sasl_password: SecretStr = SecretStr("")
    oauth_token_file: Path | None = None
    """File with the bearer token (OAUTHBEARER), read for every connection."""
    ssl_ca_file: Path | None = None
    ssl_cert_file: Path | None = None
    ssl_key_file: Path | None = None
    ssl_key_password: SecretStr = SecretStr("")
    ssl_check_hostname: bool = True
    client_id: str = "headrace"
    client_rack: str = ""
    request_timeout_ms: Annotated[int, Field(ge=1000, le=_HOUR_MS), NOT_BOOL] = 20_000
    session_timeout_ms: Annotated[int, Field(ge=1000, le=_HOUR_MS), NOT_BOOL] = 30_000
    transaction_timeout_ms: Annotated[int, Field(ge=1000, le=_HOUR_MS), NOT_BOOL] = 10_000
    """The broker aborts longer transactions; each answering step must take less."""
    linger_ms: Annotated[int, Field(ge=0, le=60_000), NOT_BOOL] = 0
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"

    @model_validator(mode="after")
    def _protocol_has_what_is_set(self) -> Self:
        # Who sets these expects TLS, or a login; Kafka's own clients would connect without a word.
        for has_it, expected, prefixes in (
            (self.security_protocol.endswith("SSL"), "SSL or SASL_SSL", ("ssl_",)),
            (
                self.security_protocol.startswith("SASL"),
                "SASL_PLAINTEXT or SASL_SSL",
                ("sasl_", "oauth_"),
            ),
        ):
            unused = [
                name
                for name, field in type(self).model_fields.items()
                if name.startswith(prefixes) and getattr(self, name) != field.default
            ]
            if unused and not has_it:
                raise ValueError(
                    f"security_protocol: expected {expected} with {', '.join(unused)}, "
                    f"got {self.security_protocol}"
                )
        return self

    @model_validator(mode="after")
    def _credentials_are_complete(self) -> Self:
        if not self.security_protocol.startswith("SASL"):
            return self
        if self.sasl_mechanism == "OAUTHBEARER":
            if self.oauth_token_file is None:
                raise ValueError("sasl_mechanism OAUTHBEARER needs oauth_token_file")
        elif not (self.sasl_username and self.sasl_password.get_secret_value()):
            raise ValueError(
                f"sasl_mechanism {self.sasl_mechanism} needs sasl_username and sasl_password"
            )
        return self


class TopicSettings(_Section):
    """Names of the topics, and their configuration for `headrace topics create`."""

    partitions: Annotated[int, Field(ge=1, le=100_000), NOT_BOOL] = 4
    replication_factor: Annotated[int, Field(ge=1, le=1000), NOT_BOOL] = 1
    retention_ms: Annotated[int, Field(ge=1, le=_KAFKA_LONG), NOT_BOOL] = 7 * 24 * 3600 * 1000
    internal_retention_ms: Annotated[int, Field(ge=1, le=_KAFKA_LONG), NOT_BOOL] = 24 * 3600 * 1000
    """Retention of items, batches, results and events, which are not needed after the answer."""
    max_message_bytes: Annotated[int, Field(ge=1024, le=_KAFKA_INT), NOT_BOOL] = 8 * 1024 * 1024
    reply_allowed: tuple[str, ...] = (r"{namespace}\..*",)
    """Regular expressions; a `kafka_replyTopic` must match one of them in full."""
    names: dict[Topic, TopicName] = {}
    """Full names of topics, instead of `{namespace}.{topic}`."""


class DeliverySettings(_Section):
    """Guarantees for answers."""

    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"
    max_attempts: Annotated[int, Field(ge=1, le=1000), NOT_BOOL] = 3
    """Number of unclean ends of a process while a request runs alone in it, after which the request
    is answered without being run.
    """
    order: Literal["none", "key", "partition"] = "none"


class LimitSettings(_Section):
    """Limits on one request and on everything in flight."""

    max_request_bytes: Annotated[int, Field(ge=1024, le=_KAFKA_INT), NOT_BOOL] = 4 * 1024 * 1024
    max_in_flight_bytes: Annotated[int, Field(ge=1024 * 1024, le=2**40), NOT_BOOL] = (
        256 * 1024 * 1024
    )
    model_share: Annotated[Real, Field(gt=0, le=1), NOT_BOOL] = 0.5
    """Share of `max_in_flight_bytes` that one model may hold while no other model holds any; 1
    disables the limit.
    """
    tenant_share: Annotated[Real, Field(gt=0, le=1), NOT_BOOL] = 0.5
    """The same share for one tenant (`x-tenant`)."""
    max_decompressed_bytes: Annotated[int, Field(ge=0, le=_KAFKA_INT), NOT_BOOL] = 0
    """Decompressed size of one compressed record batch; 0 means 16 times the largest record. It
    never exceeds `max_in_flight_bytes`.
    """
    inline_payload_bytes: Annotated[int, Field(ge=0, le=_KAFKA_INT), NOT_BOOL] = 4 * 1024
    """Request records whose values are smaller travel between stages in different processes with
    their bytes; of others the process that runs the model reads the record on `requests` again.
    """
    shared_values_bytes: Annotated[int, Field(ge=0, le=2**40), NOT_BOOL] = 128 * 1024 * 1024
    """Most shared memory in which a process passes such values to others of its machine, so
    that these need not read them on `requests`; 0 passes and reads none.
    """
    shared_values_dir: Path = Path("/dev/shm")  # noqa: S108 - see shm_overview(7)
    """Directory in memory that these processes share; nothing is passed where there is none."""
    default_timeout_ms: Annotated[int, Field(ge=0, le=31 * _DAY_S * 1000), NOT_BOOL] = 0
    """Timeout of requests that set none, counted from the record's timestamp; 0 means none."""
    drain_timeout_s: Annotated[Real, Field(gt=0, le=_DAY_S), NOT_BOOL] = 10.0
    max_unanswered_s: Annotated[Real, Field(ge=0, le=_DAY_S), NOT_BOOL] = 60.0
    """A process that answers none of its waiting records for this long is not ready; 0 disables
    this.
    """
    max_stall_s: Annotated[Real, Field(ge=0, le=_DAY_S), NOT_BOOL] = 60.0
    """A process whose event loop stalls for this long ends itself; 0 disables this."""


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}")
_STORES = ("s3", "gs", "az", "https")


def _read_locations(value: object) -> object:
    """Tell URLs of stores from paths of directories."""
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("expected at least one, got none")
        return tuple(read_location(each) for each in value)
    return read_location(value)


def read_location(value: object) -> Path | str:
    """Return the URL of a store as a text, and anything else as a path. Raises `ValueError`."""
    if not isinstance(value, str | Path):
        raise ValueError(f"expected a directory or a URL, got {type(value).__name__}")  # noqa: TRY004 - pydantic tells it
    match = _SCHEME.match(str(value))
    if match is None:
        return Path(value)
    scheme, rest = match[1], str(value)[match.end() :]
    if scheme not in _STORES:
        raise ValueError(
            f"expected a directory or a URL that begins with one of "
            f"{', '.join(f'{each}://' for each in _STORES)}, got {scheme}://"
        )
    host = rest.partition("/")[0]
    if not host or "@" in host or "?" in rest:
        raise ValueError(f"expected {scheme}://NAME/PATH, without credentials and query")
    return f"{scheme}://{rest.rstrip('/')}"


class ModelSettings(_Section):
    """The model repository."""

    repository: Annotated[Path | str | tuple[Path | str, ...], BeforeValidator(_read_locations)] = (
        Path("models")
    )
    """Directory, or the URL of an object store, or several of them; the first with a model wins."""
    mode: Literal["all", "poll", "explicit"] = "all"
    """Source of the versions to load: `all` follows each model's `model.toml`, and so does `poll`,
    which also reads the repository every `poll_interval_ms`; `explicit` follows the control topic
    (docs/changing-a-model.md).
    """
    poll_interval_ms: Annotated[int, Field(ge=100, le=_DAY_S * 1000), NOT_BOOL] = 15_000
    """Time from one reading of the repository to the next with `mode = "poll"`, and with `"all"`
    while a store is unavailable.
    """
    cache_dir: Path = Path("~/.cache/headrace/models")
    """Cache for versions from object stores, shared by the processes of a machine."""
    cache_bytes: Annotated[int, Field(ge=1, le=2**50), NOT_BOOL] = 64 * 1024**3
    allow_python: bool = False
    """Serve versions with Python code from object stores."""
    keep_replaced_s: Annotated[Real, Field(ge=0, le=_DAY_S), NOT_BOOL] = 60.0
    """Time for which a process without ingest, and with `mode = "explicit"` every process, keeps a
    replaced version after its last batch.
    """
    min_ready: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 1
    """With `mode = "explicit"` and executors in processes of their own: how many of them must have
    a version ready before requests are sent to it.
    """
    memory_bytes: Annotated[int, Field(ge=0, le=2**50), NOT_BOOL] = 0
    """Bound of the host memory of all versions that a process has loaded; 0 means none. With a
    bound, versions are loaded one after the other.
    """
    trial_load: bool = True
    """With `mode = "poll"` or `"explicit"`: import and load a version in child processes first, so
    that one that ends its process meanwhile is refused (docs/models.md).
    """
    require_signature: bool = False
    """Serve only versions whose manifest one of `trusted_keys` has signed."""
    trusted_keys: tuple[Path, ...] = ()
    """Files with Ed25519 public keys in PEM."""

    @property
    def locations(self) -> tuple[Path | str, ...]:
        """All repositories, the first choice first."""
        return self.repository if isinstance(self.repository, tuple) else (self.repository,)

    @property
    def directory(self) -> Path:
        """The repository, where only a directory will do.

        Raises:
            ConfigurationError: it is a store, or there are several.
        """
        if isinstance(self.repository, Path):
            return self.repository
        got = ", ".join(map(str, self.locations))
        raise ConfigurationError(f"models.repository: expected a directory here, got {got}")

    @model_validator(mode="after")
    def _signatures_can_be_checked(self) -> Self:
        if self.require_signature and not self.trusted_keys:
            raise ValueError("require_signature needs trusted_keys")
        if self.trusted_keys and not self.require_signature:
            raise ValueError(
                "require_signature: expected true with trusted_keys, which check nothing without "
                "it, got false"
            )
        return self


class IngestSettings(_Section):
    """Workers that make inputs of payloads (docs/payloads.md)."""

    transform_workers: Annotated[int, Field(ge=1, le=256), NOT_BOOL] = 1
    """Payloads of a process that are transformed at a time."""
    transform_isolation: Literal["thread", "process"] = "thread"
    """Workers are threads, or child processes: a transform that crashes or hangs in native code
    then ends its child alone. Linux only.
    """


class BatchingSettings(_Section):
    """Batching defaults for all models; a model's `model.toml` overrides them."""

    max_batch_size: Rows = 32
    max_queue_delay_ms: QueueDelayMs = 0.0
    max_batch_bytes: BatchBytes = 8 * 1024 * 1024


class ExecutorSettings(_Section):
    """Defaults for running models."""

    device: Device = "cpu"
    instances: Instances = 1
    intra_op_threads: Threads = 0
    """Threads per run; 0 divides the process' cores among the instances of a model."""
    cores: Part = ALL_CORES
    """Part of the machine's cores that this process uses, for the threads of runs and for pinned
    instances: `2/4` is the second of four parts. `headrace run --replicas` sets it.
    """
    io_binding: bool = True
    """Bind inputs and outputs by address where possible."""
    experimental_cuda: bool = False
    """Allow `cuda:N`, which is experimental: it has not been under load for hours."""
    ring: bool = False
    """Run batches through the ring (docs/device.md), for models with fixed shapes."""
    cuda_graphs: bool = False
    """Record one CUDA graph per bucket of rows; needs `ring`."""
    gpu_memory_limit_bytes: DeviceBytes = 0
    """Limit of ONNX Runtime's arena for each instance on a GPU; 0 sets none."""


class JwtSettings(_Section):
    """JSON Web Tokens of callers, which an identity provider issues (docs/http.md)."""

    jwks_file: Path
    """The provider's public keys, a JSON Web Key Set. The file is read anew when it changes."""
    issuer: Annotated[str, Field(min_length=1)]
    """Required value of the claim `iss` of each token."""
    audience: Annotated[str, Field(min_length=1)]
    """Value that the claim `aud` must be or contain."""
    algorithms: Annotated[tuple[JwtAlgorithm, ...], Field(min_length=1)] = (
        "RS256",
        "PS256",
        "ES256",
        "ES384",
        "EdDSA",
    )
    """Accepted algorithms of signatures. Algorithms with a shared secret are not supported."""
    tenant_claim: Annotated[str, Field(min_length=1)] = "sub"
    """The claim that names the tenant of the caller's requests."""
    groups_claim: Annotated[str, Field(min_length=1)] = "scope"
    """The claim with the groups of methods that a token opens: words, or a list; others in it are
    ignored.
    """
    groups_prefix: str = ""
    """Before each group in the claim, such as `headrace:`."""
    leeway_s: Annotated[Real, Field(ge=0, le=300), NOT_BOOL] = 30.0
    """Difference between the clocks of the provider and of this machine."""


class SchemaRegistrySettings(_Section):
    """Registry of the schemas of records with Confluent's framing (docs/payloads.md)."""

    url: Annotated[str, Field(pattern=r"^https?://[^@/?#\s]+(/[^?#\s]*)?$")]
    username: str = ""
    password: SecretStr = SecretStr("")
    bearer_token: SecretStr = SecretStr("")
    """Token instead of a user's name and password."""
    tls_ca_file: Path | None = None
    """Certificates in PEM that sign the registry's; by default those of the machine."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_key_password: SecretStr = SecretStr("")
    timeout_ms: Annotated[int, Field(ge=1, le=60_000), NOT_BOOL] = 5_000
    """Timeout of one request."""
    auto_register: bool = True
    """Register schemas of answers that are not there; false looks them up alone."""

    @model_validator(mode="after")
    def _login_is_one(self) -> Self:
        if self.username and self.bearer_token.get_secret_value():
            raise ValueError("username, bearer_token: expected only one of them")
        if self.password.get_secret_value() and not self.username:
            raise ValueError("password: expected username beside it")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_key_file: expected tls_cert_file beside it")
        files = ("tls_ca_file", "tls_cert_file")
        unused = [name for name in files if getattr(self, name) is not None]
        if unused and self.url.startswith("http:"):
            raise ValueError(f"url: expected https:// with {', '.join(unused)}, got http://")
        return self


def _check_prefix(url: str) -> str:
    address = parse_address(url)
    if "?" in url:
        raise ValueError(f"expected {address.origin} and a path, without a query")
    return url


Prefix = Annotated[str, AfterValidator(_check_prefix)]


class ClaimSettings(_Section):
    """Values in stores, which requests refer to by `x-claim` (docs/payloads.md)."""

    allowed: tuple[Prefix, ...] = ()
    """URLs below which objects may be fetched, such as `s3://bucket/inputs`; nothing else ever is.
    """
    max_bytes: Annotated[int, Field(ge=1024, le=_KAFKA_INT), NOT_BOOL] = 64 * 1024 * 1024
    """Limit of one object, before and after it is decompressed."""
    timeout_ms: Annotated[int, Field(ge=1, le=_HOUR_MS), NOT_BOOL] = 30_000
    """Time for one object, with all attempts."""
    concurrency: Annotated[int, Field(ge=1, le=1000), NOT_BOOL] = 16
    """Objects of one store that a process fetches at a time, and likewise puts."""
    store: Prefix | None = None
    """URL below which clients and gateways put large requests; without it they put none."""
    above_bytes: Annotated[int, Field(ge=0, le=_KAFKA_INT), NOT_BOOL] = 1024 * 1024
    """Requests with larger values are put there."""


class AnswerSettings(_Section):
    """Answers in stores, for what is too large for a record (docs/payloads.md)."""

    claim_store: Prefix | None = None
    """URL below which large answers are put; without it all are in their records."""
    claim_above_bytes: Annotated[int, Field(ge=0, le=_KAFKA_INT), NOT_BOOL] = 1024 * 1024
    """Answers whose outputs have more bytes are put there."""
    claim_expiry_s: Annotated[Real, Field(ge=1, le=3650 * _DAY_S), NOT_BOOL] = 7.0 * _DAY_S
    """Time for which the store is to keep them; a rule of the bucket deletes them."""


class AccessSettings(_Section):
    """Access to the servers of this process: TLS, logins and their rights (docs/http.md)."""

    section: ClassVar[str]
    """Name of the settings' section, for errors."""

    tls_cert_file: Path | None = None
    """Certificate chain of the server in PEM; with it the server speaks TLS alone. The files are
    read anew when they change.
    """
    tls_key_file: Path | None = None
    """Its key in PEM, without a password; by default it is in the same file."""
    tls_client_ca_file: Path | None = None
    """Certificates in PEM that sign those of callers. A gateway's doors refuse callers without one;
    the HTTP server of a process answers them what is public.
    """
    keys_file: Path | None = None
    """API keys of callers and what they open, in TOML. The file is read anew when it changes.
    Without any of this and `jwt` anybody may call everything but changes of models.
    """
    jwt: JwtSettings | None = None
    model_changes: Literal["login", "anyone", "off"] = "login"
    """Callers that may load and unload models by Triton's repository API: those with a login whose
    groups name *repository*, any for which that group is open, or none.
    """


ForwardedHeader: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,99}$")]
"""The name of a header, in lower case."""


class GatewaySettings(AccessSettings):
    """Inference for clients that do not speak Kafka (docs/http.md, docs/grpc.md)."""

    section: ClassVar[str] = "gateway"

    http_host: str = "127.0.0.1"
    http_port: Port | Literal["off"] = 8000
    """Port to listen on; 0 picks a free one, and prints it; `off` does not listen."""
    base_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$", max_length=200)] = ""
    """Path before `/v2`, such as `/inference`, for a proxy that passes paths on unchanged."""
    grpc_host: str = "127.0.0.1"
    grpc_port: Port | Literal["off"] = 8001
    caller_requests_per_second: Rate = 0.0
    """Limit of the inference requests of each caller; 0 for none. A caller is a login, or the
    address of one without a login. Each process counts for itself.
    """
    caller_burst: Annotated[int, Field(ge=0, le=1_000_000), NOT_BOOL] = 0
    """Requests that a caller may send at once after a pause, if there is a rate; 0 for those of a
    second.
    """
    caller_max_in_flight: Annotated[int, Field(ge=0, le=1_000_000), NOT_BOOL] = 0
    """Limit of concurrent requests of each caller; 0 for none."""
    caller_max_in_flight_bytes: Annotated[int, Field(ge=0, le=2**40), NOT_BOOL] = 0
    """Limit of their decompressed bodies; 0 for none."""
    timeout_ms: Annotated[int, Field(ge=1, le=_DAY_S * 1000), NOT_BOOL] = 30_000
    """Timeout of requests that give none."""
    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000), NOT_BOOL] = 1024
    """Limit of concurrent requests; further ones are refused."""
    max_in_flight_bytes: Annotated[int, Field(ge=1024 * 1024, le=2**40), NOT_BOOL] = (
        256 * 1024 * 1024
    )
    """Limit of the decompressed bodies of concurrent requests; further ones are refused. And of the
    answers that wait for their callers, of which those that have waited longest are dropped.
    """
    max_body_bytes: Annotated[int, Field(ge=1024, le=_KAFKA_INT), NOT_BOOL] = 16 * 1024 * 1024
    """Limit of one body or gRPC message, decompressed. JSON takes several times the bytes of its
    tensors.
    """
    max_connections: Annotated[int, Field(ge=1, le=1_000_000), NOT_BOOL] = 4096
    """Limit of the open connections of each door, TLS handshakes included. Over HTTP a further one
    replaces the one that has waited for its caller longest; over gRPC it is refused.
    """
    header_timeout_s: Timeout = 10.0
    """Time from the accept of a connection to the end of its first request's head over HTTP, and to
    the end of its handshakes over gRPC.
    """
    body_timeout_s: Timeout = 30.0
    """Time from the head of an HTTP request to the end of its body."""
    idle_timeout_s: Timeout = 75.0
    """Time for which a connection is kept open without a request."""
    forward_headers: Annotated[tuple[ForwardedHeader, ...], Field(max_length=32)] = ()
    """Headers of callers, or metadata over gRPC, that the records of their requests get as well,
    such as `x-request-id`; none of Headrace's own and no credentials.
    """
    shared_memory: Annotated[str, Field(pattern=r"^(off|/[A-Za-z0-9._-]{1,100})$")] = "off"
    """Prefix of the shared memory objects that callers may have tensors in, such as `/headrace_`;
    only objects of this process' user; `off` for none.
    """
    reuse_port: bool = False
    """Share the ports with other gateways of the same user on this machine (SO_REUSEPORT), as the
    processes of `headrace gateway --workers` do.
    """
    drain_notice_s: Annotated[Real, Field(ge=0, le=_DAY_S), NOT_BOOL] = 0.0
    """Time for balancers to see that a gateway is no longer ready, before it stops listening."""

    @model_validator(mode="after")
    def _regions_have_one_process(self) -> Self:
        if self.reuse_port and self.shared_memory != "off":
            raise ValueError(
                "reuse_port: regions of shared memory (gateway.shared_memory) belong to one "
                "process, and calls on a port that is shared may come to another"
            )
        return self

    @model_validator(mode="after")
    def _burst_belongs_to_a_rate(self) -> Self:
        # A key in the file may have a rate alone, of which this is the burst.
        if self.caller_burst and not self.caller_requests_per_second and self.keys_file is None:
            raise ValueError(
                "caller_burst: expected caller_requests_per_second beside it, or keys_file with "
                f"rates, without which nothing is limited, got {self.caller_burst} alone"
            )
        return self


class TelemetrySettings(AccessSettings):
    """Traces, logs and the HTTP server."""

    section: ClassVar[str] = "telemetry"

    otlp_endpoint: str = ""
    """Destination of traces, such as `http://127.0.0.1:4318`. `OTEL_EXPORTER_OTLP_*` overrides it;
    without either there is no tracing.
    """
    sample_ratio: Annotated[Real, Field(ge=0, le=1), NOT_BOOL] = 0.01
    """Share of requests without a trace context that get a trace."""
    traces_per_second: Rate = 10.0
    """Limit of these traces, for each process with ingest."""
    caller_traces_per_second: Rate = 20.0
    """Limit of traces for requests whose caller's `traceparent` has the sampled flag."""
    failure_traces_per_second: Rate = 20.0
    """Limit of traces for failed requests that have none, including missed deadlines."""
    http_host: str = "127.0.0.1"
    http_port: Port = 8080
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(BaseModel):
    """All settings, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    namespace: Namespace = "headrace"
    kafka: KafkaSettings | None = None
    topics: TopicSettings = TopicSettings()
    delivery: DeliverySettings = DeliverySettings()
    limits: LimitSettings = LimitSettings()
    models: ModelSettings = ModelSettings()
    ingest: IngestSettings = IngestSettings()
    batching: BatchingSettings = BatchingSettings()
    executor: ExecutorSettings = ExecutorSettings()
    schema_registry: SchemaRegistrySettings | None = None
    claims: ClaimSettings = ClaimSettings()
    answers: AnswerSettings = AnswerSettings()
    gateway: GatewaySettings = GatewaySettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _reply_patterns_compile(self) -> Self:
        for pattern in self.topics.reply_allowed:
            try:
                re.compile(pattern.replace("{namespace}", re.escape(self.namespace)))
            except re.error as error:
                raise ValueError(f"topics.reply_allowed: {pattern!r}: {error}") from error
        return self

    @model_validator(mode="after")
    def _topics_differ(self) -> Self:
        for topic in Topic:
            name = self.topic(topic)
            alike = [each for each in Topic if self.topic(each) == name]
            if len(alike) > 1:
                raise ValueError(
                    f"topics.names: expected a topic for each of {', '.join(alike)}, got {name} "
                    "for all of them"
                )
        return self

    @model_validator(mode="after")
    def _claims_have_room(self) -> Self:
        limit_bytes = self.limits.max_in_flight_bytes
        if self.claims.allowed and self.claims.max_bytes > limit_bytes:
            raise ValueError(
                f"claims.max_bytes: expected at most limits.max_in_flight_bytes, {limit_bytes}, "
                f"got {self.claims.max_bytes}"
            )
        return self

    @property
    def decompressed_bytes(self) -> int:
        """Largest decompressed size of one compressed record batch."""
        limits = self.limits
        largest_record_bytes = max(limits.max_request_bytes, self.topics.max_message_bytes)
        allowed = limits.max_decompressed_bytes or 16 * largest_record_bytes
        return min(allowed, limits.max_in_flight_bytes)

    def topic(self, topic: Topic) -> str:
        """Return the full name of one of Headrace's topics."""
        return self.topics.names.get(topic, f"{self.namespace}.{topic}")


def check_namespace(namespace: str) -> str:
    """Return the namespace. Raises `ConfigurationError` if topics cannot be named after it."""
    try:
        return _check_namespace(namespace)
    except ValidationError as error:
        (fault,) = error.errors(include_url=False)
        reason = fault["msg"].removeprefix("Value error, ")
        got = "" if fault["type"] == "value_error" else f", got {namespace!r}"
        raise ConfigurationError(f"namespace: {reason}{got}") from error


_check_namespace = TypeAdapter(Namespace).validate_python


class Option(NamedTuple):
    """A setting given on the command line, which overrides file and environment."""

    name: str
    path: tuple[str, ...]
    value: Any


def load_settings(config_file: Path | None = None, options: Sequence[Option] = ()) -> Settings:
    """Read the settings.

    Raises:
        ConfigurationError: with one line for each fault.
    """
    path = config_file or _configured_file()
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error
        except ValueError as error:  # of TOML, of UTF-8, and of integers with thousands of digits
            raise ConfigurationError(f"{path}: {error}") from error
        except RecursionError as error:
            raise ConfigurationError(f"{path}: expected TOML, got too many levels") from error
    return make_settings(values, origin=str(path or "environment"), options=options)


def make_settings(
    values: dict[str, Any], *, origin: str = "settings", options: Sequence[Option] = ()
) -> Settings:
    """Return settings from plain values; the environment overrides them, and `options` override
    both.

    Raises:
        ConfigurationError: with one line for each fault, which names where the value comes from.
    """
    faults = list(_unknown_variables())
    merged = _merged(values, _read_environment())
    for option in options:
        value = option.value
        for name in reversed(option.path):
            value = {name: value}
        merged = _merged(merged, value)
    try:
        settings = Settings(**merged)
        if not faults:
            return settings
    except ValidationError as error:
        faults += [_described(fault, origin, options) for fault in error.errors(include_url=False)]
    raise ConfigurationError("\n".join(faults))


def _read_environment() -> dict[str, Any]:
    """Return the values of environment variables; they are not checked."""
    if not any(name.upper().startswith("HEADRACE_") for name in os.environ):
        return {}
    # Imported where it is needed: that takes a tenth of a short command's time.
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

    class Environment(Settings, BaseSettings):
        """The settings as environment variables name them."""

        model_config = SettingsConfigDict(
            env_prefix="HEADRACE_", env_nested_delimiter="__", defer_build=True
        )

    class Source(EnvSettingsSource):
        """Leaves what is no JSON as it is: the error that follows names its variable."""

        def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
            try:
                return super().decode_complex_value(field_name, field, value)
            except ValueError:
                return value

    return Source(Environment)()


def _merged(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return both merged, section by section; `over` wins."""
    result = dict(below)
    for name, value in over.items():
        present = result.get(name)
        if isinstance(present, dict) and isinstance(value, dict):
            value = _merged(present, value)  # noqa: PLW2901 - section by section
        result[name] = value
    return result


def _described(fault: ErrorDetails, origin: str, options: Sequence[Option]) -> str:
    """Describe a fault: the origin of the value, its name, and what is wrong with it."""
    location = fault["loc"]
    text = describe_fault(fault)
    if fault["type"] == "extra_forbidden":
        text = _unknown(str(location[-1]), _names_in(location[:-1]))
    for option in options:
        if location == option.path:
            return f"{option.name}: {text}"
    path = [str(part) for part in location]
    for length in range(len(path), 0, -1):
        variable = _variable("__".join((f"HEADRACE_{path[0]}", *path[1:length])))
        if variable is not None:
            rest = path[length:]
            if fault["type"] in _CONTAINERS:
                text += "; in a variable it is JSON"
            return ": ".join([variable, *([".".join(rest)] if rest else []), text])
    return f"{origin}: {'.'.join(path) or 'settings'}: {text}"


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return "there is no such setting" + (f"; did you mean `{near[0]}`?" if near else "")


def _names_in(path: tuple[int | str, ...]) -> Iterable[str]:
    """Return the known names of a section."""
    group: Any = Settings
    for part in path:
        field = group.model_fields.get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        groups = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not groups:
            return ()
        group = groups[0]
    names: Iterable[str] = group.model_fields
    return names


def _variable(name: str) -> str | None:
    """Return the name of an environment variable as it is set, ignoring case."""
    return next((each for each in os.environ if each.upper() == name.upper()), None)


def _unknown_variables() -> Iterator[str]:
    """Yield a line for each variable that names an unknown section, or has a single underscore
    between section and setting.

    Other names are let pass: Kubernetes sets some of its own for services such as `headrace`, and
    one of `headrace-gateway-http` is even called as a setting, and has a URL.
    """
    for name, value in os.environ.items():
        head, _, rest = name.partition("_")
        if head.upper() != "HEADRACE":
            continue
        section, separator, _ = rest.partition("__")
        if separator and section.lower() not in Settings.model_fields:
            yield f"{name}: {_unknown(section.lower(), Settings.model_fields)}"
        for section in Settings.model_fields:
            setting = rest.lower().removeprefix(f"{section}_")
            is_of_service = setting.endswith("_port") and "://" in value
            if setting in _names_in((section,)) and setting != rest.lower() and not is_of_service:
                meant = f"HEADRACE_{section}__{setting}".upper()
                yield f"{name}: there is no such setting; did you mean `{meant}`?"


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
}
_CONTAINERS = {
    "dict_type": "a table",
    "list_type": "a list",
    "model_type": "a table",
    "tuple_type": "a list",
}
_LONGEST_VALUE = 40


def describe_fault(fault: ErrorDetails) -> str:
    """Describe what is wrong with a value. Only numbers are shown, since other values may be
    secrets.
    """
    if fault["type"] == "finite_number":
        return f"expected a finite number, got {fault['input']}"
    if fault["type"] in _BOUNDS:
        try:
            got = str(fault["input"])[:_LONGEST_VALUE]
        except ValueError:  # of integers with thousands of digits
            got = "a number of thousands of digits"
        key, relation = _BOUNDS[fault["type"]]
        bound = fault["ctx"][key]
        whole = isinstance(bound, float) and bound.is_integer()
        return f"expected {relation} {int(bound) if whole else bound}, got {got}"
    if fault["type"] in _CONTAINERS:
        got = "text" if isinstance(fault["input"], str) else "another value"
        return f"expected {_CONTAINERS[fault['type']]}, got {got}"
    return fault["msg"].removeprefix("Value error, ")


def _configured_file() -> Path | None:
    named = os.environ.get("HEADRACE_CONFIG")
    if named:
        return Path(named)
    here = Path("headrace.toml")
    with suppress(PermissionError):  # the directory may be closed to us, as another user's home
        if here.is_file():
            return here
    return None
