"""Stores of claims: HTTP by aiohttp, object stores by obstore, directories by their descriptors.

- obstore's store for HTTP follows redirects to other hosts and has no option against it, so aiohttp
  does HTTP.
- Its store for directories follows links, so a directory is walked here, one part at a time, and
  none may be a link: nothing outside the allowed directory can be reached.

Credentials come from the environment variables of each service, such as `AWS_ACCESS_KEY_ID`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import stat
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import structlog

from headrace.errors import ConfigurationError, Rejected, Retriable, describe_error
from headrace.primitives.backoff import Backoff, Pauses
from headrace.primitives.worker_thread import WorkerThread
from headrace.protocol.claims import Claim, refuse_claim
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ClaimTuning
from headrace.urls import Address

if TYPE_CHECKING:
    import aiohttp
    from obstore.store import ClientConfig, ObjectStore

T = TypeVar("T")
OnEnded = Callable[[str, int, float], None]
"""Called with the outcome of a call, the bytes that were transferred, and its time in seconds."""

log = structlog.get_logger(__name__)

_OBJECT_STORES = frozenset({"s3", "gs", "az"})
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""Prefixes of the environment variables of each service."""
_CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "read_timeout", "timeout"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes", "user_agent"),
)
_WRITTEN = frozenset({200, 201, 204})
_NO_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
_LATER = frozenset({408, 423, 425, 429})
"""Statuses below 500 after which the same request may succeed."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_LOGIN_REFUSED = frozenset(
    {
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "InvalidToken"),
        "AuthenticationFailed",
    }
)
"""Codes of S3 and, the last one, Azure, beside status 403: the login of this process is wrong.
Sources: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html,
https://learn.microsoft.com/en-us/rest/api/storageservices/common-rest-api-error-codes"""


