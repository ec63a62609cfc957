"""Object stores by URL, through the library obstore: S3, Google Cloud, Azure and HTTPS.

Calls block, and are for threads other than the event loop's. Credentials come from the standard
environment variables of each service, such as `AWS_ACCESS_KEY_ID` or `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headrace.errors import ConfigurationError, Retriable, describe_error
from headrace.models.packing.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from headrace.primitives.backoff import Backoff, Pauses
from headrace.tuning import TUNING, ModelTuning

if TYPE_CHECKING:
    import obstore.store

T = TypeVar("T")

INDEX_NAME = "index.json"
"""Object that lists the versions, `{"digits": ["1", "2"]}`: HTTPS itself has no listings."""

_MANIFEST = re.compile(rf"([^/]+)/([1-9][0-9]{{0,17}})/{re.escape(MANIFEST_NAME)}")
_BEHIND_END = "status code: 416"
"""In the library's error for a range that begins behind the end of an object."""
_DURATION = re.compile(r" in [0-9.]+(?:ns|µs|ms|s)(?= )")


class StoreUnavailable(Retriable):
    """The store could not be reached, in spite of retries."""


class ObjectChanged(Retriable):
    """An object was written by somebody else since it was read."""


class ReadObject(NamedTuple):
    """A small object, and what identifies its content in the store.

    Attributes:
        content: its bytes.
        etag: its entity tag; None if the store has none.
        version: its version, by which Google Cloud compares; None if the store has none.
    """

    content: bytes
    etag: str | None
    version: str | None


