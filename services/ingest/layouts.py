"""Requests that differ in nothing but their tensor's bytes are decoded and checked once.

A MessagePack value says how long its tensor's bytes are before they come. So where two values are
of the same length, and equal before and behind the tensor of one of them, they decode to the same
message around other tensor bytes. Most callers send such values all day long, and comparing two
byte strings costs a tenth of decoding.

Left out are values with an `id` (they all differ), with several inputs, and datatypes whose bytes
are looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from headrace.errors import Rejected
from headrace.models.binding import Bound
from headrace.protocol.messages import InferenceRequest, InputTensor, RequestedOutput

MAX_LAYOUTS = 256
MAX_AROUND_BYTES = 1024
"""Of what stands around the tensor; longer values are decoded each time."""
DOUBT = 64
"""After so many values of its length that are not of it, a layout gives way to another one."""

_NOT_NUMBERS = {"BYTES", "BOOL"}

Bind: TypeAlias = Callable[[Sequence[InputTensor], Sequence[RequestedOutput] | None], Bound]


class Binding(Protocol):
    """The part of `headrace.models.version.ModelVersion` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def bind(self) -> Bind: ...
    @property
    def looks_inside(self) -> bool: ...


Lookup: TypeAlias = Callable[[str, str | None], Binding]


class DecodeTemplate(NamedTuple):
    """What was found when a request of a layout was bound, and holds for the others.

    Attributes:
        head, tail: what stands before and behind the tensor's bytes in a value.
        start, stop: where these bytes are.
        name, datatype, shape: of the tensor.
        model, version: by which it was bound.
        bound: see `headrace.models.binding.Bound`: rows, shape class, size in bytes, and outputs
            that are wanted.
    """

    head: bytes
    tail: bytes
    start: int
    stop: int
    name: str
    datatype: str
    shape: tuple[int, ...]
    model: str
    version: str
    bound: tuple[int, tuple[int, ...], int, tuple[str, ...] | None]


class Layout:
    """What requests of one layout share.

    Attributes:
        message: decoded, without the tensor's bytes.
        head, tail: what stands before and behind them in a value.
    """

    __slots__ = ("_alike", "_bind", "_start", "_stop", "doubt", "head", "message", "tail")

    def __init__(self, value: bytes, message: InferenceRequest, start: int) -> None:
        (tensor,) = message.inputs
        self._start = start
        self._stop = start + len(tensor.data)
        self.head = value[: self._start]
        self.tail = value[self._stop :]
        self._bind: Bind | None = None
        self._alike: DecodeTemplate | None = None
        self.message = message
        self.doubt = 0
        tensor.data = memoryview(b"")  # or the first value would live as long as its layout

    def bound(self, value: bytes, version: Binding) -> Bound:
        """The inputs of a request of this layout, as the version's `bind` gives them.

        Args:
            value: of the request; it begins with the head and ends with the tail.
            version: of the model.

        Raises:
            Rejected: see `headrace.models.binding.Binder.bind`.
        """
        content = memoryview(value)[self._start : self._stop]
        (known,) = self.message.inputs
        given = InputTensor(
            name=known.name, datatype=known.datatype, shape=known.shape, data=content
        )
        bound = version.bind([given], self.message.outputs)
        if not version.looks_inside:
            place = (self.head, self.tail, self._start, self._stop)
            tensor = bound.tensors[0][:3]
            self._bind = version.bind
            self._alike = DecodeTemplate(*place, *tensor, version.name, version.version, bound[1:])
        return bound

    def alike(self, lookup: Lookup) -> DecodeTemplate | None:
        """What holds for every request of this layout now; None where each has to be bound."""
        if self._alike is None:
            return None
        try:
            version = lookup(self.message.model_name, self.message.model_version)
        except Rejected:
            return None  # each is told why
        return self._alike if version.bind is self._bind else None


class DecodeCache:
    """The layouts of late, one for each length."""

    def __init__(self) -> None:
        self._by_length: dict[int, Layout] = {}

    def find(self, value: bytes) -> Layout | None:
        """The layout of a value; None where it has to be decoded."""
        layout = self._by_length.get(len(value))
        if layout is None:
            return None
        return layout if value.startswith(layout.head) and value.endswith(layout.tail) else None

    def alike(self, length: int, lookup: Lookup) -> DecodeTemplate | None:
        """What holds for the requests of the layout of this length, if it is bound by now."""
        layout = self._by_length.get(length)
        return None if layout is None else layout.alike(lookup)

    def learn(self, value: bytes, message: InferenceRequest) -> None:
        """Remember the layout of a value that was decoded and bound, if it has one.

        Where it has, the tensor in `message` loses its bytes.

        Raises:
            ValueError: the message was decoded from another value.
        """
        known = self._by_length.get(len(value))
        if known is not None:
            known.doubt += 1
            if known.doubt < DOUBT:
                return
        if message.id is not None or len(message.inputs) != 1:
            return
        (tensor,) = message.inputs
        size = len(tensor.data)
        if not size or len(value) - size > MAX_AROUND_BYTES or tensor.datatype in _NOT_NUMBERS:
            return
        if len(self._by_length) >= MAX_LAYOUTS:
            self._by_length.clear()
        start = _address(tensor.data) - _address(value)
        if not 0 <= start <= len(value) - size:
            raise ValueError("message: expected the one that was decoded from this value")
        self._by_length[len(value)] = Layout(value, message, start)


def _address(content: bytes | memoryview) -> int:
    address: int = np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    return address
