"""Parts that the doors of a gateway share: the client of the log, limits, errors, and the drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import structlog

from headrace.access.callers import Caller, Callers, Denied
from headrace.access.limits import CallerLimits, CallerUsage, Limits, Reason
from headrace.access.tls import open_certificates
from headrace.access.watched import Watched
from headrace.client import Client, ClientClosed, InferenceError, InferenceTimeout, Response
from headrace.config import GatewaySettings, Settings
from headrace.errors import Code, ConfigurationError, Rejected, Retriable
from headrace.gateway.classification import classify
from headrace.gateway.codec import InferCall
from headrace.gateway.conversions import Conversions
from headrace.gateway.shared_memory import RegionAccess, Regions
from headrace.gateway.spans import ServerSpan, ServerSpans
from headrace.gateway.statistics import Statistics
from headrace.log.port import Log
from headrace.models.index import Overtaken, RepositoryIndex, Unsupported
from headrace.protocol.headers import ALL_HEADERS, MAX_HEADER_BYTES, MAX_PRIORITY, HeaderName
from headrace.telemetry.health import Health
from headrace.telemetry.http import ServedModels
from headrace.telemetry.http_listener import AnswerLimits, Connections
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.logs import Event
from headrace.telemetry.snapshots import GatewaySnapshot
from headrace.topics import Topic
from headrace.tuning import TUNING, GatewayTuning

log = structlog.get_logger(__name__)

MAX_TIMEOUT_MS = 24 * 3600 * 1000
UNAUTHENTICATED, PERMISSION_DENIED = "UNAUTHENTICATED", "PERMISSION_DENIED"
"""Codes of callers without a key, and of those whose key does not open what they call."""
UNAVAILABLE = "UNAVAILABLE"
"""Code of the gateway's own errors: its limits are reached, or it cannot reach the broker."""


CONFLICT, UNSUPPORTED = "CONFLICT", "UNSUPPORTED"
"""Codes of changes of models: another one was made first; this process makes none."""


_STOPS = "gateway: it stops, and waits for no more answers"


class Unavailable(Retriable):
    """The gateway cannot take the request now."""


class ErrorAnswer(NamedTuple):
    """An error as callers see it; `code` is a `headrace.errors.Code`, a newer one, or
    `UNAVAILABLE`.
    """

    code: str
    message: str
    retriable: bool
    retry_after_ms: int | None = None


class Urgency(NamedTuple):
    """Timeout and priority (`x-priority`) of a caller's request."""

    timeout_s: float
    priority: int = 0


class CountedRequest:
    """A request under way, and the bytes of its body.

    Attributes:
        came_s: monotonic time at which its body had come, as it was sent: from then on the time
            that its caller gives passes.
    """

    def __init__(self, under_way: UnderWay, usage: CallerUsage | None) -> None:
        self._under_way = under_way
        self._usage = usage
        self.size_bytes = 0
        self.came_s = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Count more bytes.

        Raises:
            Unavailable: all requests together have too many.
            Rejected: those of its caller do; see `CallerUsage.check_bytes`.
        """
        usage = self._usage
        if usage is not None:
            usage.check_bytes(self.size_bytes, size_bytes)
        self._under_way.add_bytes(size_bytes)
        if usage is not None:
            usage.size_bytes += size_bytes
        self.size_bytes += size_bytes


class HeldBytes:
    """Bytes of answers that wait for their caller to read them; see `UnderWay.holding`."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count the bytes of an answer."""
        self.size_bytes += size_bytes
        self._under_way.size_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        """Count the bytes of an answer no longer."""
        self.add(-size_bytes)


