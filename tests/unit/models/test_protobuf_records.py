"""Records in Protobuf on their way to a model's inputs, and back with its outputs."""

from __future__ import annotations

import struct
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from headrace.config import SchemaRegistrySettings, make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import make_model_config
from headrace.models.inputs.protobuf import ProtobufSchema, follow
from headrace.models.inputs.records import Records
from headrace.models.inputs.transforms import make_transform
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.signature import make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.support.protoc import write_descriptors
from tests.support.schema_registry import StandInRegistry
from tests.unit.models.requests import spec

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
enum Kind { PLAIN = 0; GIFT = 1; }
message Customer { optional int32 age = 1; }
message Order {
  double amount = 1;
  Customer customer = 2;
  Kind kind = 3;
  google.protobuf.Timestamp at = 4;
  repeated Customer others = 5;
  map<string, int64> points = 6;
  google.protobuf.DoubleValue weight = 7;
  map<int32, int64> by_number = 8;
  repeated int64 counts = 9;
  repeated string notes = 10;
}
message Scored {
  message Order { float score = 20; repeated int64 labels = 21; }
}
message Sealed {
  string text = 1;
  bytes seal = 2;
}
message Parcel {
  repeated Kind kinds = 1;
  map<string, Kind> by_name = 2;
  map<int64, int64> by_id = 3;
  map<uint64, int64> by_hash = 4;
}
"""
COLUMNS = """
x = [
    { path = "amount" },
    { path = "customer.age", default = 40 },
    { path = "kind", vocabulary = ["PLAIN", "GIFT"] },
    { path = "at", date = "hour" },
    { path = "others.1.age", default = -1 },
    { path = "points.a", default = -2 },
    { path = "weight", default = -3 },
    { path = "by_number.7", default = -4 },
]
"""
COLUMNS = COLUMNS.replace("\n    ", " ").replace(",\n]", " ]")
PROTOBUF = "application/x-protobuf"
OUTPUTS = [spec("score", "FP32", [-1]), spec("labels", "INT64", [-1, 2])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with the descriptors of orders, and a set without what they import."""
    path = tmp_path_factory.mktemp("version")
    (path / "order.proto").write_text(PROTO)
    write_descriptors(path, "order.proto", "order.desc", "--include_imports")
    write_descriptors(path, "order.proto", "alone.desc")
    return path


@pytest.fixture(scope="module")
def order_type(directory: Path) -> Any:
    """The class of orders, as a producer has it."""
    pool = descriptor_pool.DescriptorPool()
    content = (directory / "order.desc").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def records_of(directory: Path, more: str = "", registry: SchemaRegistry | None = None) -> Records:
    """A transform of orders to the input `x`."""
    text = (
        '[transform.record]\nprotobuf_descriptors = "order.desc"\nprotobuf_message = "shop.Order"\n'
        f"{more}\n[transform.record.inputs]\n{COLUMNS}"
    )
    config = make_model_config(tomllib.loads(text), make_settings({}))
    signature = make_signature([spec("x", "FP64", [-1, 8])], OUTPUTS)
    transform = make_transform(directory, config, signature, registry=registry)
    assert isinstance(transform, Records)
    return transform


def row_of(records: Records, payload: bytes) -> list[float]:
    """The only row of a payload."""
    (given,) = records(payload, PROTOBUF)
    (row,) = to_array(Tensor(given.name, given.datatype, tuple(given.shape), given.data))
    assert isinstance(row, np.ndarray)
    return [float(each) for each in row]


def full_order(order_type: Any) -> Any:
    """An order with all fields."""
    order = order_type("shop.Order")(
        amount=2.5, customer={"age": 30}, kind="GIFT", others=[{"age": 1}, {"age": 2}]
    )
    order.at.seconds = 1772366400
    order.points["a"] = 2**40
    order.weight.value = 0.5
    order.by_number[7] = 9
    return order


def test_fields_of_message_become_columns(directory: Path, order_type: Any) -> None:
    """A path of names selects a field in messages, lists, maps, enums, dates and wrappers."""
    records = records_of(directory)

    assert row_of(records, full_order(order_type).SerializeToString()) == [
        *(2.5, 30, 1, 12, 2, 2**40, 0.5, 9)
    ]


