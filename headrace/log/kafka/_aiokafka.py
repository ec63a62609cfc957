"""Every use of a private name of aiokafka, and every change to how it behaves.

aiokafka's public interface cannot keep all promises of the port (`headrace.log.port`). Where it
cannot, the adapter uses its internals, by way of the functions and classes of this module alone.
`PRIVATE_NAMES` lists them. The import fails if the installed release lacks one, so that an upgrade
shows at start-up what has to be looked at. docs/decisions/0001 says why the release is pinned.

The parts, and what each is for:

- connections: responses are delivered in the event-loop iteration in which they arrive
- client: reconnect back-off, return to the bootstrap servers, reasons of failures
- consumer: state of the group and of reading, commits of one generation (P2, P5)
- fetch buffer: polls that are limited by bytes, batches that cannot be read (P2, P5), fetches that
  are encoded and decoded in one step for each partition
- batches: records without futures of their own, header names that are not UTF-8
- closing: everything ends within seconds, also without a broker
"""

from __future__ import annotations

import asyncio
import struct
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from io import BytesIO
from types import ModuleType
from typing import Any, Final

import aiokafka
import aiokafka.errors as kafka_errors
from aiokafka import AIOKafkaConsumer
from aiokafka import client as aiokafka_client
from aiokafka import conn as aiokafka_conn
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer import fetcher as aiokafka_fetcher
from aiokafka.consumer.fetcher import Fetcher, FetchError, FetchResult, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator, NoGroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.producer import sender as aiokafka_sender
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.protocol.fetch import FetchRequest_v11
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.produce import ProduceRequest_v7
from aiokafka.record import default_records
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.structs import OffsetAndMetadata

from headrace.log.port import Committed, Headers, Membership, TopicPartition

WRITTEN_FOR: Final = "0.14.0"

PRIVATE_NAMES: Final[Mapping[type | ModuleType, tuple[str, ...]]] = {
    AIOKafkaClient: (
        "_conns",
        "_get_conn",
        "_get_conn_lock",
        "_loop",
        "_md_synchronizer",
        "_md_update_fut",
        "_metadata_update",
        "_on_connection_closed",
        "_request_timeout_ms",
        "_sync_task",
        "_topics",
        # Public, but replaced on the object.
        "bootstrap",
        "force_metadata_update",
        "send",
    ),
    AIOKafkaConnection: (
        "_client_id",
        "_closed_fut",
        "_create_reader_task",
        "_handle_frame",
        "_last_action",
        "_next_correlation_id",
        "_request_timeout",
        "_requests",
        "_versions",
        "_writer",
    ),
    AIOKafkaConsumer: ("_client", "_coordinator", "_fetcher", "_subscription"),
    BatchBuilder: ("_build", "_builder", "_relative_offset", "_set_producer_state"),
    FetchError: ("_error",),
    FetchRequest_v11: ("RESPONSE_TYPE", "encode"),  # public, but replaced
    ProduceRequest_v7: ("RESPONSE_TYPE", "encode"),  # public, but replaced
    FetchResult: ("_partition_records", "_update_position"),
    Fetcher: (
        "_closed",
        "_create_fetch_waiter",
        "_fetch_max_wait_ms",
        "_fetch_task",
        "_fetch_waiters",
        "_get_actions_per_node",
        "_in_flight",
        "_notify",
        "_pending_tasks",
        "_prefetch_backoff",
        "_proc_fetch_request",
        "_records",
        "_subscriptions",
        "_wait_consume_future",
        "error_future",
        "request_offset_reset",
    ),
    NoGroupCoordinator: ("_reset_committed_task",),
    GroupCoordinator: (
        "_commit_refresh_task",
        "_coordination_task",
        "_do_commit_offsets",
        "_heartbeat_task",
        "check_errors",
        "ensure_coordinator_known",
        "generation",
        "member_id",
    ),
    PartitionRecords: (
        "_aborted_producers",
        "_consume_aborted_up_to",
        "_contains_abort_marker",
        "_records",
        "_records_iterator",
        "_tp",
    ),
    SubscriptionState: ("_fetch_count", "_last_fetch_ended", "fetch_context"),
    aiokafka_fetcher: ("MemoryRecords",),
    default_records: ("_DefaultRecordBatchBuilderPy",),
}

