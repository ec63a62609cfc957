"""Parts that the methods of the door for gRPC share: messages, metadata, logins, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from headrace.access.callers import Credentials, join_values
from headrace.errors import Code, Rejected
from headrace.gateway.gateway import (
    CONFLICT,
    PERMISSION_DENIED,
    UNAUTHENTICATED,
    UNAVAILABLE,
    UNSUPPORTED,
    ErrorAnswer,
    Unavailable,
)
from headrace.gateway.grpc_parts import INFER_PARTS, OTHER_PARTS, check_parts
from headrace.gateway.open_inference_pb2 import ModelInferRequest
from headrace.gateway.quiet_calls import EndedQuiet
from headrace.tuning import TUNING, GatewayTuning

DETAILS = "grpc-status-details-bin"
PUSHBACK = "grpc-retry-pushback-ms"

_STATUS = {
    Code.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Code.INVALID_TENSOR: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Code.MODEL_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Code.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.MODEL_FAILED: grpc.StatusCode.INTERNAL,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    CONFLICT: grpc.StatusCode.ABORTED,
    UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)


class Drain:
    """The end of a door, which refuses further calls as retriable.

    Args:
        refusal_s: longest time until a call is refused.

    Attributes:
        begun: the door listens no longer.
        goaway_sent: GOAWAY was sent.
    """

    def __init__(self, refusal_s: float) -> None:
        self.begun = asyncio.Event()
        self.goaway_sent = asyncio.Event()
        self._refusal_s = refusal_s

    async def refuse(self) -> NoReturn:
        """Raise `Unavailable` once GOAWAY was sent, or after `refusal_s`.

        A caller that tries again at once has then read GOAWAY and opens a connection, to another
        gateway. If it were refused at once it would send call after call here, one of which would
        meet GOAWAY and be cancelled.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._refusal_s):
                await self.goaway_sent.wait()
        raise Unavailable("the gateway stops; expected this call at another one")


class Refusal(NamedTuple):
    """Status with which a call ends that gets no answer."""

    status: grpc.StatusCode
    message: str
    metadata: tuple[tuple[str, str | bytes], ...]


def parse_message(
    kind: type[M], message: bytes, unchecked_bytes: int = TUNING.gateway.unchecked_message_bytes
) -> M:
    """Return the message in bytes that a caller sent.

    A larger one than `unchecked_bytes` is refused before it is parsed if it has too many parts.
    Raises `Rejected` for that, and if the bytes are no such message.

    The methods take bytes and call this, because gRPC would call a message that cannot be parsed an
    internal error, which is its caller's fault.
    """
    if len(message) > unchecked_bytes:
        check_parts(message, INFER_PARTS if kind is ModelInferRequest else OTHER_PARTS)
    try:
        return kind.FromString(message)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise Rejected.mismatch(
            Code.INVALID_REQUEST, "message", expected=name, got="other bytes"
        ) from error


async def begin_answers(context: Context) -> None:
    """Send the initial metadata of a call that stays open; cancel it if its caller is gone.

    gRPC would send them with the first answer, and again with the end of the call if the caller has
    not read that answer: then the call could not be ended with a reason.
    """
    try:
        await context.send_initial_metadata(())
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


async def write_answer(context: Context, answer: Any) -> None:
    """Write an answer of a stream; cancel the call if its caller is gone.

    gRPC cancels it as well, but maybe later, and logs any other error as one of the server.
    """
    try:
        await context.write(answer)
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


async def end_quiet(context: Context, error: EndedQuiet, timeout_s: float) -> NoReturn:
    """End a call with the reason why it has to end.

    gRPC sends it after the answers that the caller has not read, and so not at once.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{error}; begin a new call")
    except grpc.aio.AbortError:
        raise
    except (TimeoutError, grpc.aio.BaseError):  # its caller does not read, or has gone
        raise asyncio.CancelledError from None


def text_of(value: str | bytes | None) -> str | None:
    """Return the value of a header; only those whose names end with `-bin` are bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def headers_in(
    metadata: Iterable[tuple[str, str | bytes]] | None,
) -> dict[str, str | bytes]:
    """Return the metadata of a call by name; several values of one are as those of a header, see
    `join_values`.
    """
    found: dict[str, list[str | bytes]] = {}
    for name, value in metadata or ():
        found.setdefault(name, []).append(value)
    return {name: _joined(values) for name, values in found.items()}