class ClaimUnavailable(Retriable):
    """The store could not be reached, or did not do what it was asked for.

    Args:
        message: why.
        retry_after_s: after how long the store wants to be asked again; 0 if it does not say.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClaimStores:
    """Reads and writes objects. Open while the context lasts; calls come from its event loop.

    Args:
        allowed: prefixes of the addresses of all objects.
        setting: that names them, for messages.

    Raises:
        ConfigurationError: a package is missing.
    """

    def __init__(
        self,
        allowed: tuple[Address, ...],
        tuning: ClaimTuning = TUNING.claims,
        setting: str = "claims.allowed",
    ) -> None:
        self._allowed = allowed
        self._setting = setting
        self._tuning = tuning
        self._objects: dict[str, ObjectStore] = {}
        self._file_threads: defaultdict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, tuning.file_threads)
        )
        self._session: aiohttp.ClientSession | None = None
        self._stack = AsyncExitStack()
        for address in allowed:
            if address.scheme in _OBJECT_STORES:
                self._objects[address.origin] = self._open_objects(address)

    async def __aenter__(self) -> Self:
        import aiohttp  # a fifth of a second, which clients without claims need not wait for

        tuning = self._tuning
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=tuning.connect_timeout_s, sock_read=tuning.read_timeout_s
            ),
            auto_decompress=False,  # size and digest are those of the object as it is stored
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._session = await self._stack.enter_async_context(session)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._session = None
        await self._stack.aclose()

    def read(self, claim: Claim) -> AsyncGenerator[bytes, None]:
        """Return the parts of an object. The address must be an allowed one.

        Raises:
            ClaimUnavailable: it may succeed later.
            Rejected: `INVALID_REQUEST`: there is no such object, or not of this size.
        """
        scheme = claim.address.scheme
        if scheme == "file":
            return self._read_file(claim)
        return self._read_object(claim) if scheme in _OBJECT_STORES else self._read_http(claim)

    async def write(self, claim: Claim, content: bytes, attributes: dict[str, str]) -> None:
        """Write an object; one that is there already is replaced. The address must be allowed.

        Args:
            claim: describes the content.
            content: all of it.
            attributes: `Content-Type`, and names and values that the store keeps beside the object;
                directories keep none.

        Raises:
            ClaimUnavailable: it may succeed later.
        """
        scheme = claim.address.scheme
        if scheme == "file":
            await self._write_file(claim.address, content)
        elif scheme in _OBJECT_STORES:
            await self._write_object(claim.address, content, attributes)
        else:
            await self._write_http(claim.address, content, attributes)

    # --- HTTP -------------------------------------------------------------------------------------

    async def _read_http(self, claim: Claim) -> AsyncGenerator[bytes, None]:
        import aiohttp
        from yarl import URL

        if self._session is None:
            raise ClaimUnavailable("claims: expected open stores")
        try:
            async with self._session.get(
                URL(claim.address.url, encoded=True),
                headers={"Accept-Encoding": "identity"},
                allow_redirects=False,  # to a host that is not allowed
            ) as response:
                _check_status(claim.address, response)
                if response.content_length is not None:
                    check_size(claim, response.content_length)
                async for part in response.content.iter_any():
                    yield part
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unavailable(claim.address, error) from error

    async def _write_http(
        self, address: Address, content: bytes, attributes: dict[str, str]
    ) -> None:
        import aiohttp
        from yarl import URL

        if self._session is None:
            raise ClaimUnavailable("claims: expected open stores")
        try:
            async with self._session.put(
                URL(address.url, encoded=True),
                # In parts: all at once would be copied, and hold the loop.
                data=_divide(content, self._tuning.chunk_bytes),
                headers={**attributes, "Content-Length": str(len(content))},
                allow_redirects=False,
            ) as response:
                if response.status not in _WRITTEN:
                    raise _refused_for_now(address, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unavailable(address, error) from error

    # --- object stores ----------------------------------------------------------------------------

    def _open_objects(self, address: Address) -> ObjectStore:
        try:
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ConfigurationError(
                f"{self._setting}: {address.origin} needs the package obstore: "
                "pip install 'headrace[claims]'"
            ) from error
        try:
            return obstore.store.from_url(
                address.origin,
                retry_config={"max_retries": 0},
                client_options=self._client_options(address.scheme),
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigurationError(
                f"{self._setting}: {address.origin}: {describe_error(error)}"
            ) from error

    def _client_options(self, scheme: str) -> ClientConfig:
        """Return the options of a store's HTTP client; variables such as `AWS_TIMEOUT` go first."""
        options: dict[str, Any] = {
            "connect_timeout": f"{self._tuning.connect_timeout_s:g} s",
            "read_timeout": f"{self._tuning.read_timeout_s:g} s",
            # Its own 30 s would end each read of a large object; ours is that of the claim.
            "timeout": "1 hour",
        }
        # The library ignores these variables as soon as it is given an option.
        for name in _CLIENT_OPTIONS:
            value = os.environ.get(f"{_PREFIXES[scheme]}_{name.upper()}")
            if value is not None:
                options[name] = value
        return cast("ClientConfig", options)

    async def _read_object(self, claim: Claim) -> AsyncGenerator[bytes, None]:
        import obstore
        from obstore import exceptions

        address = claim.address
        refusals = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
            exceptions.NotSupportedError,
        )
        try:
            found = await obstore.get_async(self._objects[address.origin], address.key)
            check_size(claim, found.meta["size"])
            async for part in found.stream(min_chunk_size=self._tuning.chunk_bytes):
                yield bytes(part)
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            raise _missing(address) from error
        except refusals as error:
            code = _CODE.search(str(error))
            if isinstance(error, exceptions.UnauthenticatedError) or (
                code is not None and code[1] in _LOGIN_REFUSED
            ):  # the caller has no part in it
                raise _unavailable(address, error) from error
            raise refuse_claim(
                f"an object that may be read in {address.origin}", _describe_kind(error)
            ) from error
        except (exceptions.BaseError, OSError) as error:
            raise _unavailable(address, error) from error

    async def _write_object(
        self, address: Address, content: bytes, attributes: dict[str, str]
    ) -> None:
        import obstore
        from obstore import exceptions

        if address.scheme == "az":  # takes identifiers alone as names of its own
            attributes = {
                name if name == "Content-Type" else name.replace("-", "_"): value
                for name, value in attributes.items()
            }
        try:
            await obstore.put_async(
                self._objects[address.origin], address.key, content, attributes=attributes
            )
        except (exceptions.BaseError, OSError) as error:
            raise _unavailable(address, error) from error

    # --- directories ------------------------------------------------------------------------------

    async def _read_file(self, claim: Claim) -> AsyncGenerator[bytes, None]:
        address, length = claim.address, self._tuning.chunk_bytes
        opened: list[int] = []

        def open_file() -> int:
            opened.append(self._open_file(address))
            return os.fstat(opened[0]).st_size

        try:
            async with self._file_thread(address) as thread:
                try:
                    check_size(claim, await thread.call(open_file).done)
                    while part := await thread.call(partial(os.read, opened[0], length)).done:
                        yield part
                finally:
                    # There: a descriptor that is closed while it is still read may be another's.
                    thread.call(partial(_close, opened))
        except OSError as error:
            raise _unavailable(address, error) from error

    async def _write_file(self, address: Address, content: bytes) -> None:
        path = Path("/", *address.parts)
        try:
            async with self._file_thread(address) as thread:
                await thread.call(partial(_replace_file, path, content)).done
        except OSError as error:
            raise _unavailable(address, error) from error

    @asynccontextmanager
    async def _file_thread(self, address: Address) -> AsyncIterator[WorkerThread]:
        """Yield a thread for the calls of one file, when fewer than enough of its store hang.

        A mount in a network may hang them for as long as its server is away, and then they would
        take all threads that the process shares, and keep it from ending.
        """
        places = self._file_threads[self.store_of(address)]
        await places.acquire()
        thread = WorkerThread("claims-file")
        try:
            thread.start()
        except RuntimeError as error:
            places.release()
            raise ClaimUnavailable(f"{address.origin}: no thread can be started") from error
        try:
            yield thread
        finally:
            # The calls are made in order: after this one, none hangs any more.
            thread.call(_do_nothing).done.add_done_callback(lambda _: places.release())
            thread.close()

    def store_of(self, address: Address) -> str:
        """Return the name of an allowed address's store: of files, their allowed directory."""
        if address.scheme != "file":
            return address.origin
        return next(each.url for each in self._allowed if address.is_within(each))

    def _open_file(self, address: Address) -> int:
        """Return the descriptor of a file below an allowed directory; no part is a link."""
        root = next(each for each in self._allowed if address.is_within(each))
        *directories, name = address.parts[len(root.parts) :] or ("",)
        # Without it the store is away, such as a mount, and no object is known to be missing.
        at = os.open("/" + root.key, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                for part in directories:
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    within = os.open(part, flags, dir_fd=at)
                    os.close(at)
                    at = within
                # A FIFO would block the open.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(name, flags, dir_fd=at)
            finally:
                os.close(at)
        except OSError as error:
            if error.errno in _NO_OBJECT:
                raise _missing(address) from error
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.EACCES, errno.EPERM):
                expected = "a file that may be read, without links in its path"
                raise refuse_claim(expected, errno.errorcode[error.errno]) from error
            raise _unavailable(address, error) from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise refuse_claim("a file", "a directory or a device")
        return file