@pytest.mark.parametrize(
    ("payload", "is_read"),
    [
        (b"\x2a\x00" * 10_000, False),
        (b"\xaa\x80\x00\x00" * 10_000, False),
        (b"\x32\x00" * 10_000, False),
        (b"\x4a\xff\xff\x01" + b"\x01" * 32_767, False),
        (b"\x48\x01" * 32_767, False),
        (b"\x52\x00" * 10_000, False),
        (b"\x12\x00" * 8000, True),
        (b"\x2a\x02\x08\x07" * 1000, True),
        (b"\x52\x05abcde" * 2000, True),
        (b"\x4a\x80\xfa\x01" + b"\xff\xff\xff\x01" * 8000, True),
    ],
    ids=[
        *("messages", "long tags", "entries", "packed numbers", "numbers", "texts"),
        *("one message", "few messages", "few texts", "longer numbers"),
    ],
)
def test_message_that_would_take_too_much_memory_is_too_large(
    directory: Path, payload: bytes, is_read: bool
) -> None:
    """Two bytes may become a message or a text, and one byte a number of eight."""
    content = (directory / "order.desc").read_bytes()
    schema = ProtobufSchema(content, "shop.Order", "", [], memory_bytes=400_000)

    if is_read:
        assert schema.read(payload).ByteSize()
    else:
        with pytest.raises(Rejected, match="memory of its messages and lists") as caught:
            schema.read(payload)
        assert caught.value.code == Code.TOO_LARGE


def test_record_that_would_take_much_memory_is_too_large(directory: Path) -> None:
    """12 MB would take more than 300."""
    with pytest.raises(Rejected) as caught:
        records_of(directory)(b"\x2a\x00" * 6_200_000, PROTOBUF)
    assert caught.value.code == Code.TOO_LARGE


def test_message_that_contains_itself_is_measured(directory: Path) -> None:
    """Any number of them may be in another."""
    (directory / "tree.proto").write_text(
        'syntax = "proto3"; message Tree { Tree left = 1; Tree right = 2; string name = 3; }'
    )
    write_descriptors(directory, "tree.proto", "tree.desc")
    content = (directory / "tree.desc").read_bytes()
    schema = ProtobufSchema(content, "Tree", "", [], memory_bytes=400_000)
    tree = b""
    for _ in range(12):
        tree = b"\x0a" + varint(len(tree)) + tree + b"\x12" + varint(len(tree)) + tree

    with pytest.raises(Rejected) as caught:
        schema.read(tree)
    assert caught.value.code == Code.TOO_LARGE


def varint(number: int) -> bytes:
    """A number in Protobuf's encoding of variable length."""
    if number < 128:
        return bytes([number])
    return bytes([number % 128 + 128]) + varint(number // 128)


def test_field_with_presence_is_missing_and_others_have_their_zeros(directory: Path) -> None:
    """An empty message is an order of nothing, as for each reader of Protobuf."""
    with pytest.raises(Rejected) as raised:
        records_of(directory)(b"", PROTOBUF)

    assert row_of(records_of(directory), b"\x22\x00") == [0, 40, 0, 0, -1, -2, -3, -4]
    assert raised.value.message == "rows[0].at: expected a date, got nothing"


@pytest.mark.parametrize("payload", [b"\x09\x01", b"\xff" * 20, b"\x12\x05\x08"])
def test_damaged_message_is_refused(directory: Path, payload: bytes) -> None:
    """With its message's name and its size."""
    with pytest.raises(Rejected, match=r"Protobuf as in shop\.Order") as raised:
        records_of(directory)(payload, PROTOBUF)

    assert raised.value.code == Code.INVALID_REQUEST


@pytest.mark.parametrize("path", ["kinds.1", "by_name.a"], ids=["list", "map"])
def test_enum_in_list_or_map_is_its_name(directory: Path, order_type: Any, path: str) -> None:
    """As in a field of its own; a vocabulary would take the number for an unknown string."""
    parcel = order_type("shop.Parcel")(kinds=["PLAIN", "GIFT"], by_name={"a": 1})

    assert follow(parcel, path.split(".")) == "GIFT"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("by_id.12345678901", 1),
        ("by_id.-7", 2),
        ("by_id.18446744073709551615", None),
        ("by_hash.18446744073709551615", 3),
        ("by_hash.-7", None),
        ("by_name.-7", None),
    ],
)
def test_integer_of_any_size_is_key_of_map(order_type: Any, path: str, value: int | None) -> None:
    """One that the type of the keys does not have is not there."""
    parcel = order_type("shop.Parcel")(
        by_id={12345678901: 1, -7: 2}, by_hash={18446744073709551615: 3}, by_name={"a": "GIFT"}
    )
    assert follow(parcel, path.split(".")) == value


def test_number_that_enum_does_not_have_is_no_entry(directory: Path, order_type: Any) -> None:
    """A later schema of the producer's may have it."""
    records = records_of(directory)
    order = full_order(order_type)
    order.kind = 5
    with pytest.raises(Rejected, match=r"rows\[0\]\.kind: expected an entry of the vocabulary"):
        records(order.SerializeToString(), PROTOBUF)


ANSWER = 'pass_through = true\nprotobuf_answer = "shop.Scored.Order"'