_LENGTH: Final = struct.Struct(">i")
_HEADER: Final = struct.Struct(">hhih")  # API, its version, correlation id, length of client id


def check_names(names: Mapping[type | ModuleType, Iterable[str]], release: str) -> None:
    """Check that classes and modules still have the names that this module uses.

    Raises:
        ImportError: one is missing.
    """
    for owner, wanted in names.items():
        known = set(dir(owner)) | _names_in_methods(owner)
        for name in wanted:
            if name not in known:
                raise ImportError(
                    f"aiokafka {release} has no {owner.__name__}.{name}, which "
                    f"headrace/log/kafka/_aiokafka.py uses; Headrace was written for {WRITTEN_FOR}"
                )


def _names_in_methods(owner: type | ModuleType) -> set[str]:
    """Return the names in the code of a class's methods; attributes of objects are among them."""
    if isinstance(owner, ModuleType):
        return set()
    return {
        name
        for base in owner.__mro__
        for method in vars(base).values()
        if hasattr(method, "__code__")
        for name in method.__code__.co_names
    }


check_names(PRIVATE_NAMES, aiokafka.__version__)


# --- connections ------------------------------------------------------------------------------
#
# aiokafka reads responses from a stream, in a task. The stream's buffer grows with every read of
# the socket, which moves its content each time: a fetch of some MiB is moved about five times. The
# task runs one loop iteration after the bytes arrive, and the caller yet another one later. Here
# the protocol assembles a response once, and completes the request itself. What that saves, and
# when to undo it, is in docs/decisions/0020.


class Frames:
    """Cuts a stream of bytes into frames, each of which follows its length.

    Source: "Network" in Kafka's protocol guide: a frame is an INT32 and that many bytes.
    """

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._missing = 0
        """Bytes missing from the frame whose parts are held; 0 if the parts are of a length prefix.
        """

    def cut(self, data: bytes) -> list[bytes]:
        """Return the frames that these bytes complete.

        Raises:
            ValueError: a length is negative.
        """
        found: list[bytes] = []
        at = 0
        if self._parts:
            if not self._missing:
                data = b"".join((*self._parts, data))
                self._parts = []
            elif len(data) < self._missing:
                self._parts.append(data)
                self._missing -= len(data)
                return found
            else:
                at = self._missing
                self._parts.append(memoryview(data)[:at])
                found.append(b"".join(self._parts))
                self._parts, self._missing = [], 0
        while len(data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, at)
            if size < 0:
                raise ValueError(f"expected the length of a frame, got {size}")
            at += _LENGTH.size
            end = at + size
            if end > len(data):
                self._missing = end - len(data)
                self._parts = [memoryview(data)[at:]]
                return found
            found.append(data[at:end])
            at = end
        if at < len(data):
            self._parts = [data[at:]]
        return found


class ResponseProtocol(asyncio.Protocol):
    """Protocol that reads responses; refers to its connection weakly, as aiokafka's own reading
    does.

    Args:
        closed: set when the transport has released the socket.
    """

    def __init__(self, connection: DirectConnection, closed: asyncio.Future[None]) -> None:
        self._connection = weakref.ref(connection)
        self._closed = closed
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        connection = self._connection()
        try:
            for frame in self._frames.cut(data):
                if connection is None or not connection.connected():
                    return
                connection._handle_frame(frame)
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing more can be read
            # Log as aiokafka's own reading does, which this replaces.
            aiokafka_conn.log.exception("Unexpected exception in AIOKafkaConnection")
            self._break(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._break(error or EOFError("the broker has closed the connection"))

    def _break(self, error: Exception) -> None:
        connection = self._connection()
        if connection is not None and connection.connected():
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)


class DirectConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka publishes no types
    """aiokafka's connection, except for how requests are written and responses read, and how long
    heartbeats may take.

    Attributes:
        transport: the transport; None before there is a connection. Kept after the connection has
            closed itself, because the socket is released only later.
    """

    transport: asyncio.WriteTransport | None = None
    heartbeat_timeout_s: float | None = None

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """Send a request; see the base class, which has one timeout for all."""
        if self._writer is None or not expect_response:
            return super().send(request, expect_response)
        message = request.prepare(self._versions)
        correlation_id = self._next_correlation_id()
        header, body = _header(message, correlation_id, self._client_id), message.encode()
        try:
            self._writer.write(b"".join((_LENGTH.pack(len(header) + len(body)), header, body)))
        except OSError as error:
            self.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
            raise kafka_errors.KafkaConnectionError(
                f"Connection at {self.host}:{self.port} broken: {error}"
            ) from error
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.append((correlation_id, message, answer))
        timeout_s = self._request_timeout
        if isinstance(request, HeartbeatRequest) and self.heartbeat_timeout_s is not None:
            timeout_s = self.heartbeat_timeout_s
        return _wait_for(answer, timeout_s)

    def close(
        self, reason: CloseReason | None = None, exc: Exception | None = None
    ) -> asyncio.Future[None]:
        """Close; return a future that ends when the socket is released.

        A future of its own: aiokafka's client is cancelled while it waits for it if a broker is
        slow to close, and would cancel the one by which the release is known.
        """
        return asyncio.shield(super().close(reason=reason, exc=exc))

    def _handle_frame(self, frame: bytes) -> None:
        correlation_id, request, answer = self._requests[0]
        if request is None or request.FLEXIBLE_VERSION or frame[:4] != _LENGTH.pack(correlation_id):
            super()._handle_frame(frame)
            return
        if not answer.done():
            content = BytesIO(frame)
            content.seek(_LENGTH.size)
            answer.set_result(request.RESPONSE_TYPE.decode(content))
        self._last_action = time.monotonic()
        self._requests.popleft()

    def _create_reader_task(self) -> asyncio.Future[None]:
        """Called where aiokafka begins to read: on the new transport, before anything was sent.

        Returns:
            A future that does not end by itself, instead of aiokafka's reading task.
        """
        self.transport = self._writer.transport
        self.transport.set_protocol(ResponseProtocol(self, self._closed_fut))
        return asyncio.get_running_loop().create_future()


def _header(message: Any, correlation_id: int, client_id: str) -> bytes:
    """Encode the header of a request, version 1 or 2.

    aiokafka makes an object for each. Source: "Request Header" in Kafka's protocol guide.
    """
    name = client_id.encode()
    header = _HEADER.pack(message.API_KEY, message.API_VERSION, correlation_id, len(name))
    tagged_fields = b"\0" if message.FLEXIBLE_VERSION else b""  # none
    return b"".join((header, name, tagged_fields))


