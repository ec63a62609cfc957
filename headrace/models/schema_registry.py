"""Client of a schema registry: schemas by their ids, and ids of the schemas of answers.

The protocol is that of Confluent's registry, which others speak too (Apicurio under
`/apis/ccompat/v7`, Karapace, Redpanda). An id never changes its schema, so both directions are
cached. Source: https://docs.confluent.io/platform/current/schema-registry/develop/api.html
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Annotated, Generic, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

import msgspec

from headrace.config import SchemaRegistrySettings
from headrace.errors import Code, ConfigurationError, Rejected, Retriable, describe_error
from headrace.protocol.codec.faults import DECODE_ERRORS
from headrace.tuning import TUNING, SchemaTuning

# The child processes of trial loads, which request nothing, would spend 0.14 s of processor
# time on its import, a sixth of all.
if TYPE_CHECKING:
    import aiohttp

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_NOT_FOUND = frozenset({40401, 40402, 40403})
_REFUSED = frozenset({409, 422})
"""The schema is not compatible with the subject's others, or no schema."""


class RegistryUnavailable(Retriable):
    """The registry could not be reached, or did not do what it was asked for."""


class RegisteredSchema(NamedTuple):
    """A schema in the registry.

    Attributes:
        form: kind of the schema, in the registry's words.
        text: the schema as it was registered.
    """

    form: str
    text: str


class _Response(msgspec.Struct, rename={"form": "schemaType"}):
    """The fields of the registry's responses that are read; null counts as absent."""

    schema: str | None = None
    form: str | None = None
    references: list[msgspec.Raw] | None = None
    id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    error_code: int | None = None
    message: str | None = None


class Bounded(Generic[K, V]):
    """Mapping of at most `size` entries, without those that were not used for the longest time.
    Any thread may use it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None without one."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: K, value: V) -> None:
        """Set the value of a key."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)


