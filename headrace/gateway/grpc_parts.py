"""Limits of the parts of a message over gRPC, checked before it is parsed.

Protobuf makes an object of each part, and holds the interpreter meanwhile: 16 MiB of empty inputs
take 0.5 s and 0.5 GB, and of small integers 0.2 s and 0.2 GB. A message that can have so many is
walked by its fields, only as far as one within the limits goes. Source:
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from headrace.errors import Code, Rejected
from headrace.protocol.messages import MAX_INPUTS, MAX_OUTPUTS, MAX_PARAMETERS, MAX_RANK
from headrace.tuning import TUNING, GatewayTuning

_MAX_VARINT_BYTES = 10
_NOT_LAST = bytes(range(0x80, 0x100))
"""Bytes of a number of variable size but its last one."""


class _Part(NamedTuple):
    """A repeated field: its name, and how many times it may be there.

    Attributes:
        parts: repeated fields of a message in it, by number; None if it is none.
        most_bytes: of its content; 0 for any number.
    """

    name: str
    most: int
    parts: Mapping[int, _Part] | None = None
    most_bytes: int = 0


Parts = Mapping[int, _Part]
"""The repeated fields of a message, by number."""

_SHAPE = _Part("shape", MAX_RANK, most_bytes=MAX_RANK * _MAX_VARINT_BYTES)
_PARAMETERS = _Part("parameters", MAX_PARAMETERS)
_CONTENTS = _Part("contents", 1)
_INTEGERS = frozenset({1, 2, 3, 4, 5})
"""The fields of `contents` with numbers of variable size; those of fixed size are only copied."""
INFER_PARTS: Final[Parts] = MappingProxyType(
    {
        4: _PARAMETERS,
        5: _Part("inputs", MAX_INPUTS, {3: _SHAPE, 4: _PARAMETERS, 5: _CONTENTS}),
        6: _Part("outputs", MAX_OUTPUTS, {2: _PARAMETERS}),
        7: _Part("raw_input_contents", MAX_INPUTS),
    }
)
"""Those of `ModelInferRequest`."""
OTHER_PARTS: Final[Parts] = MappingProxyType({3: _PARAMETERS})
"""Those of the other requests."""


def check_parts(message: bytes, parts: Parts, tuning: GatewayTuning = TUNING.gateway) -> None:
    """Refuse a message with more parts than a request can have. One that is damaged is not refused.

    Args:
        message: the bytes of it.
        parts: its repeated fields.
        tuning: the limits of other fields, and of `contents`.

    Raises:
        Rejected: `INVALID_REQUEST`, with the part.
    """
    _Walk(tuning).check_fields(memoryview(message), parts, "")


class _Walk:
    """Walks a message, and counts what is in all `contents` of it."""

    def __init__(self, tuning: GatewayTuning) -> None:
        self._tuning = tuning
        self._values = 0
        self._integers = 0

    def check_fields(self, content: memoryview, parts: Parts, where: str) -> None:
        others = 0
        most_others = self._tuning.max_other_fields
        counts = dict.fromkeys(parts, 0)
        for number, field in _fields(content):
            part = parts.get(number)
            if part is None or part is _CONTENTS:
                others += 1
                if others > most_others:
                    place = where.removesuffix(".") or "message"
                    _refuse(place, f"at most {most_others} other fields")
                if part is _CONTENTS:
                    self._check_contents(field, f"{where}{part.name}")
                continue
            counts[number] += 1
            if counts[number] > part.most or (part.most_bytes and len(field) > part.most_bytes):
                _refuse(f"{where}{part.name}", f"at most {part.most}")
            if part.parts is not None:
                place = f"{where}{part.name}[{counts[number] - 1}]."
                self.check_fields(field, part.parts, place)

    def _check_contents(self, content: memoryview, where: str) -> None:
        most_values = self._tuning.max_contents_values
        most_integers = self._tuning.max_contents_integers
        for number, field in _fields(content):
            self._values += 1
            if self._values > most_values:
                expected = f"at most {most_values} strings and unpacked numbers in all inputs"
                _refuse(where, f"{expected}, or raw_input_contents")
            if number not in _INTEGERS:
                continue
            for start in range(0, len(field), most_integers + 1):
                part = bytes(field[start : start + most_integers + 1])
                self._integers += len(part.translate(None, _NOT_LAST))
                if self._integers > most_integers:
                    expected = f"at most {most_integers} integers and booleans in all inputs"
                    _refuse(where, f"{expected}, or raw_input_contents")


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the content of each field; only strings and messages have one.

    What is in a group, which no request has, comes with the number 0: to the parser it is no part
    of the message. Ends where the message is damaged: the parser says so.
    """
    at = groups = 0
    while at < len(content):
        try:
            tag, at = _varint(content, at)
            start = at
            match tag & 7:
                case 0:  # a number of variable size
                    _, at = _varint(content, at)
                    start = at
                case 1:  # a number of 8 bytes
                    at = start = at + 8
                case 2:  # bytes, text, or a message
                    size, start = _varint(content, at)
                    at = start + size
                case 3:  # the start of a group
                    groups += 1
                case 4:  # the end of a group
                    groups -= 1
                case 5:  # a number of 4 bytes
                    at = start = at + 4
                case _:
                    return
        except IndexError:
            return
        yield 0 if groups else tag >> 3, content[start:at]


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """Return an integer and where it ends. Raises `IndexError` if it does not end."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number of more than 10 bytes")


def _refuse(where: str, expected: str) -> NoReturn:
    raise Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got="more")