async def _wait_for(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    """Wait for an answer. Raises TimeoutError.

    aiokafka makes a context for each request, which takes longer than this timer.
    """
    timer = asyncio.get_running_loop().call_later(timeout_s, _time_out, answer)
    try:
        return await answer
    finally:
        timer.cancel()
        del answer  # its error refers to this frame, and to that of the request


def _time_out(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


async def close_connection(connection: DirectConnection, timeout_s: float) -> None:
    """Close one connection and wait for its socket; reset it if the other side is slow to close.

    A connection that a broker refused has closed itself. With TLS its socket stays open until the
    other side answers, which can take longer than the event loop lives: it is reset at once.
    """
    was_open = connection.connected()
    closed = connection.close(reason=CloseReason.SHUTDOWN)
    if connection.transport is None:  # never connected
        return
    if was_open:
        await asyncio.wait([closed], timeout=timeout_s)
    if not closed.done():
        connection.transport.abort()
        await asyncio.wait([closed], timeout=timeout_s)


def reset_connection(connection: DirectConnection) -> None:
    """Close one connection at once, without what was to be sent to the other side."""
    connection.close(reason=CloseReason.SHUTDOWN)
    if connection.transport is not None:
        connection.transport.abort()


# --- the client -------------------------------------------------------------------------------


def replace_connecting(
    client: AIOKafkaClient,
    *,
    bootstrap: Callable[[], Awaitable[None]],
    get_connection: Callable[..., Awaitable[AIOKafkaConnection | None]],
    find_metadata: Callable[[ClusterMetadata, Collection[str]], Awaitable[bool]],
    on_request: Callable[[str], None],
    pause_s: Callable[[Any, float], float],
    metadata_pause_s: float,
) -> None:
    """Replace how a client finds and connects to brokers.

    Args:
        client: a client that has not been started.
        bootstrap: connects for the first time; called without arguments.
        get_connection: returns the connection to a node, None if there can be none now; called with
            the node's id and `group=`.
        find_metadata: called when no known broker answers a metadata request; returns whether
            another one did.
        on_request: called with the name of each request to a broker.
        pause_s: called with each response and the time in monotonic seconds; returns for how long
            the response is held back.
        metadata_pause_s: between requests for metadata while a topic, or a leader, is missing.
    """
    ask_known_brokers = client._metadata_update
    held_until_s = 0.0

    async def update_metadata(cluster: ClusterMetadata, topics: Collection[str]) -> bool:
        # aiokafka's fetcher requests metadata in a loop while a partition that it reads has no
        # leader, or its topic was deleted: thousands of times a second, of each process.
        nonlocal held_until_s
        if (delay_s := held_until_s - time.monotonic()) > 0:
            await asyncio.sleep(delay_s)
        found = await ask_known_brokers(cluster, topics) or await find_metadata(cluster, topics)
        if not all(_has_leaders(cluster, topic) for topic in topics or ()):
            held_until_s = time.monotonic() + metadata_pause_s
        return found

    client.send = partial(_send, client, get_connection, on_request, pause_s)
    client._get_conn = get_connection
    client.bootstrap = bootstrap
    client._metadata_update = update_metadata


def _has_leaders(cluster: ClusterMetadata, topic: str) -> bool:
    """Return whether a topic exists and each of its partitions has a leader."""
    partitions = cluster.partitions_for_topic(topic)
    return bool(partitions) and partitions == cluster.available_partitions_for_topic(topic)


async def _send(
    client: AIOKafkaClient,
    get_connection: Callable[..., Awaitable[AIOKafkaConnection | None]],
    on_request: Callable[[str], None],
    pause_s: Callable[[Any, float], float],
    node_id: int,
    request: Any,
    *,
    group: int = ConnectionGroup.DEFAULT,
) -> Any:
    """Send a request as aiokafka's client does, and raise its own error if the transport is closed
    already.

    asyncio's transport ignores writes after it was closed, and the request fails with its
    connection. uvloop's raises RuntimeError, which aiokafka does not expect and which would end its
    background tasks.
    """
    on_request(type(request).__name__.removesuffix("Request"))
    connection = open_connection(client, (node_id, group))
    connection = connection or await get_connection(node_id, group=group)
    if connection is None:
        raise kafka_errors.NodeNotReadyError(f"node {node_id}: there is no connection at present")
    try:
        response = await connection.send(request)
    except TimeoutError as error:
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)  # the next request opens another
        raise kafka_errors.RequestTimedOutError from error
    except RuntimeError as error:
        if "handler is closed" not in str(error):
            raise
        raise kafka_errors.KafkaConnectionError(f"node {node_id}: {error}") from error
    if delay_s := pause_s(response, time.monotonic()):
        await asyncio.sleep(delay_s)
    return response


def start_metadata_refresh(client: AIOKafkaClient) -> None:
    """Start the client's periodic metadata requests, unless they run."""
    if client._sync_task is None:
        client._sync_task = asyncio.create_task(client._md_synchronizer(), name="kafka-metadata")


def open_connection(client: AIOKafkaClient, key: tuple[int, int]) -> AIOKafkaConnection | None:
    """Return the client's connection to a node for a group of requests; None if none is open."""
    connection = client._conns.get(key)
    return connection if connection is not None and connection.connected() else None


def connecting_lock(client: AIOKafkaClient) -> asyncio.Lock:
    """Return the lock that is held while the client opens a connection."""
    lock: asyncio.Lock = client._get_conn_lock
    return lock


def new_connection(
    client: AIOKafkaClient,
    address: tuple[str, int],
    group: int,
    *,
    request_timeout_ms: int,
    heartbeat_timeout_s: float,
    **options: Any,
) -> DirectConnection:
    """Return an unopened connection that tells the client when it closes.

    A connection for the requests of a member has the timeout of its client, which is that of a
    JoinGroup. All others, and heartbeats, have their own: a connection that is broken without a
    sign of it must not stay in use for longer.
    """
    is_of_member = group == ConnectionGroup.COORDINATION
    connection = DirectConnection(
        *address,
        request_timeout_ms=client._request_timeout_ms if is_of_member else request_timeout_ms,
        on_close=client._on_connection_closed,
        **options,
    )
    connection.heartbeat_timeout_s = heartbeat_timeout_s
    return connection


def add_connection(
    client: AIOKafkaClient, key: tuple[int, int], connection: AIOKafkaConnection
) -> None:
    """Let the client use a connection, which is open, for a node and a group of requests."""
    client._conns[key] = connection


def log_connecting_failed(node_id: int, error: Exception) -> None:
    """Log as aiokafka's client does, so that the same filters apply."""
    aiokafka_client.log.error("Unable connect to node with id %s: %s", node_id, error)


def log_send_retried(partition: TopicPartition, reason: str) -> None:
    """Log as aiokafka's producer does, so that the same filters apply."""
    aiokafka_sender.log.warning(
        "Got error produce response on topic-partition %s, retrying. Error: %s", partition, reason
    )


def log_fetch_failed(topic: str, partition: int, reason: str) -> None:
    """Log as aiokafka's fetcher does, whose own line has only the name of the error."""
    aiokafka_fetcher.log.warning("Cannot fetch from %s/%d: %s", topic, partition, reason)


def last_response_s(client: AIOKafkaClient) -> float:
    """Return the monotonic time of the last response of any broker; 0.0 if there was none."""
    return max((each._last_action for each in client._conns.values()), default=0.0)


def forget_topic(client: AIOKafkaClient, topic: str) -> None:
    """Stop requesting a topic's metadata with each refresh."""
    client._topics.discard(topic)


# --- the consumer -----------------------------------------------------------------------------


def client_of(consumer: AIOKafkaConsumer) -> AIOKafkaClient:
    """Return the client of a consumer."""
    return consumer._client


def membership_of(consumer: AIOKafkaConsumer) -> Membership:
    """Return a consumer's membership as aiokafka knows it; its generation is -1 if it is none."""
    coordinator = consumer._coordinator
    return Membership(coordinator.generation, coordinator.member_id)


def raise_coordination_error(consumer: AIOKafkaConsumer) -> None:
    """Raise the error that ended the consumer's coordination for good, if one did."""
    consumer._coordinator.check_errors()


def count_as_polling(consumer: AIOKafkaConsumer) -> AbstractContextManager[None]:
    """Return a context in which the consumer counts as polling: aiokafka rejoins only then."""
    context: AbstractContextManager[None] = consumer._subscription.fetch_context()
    return context


def reset_polling(consumer: AIOKafkaConsumer) -> None:
    """Count no poll as running, after one has failed.

    aiokafka counts pollers without a `finally`; a leftover would make the consumer look busy
    forever, and switch its watchdog off.
    """
    consumer._subscription._fetch_count = 0
    consumer._subscription._last_fetch_ended = time.monotonic()


def seek_by_policy(consumer: AIOKafkaConsumer, partition: aiokafka.TopicPartition) -> None:
    """Start a partition without a position at its beginning."""
    earliest = aiokafka_fetcher.OffsetResetStrategy.EARLIEST
    consumer._fetcher.request_offset_reset([partition], earliest)


def set_fetch_wait(consumer: AIOKafkaConsumer, wait_s: float) -> None:
    """Set how long brokers may hold the consumer's next fetches for records to arrive."""
    consumer._fetcher._fetch_max_wait_ms = int(wait_s * 1000)


def fetching_task(consumer: AIOKafkaConsumer) -> asyncio.Future[None]:
    """Return the task that fetches records; it ends only if fetching has failed for good."""
    task: asyncio.Future[None] = consumer._fetcher.error_future
    return task


async def find_coordinator(consumer: AIOKafkaConsumer) -> None:
    """Wait until the group's coordinator is known."""
    await consumer._coordinator.ensure_coordinator_known()


async def commit_once(
    consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, Committed]
) -> None:
    """Commit as a member of the current generation, in one request.

    aiokafka's own `commit` retries, also after the generation has ended.
    """
    wanted = {
        aiokafka.TopicPartition(*each): OffsetAndMetadata(*at) for each, at in offsets.items()
    }
    await consumer._coordinator._do_commit_offsets(None, wanted)