class UnderWay:
    """The requests that the doors have taken and not answered, and the bytes of their bodies and
    of the answers that wait in streams for their callers.

    Args:
        max_requests: a further one is refused.
        max_bytes: of the bodies of all of them.
        callers: counts them for each caller.

    Attributes:
        refused: number of requests that were refused, by the limit that was reached.
    """

    def __init__(self, max_requests: int, max_bytes: int, callers: CallerLimits) -> None:
        self.requests = 0
        self.size_bytes = 0
        self.begun = 0
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.refused = {"requests": 0, "bytes": 0}
        self._callers = callers
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = asyncio.Event()

    @contextmanager
    def counting(
        self, caller: Caller | None = None, known_bytes: int = 0
    ) -> Iterator[CountedRequest]:
        """Count a request while the context lasts.

        Args:
            caller: whose limits the request is counted against; None for none.
            known_bytes: size of its body as far as it is known yet, for these limits.

        Raises:
            Unavailable: too many requests are under way, or they were ended meanwhile.
            Rejected: the caller is over its limits; see `CallerLimits.begin`.
        """
        if self._ended.is_set():
            raise Unavailable(_STOPS)
        if self.requests >= self.max_requests:
            self.refused["requests"] += 1
            raise Unavailable(
                f"gateway: {self.requests} requests are under way, which is the limit"
            )
        usage = None
        if caller is not None and caller.limits is not None:
            usage = self._callers.begin(
                caller.limited_as, caller.limits, time.monotonic(), known_bytes
            )
        counted = CountedRequest(self, usage)
        self.requests += 1
        self.begun += 1
        self._is_idle.clear()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield counted
        except asyncio.CancelledError:
            if not self._ended.is_set():
                raise
            task.uncancel()
            raise Unavailable(_STOPS) from None
        finally:
            self._tasks.discard(task)
            self.requests -= 1
            self.size_bytes -= counted.size_bytes
            if caller is not None and usage is not None:
                self._callers.end(caller.limited_as, usage, counted.size_bytes)
            if not self.requests:
                self._is_idle.set()

    @contextmanager
    def holding(self) -> Iterator[HeldBytes]:
        """Count bytes of answers that wait for their caller to read them.

        They are never refused: their requests were, by then, within the limits. What is left of
        them ends with the context.
        """
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.size_bytes -= held.size_bytes

    def add_bytes(self, size_bytes: int) -> None:
        """Count bytes of a request; see `CountedRequest.add`."""
        if self.size_bytes + size_bytes > self.max_bytes:
            self.refused["bytes"] += 1
            raise Unavailable(
                f"gateway: expected at most {self.max_bytes} bytes in the bodies of all requests "
                "under way, got more"
            )
        self.size_bytes += size_bytes

    def end(self) -> None:
        """Refuse the requests under way, and all further ones: the gateway waits no longer."""
        self._ended.set()
        for task in self._tasks:
            task.cancel()

    async def wait_for_silence(self, silence_s: float) -> None:
        """Wait until no request has been under way for so long."""
        begun = -1
        while begun != self.begun or self.requests:
            begun = self.begun
            await self._is_idle.wait()
            await asyncio.sleep(silence_s)


_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
_NOT_FORWARDED = ALL_HEADERS | _CREDENTIALS
_NOT_FORWARDED_PREFIXES = ("content-", "grpc-", "x-replay-")


def _check_forwarded(names: Iterable[str]) -> None:
    """Raise `ConfigurationError` for headers that callers must not give a record."""
    for name in names:
        if name in _NOT_FORWARDED or name.startswith(_NOT_FORWARDED_PREFIXES):
            expected = "neither headers of Headrace and of bodies nor credentials"
            raise ConfigurationError(f"gateway.forward_headers: expected {expected}, got {name!r}")


