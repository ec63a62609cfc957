"""Send orders with Confluent's serializers, and print the scores with which they come back.

Usage: python scored_orders.py avro|json|protobuf

The serializer registers the schema of the orders and writes its id before each one; the
deserializer finds the schema of the answers in the registry. In Protobuf that schema is registered
here, because only the owner of the messages can write it. Needs `pip install
'confluent-kafka[schemaregistry,avro,json,protobuf]'`.
"""

import base64
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

AVRO_SCHEMA = Path(__file__).parents[1] / "models" / "fraud" / "order.avsc"
JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "amount": {"type": "number"},
        "customer": {"type": "object", "properties": {"age": {"type": ["integer", "null"]}}},
        "country": {"type": "string"},
        "ordered_at": {"type": "string"},
    },
    "required": ["id", "amount", "customer", "country", "ordered_at"],
    "additionalProperties": False,
}
FIRST_ORDER = datetime(2026, 3, 1, tzinfo=UTC)
TIMEOUT_S = 100


def order(number):
    """Return an order without its date, and the date."""
    fields = {
        "id": f"order-{number}",
        "amount": 10.0 * (number % 50),
        "customer": {},
        "country": ("DE", "FR", "PL", "US")[number % 4],
    }
    return fields, FIRST_ORDER + timedelta(hours=number % 24)


def avro(registry, settings, model):
    """Return the functions that write an order and read an answer in Avro."""
    serializer = AvroSerializer(registry, AVRO_SCHEMA.read_text(), conf=settings)
    deserializer = AvroDeserializer(registry)

    def write(number, context):
        fields, at = order(number)
        return serializer({**fields, "customer": {"age": None}, "ordered_at": at}, context)

    return write, deserializer


def in_json(registry, settings, model):
    """Return the functions that write an order and read an answer in JSON, with JSON Schema."""
    serializer = JSONSerializer(json.dumps(JSON_SCHEMA), registry, conf=settings)
    deserializer = JSONDeserializer(None, schema_registry_client=registry)

    def write(number, context):
        fields, at = order(number)
        return serializer({**fields, "ordered_at": at.isoformat()}, context)

    return write, deserializer


def protobuf(registry, settings, model):
    """Return the functions that write an order and read an answer in Protobuf."""
    pool = descriptor_pool.DescriptorPool()
    described = Path(os.environ["ORDER_DESCRIPTORS"]).read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(file)
    sent, answered = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{name}"))
        for name in ("Order", "ScoredOrder")
    )
    schema = base64.b64encode(sent.DESCRIPTOR.file.serialized_pb).decode()
    registry.register_schema(f"{model}-scored-value", Schema(schema, "PROTOBUF"))
    serializer = ProtobufSerializer(sent, registry, settings)
    deserializer = ProtobufDeserializer(answered, schema_registry_client=registry)

    def write(number, context):
        fields, at = order(number)
        return serializer(sent(**fields, ordered_at=at.isoformat()), context)

    def read(value, context):
        message = deserializer(value, context)
        return json_format.MessageToDict(message, preserving_proto_field_name=True)

    return write, read


def main():
    """Send the orders, and print the answers."""
    form = sys.argv[1]
    model = os.environ.get("MODEL", "fraud")
    namespace = os.environ.get("NAMESPACE", "headrace")
    count = int(os.environ.get("COUNT", "10"))
    broker = {"bootstrap.servers": os.environ.get("BOOTSTRAP_SERVERS", "127.0.0.1:9092")}
    requests, responses = f"{namespace}.requests", f"{namespace}.responses"
    registry = SchemaRegistryClient({"url": os.environ["SCHEMA_REGISTRY"]})
    # The topic has records of several schemas: a subject is that of a model's records.
    settings = {"subject.name.strategy": lambda *_: f"{model}-value"}
    write, read = {"avro": avro, "json": in_json, "protobuf": protobuf}[form](
        registry, settings, model
    )
    headers = {"x-model": model, "content-type": f"application/{form}"}

    producer = Producer(broker)
    consumer = Consumer({**broker, "group.id": "unused", "isolation.level": "read_committed"})
    # Where the answers end is read before anything is sent.
    found = consumer.list_topics(responses, timeout=TIMEOUT_S).topics[responses].partitions
    ends = [
        consumer.get_watermark_offsets(TopicPartition(responses, each), timeout=TIMEOUT_S)[1]
        for each in found
    ]
    consumer.assign(
        [TopicPartition(responses, each, end) for each, end in zip(found, ends, strict=True)]
    )
    context = SerializationContext(requests, MessageField.VALUE)
    for number in range(count):
        value = write(number, context)
        producer.produce(requests, value, key=f"order-{number}", headers=headers)
    producer.flush(TIMEOUT_S)

    context = SerializationContext(responses, MessageField.VALUE)
    deadline = time.monotonic() + TIMEOUT_S
    printed = 0
    while printed < count:
        if time.monotonic() > deadline:
            sys.exit(f"{printed} of {count} orders in {TIMEOUT_S} s")
        record = consumer.poll(0.2)
        if record is None:
            continue
        if record.error():
            sys.exit(str(record.error()))
        if dict(record.headers())["x-status"] != b"ok":
            sys.exit(record.value().decode(errors="replace"))
        answer = read(record.value(), context)
        sys.stdout.write(f"{answer['id']} {answer['score']}\n")
        printed += 1
    consumer.close()


if __name__ == "__main__":
    main()
