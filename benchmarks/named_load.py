"""Open-loop load over HTTP on several names of a model, in a process of its own.

Each answer is noted with the version that gave it, by what it says and by its outputs, which must
agree. Requests are due at the times of a Poisson process, whether earlier ones are answered or not,
and latencies count from there.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.door_load import HttpCaller, http_request
from headrace.tools.bench.load import PoissonArrivals

HOST = "127.0.0.1"
PIXELS = 64
CONNECTIONS = 256
"""Requests beyond as many wait here; their latency counts."""
REPORT_S = 0.25
START_S = 30.0
LAST_ANSWERS_S = 40.0
LONGEST_S = 86_400.0
REFUSED = 0
"""Instead of a version, in a note about a request that was not answered by a model."""


class LoadPlan(NamedTuple):
    """Parameters of the load.

    Attributes:
        port: of the gateway, or of a process with a door.
        names: of the model, with and without labels; requests take them in turns.
        per_s, seed: of the Poisson process.
    """

    port: int
    names: Sequence[str]
    per_s: float
    seed: int = 1


class Note(NamedTuple):
    """One request. Times are nanoseconds of the machine's monotonic clock.

    Attributes:
        name: its place among the names of the plan.
        version: number of the version that answered, or `REFUSED`.
    """

    name: int
    due_ns: int
    sent_ns: int
    done_ns: int
    version: int


class NoteColumns(NamedTuple):
    """The fields of many notes, each as an array."""

    name: NDArray[np.int64]
    due_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    version: NDArray[np.int64]


class Report(NamedTuple):
    """Requests that have ended since the last report, as rows of `Note`, and refusals in words."""

    notes: NDArray[np.int64]
    refusals: list[str]


class NamedLoad:
    """The load's process, as seen from the one that started it; entered when it is connected.

    Attributes:
        sent: requests of the whole load; known after `stop`.
        refusals: what was said instead of answers.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(plan, theirs), daemon=True)
        self._theirs = theirs
        self._reports: list[NDArray[np.int64]] = []
        self._ended = asyncio.Event()
        self.sent = 0
        self.refusals: list[str] = []

    async def __aenter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        if not await asyncio.to_thread(self._ours.poll, START_S):
            raise TimeoutError(f"the load was not connected within {START_S:g} s")
        self._ours.recv()
        _watch(self._ours, self._receive)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours.fileno())
        self._process.kill()
        self._process.join()
        self._ours.close()

    def _receive(self) -> None:
        try:
            received = self._ours.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._ours.fileno())
            self._ended.set()
            return
        if isinstance(received, Report):
            self._reports.append(received.notes)
            self.refusals += received.refusals
        else:
            self.sent = received
            self._ended.set()

    @property
    def count(self) -> int:
        """Number of requests that have ended so far."""
        return sum(map(len, self._reports))

    async def stop(self) -> NDArray[np.int64]:
        """Send nothing further; return all notes when the last answer is there.

        Raises:
            TimeoutError: some requests were not answered.
        """
        self._ours.send("stop")
        async with asyncio.timeout(LAST_ANSWERS_S):
            await self._ended.wait()
        return np.concatenate([np.zeros((0, len(Note._fields)), np.int64), *self._reports])


# --- the process of the load ---------------------------------------------------------------------


class _Output(msgspec.Struct):
    name: str
    data: list[float]


class _Answer(msgspec.Struct):
    model_version: str
    outputs: list[_Output]


_decode = msgspec.json.Decoder(_Answer).decode


def version_of(body: bytes) -> int:
    """Return the version that an answer names. Raises `ValueError` if its outputs are another's."""
    answer = _decode(body)
    # The weights of version n are n times those of version 1, whose second score sums the pixels.
    computed = round(answer.outputs[0].data[1])
    if str(computed) != answer.model_version:
        raise ValueError(f"outputs of version {computed} by {answer.model_version}")
    return computed