# --- the fetch buffer -------------------------------------------------------------------------


class FetchBuffer:
    """The records that a consumer has fetched and not returned yet.

    aiokafka's fetcher is a task that is woken when a fetch ends. It wakes those who wait for
    records, looks for a fetch that it could send, and is woken again once the records have been
    read; each fetch is a task of its own. Here the end of a fetch wakes them itself, and the same
    task sends the next one from that broker. The fetcher sees it end if there is anything else to
    do.

    Args:
        consumer: one that has been started. It has no other buffer.
    """

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._fetcher: Fetcher = consumer._fetcher
        self._unread: set[asyncio.Future[object]] = set()
        """One for each fetch whose records are being read."""
        self._fetcher._proc_fetch_request = partial(self._fetch, self._fetcher._proc_fetch_request)

    async def _fetch(
        self, fetch: Callable[..., Awaitable[bool]], assignment: Any, node: int, request: Any
    ) -> bool:
        """Fetch from one broker, until something else than the next fetch from it has to be done.

        Returns:
            False: nobody has to be woken by aiokafka.
        """
        try:
            while await fetch(assignment, node, request):
                await self._wait_until_due()
                following = self._next_request(assignment, node)
                if following is None:
                    break
                request = following
        except asyncio.CancelledError:
            pass  # as aiokafka's own method does: the partitions are revoked, or this is the end
        # The broker counts as busy until a callback at the end of this task. A partition that is
        # resumed or sought in the same turn makes the fetcher look for fetches just before that;
        # it would not look again until its own timeout.
        asyncio.get_running_loop().call_soon(self._wake_fetcher)
        return False

    async def _wait_until_due(self) -> None:
        """Pass records, or an error, to those who wait, and wait until the next fetch is due.

        This is after `fetch_again`, or after the pause in which aiokafka itself sends no fetch to a
        broker of whose records some are unread.
        """
        fetcher = self._fetcher
        for waiter in fetcher._fetch_waiters:
            fetcher._notify(waiter)
        loop = asyncio.get_running_loop()
        unread: asyncio.Future[object] = loop.create_future()
        self._unread.add(unread)
        timer = loop.call_later(fetcher._prefetch_backoff, _end_wait, unread)
        try:
            await unread
        finally:
            timer.cancel()
            self._unread.discard(unread)

    def _next_request(self, assignment: Any, node: int) -> Any | None:
        """Return the next fetch from a broker, or None if the fetcher has to look for what to do:
        partitions are revoked, read from elsewhere, or without a position or a leader.
        """
        if not assignment.active:
            return None
        fetcher = self._fetcher
        fetcher._in_flight.discard(node)
        fetches, resets, _, lacks_leader, _ = fetcher._get_actions_per_node(assignment)
        fetcher._in_flight.add(node)
        if resets or lacks_leader or [to for to, _ in fetches] != [node]:
            return None
        return fetches[0][1]

    async def wait_for_assignment(self) -> None:
        """Wait for the end of a rebalance in progress."""
        subscriptions = self._fetcher._subscriptions
        if subscriptions.reassignment_in_progress:
            await subscriptions.wait_for_assignment()

    async def wait_for_records(self, timeout_s: float) -> bool:
        """Wait until something was fetched; False after the timeout, or once fetching has ended.

        Raises:
            KafkaError: we may not read a topic.
        """
        waiter = self._fetcher._create_fetch_waiter()
        # A timer instead of `asyncio.wait`, which takes longer than all else in here.
        timer = asyncio.get_running_loop().call_later(timeout_s, _end_wait, waiter)
        try:
            has_fetched = await waiter is not _TIMED_OUT
        finally:
            timer.cancel()
        return has_fetched and not self._fetcher._closed

    def results(self) -> list[tuple[aiokafka.TopicPartition, FetchResult | FetchError]]:
        """Return the result of the last fetch of each partition, in the order of arrival."""
        return list(self._fetcher._records.items())

    def seek(self, partition: aiokafka.TopicPartition, offset: int) -> None:
        """Make this offset the next one; what was fetched from the partition is dropped."""
        self._consumer.seek(partition, offset)
        self.fetch_again()

    def drop_result(self, partition: aiokafka.TopicPartition) -> None:
        """Drop a result; its partition is fetched again after `fetch_again`."""
        del self._fetcher._records[partition]

    def fetch_again(self) -> None:
        """Send the next fetches, of the partitions without a result."""
        if not self._unread:
            self._wake_fetcher()
        for waiting in self._unread:
            self._fetcher._notify(waiting)

    def _wake_fetcher(self) -> None:
        self._fetcher._notify(self._fetcher._wait_consume_future)


