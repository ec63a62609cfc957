"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from headrace.client.client import DEFAULT_MAX_IN_FLIGHT, Client
from headrace.client.rpc import ClientClosed
from headrace.config import Settings
from headrace.protocol import headers

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    """Return the blocking form of a method of `Client`."""

    def call(self: SyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda client: method(client, *args, **kwargs))

    return cast("Callable[Concatenate[SyncClient, P], T]", wraps(method)(call))


class SyncClient:
    """A `Client` whose methods block. Several threads may call it at the same time.

    The client runs on an event loop in a thread of its own while the context is entered, which may
    be done again. A process that is forked meanwhile does not have that thread: its calls raise
    `ClientClosed`, and it needs a client of its own.

    Args:
        bootstrap_servers, namespace, settings, reply_partition, content_type, compression,
            max_in_flight: see `Client`.

    Raises (on entering):
        ConfigurationError, LogUnavailable, LogAuthenticationFailed: see `Client`.
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        namespace: str | None = None,
        settings: Settings | None = None,
        reply_partition: int | None = None,
        content_type: str = headers.MSGPACK,
        compression: str = "",
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
    ) -> None:
        make_client = partial(
            Client,
            bootstrap_servers,
            namespace=namespace,
            settings=settings,
            reply_partition=reply_partition,
            content_type=content_type,
            compression=compression,
            max_in_flight=max_in_flight,
        )
        make_client()  # raises for wrong arguments
        self._open: Callable[[], AbstractAsyncContextManager[Client]] = make_client
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        self._leave = asyncio.Event()
        self._process = 0
        # Held while a call is handed to the loop, which must not end meanwhile.
        self._handing_over = threading.Lock()

    @classmethod
    def of(cls, open_client: Callable[[], AbstractAsyncContextManager[Client]]) -> Self:
        """Return a blocking client over the client that a context manager yields.

        Args:
            open_client: called on entering; its context is entered and left in the thread.
        """
        blocking = cls()
        blocking._open = open_client
        return blocking

    infer = _blocking(Client.infer)
    infer_raw = _blocking(Client.infer_raw)

    def __enter__(self) -> Self:
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._process, self._loop, self._leave = os.getpid(), None, asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(opened)), name="headrace-client", daemon=True
        )
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        """Leave the client's context and wait for its thread; `Client` bounds that time."""
        loop, thread = self._loop, self._thread
        if loop is None:
            self._leave.set()  # interrupted before the thread had a loop
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._leave.set)
        if thread is not None:
            thread.join()

    def _call(self, start: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        if self._client is not None and self._process != os.getpid():
            raise ClientClosed(
                f"the client was opened by process {self._process}, from which this one was "
                "forked: open another one here"
            )
        with self._handing_over:
            client, loop = self._client, self._loop
            if client is None or loop is None:
                raise ClientClosed("the client is not open: use it within `with`")
            future = asyncio.run_coroutine_threadsafe(start(client), loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise ClientClosed("the client was closed before the answer came") from error
        except BaseException:
            future.cancel()  # e.g. on KeyboardInterrupt: cancel the request as well
            raise

    async def _run(self, opened: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            async with self._open() as self._client:
                opened.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            with self._handing_over:
                self._client = None