class Gateway:
    """The client of the log that all doors of a process share; entering opens it.

    Attributes:
        certificates: of the doors; None if they speak without TLS.
        callers: who may call, and how much.
        connections: of the door for HTTP.
        conversions: of the bodies of all doors.
        models: the models that the metadata describes. Requests do not depend on them: one for any
            model is sent, and the stages decide.
        repository: lists the models, and changes them if this process can.
        draining: set once each answer is to be the last one on its connection.
        spans: the server spans of all doors.
        statistics: of the models, over the requests of all doors.
        under_way: the requests of all doors.
        regions: of shared memory, which callers of all doors have registered.
        files: those of certificates and keys, to be refreshed while the gateway is open.

    Raises:
        ConfigurationError: the files of certificates or keys cannot be used.

    Raises (on entering):
        ConfigurationError, LogUnavailable, LogAuthenticationFailed: see `headrace.client.Client`.
    """

    def __init__(
        self,
        settings: Settings,
        log_: Log,
        models: ServedModels,
        health: Health,
        instruments: Instruments,
        repository: RepositoryIndex | None = None,
        tuning: GatewayTuning = TUNING.gateway,
    ) -> None:
        self.settings: GatewaySettings = settings.gateway
        _check_forwarded(self.settings.forward_headers)
        self.models = models
        self.repository = repository or RepositoryIndex(models, settings.models.mode)
        self.health = health
        self.metrics = instruments.metrics
        self.spans = ServerSpans(settings.telemetry, instruments)
        self.statistics = Statistics(models)
        self.tuning = tuning
        limits = self.settings
        self.certificates = open_certificates(limits)
        usual = Limits(
            limits.caller_requests_per_second,
            limits.caller_burst,
            limits.caller_max_in_flight,
            limits.caller_max_in_flight_bytes,
        )
        self.callers = Callers(limits, tuning.access, usual)
        self.files: list[Watched[Any]] = [*self.callers.files]
        if self.certificates is not None:
            self.files.append(self.certificates)
            self.metrics.show_expiry(limits.section, self.certificates)
        self.draining = asyncio.Event()
        self.regions = Regions(self.settings.shared_memory, tuning.max_regions)
        self.conversions = Conversions(tuning, use_regions=self.has_shared_memory)
        self._limits = CallerLimits(tuning.max_idle_callers)
        self.connections = Connections(
            limits.max_connections,
            limits.header_timeout_s,
            limits.idle_timeout_s,
            answers=AnswerLimits(
                limits.max_in_flight_bytes,
                tuning.end_timeout_s,
                tuning.end_bytes_per_s,
                tuning.answer_part_bytes,
            ),
        )
        self.under_way = UnderWay(limits.max_in_flight, limits.max_in_flight_bytes, self._limits)
        self._responses = settings.topic(Topic.RESPONSES)
        self._client = Client(
            log=log_,
            settings=settings,
            max_in_flight=limits.max_in_flight,
            executor=self.conversions.threads,
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self.health.watch_live(self._client.fault)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)
        self.regions.unregister()
        self.conversions.close()

    def snapshot(self, untaken_bytes: Mapping[str, int]) -> GatewaySnapshot:
        """Return the state that the metrics show; `untaken_bytes` is what each door has of them."""
        under_way = self.under_way
        return GatewaySnapshot(
            under_way.requests,
            under_way.max_requests,
            under_way.size_bytes,
            under_way.max_bytes,
            under_way.refused.copy(),
            self._client.late_answers,
            len(self.regions),
            len(self._limits),
            {reason: self._limits.refused[reason] for reason in Reason},
            len(self.connections),
            self.connections.closed_early,
            untaken_bytes,
            self._responses,
            self._client.last_contact_s(),
        )

    @property
    def has_shared_memory(self) -> bool:
        """True if callers may pass tensors in shared memory."""
        return self.settings.shared_memory != "off"

    @property
    def extensions(self) -> list[str]:
        """Triton's extensions that all doors have, by their names in the metadata of a server."""
        names = ["classification", "model_configuration", "model_repository", "statistics"]
        return [*names, "system_shared_memory"] if self.has_shared_memory else names

    def access(self, counted: CountedRequest) -> RegionAccess:
        """Return the regions as one request uses them: what it reads counts as its body."""
        limit = self.settings.max_body_bytes

        def count(size_bytes: int) -> None:
            if counted.size_bytes + size_bytes > limit:
                expected = f"at most {limit} bytes in the body and shared memory"
                got = str(counted.size_bytes + size_bytes)
                raise Rejected.mismatch(Code.TOO_LARGE, "request", expected=expected, got=got)
            counted.add(size_bytes)

        return RegionAccess(self.regions, count)

    def urgency(
        self, given_s: Iterable[float], passed_s: float, priority: int | None = None
    ) -> Urgency:
        """Return what is left of the earliest of the times that a caller gives, and its priority.

        A caller that gives no time has `gateway.timeout_ms`; the longest one is a day.

        Args:
            given_s: those times.
            passed_s: what has passed of them.
            priority: that of the caller; None if it gives none.

        Raises:
            InferenceTimeout: nothing is left.
        """
        timeout_s = min(min(given_s, default=self.settings.timeout_ms / 1e3), MAX_TIMEOUT_MS / 1e3)
        if passed_s >= timeout_s:
            raise InferenceTimeout(
                f"no answer within {timeout_s:g} s: it was not sent, since reading it took "
                f"{passed_s:.3f} s"
            )
        return Urgency(timeout_s - passed_s, priority or 0)

    def record_headers(
        self,
        span: ServerSpan,
        caller: Caller | None,
        given: Callable[[str], str | bytes | None],
    ) -> list[tuple[str, bytes]]:
        """Return the headers of a request's record: the trace, the caller as its tenant, and those
        of the caller that `gateway.forward_headers` names.

        Args:
            span: of the request.
            caller: who sends it; None if all callers are alike.
            given: returns a header of the caller by its name in lower case; None if it has none.

        Raises:
            Rejected: a forwarded header is too long.
        """
        headers = span.headers
        if caller is not None and caller.tenant:
            headers = [*headers, (HeaderName.TENANT, caller.tenant.encode())]
        for name in self.settings.forward_headers:
            value = given(name)
            if value is None:
                continue
            content = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
            if len(content) > MAX_HEADER_BYTES:
                expected, got = f"at most {MAX_HEADER_BYTES} bytes", str(len(content))
                raise Rejected.mismatch(
                    Code.INVALID_REQUEST, f"header {name}", expected=expected, got=got
                )
            headers = [*headers, (name, content)]
        return headers

    async def infer(
        self,
        model: str,
        version: str | None,
        call: InferCall,
        urgency: Urgency,
        headers: list[tuple[str, bytes]],
    ) -> Response:
        """Send a request and return its answer. Cancelling this cancels the request.

        Raises:
            Exception: `answer_of_error` knows what to tell the caller.
        """
        answer = await self.statistics.counted(
            model,
            version,
            self._client.infer(
                model,
                call.inputs,
                version=version,
                id=call.id,
                parameters=call.parameters or None,
                outputs=call.outputs,
                timeout_s=urgency.timeout_s,
                priority=urgency.priority,
                headers=headers,
            ),
        )
        return await self._classify(answer, call.classes) if call.classes else answer

    async def _classify(self, answer: Response, classes: Mapping[str, int]) -> Response:
        """Replace outputs by their top classes, with the labels of the version that answered."""
        try:
            version = self.models.lookup_bound(answer.model_name, answer.model_version)
        except Rejected as error:  # the stages have read the repository earlier or later
            answered = f"{answer.model_name}/{answer.model_version}"
            raise Unavailable(
                f"gateway: does not know {answered}, which answered: {error}"
            ) from error
        outputs = dict(answer.outputs)
        for name, count in classes.items():
            turn = partial(
                classify,
                name,
                outputs[name],
                count,
                batched=version.signature.batched,
                labels=version.labels.get(name, ()),
            )
            takes_long = outputs[name].size > self.tuning.classified_inline
            outputs[name] = await self.conversions.run(turn, takes_long=takes_long)
        return answer._replace(outputs=outputs)

    async def infer_payload(
        self,
        model: str,
        version: str | None,
        payload: bytes,
        content_type: str,
        accept: str,
        urgency: Urgency,
        headers: list[tuple[str, bytes]],
    ) -> Response:
        """Send a payload for the model's transform; otherwise as `infer`.

        `accept` names content types for the answer as its record carries it; empty: any.
        """
        return await self.statistics.counted(
            model,
            version,
            self._client.infer_raw(
                model,
                payload,
                content_type,
                accept=accept,
                version=version,
                timeout_s=urgency.timeout_s,
                priority=urgency.priority,
                headers=headers,
            ),
        )


