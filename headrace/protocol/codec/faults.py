"""Convert msgspec's errors to Headrace's: what was expected, what was received, and where.

msgspec names the path of a fault and what it expected there, but not always what it got. A second
pass follows that path through the value, one level at a time, and leaves everything else undecoded
(`msgspec.Raw`): it needs no more memory than the value itself, however deeply that is nested. A
general decoder would be unsafe: a few bytes of MessagePack can announce lists of any length.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import msgspec

from headrace.errors import Code, Rejected
from headrace.protocol.messages import MAX_OUTPUTS
from headrace.tuning import TUNING

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All errors that msgspec raises on malformed bytes."""

_PLACE = re.compile(r"(.*?)(?: - at (`key` in )?`(\$.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_OF_TENSOR = re.compile(r"inputs\[\d+\]\.(datatype|shape|data)\b")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_KIND = re.compile(r"Expected `(.+)`, got `(.+)`")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)")
_CUT = "Input data was truncated"
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u|\\?\Z)")
"""Half a surrogate pair that is followed by other text than its second half."""
_PAIR_BYTES = len(r"\ud83d\ude00")
_SCALARS = frozenset({"str", "int", "float", "bool"})
_MAX_SHOWN = 40
_TUNING = TUNING.protocol
_TYPES = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "array": list,
    "object": dict,
    "bytes": bytes,
}
_UNITS = {"str": "characters", "array": "elements", "object": "entries", "bytes": "bytes"}


class Format(NamedTuple):
    """Format of a request, MessagePack or JSON: its name and its decoder."""

    name: str
    codec: Any  # the module msgspec.msgpack or msgspec.json
    names: dict[str, str]  # of types, if msgspec's name differs from the format's

    def type_names(self, text: str) -> str:
        """Replace msgspec's names of types by those of this format."""
        return " or ".join(self.names.get(name, name) for name in text.split(" | "))


MSGPACK = Format(
    "MessagePack", msgspec.msgpack, {"object": "map", "bytes": "bin", "null": "nil", "None": "nil"}
)
JSON = Format(
    "JSON",
    msgspec.json,
    {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "None": "null"},
)


def refusal(error: Exception, value: bytes | memoryview, form: Format) -> Rejected:
    """Return the error for a value that could not be decoded.

    A fault in a tensor's datatype, shape or data is `INVALID_TENSOR`, any other
    `INVALID_REQUEST`.
    """
    if isinstance(error, RecursionError):
        return _invalid("value", "no more than a few levels of nesting", "hundreds")
    if isinstance(error, UnicodeDecodeError):
        wrong = error.object[error.start]
        return _invalid("value", "UTF-8 in every string", f"byte 0x{wrong:02x}")
    if isinstance(error, msgspec.ValidationError):
        return _misfit(str(error), value, form)
    text = str(error)
    if not value:
        return _invalid("value", f"one {form.name} map", "an empty value")
    if _is_cut(error, value):
        return _invalid("value", f"a whole {form.name} map", f"{len(value)} bytes that end early")
    detail = _detail(text).removeprefix(f"{form.name} is malformed: ")
    return _invalid("value", f"one {form.name} map", f"malformed {form.name}: {detail}")


def describe_json_error(error: Exception, content: bytes) -> str:
    """Return what msgspec says of JSON that it cannot read, and where content ends that is cut
    short, of which it does not say that.
    """
    if _is_cut(error, content):
        return f"a value that ends at byte {len(content)}"
    if isinstance(error, UnicodeDecodeError):  # its position is that in one of the strings
        return f"a string with byte {error.object[error.start]:#04x}, which is not UTF-8"
    return _detail(str(error)).replace("JSON is malformed", "malformed JSON", 1)


def _is_cut(error: Exception, content: bytes | memoryview) -> bool:
    """Return True if content was cut short, and has not only half a surrogate pair near its end, of
    which msgspec says the same.
    """
    if not isinstance(error, msgspec.DecodeError) or _CUT not in str(error):
        return False
    return _HALF_PAIR.search(bytes(content[-_PAIR_BYTES:])) is None


