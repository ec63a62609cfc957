"""Decode cache: requests that differ only in their tensor's bytes are decoded and checked once.

A MessagePack value states the length of its tensor's bytes before them. So two values of the same
length that are equal before and behind the tensor of one of them decode to the same message with
other tensor bytes. Most callers send such values all the time, and comparing two byte strings
costs a tenth of decoding.

Not cached: values with an `id` (they all differ), values with several inputs, and datatypes whose
bytes must be inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from headrace.errors import Rejected
from headrace.models.inputs.binding import Bound
from headrace.primitives.bounded_cache import BoundedCache
from headrace.protocol.codec.views import address_of
from headrace.protocol.messages import InferenceRequest, InputTensor, RequestedOutput, Tensor
from headrace.tuning import TUNING, IngestTuning

_NOT_NUMBERS = {"BYTES", "BOOL"}

Bind: TypeAlias = Callable[[Sequence[InputTensor], Sequence[RequestedOutput] | None], Bound]


class BindableVersion(Protocol):
    """The part of `headrace.models.version.ModelVersion` that is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def bind(self) -> Bind: ...
    @property
    def depends_on_values(self) -> bool: ...


Lookup: TypeAlias = Callable[[str, str | None], BindableVersion]


class DecodeTemplate(NamedTuple):
    """Result of binding one request of a layout; it holds for all of them.

    Attributes:
        head, tail: the bytes before and behind the tensor's bytes in a value.
        start, stop: position of the tensor's bytes.
        name, datatype, shape: the tensor's header.
        model, version: the model version that bound it.
        bound: see `headrace.models.inputs.binding.Bound`: rows, shape class, size in bytes, and
            requested outputs.
        places: see `headrace.protocol.messages.IngestedRequest`.
        inputs: the tensor without its bytes, for requests that leave them in the source record.
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
    places: tuple[tuple[int, int], ...]
    inputs: tuple[Tensor, ...]


class Layout:
    """Common part of the requests of one layout.

    Attributes:
        message: the decoded message, without the tensor's bytes.
        head, tail: the bytes before and behind the tensor's bytes in a value.
    """

    __slots__ = ("_bind", "_start", "_stop", "_template", "head", "message", "mismatches", "tail")

    def __init__(self, value: bytes, message: InferenceRequest, start: int) -> None:
        (tensor,) = message.inputs
        self._start = start
        self._stop = start + len(tensor.data)
        self.head = value[: self._start]
        self.tail = value[self._stop :]
        self._bind: Bind | None = None
        self._template: DecodeTemplate | None = None
        self.message = message
        self.mismatches = 0
        tensor.data = memoryview(b"")  # otherwise the first value would live with its layout

    def bind(self, value: bytes, version: BindableVersion) -> Bound:
        """Bind a request of this layout, and return the result of the version's `bind`.

        Args:
            value: the request's value; it begins with the head and ends with the tail.
            version: the model version.

        Raises:
            Rejected: see `headrace.models.inputs.binding.Binder.bind`.
        """
        content = memoryview(value)[self._start : self._stop]
        (known,) = self.message.inputs
        given = InputTensor(
            name=known.name, datatype=known.datatype, shape=known.shape, data=content
        )
        bound = version.bind([given], self.message.outputs)
        if not version.depends_on_values:
            place = (self.head, self.tail, self._start, self._stop)
            tensor = bound.tensors[0][:3]
            self._bind = version.bind
            places = ((self._start, self._stop - self._start),)
            self._template = DecodeTemplate(
                *place,
                *tensor,
                version.name,
                version.version,
                bound[1:],
                places,
                (Tensor(*tensor, b""),),
            )
        return bound

    def template(self, lookup: Lookup) -> DecodeTemplate | None:
        """Return the template for requests of this layout; None if each must be bound."""
        if self._template is None:
            return None
        try:
            version = lookup(self.message.model_name, self.message.model_version)
        except Rejected:
            return None  # each request is rejected with the reason when it is bound
        return self._template if version.bind is self._bind else None


class DecodeCache:
    """Cache of recent layouts, one for each length of values."""

    def __init__(self, tuning: IngestTuning = TUNING.ingest) -> None:
        self._tuning = tuning
        self._by_length: BoundedCache[int, Layout] = BoundedCache(tuning.max_cached_layouts)

    def find(self, value: bytes) -> Layout | None:
        """Return the layout of a value; None if it must be decoded."""
        layout = self._by_length.get(len(value))
        if layout is None:
            return None
        return layout if value.startswith(layout.head) and value.endswith(layout.tail) else None

    def template(self, length: int, lookup: Lookup) -> DecodeTemplate | None:
        """Return the template of the layout of this length; None if there is none yet."""
        layout = self._by_length.get(length)
        return None if layout is None else layout.template(lookup)

    def learn(self, value: bytes, message: InferenceRequest) -> None:
        """Cache the layout of a value that was decoded and bound, if it can be cached.

        The tensor in `message` then loses its bytes.

        Raises:
            ValueError: the message was decoded from another value.
        """
        known = self._by_length.get(len(value))
        if known is not None:
            known.mismatches += 1
            if known.mismatches < self._tuning.layout_mismatches:
                return
        if message.id is not None or len(message.inputs) != 1:
            return
        (tensor,) = message.inputs
        size = len(tensor.data)
        if (
            not size
            or len(value) - size > self._tuning.max_layout_bytes
            or tensor.datatype in _NOT_NUMBERS
        ):
            return
        start = address_of(tensor.data) - address_of(value)
        if not 0 <= start <= len(value) - size:
            raise ValueError("message: expected the one that was decoded from this value")
        self._by_length.add(len(value), Layout(value, message, start))
