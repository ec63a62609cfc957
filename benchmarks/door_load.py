"""A closed loop of requests against one door of a server, in a process of its own.

    python -m benchmarks.door_load ORDER

`ORDER` is the file of a `LoadOrder`. Each answer is compared with what ONNX Runtime answers. The
process prints a line when the measurement begins, and a `LoadReport` when it has ended.

A client that costs more than the server would measure itself. So HTTP and gRPC are written as bytes
here, prepared before the load begins, and answers are taken apart no further than the comparison
needs; the report has the processor time of the client.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from headrace.client import Client, InferenceError, InferenceTimeout
from headrace.gateway import open_inference_pb2 as messages

TOLERANCE = 1e-4
"""Allowed error of a probability: a run of several rows rounds differently from a run of one."""
STREAMS_PER_CONNECTION = 16
ANSWER_TIMEOUT_S = 60.0
SHOWN = 200


class Way(StrEnum):
    """How a request reaches a server."""

    BINARY = "HTTP, binary"
    JSON = "HTTP, JSON"
    GRPC = "gRPC"
    KAFKA = "Kafka client"


class Dialect(StrEnum):
    """Bodies of HTTP that a server takes."""

    OPEN_INFERENCE = "Open Inference Protocol"
    OBJECT = "one object for a row"
    ROWS = "rows"


class LoadOrder(Struct):
    """The instructions for a process that makes load.

    Attributes:
        address: port of the door, or the broker's address.
        namespace: of the topics, for Kafka.
        rows: one row of pixels for each distinct request.
        labels, probabilities: what the model answers to each of them.
        concurrency: requests under way at once.
        skip_s: time before the measurement begins.
    """

    way: Way
    dialect: Dialect
    address: str
    path: str
    namespace: str
    rows: list[list[float]]
    labels: list[int]
    probabilities: list[list[float]]
    concurrency: int
    skip_s: float
    window_s: float


class LoadReport(Struct):
    """The measurements of a process that makes load.

    Attributes:
        window_s: duration of the measurement.
        answered: right answers in it.
        wrong: other answers, also before the measurement; `example` is the first of them.
        cpu_s: processor time of this process in the measurement.
    """

    window_s: float
    answered: int
    wrong: int
    example: str
    p50_ms: float
    p99_ms: float
    cpu_s: float


class WrongAnswer(Exception):
    """An answer that is no answer to its request; the text says what came."""


class Expected(NamedTuple):
    """The right answer to a request."""

    label: int
    probabilities: Sequence[float]

    def check(self, label: int, probabilities: Sequence[float]) -> None:
        """Raise `WrongAnswer` if this is not the answer."""
        if label == self.label and len(probabilities) == len(self.probabilities):
            pairs = zip(probabilities, self.probabilities, strict=True)
            if all(abs(got - expected) < TOLERANCE for got, expected in pairs):
                return
        raise WrongAnswer(f"expected label {self.label}, got {label} with {probabilities}")


class Exchange(NamedTuple):
    """A request as it is sent, and the comparison of its answer's body, which raises
    `WrongAnswer`.
    """

    request: bytes
    check: Callable[[bytes], None]


class Loop:
    """Counts the answers of a closed loop in a window of time.

    Args:
        exchanges: sent in rotation.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._turns = cycle(exchanges)
        self._latencies_s: list[float] | None = None
        self.ended = False
        self.heard = asyncio.Event()  # an answer was counted, or something else came
        self.wrong = 0
        self.example = ""

    def begin(self) -> None:
        """Begin to count."""
        self._latencies_s = []

    def end(self) -> list[float]:
        """Let nothing further be sent; return the latencies of the answers in the window."""
        self.ended = True
        counted, self._latencies_s = self._latencies_s or [], None
        return counted

    def next(self) -> Exchange:
        """Return what is to be sent."""
        return next(self._turns)

    def answered(self, exchange: Exchange, sent_s: float, body: bytes) -> None:
        """Count the answer to a request."""
        try:
            exchange.check(body)
        except Exception as error:  # noqa: BLE001 - whatever came is no answer
            self.failed(f"{type(error).__name__}: {error}")
            return
        if self._latencies_s is not None:
            self._latencies_s.append(time.perf_counter() - sent_s)
            self.heard.set()

    def failed(self, what: str) -> None:
        """Count something that is no answer."""
        self.wrong += 1
        self.example = self.example or what[:SHOWN]
        self.heard.set()