def read_number(name: str, text: str | None, lowest: int, highest: int) -> int | None:
    """Return the integer in a header, None if it is absent.

    Raises:
        Rejected: `INVALID_REQUEST`: it is no integer in the range.
    """
    if text is None:
        return None
    digits = text.strip().removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 16 else None
    if number is None or not lowest <= number <= highest:
        expected = f"an integer from {lowest} to {highest}"
        got = repr(text[:40])
        raise Rejected.mismatch(Code.INVALID_REQUEST, f"header {name}", expected=expected, got=got)
    return number


def read_priority(name: str, text: str | None) -> int | None:
    """Return the priority in a header, see `read_number`."""
    return read_number(name, text, -MAX_PRIORITY, MAX_PRIORITY)


def answer_of_error(error: Exception) -> ErrorAnswer:
    """Return the answer to an error; log the error if it is of no known kind."""
    match error:
        case InferenceError():
            return ErrorAnswer(error.code, error.message, error.retriable, error.retry_after_ms)
        case Denied() | Overtaken() | Unsupported():
            return ErrorAnswer(_code_of(error), error.message, retriable=False)
        case Rejected():
            return ErrorAnswer(
                error.code, error.message, error.code.is_retriable, error.retry_after_ms
            )
        case InferenceTimeout():
            return ErrorAnswer(Code.DEADLINE_EXCEEDED, str(error), retriable=False)
        case Retriable() | ClientClosed():
            return ErrorAnswer(UNAVAILABLE, str(error), retriable=True)
    log.error(Event.GATEWAY_FAILED, error=type(error).__name__, exc_info=error)
    return ErrorAnswer(Code.INTERNAL, "the gateway failed; its log has the reason", retriable=True)


def _code_of(error: Denied | Overtaken | Unsupported) -> str:
    match error:
        case Denied():
            return PERMISSION_DENIED if error.is_known else UNAUTHENTICATED
        case Overtaken():  # not retriable: its caller has to look at the winner's change first
            return CONFLICT
        case Unsupported():
            return UNSUPPORTED