_TIMED_OUT: Final = object()


def _end_wait(waiter: asyncio.Future[object]) -> None:
    if not waiter.done():
        waiter.set_result(_TIMED_OUT)


def fetch_error(result: FetchResult | FetchError) -> Exception | None:
    """Return the error with which a fetch ended; None if it has records."""
    return result._error if type(result) is FetchError else None


def fetched_part(result: FetchResult) -> Any:
    """Return a partition's part of a fetch response."""
    return result._partition_records


def replace_fetched_part(result: FetchResult, part: Any) -> None:
    """Replace the part; aiokafka reads its `next_fetch_offset`."""
    result._partition_records = part


def update_position(result: FetchResult) -> None:
    """Move the consumer's position to the part's `next_fetch_offset`."""
    result._update_position()


def fetched_batches(part: PartitionRecords) -> Any:
    """Return the record set of a part that aiokafka made.

    This also breaks the reference cycle with the part's own iterator, which is not used here: it
    would keep the response in memory until the garbage collector runs.
    """
    part._records_iterator = None
    return part._records


def partition_of(part: PartitionRecords) -> TopicPartition:
    """Return the partition from which a part was fetched."""
    return TopicPartition(*part._tp)


def is_visible(part: PartitionRecords, batch: Any) -> bool:
    """Return whether a batch is neither a marker nor part of an aborted transaction.

    To be called once for each batch of the part, in order.
    """
    if batch.producer_id is not None:
        part._consume_aborted_up_to(batch.base_offset)
        if batch.is_control_batch and _is_abort_marker(part, batch):
            part._aborted_producers.discard(batch.producer_id)
        if batch.is_transactional and batch.producer_id in part._aborted_producers:
            return False
    return not batch.is_control_batch