async def _divide(content: bytes, length: int) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(content), length):
        yield content[start : start + length]


def _replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No reader sees a part of it, and writers of the same object do not disturb each other.
    other = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        other.write_bytes(content)
        other.replace(path)
    finally:
        other.unlink(missing_ok=True)


def _close(opened: list[int]) -> None:
    while opened:
        os.close(opened.pop())


def _do_nothing() -> None:
    """Do nothing: the last call of a thread, which shows that all others have ended."""


class StoreCalls:
    """Calls of stores, each repeated while its store is unavailable, and counted. Open while the
    context lasts.

    Args:
        stores: those that are called.
        timeout_s: time for all attempts of a call.
        backoff: pauses between them.
        where: what is transferred, for errors.
        on_ended: called with the outcome of each call.
    """

    def __init__(
        self,
        stores: ClaimStores,
        timeout_s: float,
        backoff: Backoff,
        where: str,
        on_ended: OnEnded,
    ) -> None:
        self._timeout_s = timeout_s
        self._backoff = backoff
        self._where = where
        self._on_ended = on_ended
        self.stores = stores

    async def __aenter__(self) -> Self:
        await self.stores.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stores.__aexit__(*error)

    async def call(
        self, attempt: Callable[[], Awaitable[T]], slots: asyncio.Semaphore, size_bytes: int
    ) -> T:
        """Return the result of an attempt, made when there is a slot; see `retry_in_time`.

        Args:
            attempt: raises `ClaimUnavailable` while the store is unavailable.
            slots: bound the calls that are made at a time.
            size_bytes: what is transferred if it succeeds.

        Raises:
            ClaimUnavailable: no attempt has succeeded in time.
            Rejected: what an attempt raises.
        """
        async with slots:
            began_s = time.monotonic()
            outcome = "cancelled"
            try:
                result = await retry_in_time(attempt, self._timeout_s, self._backoff, self._where)
                outcome = "ok"
            except Rejected:
                outcome = "refused"
                raise
            except ClaimUnavailable:
                outcome = "unavailable"
                raise
            finally:
                taken_bytes = size_bytes if outcome == "ok" else 0
                self._on_ended(outcome, taken_bytes, time.monotonic() - began_s)
        return result