class Store:
    """An object store with models, as `<model>/<version>/<file>`.

    Args:
        objects: the store of the library.
        name: URL or path, for messages.
        has_index: list versions by `INDEX_NAME`.
        tuning: number of attempts, and pauses between them.
        sleep: waits between attempts, in seconds.
    """

    def __init__(
        self,
        objects: obstore.store.ObjectStore,
        name: str,
        *,
        has_index: bool = False,
        tuning: ModelTuning = TUNING.models,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self._objects = objects
        self._has_index = has_index
        self._tuning = tuning
        self._sleep = sleep

    def list_versions(self, within_s: float | None = None) -> dict[str, list[int]]:
        """Return the versions whose manifest is there, by model, ascending.

        Args:
            within_s: longest time for all attempts; None bounds only each request (30 s).

        Raises:
            StoreUnavailable: the store cannot be reached, or did not answer in time.
            ConfigurationError: the store refuses, or its index cannot be used.
        """
        keys = self._list_index(within_s) if self._has_index else self._list_keys(within_s)
        found: dict[str, list[int]] = {}
        for match in filter(None, map(_MANIFEST.fullmatch, keys)):
            found.setdefault(match[1], []).append(int(match[2]))
        return {name: sorted(found[name]) for name in sorted(found)}

    def _list_keys(self, within_s: float | None) -> list[str]:
        import obstore

        def collect() -> list[str]:
            return [each["path"] for page in obstore.list(self._objects) for each in page]

        return self._attempt("", collect, within_s)

    def _list_index(self, within_s: float | None) -> list[str]:
        content = self.read(INDEX_NAME, within_s)
        try:
            index = json.loads(content)
            return [
                f"{name}/{version}/{MANIFEST_NAME}" for name in index for version in index[name]
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(
                f'{self.name}/{INDEX_NAME}: expected {{"MODEL": ["VERSION"]}}, got something else'
            ) from error

    def read(self, key: str, within_s: float | None = None) -> bytes:
        """Return a small object, of at most `MAX_MANIFEST_BYTES`.

        Args:
            key: of the object.
            within_s: see `list_versions`.

        Raises:
            FileNotFoundError: there is no such object.
            StoreUnavailable: the store cannot be reached, or did not answer in time.
            ConfigurationError: the store refuses, or the object is too large.
        """
        return self.read_object(key, within_s).content

    def read_object(self, key: str, within_s: float | None = None) -> ReadObject:
        """Return a small object with its tag, for `replace`; see `read`."""
        import obstore

        def get() -> ReadObject:
            result = obstore.get(self._objects, key)
            meta = result.meta
            size = meta["size"]
            if size > MAX_MANIFEST_BYTES:
                raise ConfigurationError(
                    f"{self.name}/{key}: expected at most {MAX_MANIFEST_BYTES} bytes, got {size}"
                )
            return ReadObject(bytes(result.bytes()), meta["e_tag"], meta["version"])

        return self._attempt(key, get, within_s)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of an object, less or nothing where that ends before; see `read`."""
        import obstore
        from obstore import exceptions

        def get() -> bytes:
            try:
                return bytes(obstore.get_range(self._objects, key, start=start, length=length))
            except exceptions.BaseError as error:
                if _BEHIND_END not in str(error):
                    raise
                return b""

        return self._attempt(key, get)

    def write(self, key: str, content: bytes | Path) -> None:
        """Write an object, from bytes or from a file; see `read`."""
        import obstore

        self._attempt(key, lambda: obstore.put(self._objects, key, content))

    def replace(self, key: str, content: bytes, seen: ReadObject | None) -> None:
        """Write a small object if it is still as it was read.

        Directories, and stores for which the environment says so (`AWS_CONDITIONAL_PUT=disabled`),
        have no such condition: there it is written whatever it is.

        Args:
            key: of the object.
            content: its new bytes.
            seen: the object as it was read; None if there was none.

        Raises:
            ObjectChanged: it is not.
            StoreUnavailable: the store cannot be reached.
            ConfigurationError: the store refuses.
        """
        import obstore

        mode: obstore.PutMode = "create"
        if seen is not None:
            mode = {}  # the library takes no None in it
            if seen.etag is not None:
                mode["e_tag"] = seen.etag
            if seen.version is not None:
                mode["version"] = seen.version

        def put() -> None:
            try:
                obstore.put(self._objects, key, content, mode=mode)
            except NotImplementedError:
                obstore.put(self._objects, key, content)

        self._attempt(key, put)

    def _attempt(self, key: str, call: Callable[[], T], within_s: float | None = None) -> T:
        """Call the library, again after pauses while the store cannot be reached."""
        from obstore import exceptions

        refusals = (
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
            exceptions.InvalidPathError,
            exceptions.NotSupportedError,
        )
        conflicts = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        place = f"{self.name}/{key}" if key else self.name
        pauses = Pauses(Backoff(self._tuning.store_retry_first_s, self._tuning.store_retry_max_s))
        end_s = None if within_s is None else time.monotonic() + within_s
        for left in range(self._tuning.store_attempts - 1, -1, -1):
            try:
                return call() if end_s is None else _call_within(end_s - time.monotonic(), call)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                raise FileNotFoundError(f"{place}: expected an object, got none") from error
            except conflicts as error:
                raise ObjectChanged(f"{place}: {_describe(error, self._tuning)}") from error
            except refusals as error:
                raise ConfigurationError(f"{place}: {_describe(error, self._tuning)}") from error
            except (exceptions.BaseError, OSError) as error:
                if not left or (end_s is not None and time.monotonic() >= end_s):
                    raise StoreUnavailable(f"{place}: {_describe(error, self._tuning)}") from error
            self._sleep(pauses.next_s())
        raise AssertionError("at least one attempt is made")


def _call_within(limit_s: float, call: Callable[[], T]) -> T:
    """Return the result of a call, which goes on in its own thread if it takes longer.

    The time limits of the library are set for a whole store, where large files need longer.

    Raises:
        TimeoutError: it took longer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            future.set_exception(error)

    Thread(target=run, name="store-request", daemon=True).start()
    try:
        return future.result(max(0.0, limit_s))
    except TimeoutError as error:
        if future.done():
            raise
        raise TimeoutError("no answer in time") from error


def _describe(error: Exception, tuning: ModelTuning) -> str:
    """Describe an error of the library by the first of its many lines.

    How long the request took is left out, so that equal errors have equal texts: each is logged
    once.
    """
    first = describe_error(error, tuning.store_error_chars).splitlines()[0]
    return _DURATION.sub("", first)


def open_store(location: str | Path, tuning: ModelTuning = TUNING.models) -> Store:
    """Return the store of a URL (`s3://`, `gs://`, `az://`, `https://`), or of a directory.

    Raises:
        ConfigurationError: the URL is wrong, or the package `obstore` is missing.
    """
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigurationError(
            f"{location} needs the package obstore: pip install 'headrace[store]'"
        ) from error
    if isinstance(location, Path):
        return Store(obstore.store.LocalStore(location, mkdir=True), str(location), tuning=tuning)
    is_plain = location.startswith("https://")
    open_url = obstore.store.HTTPStore.from_url if is_plain else obstore.store.from_url
    try:
        # `Store` itself retries, with pauses that are injected. Without `client_options` a request
        # has 30 s and a connection 5 s, and the environment says whether HTTP will do.
        objects = open_url(location, retry_config={"max_retries": 0})
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigurationError(f"{location}: {_describe(error, tuning)}") from error
    return Store(objects, location, has_index=is_plain, tuning=tuning)