def _is_abort_marker(part: PartitionRecords, batch: Any) -> bool:
    try:
        return bool(part._contains_abort_marker(batch))
    except Exception:  # noqa: BLE001  # no marker that is known: it aborts nothing
        return False


def replace_record_sets(record_set: type) -> None:
    """Make aiokafka's fetcher keep each partition's part of a fetch response in such an object.

    It must behave as the class that it replaces, for every other consumer in the process.
    """
    aiokafka_fetcher.MemoryRecords = record_set


def replace_codec(request: type, encode: Callable[[Any], bytes], response: type) -> None:
    """Make aiokafka's connections encode requests of a class, and decode the responses, by these.

    They must do what aiokafka's do, for every other client in the process.
    """
    request.encode = encode  # type: ignore[attr-defined]
    request.RESPONSE_TYPE = response  # type: ignore[attr-defined]


# --- batches ----------------------------------------------------------------------------------


def record_appender(builder: BatchBuilder) -> tuple[Callable[..., Any], int]:
    """Return the function that appends a record to a batch, and the next record's offset in it.

    aiokafka's own `append` serializes keys and values first; those of the port are bytes already.
    """
    return builder._builder.append, builder._relative_offset


def set_record_count(builder: BatchBuilder, records: int) -> None:
    """Tell a builder how many records it has, after they were appended to it directly."""
    builder._relative_offset = records


def build_batch(
    builder: BatchBuilder, producer_id: int, producer_epoch: int, sequence: int
) -> bytes:
    """Return the bytes of a batch for an idempotent or transactional produce request."""
    builder._set_producer_state(producer_id, producer_epoch, sequence)
    content: bytes = builder._build()
    return content