class SchemaRegistry:
    """Finds and registers schemas. Open while the context lasts; calls come from its event loop.

    Args:
        settings: address and login.
        on_request: called with the outcome of each request: `ok`, `refused` or `unavailable`.
        clock_s: monotonic.

    Raises:
        ConfigurationError: a certificate cannot be read.
    """

    def __init__(
        self,
        settings: SchemaRegistrySettings,
        tuning: SchemaTuning = TUNING.schemas,
        on_request: Callable[[str], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = settings.url.rstrip("/")
        self._settings = settings
        self._tuning = tuning
        self._on_request = on_request
        self._clock_s = clock_s
        self._ssl = _make_tls_context(settings)
        self._requests = asyncio.Semaphore(tuning.concurrent_requests)
        self._schemas: Bounded[int, RegisteredSchema] = Bounded(tuning.cached_schemas)
        self._ids: Bounded[tuple[str, str, bytes], int] = Bounded(tuning.cached_schemas)
        self._refusals: Bounded[Hashable, tuple[float, Rejected]] = Bounded(tuning.cached_schemas)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        settings = self._settings
        login = f"{settings.username}:{settings.password.get_secret_value()}"
        token = settings.bearer_token.get_secret_value()
        headers = {"Accept": f"{_CONTENT_TYPE}, application/json;q=0.5"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        elif settings.username:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=settings.timeout_ms / 1000),
            connector=aiohttp.TCPConnector(ssl=self._ssl if self._ssl is not None else True),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def fetch(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with an id.

        Raises:
            RegistryUnavailable: it may succeed later.
            Rejected: `INVALID_REQUEST` if there is no such id, or a schema that is too large or has
                references; remembered for a while.
        """
        known = self._schemas.get(schema_id)
        if known is not None:
            return known
        self._raise_refusal(schema_id)
        try:
            status, content = await self._request("GET", f"/schemas/ids/{schema_id}")
        except Rejected as error:
            self._refuse(schema_id, error)
            raise
        if status == 404:
            raise self._refuse(
                schema_id,
                Rejected.mismatch(
                    Code.INVALID_REQUEST,
                    "payload",
                    expected="the id of a schema in the registry",
                    got=str(schema_id),
                ),
            )
        if status != 200 or content.schema is None:
            raise self._unexpected(f"schema {schema_id}", status, content)
        if content.references:
            raise self._refuse(
                schema_id,
                Rejected.mismatch(
                    Code.INVALID_REQUEST,
                    f"schema {schema_id}",
                    expected="a schema without references",
                    got=f"{len(content.references)} of them",
                ),
            )
        found = RegisteredSchema(content.form or "AVRO", content.schema)
        self._schemas.put(schema_id, found)
        return found

    async def find_id(self, subject: str, schema: RegisteredSchema) -> int:
        """Return the id of a subject's schema, which is registered if the settings allow it.

        Raises:
            RegistryUnavailable: it may succeed later.
            Rejected: `MODEL_FAILED` if the registry refuses the schema, or does not have it and it
                may not be registered; remembered for a while.
        """
        digest = hashlib.sha256(schema.text.encode()).digest()  # the text may be long
        key = (subject, schema.form, digest)
        known = self._ids.get(key)
        if known is not None:
            return known
        self._raise_refusal(key)
        path = f"/subjects/{quote(subject, safe='')}"
        if self._settings.auto_register:
            path += "/versions"
        body = {"schema": schema.text}
        if schema.form != "AVRO":
            body["schemaType"] = schema.form
        status, content = await self._request("POST", path, body)
        if status == 200 and content.id is not None:
            self._ids.put(key, content.id)
            return content.id
        if status in _REFUSED or status == 404:
            raise self._refuse(
                key,
                Rejected.mismatch(
                    Code.MODEL_FAILED,
                    f"subject {subject}",
                    expected="the schema of the answers in the registry, or one that may be added",
                    got=f"{status} {self._shown(content)}",
                ),
            )
        raise self._unexpected(f"subject {subject}", status, content)

    async def find_latest_id(self, subject: str) -> int:
        """Return the id of a subject's latest schema.

        Raises:
            RegistryUnavailable: it may succeed later.
            Rejected: `MODEL_FAILED` if there is no such subject, which is remembered for a while.
        """
        self._raise_refusal(subject)
        path = f"/subjects/{quote(subject, safe='')}/versions/latest"
        status, content = await self._request("GET", path)
        if status == 200 and content.id is not None:
            return content.id
        if status == 404:
            raise self._refuse(
                subject,
                Rejected.mismatch(
                    Code.MODEL_FAILED,
                    f"subject {subject}",
                    expected="the schema of the answers in the registry",
                    got="none",
                ),
            )
        raise self._unexpected(f"subject {subject}", status, content)

    def _raise_refusal(self, key: Hashable) -> None:
        refused = self._refusals.get(key)
        if refused is not None and self._clock_s() < refused[0]:
            raise Rejected(refused[1].code, refused[1].message)

    def _refuse(self, key: Hashable, error: Rejected) -> Rejected:
        self._refusals.put(key, (self._clock_s() + self._tuning.refusal_s, error))
        return error

    async def _request(
        self, method: Literal["GET", "POST"], path: str, body: dict[str, str] | None = None
    ) -> tuple[int, _Response]:
        """Return the status and the fields of a response.

        Raises:
            RegistryUnavailable: there is none, or it is not the registry's.
            Rejected: it is too large.
        """
        import aiohttp

        if self._session is None:
            raise RegistryUnavailable("schema registry: expected an open client")
        try:
            async with (
                self._requests,
                self._session.request(
                    method,
                    self._url + path,
                    data=None if body is None else msgspec.json.encode(body),
                    headers={} if body is None else {"Content-Type": _CONTENT_TYPE},
                    allow_redirects=False,  # a login must not reach another host
                ) as response,
            ):
                status = response.status
                content = await self._read(response)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._on_request("unavailable")
            raise RegistryUnavailable(f"schema registry: {describe_error(error)}") from error
        is_known = status != 404 or content.error_code in _NOT_FOUND
        if not is_known:  # of a proxy, or at another path: the registry itself gives its own code
            raise self._unexpected(path, status, content)
        if status in {200, 404, *_REFUSED}:
            self._on_request("ok" if status == 200 else "refused")
        return status, content

    async def _read(self, response: aiohttp.ClientResponse) -> _Response:
        """Return the fields of a response, none if it is not the registry's. Raises `Rejected`."""
        limit_bytes = self._tuning.max_response_bytes
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > limit_bytes:
                expected = f"at most {limit_bytes} bytes"
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST, "schema in the registry", expected=expected, got="more"
                )
        try:
            return msgspec.json.decode(content, type=_Response)
        except DECODE_ERRORS:
            return _Response()

    def _unexpected(self, what: str, status: int, content: _Response) -> RegistryUnavailable:
        self._on_request("unavailable")
        text = f"schema registry: {what}: got status {status} {self._shown(content)}"
        return RegistryUnavailable(text.rstrip())

    def _shown(self, content: _Response) -> str:
        """Return the registry's message, truncated."""
        return (content.message or "")[: self._tuning.shown_chars]


def _make_tls_context(settings: SchemaRegistrySettings) -> ssl.SSLContext | None:
    """Return the context for connections; None without settings for it."""
    if settings.tls_ca_file is None and settings.tls_cert_file is None:
        return None
    try:
        # An own authority replaces those of the machine, as for Kafka.
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
        if settings.tls_cert_file is not None:
            # With any password, even an empty one, OpenSSL does not prompt for one on a terminal.
            context.load_cert_chain(
                settings.tls_cert_file,
                settings.tls_key_file,
                settings.tls_key_password.get_secret_value(),
            )
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"schema_registry: tls_ca_file, tls_cert_file, tls_key_file: {describe_error(error)}"
        ) from error
    return context
