"""Records in Protobuf, read by a compiled descriptor set.

Outputs are appended to the bytes of a record: Protobuf takes messages behind each other for one, so
no field is lost that the descriptors do not know. Source: https://protobuf.dev/programming-guides/
encoding (last one wins; merging).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.inputs.avro import is_list
from headrace.models.signature import TensorSpec
from headrace.protocol.compression import too_large
from headrace.tuning import TUNING

_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = frozenset(
    f"google.protobuf.{each}Value"
    for each in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FLOATS = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}
_INT32, _INT64 = FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64
_UINT32, _UINT64 = FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64
_KINDS = {
    "BOOL": {FieldDescriptor.CPPTYPE_BOOL},
    "BYTES": {FieldDescriptor.CPPTYPE_STRING},
    **dict.fromkeys(("FP16", "BF16", "FP32", "FP64"), _FLOATS),
    **{name: {_INT32, _INT64} for name in ("INT8", "INT16", "INT32")},
    **{name: {_INT32, _INT64, _UINT32, _UINT64} for name in ("UINT8", "UINT16")},
    "UINT32": {_INT64, _UINT32, _UINT64},
    "INT64": {_INT64},
    "UINT64": {_UINT64},
}
"""Kinds of fields that can hold an output, by its datatype."""
_KEY = "transform.record"
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_WIRE_TYPE_BITS, _LENGTH, _GROUP = 3, 2, 3
_CONTINUES = 0x80
"""Set in each byte of a number of variable length but the last."""
_MESSAGE_BYTES, _EXTENSION_BYTES, _TEXT_BYTES = 80, 80, 48
"""Memory of a message without fields, of an extension, and of a text in a list, besides what a text
has in the payload, but with their places in lists that have grown."""
_VIEW_BYTES, _PLACE_BYTES = 16, 8
"""Room for a text in a message, and for any other field."""
_NUMBER_BYTES = {
    **dict.fromkeys((_INT64, _UINT64), 24),
    **dict.fromkeys((_INT32, _UINT32), 12),
    FieldDescriptor.CPPTYPE_BOOL: 3,
    FieldDescriptor.CPPTYPE_ENUM: 40,
}
"""Memory of a number in a list that has grown, if its field may have numbers of one byte. Those
that an enum does not have may be kept as unknown fields."""

Array: TypeAlias = NDArray[np.int64]


class ProtobufSchema:
    """The message of payloads, and that of their answers.

    Args:
        descriptors: a `FileDescriptorSet`, as `protoc --include_imports --descriptor_set_out`
            writes it.
        message: full name of the message of payloads.
        answer: full name of the message of answers; empty if answers are no records.
        outputs: the model's outputs, which the message of answers has as fields.
        memory_bytes: most memory that a payload's messages, and the values in its lists, may take.

    Attributes:
        indexes, answer_indexes: place of each message in its file, as Confluent's framing has it.
        answer_bytes: names of the fields of answers whose values are bytes and no text.

    Raises:
        ConfigurationError: a message is not there, or has other fields than the outputs.
    """

    def __init__(
        self,
        descriptors: bytes,
        message: str,
        answer: str,
        outputs: Sequence[TensorSpec],
        memory_bytes: int = TUNING.protocol.record_memory_bytes,
    ) -> None:
        pool = descriptor_pool.DescriptorPool()
        try:
            for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
                pool.Add(file)
        except (DecodeError, TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"{_KEY}.protobuf_descriptors: expected what protoc --include_imports "
                f"--descriptor_set_out writes: {describe_error(error)}"
            ) from error
        found = _find(pool, message, "protobuf_message")
        self._name = message
        self._new_message = message_factory.GetMessageClass(found)
        self._memory_bytes = memory_bytes
        self._memory_of = _Expansion(pool).measure(found)
        self.indexes = _indexes_of(found)
        self.answer_indexes: tuple[int, ...] = ()
        self.answer_bytes: frozenset[str] = frozenset()
        if answer:
            answers = _find(pool, answer, "protobuf_answer")
            for spec in outputs:
                _check_field(answers, spec)
            self._new_outputs = _message_of_outputs(answers, [spec.name for spec in outputs])
            self.answer_indexes = _indexes_of(answers)
            self.answer_bytes = frozenset(
                field.name for field in answers.fields if field.type == FieldDescriptor.TYPE_BYTES
            )

    def read(self, payload: bytes | memoryview) -> Message:
        """Return the message of a payload.

        Raises:
            Rejected: `INVALID_REQUEST` if it cannot be read, `TOO_LARGE` if it would take too much
                memory.
        """
        self._check_memory(payload)
        message = self._new_message()
        try:
            message.ParseFromString(bytes(payload))
        except DecodeError as error:
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "payload",
                expected=f"Protobuf as in {self._name}",
                got=f"{describe_error(error)} in {len(payload)} bytes",
            ) from error
        return message

    def _check_memory(self, payload: bytes | memoryview) -> None:
        """Refuse a payload that would take too much memory, before anything is made of it."""
        if len(payload) * int(self._memory_of.max()) <= self._memory_bytes:
            return
        content, found = np.frombuffer(payload, np.uint8), 0
        part_bytes = TUNING.protocol.payload_part_bytes
        for start in range(0, len(content), part_bytes):
            counts = np.bincount(content[start : start + part_bytes], minlength=256)
            found += int(counts @ self._memory_of)
            if found > self._memory_bytes:
                raise too_large("payload: memory of its messages and lists", self._memory_bytes)

    def append(self, payload: bytes, values: Mapping[str, Any]) -> bytes:
        """Return a record with outputs as further fields."""
        return payload + self._new_outputs(**values).SerializeToString()


class _Expansion:
    """Finds how much memory each byte of a payload may take.

    Two bytes may be an empty message, which has room for all its fields, and one byte a number of
    eight. A message begins with a tag, and a number of variable length ends with a byte below
    `_CONTINUES`, so it is enough to count bytes by their values: no value may begin or end with
    another byte. Other bytes that have these values count as well.
    """

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool
        self._memory_of = np.zeros(256, np.int64)
        self._single: set[str] = set()
        self._many: set[str] = set()

    def measure(self, message: Descriptor) -> Array:
        """Return the bytes of memory by the value of a byte, in payloads with such a message."""
        self._visit(message, is_one=True)
        return self._memory_of

    def _visit(self, message: Descriptor, *, is_one: bool) -> None:
        """Note the memory of all fields in a message, of which a payload may have any number unless
        `is_one`.
        """
        name = message.full_name
        if name in self._many:
            return
        if is_one and name not in self._single:
            self._single.add(name)
        else:  # several fields may have one, or it contains itself
            is_one = False
            self._many.add(name)
        for field in [*message.fields, *self._pool.FindAllExtensions(message)]:
            is_single = is_one and not field.is_repeated
            if not is_single:
                self._note_field(field)
            if field.message_type is not None:
                self._visit(field.message_type, is_one=is_single)

    def _note_field(self, field: FieldDescriptor) -> None:
        if field.message_type is not None:
            wire_type = _GROUP if field.type == FieldDescriptor.TYPE_GROUP else _LENGTH
            self._note_tag(field, wire_type, _memory_of(field.message_type))
        elif field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            self._note_tag(field, _LENGTH, _TEXT_BYTES)
        elif field.is_repeated:
            self._note(range(_CONTINUES), _NUMBER_BYTES.get(field.cpp_type, 0))
        elif field.is_extension:
            for wire_type in range(1 << _WIRE_TYPE_BITS):
                self._note_tag(field, wire_type, _EXTENSION_BYTES)

    def _note_tag(self, field: FieldDescriptor, wire_type: int, memory_bytes: int) -> None:
        tag = field.number << _WIRE_TYPE_BITS | wire_type
        first = tag % _CONTINUES
        # A tag of one byte may be written in several, too.
        longer = first | _CONTINUES
        self._note([first, longer] if tag == first else [longer], memory_bytes)

    def _note(self, values: Iterable[int], memory_bytes: int) -> None:
        for value in values:
            self._memory_of[value] = max(self._memory_of[value], memory_bytes)


def _memory_of(message: Descriptor) -> int:
    """Return the memory of an empty message, or of an entry of a map."""
    found = _MESSAGE_BYTES
    for field in message.fields:
        is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated
        found += _VIEW_BYTES if is_text else _PLACE_BYTES
        if message.GetOptions().map_entry and field.message_type is not None:
            found += _memory_of(field.message_type)  # even if the payload has no value for the key
    return found


def follow(message: Any, path: Sequence[str]) -> Any:
    """Return the field at a path through messages, maps, and lists by number; None without one.

    An enum's value is its name, a `Timestamp` a date. A field without presence has its default.
    """
    enum: Any = None
    for name in path:
        if message is None:
            return None
        if isinstance(message, Message):
            message, enum = _read_field(message, name)
        elif hasattr(message, "keys"):
            message = _look_up(message, name)
        elif hasattr(message, "append") and name.isdecimal() and len(name) < 10:
            message = message[int(name)] if int(name) < len(message) else None
        else:
            return None
    if enum is not None and isinstance(message, int):
        found = enum.values_by_number.get(message)
        return message if found is None else found.name
    return _simplify(message)


def _read_field(message: Message, name: str) -> tuple[Any, Any]:
    """Return a field, and the enum of its value, or of those in its list or map; None for either
    that is not there.
    """
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None or (field.has_presence and not message.HasField(name)):
        return None, None
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        field = entry.fields_by_name["value"]
    return getattr(message, name), field.enum_type


def _look_up(entries: Any, name: str) -> Any:
    """Return the value of a map's key, which is a string or an integer; None without one."""
    for key in (name, int(name)) if _INTEGER.fullmatch(name) else (name,):
        try:
            if key in entries:
                return entries[key]
        except (TypeError, ValueError):  # the map has keys of the other type, or of fewer bits
            continue
    return None