class AnyNameBuilder(BatchBuilder):  # type: ignore[misc]  # aiokafka publishes no types
    """Builds a batch whose headers may have names that are not UTF-8, as dead letters may.

    aiokafka's builder in C encodes names itself, strictly. Its slower builder in Python calls the
    `encode` method of each name, and so accepts names that bring their own.
    """

    def __init__(self, batch_bytes: int, codec: int, *, is_transactional: bool) -> None:
        super().__init__(batch_bytes, codec, is_transactional=is_transactional)
        self._builder = _AnyNameRecords(
            2,
            codec,
            is_transactional=is_transactional,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=0,
            batch_size=batch_bytes,
        )

    def _set_producer_state(self, producer_id: int, producer_epoch: int, sequence: int) -> None:
        """Set the producer id, epoch and sequence, without the base class's check of the builder's
        type.
        """
        self._builder.set_producer_state(producer_id, producer_epoch, sequence)


class _AnyNameRecords:
    """The methods of aiokafka's builder in Python that are used here and by `BatchBuilder`."""

    def __init__(self, *args: int, **options: int) -> None:
        self._records = _DefaultRecordBatchBuilderPy(*args, **options)
        self.size = self._records.size
        self.build = self._records.build
        self.set_producer_state = self._records.set_producer_state

    def append(
        self,
        offset: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
    ) -> Any:
        """Append a record; return None if the batch is full."""
        raw = [(_RawName(name), content) for name, content in headers]
        return self._records.append(offset, timestamp_ms, key, value, raw)


class _RawName:
    """A header name that encodes to the bytes from which it was decoded."""

    __slots__ = ("_raw",)

    def __init__(self, name: str) -> None:
        self._raw = name.encode("utf-8", "surrogateescape")

    def encode(self, _encoding: str) -> bytes:
        """Return the original bytes; replaces `str.encode`."""
        return self._raw


# --- closing ----------------------------------------------------------------------------------
#
# aiokafka's own `stop()` waits for brokers that may be gone (its issues 1013 and 1101) and can
# raise a stray `CancelledError` (issue 647). Here the tasks are cancelled, the sockets closed and
# the exceptions of both retrieved, so that none is reported as unretrieved on collection.


async def close_client(client: AIOKafkaClient, timeout_s: float) -> None:
    """Close the sockets; reset those that do not close in time."""
    client.force_metadata_update = _without_request(client)
    await _cancel([client._sync_task], timeout_s)
    client._sync_task = None
    if client._md_update_fut is not None and not client._md_update_fut.done():
        client._md_update_fut.set_result(False)
    connections = list(client._conns.values())
    client._conns.clear()
    await asyncio.gather(*(close_connection(each, timeout_s) for each in connections))


async def close_consumer(
    consumer: AIOKafkaConsumer, leave_timeout_s: float, timeout_s: float
) -> None:
    """Leave the group if the coordinator answers in time, and release all resources."""
    stopping = asyncio.create_task(consumer.stop(), name="kafka-consumer-stop")
    await asyncio.wait([stopping], timeout=leave_timeout_s)
    tasks: list[asyncio.Task[Any] | None] = [stopping]
    coordinator, fetcher = consumer._coordinator, consumer._fetcher
    if isinstance(coordinator, GroupCoordinator):
        tasks += [
            coordinator._coordination_task,
            coordinator._heartbeat_task,
            coordinator._commit_refresh_task,
        ]
    elif isinstance(coordinator, NoGroupCoordinator):
        tasks.append(coordinator._reset_committed_task)
    if fetcher is not None:
        tasks += [fetcher._fetch_task, *fetcher._pending_tasks]
    await _cancel(tasks, timeout_s)
    await close_client(consumer._client, timeout_s)


def _without_request(client: AIOKafkaClient) -> Any:
    """Make a closed client ignore the metadata requests of its last tasks."""

    def force_metadata_update() -> asyncio.Future[bool]:
        done: asyncio.Future[bool] = client._loop.create_future()
        done.set_result(False)
        return done

    return force_metadata_update


async def _cancel(tasks: Iterable[asyncio.Task[Any] | None], timeout_s: float) -> None:
    """Cancel tasks, wait for their end, and retrieve their exceptions."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=timeout_s)
    for task in running:
        if task.done() and not task.cancelled():
            task.exception()
