"""Records in Protobuf, read by a compiled descriptor set.

Outputs are appended to the bytes of a record: Protobuf takes messages behind each other for one, so
no field is lost that the descriptors do not know. Source: https://protobuf.dev/programming-guides/
encoding (last one wins; merging).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.inputs.avro import is_list
from headrace.models.signature import TensorSpec

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


class ProtobufSchema:
    """The message of payloads, and that of their answers.

    Args:
        descriptors: a `FileDescriptorSet`, as `protoc --include_imports --descriptor_set_out`
            writes it.
        message: full name of the message of payloads.
        answer: full name of the message of answers; empty if answers are no records.
        outputs: the model's outputs, which the message of answers has as fields.

    Attributes:
        indexes, answer_indexes: place of each message in its file, as Confluent's framing has it.

    Raises:
        ConfigurationError: a message is not there, or has other fields than the outputs.
    """

    def __init__(
        self, descriptors: bytes, message: str, answer: str, outputs: Sequence[TensorSpec]
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
        self.indexes = _indexes_of(found)
        self.answer_indexes: tuple[int, ...] = ()
        if answer:
            answers = _find(pool, answer, "protobuf_answer")
            for spec in outputs:
                _check_field(answers, spec)
            self._new_answer = message_factory.GetMessageClass(answers)
            self.answer_indexes = _indexes_of(answers)

    def read(self, payload: bytes | memoryview) -> Message:
        """Return the message of a payload. Raises `Rejected`."""
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

    def append(self, payload: bytes, values: Mapping[str, Any]) -> bytes:
        """Return a record with outputs as further fields."""
        return payload + self._new_answer(**values).SerializePartialToString()


def follow(message: Any, path: Sequence[str]) -> Any:
    """Return the field at a path through messages, maps, and lists by number; None without one.

    An enum's value is its name, a `Timestamp` a date. A field without presence has its default.
    """
    for name in path:
        if message is None:
            return None
        if isinstance(message, Message):
            message = _read_field(message, name)
        elif hasattr(message, "keys"):
            message = _look_up(message, name)
        elif hasattr(message, "append") and name.isdecimal() and len(name) < 10:
            message = message[int(name)] if int(name) < len(message) else None
        else:
            return None
    return _simplify(message)


def _read_field(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None or (field.has_presence and not message.HasField(name)):
        return None
    value = getattr(message, name)
    if field.enum_type is not None and isinstance(value, int):
        found = field.enum_type.values_by_number.get(value)
        return value if found is None else found.name
    return value


def _look_up(entries: Any, name: str) -> Any:
    """Return the value of a map's key, which is a string or an integer; None without one."""
    for key in (name, int(name)) if name.isdecimal() and len(name) < 10 else (name,):
        try:
            if key in entries:
                return entries[key]
        except TypeError:  # the map has keys of the other type
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