def _simplify(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    name = value.DESCRIPTOR.full_name
    fields: Any = value
    if name == _TIMESTAMP:
        try:
            return _EPOCH + timedelta(seconds=fields.seconds, microseconds=fields.nanos // 1000)
        except OverflowError:
            return fields.seconds
    return fields.value if name in _WRAPPERS else value


def _message_of_outputs(answers: Descriptor, names: Iterable[str]) -> type[Message]:
    """Return a message with these fields alone, all of which have presence.

    A field without presence is not written if it has its default, and the record before it would
    keep the value that it has there.
    """
    file = descriptor_pb2.FileDescriptorProto(name="outputs.proto", syntax="proto2")
    message = file.message_type.add(name="Outputs")
    for name in names:
        field = answers.fields_by_name[name]
        added = message.field.add(name=name, number=field.number, type=field.type)
        added.label = added.LABEL_REPEATED if field.is_repeated else added.LABEL_OPTIONAL
        if field.is_packed:
            added.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message.name))


def _find(pool: descriptor_pool.DescriptorPool, name: str, key: str) -> Descriptor:
    try:
        found: Descriptor = pool.FindMessageTypeByName(name)
    except KeyError as error:
        raise ConfigurationError(
            f"{_KEY}.{key}: expected a message of protobuf_descriptors, got {name}"
        ) from error
    return found


def _indexes_of(message: Descriptor) -> tuple[int, ...]:
    """Return the place of a message in its file, and in the messages around it."""
    outer = message.containing_type
    if outer is None:
        return (list(message.file.message_types_by_name).index(message.name),)
    return (*_indexes_of(outer), [each.name for each in outer.nested_types].index(message.name))


def _check_field(message: Descriptor, spec: TensorSpec) -> None:
    field = message.fields_by_name.get(spec.name)
    kinds = _KINDS[spec.datatype]
    if field is None or field.cpp_type not in kinds or field.is_repeated != is_list(spec):
        raise ConfigurationError(
            f"{_KEY}.protobuf_answer: expected {message.full_name} to have a field {spec.name} for "
            f"{'a list of ' if is_list(spec) else 'one '}{spec.datatype}"
        )