def _joined(values: list[str | bytes]) -> str | bytes:
    if len(values) == 1:
        return values[0]
    texts = [each for each in values if isinstance(each, str)]
    if len(texts) == len(values):
        return join_values(texts)
    return b", ".join(dict.fromkeys(each for each in values if isinstance(each, bytes)))


def credentials_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> Credentials:
    """Return what a caller sends to be known."""
    found = headers_in(metadata)
    authorization, key = (text_of(found.get(name)) for name in ("authorization", "x-api-key"))
    return Credentials(authorization or "", key or "")


def names_in(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in the certificate of a caller, as gRPC describes it."""
    kinds = (("URI:", "peer_uri"), ("DNS:", "peer_dns"), ("CN=", "x509_common_name"))
    return tuple(
        f"{prefix}{name.decode(errors='replace')}"
        for prefix, property_ in kinds
        for name in auth_context.get(property_, ())
    )


def _address_of(peer: str) -> str:
    """Return the address in a name such as `ipv4:192.0.2.1:50432` or `ipv6:%5B::1%5D:50432`
    (https://github.com/grpc/grpc/blob/master/doc/naming.md).
    """
    _, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]")


def credentials_of(context: Context, *, use_certificates: bool) -> Credentials:
    """Return what the caller of a call is known by: its keys, its address and its certificate."""
    given = credentials_in(context.invocation_metadata())
    given = given._replace(address=_address_of(context.peer()))
    if not use_certificates:
        return given
    return given._replace(certificate=names_in(context.auth_context()))


def refusal_of_error(answer: ErrorAnswer, tuning: GatewayTuning) -> Refusal:
    """Return how an error ends a call: its status, and whether and when to try again.

    `grpc-retry-pushback-ms` steers the retries of gRPC's clients (gRFC A6): a time, or -1 against
    them. The details are `google.rpc.Status` with `ErrorInfo` and `RetryInfo`.
    """
    status = _STATUS.get(answer.code)
    if status is None:
        known = grpc.StatusCode
        status = known.UNAVAILABLE if answer.retriable else known.INTERNAL
    message = _beginning_of(answer.message, tuning.error_characters)
    wait_ms = -1
    if answer.retriable:
        wait_ms = answer.retry_after_ms or tuning.retry_after_s * 1000
    details = _details(answer, status, message, wait_ms)
    return Refusal(status, message, ((PUSHBACK, str(wait_ms)), (DETAILS, details)))


def _beginning_of(text: str, limit: int) -> str:
    """Return what of a text gRPC encodes in so many characters: each byte that is not printable
    ASCII takes three.
    """
    size = 0
    for index, character in enumerate(text[:limit]):
        is_plain = " " <= character <= "~" and character != "%"
        size += 1 if is_plain else 3 * len(character.encode(errors="replace"))
        if size > limit:
            return text[:index]
    return text[:limit]


def _details(answer: ErrorAnswer, status: grpc.StatusCode, message: str, wait_ms: int) -> bytes:
    details = Status(code=status.value[0], message=message)
    retriable = "true" if answer.retriable else "false"
    reason = ErrorInfo(reason=answer.code, domain="headrace", metadata={"retriable": retriable})
    details.details.add().Pack(reason)
    if wait_ms >= 0:
        delay = Duration(seconds=wait_ms // 1000, nanos=wait_ms % 1000 * 1_000_000)
        details.details.add().Pack(RetryInfo(retry_delay=delay))
    content: bytes = details.SerializeToString()
    return content
