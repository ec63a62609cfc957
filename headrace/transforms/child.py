"""Child process that runs user code on payloads, and what it exchanges with its parent.

    python -m headrace.transforms.child SOCKET PARENT_PID

The parent writes one call at a time: to make a function of a user's, a transform or a postprocess,
to call it with a payload, or to decode a request. Calls are pickled, since they hold the model's
configuration; replies are MessagePack, followed by the bytes of the arrays, or sent with the
descriptor of a memory file (memfd_create(2)) that has them.

The child ends when its socket is closed, or its parent dies (`headrace.primitives.child_process`).
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from headrace.config import LimitSettings
from headrace.errors import Code, HeadraceError, Rejected, describe_error
from headrace.primitives.child_process import end_with_parent
from headrace.protocol.codec import decode_request
from headrace.protocol.messages import Envelope, InferenceRequest, InputTensor

CALL_HEAD = struct.Struct("<QQ")
"""Sizes of a pickled call and of the payload behind it."""
REPLY_HEAD = struct.Struct("<QQ?")
"""Sizes of a reply and of its inputs; True if these are in a memory file."""


class WorkerSource(Protocol):
    """All that a child process makes a function of; it can be pickled."""

    def make(self) -> Callable[[bytes, str], list[InputTensor]]:
        """Return a function of a payload and its content type. Raises `ConfigurationError`."""
        ...


class TransformCall(NamedTuple):
    """A call of the child.

    Attributes:
        key: the parent's number of a version.
        source: makes the function, before it is called with payloads of the version.
        decoding: headers and limits of a request to decode, instead of a payload.
        content_type: of the payload.
        max_bytes: most bytes that its inputs may have.
        shared_bytes: inputs of at least this size are sent in a memory file.
        forgotten: versions that are not needed any more.
        what, failure_code: see `headrace.transforms.workers.PendingValue`.
    """

    key: int
    source: WorkerSource | None = None
    decoding: tuple[Envelope, LimitSettings] | None = None
    content_type: str = ""
    max_bytes: int = 0
    shared_bytes: int = 0
    forgotten: tuple[int, ...] = ()
    what: str = "transform"
    failure_code: Code = Code.INVALID_REQUEST


class TransformReply(msgspec.Struct):
    """Arrays, by name, datatype, shape and size in bytes; or the error of a request.

    Attributes:
        message: a decoded request, without its inputs.
    """

    inputs: list[tuple[str, str, list[int], int]] = []
    message: InferenceRequest | None = None
    code: str = ""
    reason: str = ""
    retry_after_ms: int | None = None


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Return the next bytes. Raises `EOFError` if the other end was closed."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return received


class _Server:
    """Answers the calls of the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._functions: dict[int, Callable[[bytes, str], list[InputTensor]]] = {}

    def serve(self) -> None:
        """Answer calls until the parent closes its end."""
        self._send(TransformReply())  # all that is needed has been imported
        while True:
            try:
                head = receive_exactly(self._connection, CALL_HEAD.size)
            except EOFError:
                return
            call_bytes, payload_bytes = CALL_HEAD.unpack(head)
            # From the parent alone, over a socket that nothing else can open.
            call: TransformCall = pickle.loads(receive_exactly(self._connection, call_bytes))  # noqa: S301
            payload = bytes(receive_exactly(self._connection, payload_bytes))
            self._answer(call, payload)
            # Otherwise an idle child would keep its last payload in memory.
            del call, payload

    def _answer(self, call: TransformCall, payload: bytes) -> None:
        for key in call.forgotten:
            self._functions.pop(key, None)
        inputs: list[InputTensor] = []
        message: InferenceRequest | None = None
        try:
            if call.source is not None:
                self._functions[call.key] = call.source.make()
            elif call.decoding is not None:
                message = decode_request(payload, *call.decoding)
                inputs, message.inputs = message.inputs, []
            else:
                inputs = self._functions[call.key](payload, call.content_type)
                made_bytes = sum(len(each.data) for each in inputs)
                if made_bytes > call.max_bytes:
                    raise Rejected.mismatch(
                        Code.TOO_LARGE,
                        call.what,
                        expected=f"arrays of at most {call.max_bytes} bytes",
                        got=str(made_bytes),
                    )
        except Rejected as error:
            refusal = TransformReply(
                code=error.code, reason=error.message, retry_after_ms=error.retry_after_ms
            )
            self._send(refusal)
            return
        except HeadraceError as error:
            self._send(TransformReply(code=Code.MODEL_FAILED, reason=f"{call.what}: {error}"))
            return
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
            reason = f"{call.what}: {describe_error(error)}"
            self._send(TransformReply(code=call.failure_code, reason=reason))
            return
        described = [
            (each.name, each.datatype, list(each.shape), len(each.data)) for each in inputs
        ]
        self._send(TransformReply(described, message), inputs, call.shared_bytes)

    def _send(
        self, reply: TransformReply, inputs: list[InputTensor] | None = None, shared_bytes: int = 0
    ) -> None:
        written = msgspec.msgpack.encode(reply)
        parts = [each.data for each in inputs or ()]
        size_bytes = sum(map(len, parts))
        if not size_bytes or size_bytes < shared_bytes:
            head = REPLY_HEAD.pack(len(written), size_bytes, False)
            self._connection.sendall(b"".join([head, written, *parts]))
            return
        memory = os.memfd_create("headrace-inputs", os.MFD_CLOEXEC)
        try:
            for part in parts:
                _write_all(memory, part)
            head = REPLY_HEAD.pack(len(written), size_bytes, True)
            socket.send_fds(self._connection, [head], [memory])
            self._connection.sendall(written)
        finally:
            os.close(memory)


def _write_all(file: int, part: bytes | memoryview) -> None:
    left = memoryview(part).cast("B") if len(part) else memoryview(b"")
    while left:
        left = left[os.write(file, left) :]


def main(arguments: list[str]) -> None:
    """Serve the socket with this number until the parent has closed it, or has died."""
    descriptor, parent = map(int, arguments)
    if not end_with_parent(parent):
        return
    # The parent may end in the middle of a call.
    ended = suppress(EOFError, BrokenPipeError, ConnectionResetError)
    with socket.socket(fileno=descriptor) as connection, ended:
        _Server(connection).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
