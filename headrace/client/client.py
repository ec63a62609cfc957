"""The asyncio client.

A client reads one partition of the responses topic with one task; a call sends one record and
awaits one future. Calls may run concurrently, also from several tasks of the same event loop. At
most `max_in_flight` calls are in flight; further calls wait within their own timeouts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.claims.stores import ClaimUnavailable
from headrace.client.claims import ClientClaims
from headrace.client.rpc import ClientClosed, RpcClient
from headrace.config import KafkaSettings, Settings, check_namespace, make_settings
from headrace.errors import Code, ConfigurationError, HeadraceError, Rejected, Retriable
from headrace.log.port import Log, NewRecord, Record
from headrace.primitives.executor_calls import call_by
from headrace.protocol import headers as envelope
from headrace.protocol.codec import (
    RECORD,
    answer_takes_long,
    decode_response,
    encode_request,
)
from headrace.protocol.compression import CODINGS, compress
from headrace.protocol.headers import HeaderName
from headrace.protocol.messages import ErrorResponse, Parameter, Tensor
from headrace.runtime.log_factory import open_log
from headrace.tuning import TUNING

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_IN_FLIGHT = 1024


class InferenceError(HeadraceError):
    """The request was refused or failed, in a service or in the client before it was sent.

    Attributes:
        code: one of `headrace.errors.Code`, or a newer one.
        message: what was expected, what was received, and where.
        retriable: True if the same request may succeed later.
        retry_after_ms: when to retry, if known.
    """

    def __init__(
        self, code: str, message: str, *, retriable: bool, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retriable = retriable
        self.retry_after_ms = retry_after_ms


class InferenceTimeout(Retriable):
    """No answer arrived in time. The request may have been served; its answer is dropped."""


class Payload(NamedTuple):
    """Answer that is no response with tensors, such as an image."""

    content: bytes
    content_type: str


class Response(NamedTuple):
    """Answer to a request.

    Attributes:
        outputs: arrays by name, in the order of the answer; read-only views of the record.
        parameters: timings in microseconds (`queue_us`, `batch_us`, `compute_us`) and
            `batch_size` in rows.
        headers: headers of the response record, including those copied from the request.
    """

    model_name: str
    model_version: str
    id: str | None
    outputs: dict[str, NDArray[Any]]
    parameters: dict[str, Parameter]
    headers: Sequence[tuple[str, bytes | None]]

    @property
    def payload(self) -> Payload | None:
        """The answer itself, if it is no response with tensors; None if it is one."""
        headers = dict(self.headers)
        if HeaderName.RECORD_OF not in headers:
            return None
        content_type = (headers.get(HeaderName.CONTENT_TYPE) or b"").decode("ascii", "replace")
        return Payload(self.outputs[RECORD].item(), content_type)


class Client:
    """Send requests to models and wait for their answers.

    Nothing is opened before `async with`; leaving it fails all waiting calls with `ClientClosed`.

    Args:
        bootstrap_servers: addresses of the brokers. Overrides `settings` and the environment.
        namespace: prefix of the topics' names. Overrides `settings` and the environment.
        log: an opened log to use instead of a broker; the caller closes it.
        settings: topic names, Kafka's security, and the stores of large requests and answers; by
            default, the environment variables (`HEADRACE_KAFKA__SECURITY_PROTOCOL`, …) over the
            defaults.
        reply_partition: partition of the responses topic; chosen at random by default.
        content_type: `application/msgpack` or `application/json`, for requests and answers.
        compression: coding of requests and answers of 1 KiB and more: `zstd`, `gzip`, `deflate` or
            `br`; none by default.
        max_in_flight: most calls in flight at once. It bounds memory: at most this many requests
            are encoded, and they and their answers held. Further calls hold their arguments alone,
            which are encoded when they have their places.
        executor: decodes large answers in JSON or with BYTES, which takes up to 0.5 s for 4 MiB;
            by default the event loop does. The caller shuts it down.

    Raises (on entering):
        ConfigurationError: neither a broker nor a log was given, a topic does not exist, or it
            has no such partition.
        LogUnavailable, LogAuthenticationFailed: see `headrace.log.port`.
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        namespace: str | None = None,
        log: Log | None = None,
        settings: Settings | None = None,
        reply_partition: int | None = None,
        content_type: str = envelope.MSGPACK,
        compression: str = "",
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        executor: Executor | None = None,
    ) -> None:
        if compression and compression not in CODINGS:
            raise ValueError(
                f"compression: expected one of {', '.join(CODINGS)}, got {compression!r}"
            )
        if content_type not in (envelope.MSGPACK, envelope.JSON):
            raise ValueError(
                f"content_type: expected {envelope.MSGPACK} or {envelope.JSON}, "
                f"got {content_type!r}"
            )
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected at least 1, got {max_in_flight}")
        self._settings = _override(settings or make_settings({}), bootstrap_servers, namespace)
        self._log = log
        self._reply_partition = reply_partition
        self._content_type = content_type
        self._compression = compression
        self._executor = executor
        self._permits = asyncio.Semaphore(max_in_flight)
        self._rpc: RpcClient | None = None
        self._claims = ClientClaims(self._settings)
        self._stack = AsyncExitStack()

    @property
    def late_answers(self) -> int:
        """Number of answers to this client whose caller had gone, including second copies."""
        return self._rpc.late if self._rpc else 0

    @property
    def foreign_answers(self) -> int:
        """Number of answers to other clients on this client's reply partition."""
        return self._rpc.foreign if self._rpc else 0

    def fault(self) -> str:
        """Return why answers can no longer be read; empty if they can."""
        return self._rpc.fault() if self._rpc else ""

    def last_contact_s(self) -> float:
        """Return the seconds since a broker last answered the reader of answers; 0.0 before the
        client is entered.
        """
        return self._rpc.last_contact_s() if self._rpc else 0.0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            log = self._log
            if log is None:
                if self._settings.kafka is None:
                    raise ConfigurationError(
                        "the client needs a broker: give bootstrap_servers, or set "
                        "kafka.bootstrap_servers, or pass an embedded log"
                    )
                log = await stack.enter_async_context(open_log(self._settings))
            await stack.enter_async_context(self._claims)
            rpc = RpcClient(log, self._settings, self._reply_partition)
            self._rpc = await stack.enter_async_context(rpc)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike | Tensor],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        version: str | None = None,
        id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        outputs: Sequence[str] | None = None,
        priority: int = 0,
        tenant: str = "",
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Response:
        """Run a model on arrays. Cancelling the call cancels the request if it is still queued.

        Args:
            model: name of the model.
            inputs: arrays by name, unchanged until the call ends; shapes include the batch
                dimension, as in `[1, 64]`. An array is
                sent with its own dtype. Lists of Python floats are sent as FP32, integers as
                INT64, booleans as BOOL, `bytes` and `str` as BYTES. A
                `headrace.protocol.messages.Tensor`, which has the same name, is sent as it is.
            timeout_s: time for the whole call; it becomes the request's deadline.
            version: model version; by default the model's default version, which is the highest one
                that is ready, or with the control topic the one that was set.
            id: your own identifier of the request; the answer repeats it.
            parameters: parameters of the request.
            outputs: names of the requested outputs; all by default.
            priority: -100 to 100; among requests of one tenant, larger goes first.
            tenant: tenant of the request; tenants waiting for one model get equal shares of it.
            key: record key; requests with the same key go to one partition.
            headers: your own headers; they are copied to the answer.

        Raises:
            InferenceError: the request was refused or failed.
            InferenceTimeout: no answer arrived in time.
            ClientClosed: the client is not open, or was closed meanwhile.
            ConfigurationError, LogAuthenticationFailed: the topic of requests was deleted, or the
                broker does not allow us to write to it.
            LogUnavailable: the broker did not acknowledge the request.
            TypeError: `outputs` is one text, whose characters would be taken for names.
        """
        if isinstance(outputs, str):
            raise TypeError(f"outputs: expected a list of names, got {outputs!r}")

        def make_request() -> tuple[NewRecord, str]:
            tensors = {
                name: value if isinstance(value, Tensor) else _array(name, value)
                for name, value in inputs.items()
            }
            content_type = self._content_type
            encode = partial(
                encode_request,
                model=model,
                inputs=tensors,
                version=version,
                id=id,
                parameters=parameters,
                outputs=outputs,
            )
            about = [*headers, *_urgency(priority, tenant)]
            value = encode(content_type)
            if self._claims.is_large(value):
                # A claim needs the header, with which JSON may be taken for a record.
                content_type = envelope.MSGPACK
                value = encode(content_type) if content_type != self._content_type else value
                about.append((HeaderName.MODEL, _named(model, version)))
            return NewRecord(key, value, about), content_type

        return await self._call(make_request, timeout_s)

    async def infer_raw(
        self,
        model: str,
        payload: bytes,
        content_type: str,
        *,
        accept: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        version: str | None = None,
        priority: int = 0,
        tenant: str = "",
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> Response:
        """Run a model on a raw payload, such as a file; the model's configuration says how.

        `payload` becomes the record's value, and `content_type` (such as `image/jpeg` or
        `text/plain`) its header. `accept` names content types for the answer as in HTTP, such as
        `image/png`; any by default. For other arguments and errors see `infer`.
        """

        def make_request() -> tuple[NewRecord, str]:
            named = (HeaderName.MODEL, _named(model, version))
            about = [*headers, *_urgency(priority, tenant), named]
            if accept:
                about.append((HeaderName.ACCEPT, accept.encode()))
            return NewRecord(key, payload, about), content_type

        return await self._call(make_request, timeout_s)

    async def _call(
        self, make_request: Callable[[], tuple[NewRecord, str]], timeout_s: float
    ) -> Response:
        """Send what a function makes, a request and its content type, and return the answer."""
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s: expected a positive number of seconds, got {timeout_s}")
        deadline_ms = int((time.time() + timeout_s) * 1000)
        until_s = asyncio.get_running_loop().time() + timeout_s
        with _refusals_as_inference_errors():
            try:
                async with asyncio.timeout(timeout_s) as within, self._permits:
                    if self._rpc is None or not self._rpc.is_open:
                        raise ClientClosed("the client is not open: use it within `async with`")
                    # Not earlier: any number of calls may wait for their places.
                    request, content_type = make_request()
                    about = [
                        *request.headers,
                        (HeaderName.CONTENT_TYPE, content_type.encode()),
                        (HeaderName.DEADLINE_MS, b"%d" % deadline_ms),
                    ]
                    if self._compression:
                        request = self._compress(request, about)
                    request = await self._claims.put(request._replace(headers=about), content_type)
                    answer = await self._claims.fetch(await self._rpc.call(request, until_s))
                    return await self._decode(answer)
            except TimeoutError:
                if not within.expired():
                    raise
                raise InferenceTimeout(f"no answer within {timeout_s:g} s") from None

    async def _decode(self, answer: Record) -> Response:
        """Return an answer. Raises `InferenceError` if it is one."""
        inline_bytes = TUNING.protocol.converted_inline_bytes
        if self._executor and answer_takes_long(answer.headers, answer.value, inline_bytes):
            return await call_by(self._executor, partial(_response, answer))
        return _response(answer)

    def _compress(self, request: NewRecord, about: list[tuple[str, bytes | None]]) -> NewRecord:
        """Compress a request's value unless the caller has, and add the headers that say so."""
        given = {name for name, _ in about}
        coding = self._compression.encode()
        if HeaderName.ACCEPT_ENCODING not in given:
            about.append((HeaderName.ACCEPT_ENCODING, coding))
        value = request.value
        if HeaderName.CONTENT_ENCODING in given or value is None:
            return request
        if len(value) < TUNING.protocol.compressed_from_bytes:
            return request
        about.append((HeaderName.CONTENT_ENCODING, coding))
        return request._replace(value=compress(value, self._compression))


def _named(model: str, version: str | None) -> bytes:
    return (f"{model}/{version}" if version else model).encode()


def _override(settings: Settings, bootstrap_servers: str | None, namespace: str | None) -> Settings:
    """Return the settings, overridden by the client's explicit arguments."""
    explicit: dict[str, Any] = {}
    if bootstrap_servers is not None:
        named = {"bootstrap_servers": bootstrap_servers}
        kafka = settings.kafka
        explicit["kafka"] = kafka.model_copy(update=named) if kafka else KafkaSettings(**named)
    if namespace is not None:
        explicit["namespace"] = check_namespace(namespace)
    return settings.model_copy(update=explicit)


def _array(name: str, value: ArrayLike) -> NDArray[Any]:
    """Return the value of an input as an array. A NumPy value keeps its dtype; Python floats become
    FP32.

    Raises:
        Rejected: `INVALID_TENSOR`: it is no array, such as a list of lists of different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        expected = "lists of one length in each dimension"
        raise Rejected(Code.INVALID_TENSOR, f"{name}: expected {expected}: {error}") from error
    if isinstance(value, np.ndarray | np.generic):
        return array
    if array.dtype.kind in "SU":
        # NumPy's own text types drop the zeros at an element's end.
        return np.asarray(value, dtype=object)
    # Nearly all models take FP32, and the author of a Python float did not choose a size.
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _urgency(priority: int, tenant: str) -> list[tuple[str, bytes]]:
    headers = [(HeaderName.PRIORITY, b"%d" % priority)] if priority else []
    return [*headers, (HeaderName.TENANT, tenant.encode())] if tenant else headers


def _response(record: Record) -> Response:
    answer = decode_response(record.headers, record.value)
    if isinstance(answer, ErrorResponse):
        details = answer.error_details
        raise InferenceError(
            details.code,
            answer.error,
            retriable=details.retriable,
            retry_after_ms=details.retry_after_ms,
        )
    return Response(*answer, record.headers)


@contextmanager
def _refusals_as_inference_errors() -> Iterator[None]:
    """Turn `Rejected`, and text that is no UTF-8, into the `InferenceError` that services cause."""
    try:
        yield
    except Rejected as error:
        raise InferenceError(
            error.code,
            error.message,
            retriable=error.code.is_retriable,
            retry_after_ms=error.retry_after_ms,
        ) from error
    except UnicodeEncodeError as error:
        got = ascii(error.object)[:80]
        message = f"expected text in UTF-8, got {got}"
        raise InferenceError(Code.INVALID_REQUEST, message, retriable=False) from error
    except ClaimUnavailable as error:
        raise InferenceError(Code.INTERNAL, str(error), retriable=True) from error