def _detail(text: str) -> str:
    return text.replace(_CUT, "JSON is malformed: half of a surrogate pair")


def _misfit(text: str, value: bytes | memoryview, form: Format) -> Rejected:
    match = _PLACE.fullmatch(text)
    assert match is not None
    what, of_key, path = match[1], match[2], match[3] or "$"
    where = path.removeprefix("$").removeprefix(".")
    if missing := _MISSING.fullmatch(what):
        where = f"{where}.{missing[1]}" if where else missing[1]
        return _invalid(where, "this field", "none")
    found = None if of_key else _at(path, value, form)
    where = where or "value"
    if of_key:
        where += " (a key)"
    if kind := _KIND.fullmatch(what):
        got = form.type_names(kind[2])
        if found is not None and kind[2] in _UNITS.keys() | _SCALARS:
            got = _described(found, kind[2], form) or got
        return _invalid(where, form.type_names(kind[1]), got)
    if length := _LENGTH.fullmatch(what):
        bound = "at most" if length[2] == "<=" else "at least"
        expected = f"{bound} {length[3]} {_UNITS[length[1]]}"
        beyond = "more" if length[2] == "<=" else "fewer"
        return _invalid(where, expected, _length(found, length[1], form) or beyond)
    return _invalid(where, "a value in range", f"{what[:1].lower()}{what[1:]}")


def _invalid(where: str, expected: str, got: str) -> Rejected:
    code = Code.INVALID_TENSOR if _OF_TENSOR.match(where) else Code.INVALID_REQUEST
    return Rejected.mismatch(code, where, expected=expected, got=got)


# --- the second pass --------------------------------------------------------------------------


_ABSENT = msgspec.Raw()


class _Level(msgspec.Struct):
    """Fields of all maps in a request, undecoded; other fields are skipped."""

    model_name: msgspec.Raw = _ABSENT
    model_version: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    outputs: msgspec.Raw = _ABSENT
    name: msgspec.Raw = _ABSENT
    datatype: msgspec.Raw = _ABSENT
    shape: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT


_Elements = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_OUTPUTS)]


def _at(path: str, value: bytes | memoryview, form: Format) -> bytes | memoryview | None:
    """Return the undecoded value at a path such as `$.inputs[0].shape`; None if there is none.

    Of a key that is there twice, it may be another value than the one with the fault.
    """
    found = value
    rest = path[1:]
    try:
        while rest:
            step = _STEP.match(rest)
            if step is None:
                return None
            name, index = step.groups()
            if name:
                found = getattr(form.codec.decode(found, type=_Level), name)
            else:
                found = form.codec.decode(found, type=_Elements)[int(index)]
            rest = rest[step.end() :]
    except (*DECODE_ERRORS, AttributeError, IndexError):
        return None
    return found


def _described(found: bytes | memoryview, kind: str, form: Format) -> str | None:
    """Describe a small value; None if it is too large, of another kind or cannot be decoded."""
    if len(found) > _TUNING.described_value_bytes:
        return None
    try:
        value = form.codec.decode(found, type=_TYPES[kind])
    except DECODE_ERRORS:
        return None
    if kind in _SCALARS:
        return shown(value)
    return f"{form.type_names(kind)} of {len(value)} {_UNITS[kind]}"


def _length(found: bytes | memoryview | None, kind: str, form: Format) -> str | None:
    """Return the length of a value; None as for `_described`."""
    if found is None or len(found) > _TUNING.counted_value_bytes:
        return None
    try:
        return str(len(form.codec.decode(found, type=_TYPES[kind])))
    except DECODE_ERRORS:
        return None


def shown(value: Any) -> str:
    """Return a scalar as JSON, truncated, or a list or map as its length."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