# --- HTTP/1.1 -----------------------------------------------------------------------------------


class HttpCaller(asyncio.Protocol, ABC):
    """A kept connection with one request under way; a subclass takes the responses."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def write(self, request: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take a response, once it is there as a whole."""
        buffer = self._buffer + data if self._buffer else data
        head_end = buffer.find(b"\r\n\r\n")
        length = -1 if head_end < 0 else content_length(buffer[:head_end])
        if length < 0 or len(buffer) < head_end + 4 + length:
            self._buffer = buffer
            return
        self._buffer = b""
        self.take(buffer, buffer[head_end + 4 :], is_ok=buffer.startswith(b"HTTP/1.1 200"))

    @abstractmethod
    def take(self, response: bytes, body: bytes, *, is_ok: bool) -> None:
        """Take a whole response, and its body; `is_ok`: its status is 200."""


class HttpConnection(HttpCaller):
    """A connection of a closed loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def start(self) -> None:
        """Send the next request."""
        self._exchange = self._loop.next()
        self._sent_s = time.perf_counter()
        self.write(self._exchange.request)

    def take(self, response: bytes, body: bytes, *, is_ok: bool) -> None:
        """Count an answer, and send the next request."""
        if is_ok:
            self._loop.answered(self._exchange, self._sent_s, body)
        else:
            self._loop.failed(response.decode(errors="replace"))
        if not self._loop.ended:
            self.start()

    def connection_lost(self, error: Exception | None) -> None:
        """Count a connection that the server has closed."""
        if not self._loop.ended:
            self._loop.failed(f"connection closed: {error}")


def content_length(head: bytes) -> int:
    """Return the length of a body. Raises `ValueError`: its head names none."""
    lowered = head.lower()
    found = lowered.index(b"content-length:") + len(b"content-length:")
    return int(lowered[found:].split(b"\r\n", 1)[0])


def http_request(path: str, body: bytes, content_type: str, *headers: str) -> bytes:
    """Return a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {content_type}"]
    lines += [f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def http_exchange(order: LoadOrder, number: int, expected: Expected) -> Exchange:
    """Return a request over HTTP in the server's own form."""
    row = order.rows[number]
    if order.dialect is Dialect.OBJECT:
        body = json.dumps({"pixels": row}).encode()

        def check_object(answer: bytes) -> None:
            found = msgspec.json.decode(answer)
            expected.check(found["label"], found["probabilities"])

        return Exchange(http_request(order.path, body, "application/json"), check_object)
    if order.dialect is Dialect.ROWS:
        body = json.dumps({"pixels": [row]}).encode()

        def check_rows(answer: bytes) -> None:
            ((label, *probabilities),) = msgspec.json.decode(answer)
            expected.check(label, probabilities)

        return Exchange(http_request(order.path, body, "application/json"), check_rows)
    tensor: dict[str, Any] = {"name": "pixels", "datatype": "FP32", "shape": [1, len(row)]}
    if order.way is Way.JSON:
        body = json.dumps({"inputs": [{**tensor, "data": row}]}).encode()
        request = http_request(order.path, body, "application/json")
        return Exchange(request, lambda answer: _check_json(expected, answer))
    raw = np.array(row, "<f4").tobytes()
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    sizes = f"Inference-Header-Content-Length: {len(head)}"
    request = http_request(order.path, head + raw, "application/octet-stream", sizes)
    return Exchange(request, lambda answer: _check_binary(expected, answer))


class _Parameters(Struct, frozen=True):
    binary_data_size: int = 0


class _Output(Struct):
    name: str
    data: list[float] = []
    parameters: _Parameters = _Parameters()


class _Answer(Struct):
    outputs: list[_Output]


_decode_answer = msgspec.json.Decoder(_Answer).decode


def _check_json(expected: Expected, answer: bytes) -> None:
    found = {output.name: output.data for output in _decode_answer(answer).outputs}
    (label,) = found["label"]
    expected.check(int(label), found["probabilities"])


def _check_binary(expected: Expected, answer: bytes) -> None:
    """Compare an answer whose tensors follow its JSON; the sizes say where that ends."""
    end = answer.rindex(b"}]}") + 3
    found, tail = {}, answer[end:]
    for output in _decode_answer(answer[:end]).outputs:
        size = output.parameters.binary_data_size
        found[output.name], tail = tail[:size], tail[size:]
    expected.check(*_unpack(found["label"], found["probabilities"]))


def _unpack(label: bytes, probabilities: bytes) -> tuple[int, tuple[float, ...]]:
    return struct.unpack("<q", label)[0], struct.unpack(
        f"<{len(probabilities) // 4}f", probabilities
    )


# --- gRPC -----------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
FRAME_HEAD_BYTES = 9
MESSAGE_HEAD_BYTES = 5
INITIAL_WINDOW = 65535
LARGEST_WINDOW = 2**31 - 1
INFER = "/inference.GRPCInferenceService/ModelInfer"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, section 4.1)."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def header_block(path: str) -> bytes:
    """Return the headers of a gRPC call, which need no state of the compression (RFC 7541)."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    return b"".join(
        [
            b"\x83\x86",  # :method POST, :scheme http: both in the static table
            b"\x04" + text(path),
            b"\x01" + text("127.0.0.1"),
            b"\x0f\x10" + text("application/grpc"),  # content-type
            b"\x00" + text("te") + text("trailers"),
        ]
    )


class GrpcConnection(asyncio.Protocol):
    """A connection of HTTP/2 with so many calls under way."""

    def __init__(self, loop: Loop, calls: int) -> None:
        self._loop = loop
        self._calls = calls
        self._headers = header_block(INFER)
        self._buffer = b""
        self._stream = -1
        self._window = INITIAL_WINDOW
        self._waiting: deque[Exchange] = deque()
        self._under_way: dict[int, tuple[Exchange, float]] = {}
        self._bodies: dict[int, bytes] = {}
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings: no compression state, windows that never close."""
        self._transport = cast("asyncio.Transport", transport)
        settings = struct.pack(">HIHI", 1, 0, 4, LARGEST_WINDOW)
        larger = struct.pack(">I", LARGEST_WINDOW - INITIAL_WINDOW)
        self._transport.write(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, larger)
        )

    def start(self) -> None:
        """Begin the calls."""
        self._waiting.extend(self._loop.next() for _ in range(self._calls))
        self._send()

    def _send(self) -> None:
        """Send what the server's window lets through."""
        assert self._transport is not None
        while self._waiting and len(self._waiting[0].request) <= self._window:
            exchange = self._waiting.popleft()
            self._stream += 2
            stream, body = self._stream, exchange.request
            self._window -= len(body)
            self._under_way[stream] = exchange, time.perf_counter()
            self._out.append(frame(HEADERS, END_HEADERS, stream, self._headers))
            self._out.append(frame(DATA, END_STREAM, stream, body))
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def data_received(self, data: bytes) -> None:
        """Take whole frames, and begin a call for each that has ended."""
        buffer = self._buffer + data if self._buffer else data
        start = 0
        while len(buffer) - start >= FRAME_HEAD_BYTES:
            end = start + FRAME_HEAD_BYTES + int.from_bytes(buffer[start : start + 3], "big")
            if end > len(buffer):
                break
            stream = int.from_bytes(buffer[start + 5 : start + 9], "big")
            payload = buffer[start + FRAME_HEAD_BYTES : end]
            self._take(buffer[start + 3], buffer[start + 4], stream, payload)
            start = end
        self._buffer = buffer[start:]
        self._send()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._bodies[stream] = self._bodies.get(stream, b"") + payload
        elif kind == WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(payload, "big")
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._out.append(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY:
            self._loop.failed(f"GOAWAY: {payload!r}")
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._end(stream)

    def _end(self, stream: int) -> None:
        exchange, sent_s = self._under_way.pop(stream)
        body = self._bodies.pop(stream, b"")
        if body:
            self._loop.answered(exchange, sent_s, body[MESSAGE_HEAD_BYTES:])
        else:
            self._loop.failed("a call ended without a message")
        if not self._loop.ended:
            self._waiting.append(self._loop.next())

    def connection_lost(self, error: Exception | None) -> None:
        """Count a connection that the server has closed."""
        if not self._loop.ended:
            self._loop.failed(f"connection closed: {error}")


def grpc_exchange(order: LoadOrder, number: int, expected: Expected) -> Exchange:
    """Return a request over gRPC with raw tensors, and its message's length before it."""
    row = order.rows[number]
    request = messages.ModelInferRequest(model_name="digits")
    request.inputs.add(name="pixels", datatype="FP32", shape=[1, len(row)])
    request.raw_input_contents.append(np.array(row, "<f4").tobytes())
    message = request.SerializeToString()

    def check(answer: bytes) -> None:
        found = messages.ModelInferResponse.FromString(answer)
        names = [output.name for output in found.outputs]
        raw = dict(zip(names, found.raw_output_contents, strict=True))
        expected.check(*_unpack(raw["label"], raw["probabilities"]))

    return Exchange(struct.pack(">BI", 0, len(message)) + message, check)


# --- all of it ----------------------------------------------------------------------------------


def kafka_exchange(order: LoadOrder, number: int, expected: Expected) -> Exchange:
    """Return the pixels of a request, and the comparison of the label with the rest after it."""

    def check(answer: bytes) -> None:
        expected.check(*_unpack(answer[:8], answer[8:]))

    return Exchange(np.array(order.rows[number], "<f4").tobytes(), check)


def exchanges(order: LoadOrder) -> list[Exchange]:
    """Return the distinct requests of a load."""
    make = {Way.GRPC: grpc_exchange, Way.KAFKA: kafka_exchange}.get(order.way, http_exchange)
    answers = zip(order.labels, order.probabilities, strict=True)
    return [make(order, number, Expected(*answer)) for number, answer in enumerate(answers)]


async def _connect(order: LoadOrder, loop: Loop) -> None:
    """Open the connections, and begin the requests on each."""
    kind: Callable[[], HttpConnection | GrpcConnection] = partial(HttpConnection, loop)
    connections = order.concurrency
    if order.way is Way.GRPC:
        connections = -(-order.concurrency // STREAMS_PER_CONNECTION)
        kind = partial(GrpcConnection, loop, order.concurrency // connections)
    for _ in range(connections):
        port = int(order.address)
        _, made = await asyncio.get_running_loop().create_connection(kind, "127.0.0.1", port)
        made.start()


async def _ask_kafka(client: Client, loop: Loop) -> None:
    """Send one request after the other with Headrace's own client."""
    while not loop.ended:
        exchange = loop.next()
        pixels = np.frombuffer(exchange.request, "<f4")[np.newaxis]
        sent_s = time.perf_counter()
        try:
            outputs = (await client.infer("digits", {"pixels": pixels})).outputs
        except (InferenceError, InferenceTimeout) as error:
            loop.failed(str(error))
            continue
        body = outputs["label"].tobytes() + outputs["probabilities"].tobytes()
        loop.answered(exchange, sent_s, body)


async def measure(order: LoadOrder) -> LoadReport:
    """Load a door, and return what was measured."""
    loop = Loop(exchanges(order))
    async with AsyncExitStack() as stack:
        if order.way is Way.KAFKA:
            client = Client(order.address, namespace=order.namespace)
            await stack.enter_async_context(client)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for number in range(order.concurrency):
                tasks.create_task(_ask_kafka(client, loop), name=f"load-{number}")
        else:
            await _connect(order, loop)
        await asyncio.sleep(order.skip_s)
        print("begun", flush=True)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        loop.begin()
        await asyncio.sleep(order.window_s)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):  # a window without an answer says nothing
            await loop.heard.wait()
        latencies_s = np.array(loop.end())
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    p50_ms, p99_ms = 0.0, 0.0
    if len(latencies_s):
        p50_ms, p99_ms = 1e3 * np.percentile(latencies_s, (50, 99))
    return LoadReport(
        window_s=ended_s - began_s,
        answered=len(latencies_s),
        wrong=loop.wrong,
        example=loop.example,
        p50_ms=float(p50_ms),
        p99_ms=float(p99_ms),
        cpu_s=ended_cpu_s - began_cpu_s,
    )


def main() -> None:
    """Load as ordered, and print the report."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LoadOrder)
    print(msgspec.json.encode(uvloop.run(measure(order))).decode(), flush=True)


if __name__ == "__main__":
    main()