def test_outputs_are_appended_to_record(directory: Path, order_type: Any) -> None:
    """Unknown fields stay, and a score of the caller's own is replaced."""
    records = records_of(directory, ANSWER)
    payload = full_order(order_type).SerializeToString() + b"\xa5\x01\0\0\0\0\xa2\x06\x01x"
    outputs = {"score": np.array([0.25], np.float32), "labels": np.array([[3, 4]])}
    written = records.merge(payload, PROTOBUF, outputs)

    scored = order_type("shop.Scored.Order").FromString(written)
    assert (scored.score, list(scored.labels)) == (0.25, [3, 4])
    assert written.startswith(payload)
    assert order_type("shop.Order").FromString(written).amount == 2.5


def test_output_of_zero_replaces_value_of_record(directory: Path, order_type: Any) -> None:
    """A record that has been scored before must not keep its score."""
    records = records_of(directory, ANSWER)
    payload = order_type("shop.Scored.Order")(score=0.75).SerializeToString()
    outputs = {"score": np.array([0.0], np.float32), "labels": np.array([[0, 0]])}
    written = records.merge(payload, PROTOBUF, outputs)

    scored = order_type("shop.Scored.Order").FromString(written)
    assert (scored.score, list(scored.labels)) == (0.0, [0, 0])


def test_output_of_bytes_becomes_bytes_or_string(directory: Path, order_type: Any) -> None:
    """As its field is declared; only in a string are bytes replaced that are not UTF-8."""
    text = (
        'protobuf_descriptors = "order.desc"\nprotobuf_message = "shop.Customer"\n'
        'protobuf_answer = "shop.Sealed"\npass_through = true\ninputs.x = [{ path = "age" }]'
    )
    config = make_model_config({"transform": {"record": tomllib.loads(text)}}, make_settings({}))
    outputs = [spec("text", "BYTES", [-1]), spec("seal", "BYTES", [-1])]
    signature = make_signature([spec("x", "FP32", [-1, 1])], outputs)
    records = make_transform(directory, config, signature)
    assert isinstance(records, Records)

    content = np.array([b"\xff\0"], object)
    written = records.merge(b"", PROTOBUF, {"text": content, "seal": content})

    sealed = order_type("shop.Sealed").FromString(written)
    assert (sealed.text, sealed.seal) == ("\ufffd\0", b"\xff\0")


async def test_framed_message_comes_back_with_latest_schema_of_subject(
    directory: Path, order_type: Any
) -> None:
    """Messages are named by their place in the schema: the second, and the first in the third."""
    async with StandInRegistry() as registry:
        registry.schemas = {1: ("PROTOBUF", PROTO), 300: ("PROTOBUF", PROTO)}
        registry.subjects["s"] = [300]
        settings = SchemaRegistrySettings(url=registry.url)
        async with SchemaRegistry(settings) as client:
            more = f'{ANSWER}\nframing = "confluent"\nsubject = "s"'
            records = records_of(directory, more, client)
            assert records.framed is not None
            await records.framed.fetch(1)
    order = full_order(order_type).SerializeToString()
    payload = struct.pack(">bI", 0, 1) + b"\x02\x02" + order
    outputs = {"score": np.array([0.5], np.float32), "labels": np.array([[3, 4]])}
    written = records.merge(payload, PROTOBUF, outputs)

    assert row_of(records, payload)[0] == 2.5
    assert written.startswith(struct.pack(">bI", 0, 300) + b"\x04\x04\x00" + order)
    for wrong, expected in (
        (b"\x00" + order, "expected [1], got [0]"),
        (b"\x04\x02\x02" + order, "expected [1], got [1, 1]"),
        (b"\x80\x80", "expected the indexes of a message"),
        (b"\x01" + order, "expected the indexes of a message"),
    ):
        with pytest.raises(Rejected) as raised:
            records(struct.pack(">bI", 0, 1) + wrong, PROTOBUF)
        assert expected in raised.value.message


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("order.desc", "none.desc", "none.desc"),
        ("order.desc", "../order.desc", "in the version's directory"),
        ("order.desc", "order.proto", "expected what protoc"),
        ("order.desc", "alone.desc", "expected what protoc"),
        ("shop.Order", "shop.None", "protobuf_message: expected a message"),
        ("shop.Scored.Order", "shop.Order", "to have a field score for one FP32"),
        ("shop.Scored.Order", "", "protobuf_answer: expected it with"),
        ('protobuf_message = "shop.Order"', "", "expected both, or none"),
    ],
)
def test_wrong_descriptors_are_fault(
    directory: Path, before: str, after: str, expected: str
) -> None:
    """Found when the version is opened."""
    text = (
        '[transform.record]\nprotobuf_descriptors = "order.desc"\nprotobuf_message = "shop.Order"\n'
        f"{ANSWER}\n[transform.record.inputs]\n{COLUMNS}"
    )
    with pytest.raises(ConfigurationError) as raised:
        make_transform(
            directory,
            make_model_config(tomllib.loads(text.replace(before, after, 1)), make_settings({})),
            make_signature([spec("x", "FP64", [-1, 8])], OUTPUTS),
        )
    assert expected in str(raised.value)