class _Sender:
    """Keeps connections, each with one request under way, and notes what comes back."""

    def __init__(self, plan: LoadPlan) -> None:
        tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, PIXELS]}
        body = json.dumps({"inputs": [{**tensor, "data": [1 / PIXELS] * PIXELS}]}).encode()
        self._requests = [
            http_request(f"/v2/models/{name}/infer", body, "application/json")
            for name in plan.names
        ]
        self._port = plan.port
        self._idle: list[_Connection] = []
        self._waiting: deque[tuple[int, int]] = deque()
        self._opened = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self.sent = 0
        self.ended = 0
        self.notes: list[Note] = []
        self.refusals: list[str] = []

    async def open_first(self) -> None:
        """Connect once, so that an unreachable port ends the load."""
        self._opened += 1
        await self._open()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), HOST, self._port)
        self.freed(connection)

    def send(self, due_ns: int) -> None:
        """Send a request, or let it wait for a connection."""
        self._waiting.append((self.sent % len(self._requests), due_ns))
        self.sent += 1
        if self._idle:
            self.freed(self._idle.pop())
        elif self._opened < CONNECTIONS:
            self._opened += 1
            task = asyncio.create_task(self._open(), name="load-connection")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def freed(self, connection: _Connection) -> None:
        """Let a connection take the next request."""
        if self._waiting:
            name, due_ns = self._waiting.popleft()
            connection.start(name, due_ns, self._requests[name])
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a connection that the server has closed."""
        self._opened -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def end(self, note: Note, refusal: str = "") -> None:
        """Note the end of a request."""
        self.ended += 1
        self._news.set()
        self.notes.append(note)
        if refusal:
            self.refusals.append(refusal)

    async def all_ended(self) -> None:
        """Wait until each request has ended."""
        while self.ended < self.sent:
            self._news.clear()
            await self._news.wait()

    def report(self) -> Report:
        """Return what has ended since the last report."""
        notes, self.notes = self.notes, []
        refusals, self.refusals = self.refusals, []
        rows = np.array(notes, np.int64).reshape(len(notes), len(Note._fields))
        return Report(rows, refusals)


class _Connection(HttpCaller):
    def __init__(self, sender: _Sender) -> None:
        super().__init__()
        self._sender = sender
        self._under_way: tuple[int, int, int] | None = None

    def start(self, name: int, due_ns: int, request: bytes) -> None:
        self._under_way = name, due_ns, time.monotonic_ns()
        self.write(request)

    def take(self, response: bytes, body: bytes, *, is_ok: bool) -> None:
        if not is_ok:
            self._end(REFUSED, body.decode(errors="replace"))
        else:
            try:
                self._end(version_of(body))
            except (ValueError, msgspec.MsgspecError) as error:
                self._end(REFUSED, f"wrong answer: {error}")
        self._sender.freed(self)

    def _end(self, version: int, refusal: str = "") -> None:
        if self._under_way is not None:
            note = Note(*self._under_way, time.monotonic_ns(), version)
            self._under_way = None
            self._sender.end(note, refusal)

    def connection_lost(self, error: Exception | None) -> None:
        self._sender.lost(self)
        self._end(REFUSED, f"connection closed: {error}")


def _watch(connection: Connection, on_readable: Callable[[], object]) -> None:
    """Call a function whenever a connection has something to read."""
    asyncio.get_running_loop().add_reader(connection.fileno(), on_readable)
    # uvloop makes it non-blocking, and reports are larger than what a pipe holds.
    os.set_blocking(connection.fileno(), True)


def _serve(plan: LoadPlan, parent: Connection) -> None:
    uvloop.run(_run(plan, parent))


async def _run(plan: LoadPlan, parent: Connection) -> None:
    sender = _Sender(plan)
    await sender.open_first()
    parent.send("connected")
    stopping = asyncio.Event()
    _watch(parent, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        reporting = tasks.create_task(_report(sender, parent), name="load-reports")
        await _send(sender, plan, stopping)
        await sender.all_ended()
        reporting.cancel()
    parent.send(sender.report())
    parent.send(sender.sent)


async def _send(sender: _Sender, plan: LoadPlan, stopping: asyncio.Event) -> None:
    arrivals = PoissonArrivals(plan.per_s, LONGEST_S, plan.seed)
    began_ns = time.monotonic_ns()
    while not stopping.is_set():
        next_s = arrivals.next_s()
        now_s = (time.monotonic_ns() - began_ns) / 1e9
        if next_s is not None and next_s > now_s:
            await asyncio.sleep(next_s - now_s)
        for due_s in arrivals.due((time.monotonic_ns() - began_ns) / 1e9):
            sender.send(began_ns + round(due_s * 1e9))
        await asyncio.sleep(0)


async def _report(sender: _Sender, parent: Any) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        if sender.notes:
            parent.send(sender.report())