async def retry_in_time(
    attempt: Callable[[], Awaitable[T]], timeout_s: float, backoff: Backoff, where: str
) -> T:
    """Repeat an attempt with pauses while the store is unavailable; return its result.

    Args:
        attempt: raises `ClaimUnavailable` while the store is unavailable.
        timeout_s: time for all attempts.
        backoff: pauses between them, where the store names no longer ones.
        where: what is transferred, for the error.

    Raises:
        ClaimUnavailable: no attempt has succeeded in time.
    """
    pauses = Pauses(backoff)
    reason = "no answer"
    try:
        async with asyncio.timeout(timeout_s) as within:
            while True:
                try:
                    return await attempt()
                except ClaimUnavailable as error:
                    reason = str(error)
                    log.warning(Event.CLAIM_DELAYED, reason=reason)
                    retry_after_s = error.retry_after_s
                await asyncio.sleep(max(pauses.next_s(), retry_after_s))
    except TimeoutError:
        if not within.expired():
            raise
        raise ClaimUnavailable(
            f"{where}: expected the object within {timeout_s:g} s (claims.timeout_ms), got {reason}"
        ) from None


def check_size(claim: Claim, size_bytes: int) -> None:
    """Refuse an object of another size than its claim says. Raises `Rejected`."""
    if size_bytes != claim.size_bytes:
        raise refuse_claim(f"an object of {claim.size_bytes} bytes", str(size_bytes))


def _check_status(address: Address, response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status == 200:
        return
    if 300 <= status < 400:
        raise refuse_claim(f"an object at {address.origin}", f"a redirect ({status})")
    if status in (404, 410):
        raise _missing(address)
    if status < 500 and status not in _LATER:
        raise refuse_claim(f"an object that may be read at {address.origin}", f"status {status}")
    raise _refused_for_now(address, response)


def _refused_for_now(address: Address, response: aiohttp.ClientResponse) -> ClaimUnavailable:
    """Return the error for a status after which the same request may succeed."""
    given = response.headers.get("Retry-After", "")  # a date, which is rare, counts as none
    retry_after_s = int(given) if given.isascii() and given.isdecimal() and len(given) < 6 else 0
    return ClaimUnavailable(f"{address.origin}: got status {response.status}", retry_after_s)


def _missing(address: Address) -> Rejected:
    return refuse_claim(f"an object at {address.origin}", "none")


def _unavailable(address: Address, error: BaseException) -> ClaimUnavailable:
    """Return the error for an unavailable store, without the path and the query of its URL."""
    return ClaimUnavailable(f"{address.origin}: {_describe_kind(error)}")


def _describe_kind(error: BaseException) -> str:
    """Return the type of an error, with the status and the code that an object store has sent."""
    text = str(error)
    sent = [found[1] for found in (_STATUS.search(text), _CODE.search(text)) if found is not None]
    return type(error).__name__ + (f" ({' '.join(sent)})" if sent else "")
