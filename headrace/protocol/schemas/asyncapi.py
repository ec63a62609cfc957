"""Describe the topics of `headrace.topics` as an AsyncAPI 3 document.

Specification: https://www.asyncapi.com/docs/reference/specification/v3.0.0; Kafka bindings 0.5.0:
https://github.com/asyncapi/bindings/tree/master/kafka. Servers are left out: the user chooses them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.errors import Code
from headrace.protocol.compression import CODINGS
from headrace.protocol.headers import JSON, MAX_PRIORITY, MSGPACK, PNG
from headrace.protocol.schemas.types import DIALECT
from headrace.topics import TOPICS, Stage, Topic, TopicSpec

CONTRACT_VERSION = "1.0.0"
_BINDING_VERSION = "0.5.0"
_SCHEMA_FORMAT = "application/schema+json;version=2020-12"

_Node = dict[str, Any]


class _Message(NamedTuple):
    """Kind of record on one topic. `schema` is a file's name; None for any bytes."""

    name: str
    title: str
    content_type: str
    schema: str | None
    headers: str


_MESSAGES: dict[Topic, tuple[_Message, ...]] = {
    Topic.REQUESTS: (
        _Message("inferenceRequest", "Request", MSGPACK, "inference-request", "request"),
        _Message(
            "inferenceRequestJson", "Request in JSON", JSON, "inference-request-json", "request"
        ),
        _Message(
            "rawRequest",
            "Payload for the transform of the model that x-model names",
            "application/octet-stream",
            None,
            "rawRequest",
        ),
    ),
    Topic.ITEMS: (
        _Message("item", "Checked request", MSGPACK, "item-record", "none"),
        _Message("itemChunk", "Checked requests", MSGPACK, "item-chunk-record", "none"),
    ),
    Topic.BATCHES: (
        _Message("batch", "Batch of items", MSGPACK, "batch-record", "none"),
        _Message("chunkedBatch", "Batch of requests", MSGPACK, "chunked-batch-record", "none"),
    ),
    Topic.RESULTS: (
        _Message("result", "Outcome of a request", MSGPACK, "result-record", "none"),
        _Message("resultChunk", "Outcomes of requests", MSGPACK, "result-chunk-record", "none"),
    ),
    Topic.RESPONSES: (
        _Message("inferenceResponse", "Response", MSGPACK, "inference-response", "response"),
        _Message(
            "inferenceResponseJson", "Response in JSON", JSON, "inference-response-json", "response"
        ),
        _Message(
            "recordResponse",
            "The request's record with the outputs in it",
            "application/octet-stream",
            None,
            "recordResponse",
        ),
        _Message("errorResponse", "Error", MSGPACK, "error-response", "response"),
        _Message("errorResponseJson", "Error in JSON", JSON, "error-response", "response"),
    ),
    Topic.DEAD_LETTERS: (
        _Message(
            "deadLetter",
            "Request that can never succeed, untouched",
            "application/octet-stream",
            None,
            "deadLetter",
        ),
    ),
    Topic.EVENTS: (
        _Message("event", "What an executor can do, and has done", MSGPACK, "event-record", "none"),
    ),
    Topic.CONTROL: (
        _Message("control", "Change of the wanted models", MSGPACK, "control-record", "none"),
    ),
}


def asyncapi() -> _Node:
    """Return the document as plain values."""
    return {
        "asyncapi": "3.0.0",
        "id": "urn:headrace:contract",
        "info": {
            "title": "Headrace",
            "version": CONTRACT_VERSION,
            "description": (
                "Inference on Kafka: every request record gets an answer record. "
                "Values follow the Open Inference Protocol v2. Header values are bytes: text is "
                "UTF-8, numbers are ASCII digits or big-endian, as each says."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": MSGPACK,
        "channels": {_key(spec.topic): _channel(spec) for spec in TOPICS.values()},
        "operations": _operations(),
        "components": {
            "messages": {
                message.name: _message(message, TOPICS[topic])
                for topic, messages in _MESSAGES.items()
                for message in messages
            },
            "schemas": _headers(),
        },
    }


def _key(topic: Topic) -> str:
    first, *others = topic.split("-")
    return first + "".join(part.title() for part in others)


def _channel(spec: TopicSpec) -> _Node:
    like = " It has exactly the partitions of requests." if spec.like_requests else ""
    return {
        "address": f"{{namespace}}.{spec.topic}",
        "title": spec.topic.value,
        "description": f"{spec.message}. Partition: {spec.partition}.{like}",
        "parameters": {
            "namespace": {
                "description": "The setting `namespace`; each topic can also be named in full.",
                "default": "headrace",
            }
        },
        "messages": {
            message.name: {"$ref": f"#/components/messages/{message.name}"}
            for message in _MESSAGES[spec.topic]
        },
        "bindings": {
            "kafka": {
                "topicConfiguration": {"cleanup.policy": [spec.cleanup_policy]},
                "bindingVersion": _BINDING_VERSION,
            }
        },
    }


def _operations() -> _Node:
    operations: _Node = {}
    for spec in TOPICS.values():
        for stage in spec.readers:
            operations[f"{stage}Receives{_title(spec.topic)}"] = _operation("receive", spec, stage)
        for stage in spec.writers:
            operations[f"{stage}Sends{_title(spec.topic)}"] = _operation("send", spec, stage)
    asked = operations[f"{Stage.INGEST}Receives{_title(Topic.REQUESTS)}"]
    asked["reply"] = {
        "address": {
            "description": "Where the header is absent, the topic of responses.",
            "location": "$message.header#/kafka_replyTopic",
        },
        "channel": {"$ref": f"#/channels/{_key(Topic.RESPONSES)}"},
    }
    return operations


def _title(topic: Topic) -> str:
    return "".join(part.title() for part in topic.split("-"))


def _operation(action: str, spec: TopicSpec, stage: Stage) -> _Node:
    verb = "reads" if action == "receive" else "writes"
    return {
        "action": action,
        "summary": f"The {stage} {verb} {spec.topic}.",
        "channel": {"$ref": f"#/channels/{_key(spec.topic)}"},
        "bindings": {"kafka": {"bindingVersion": _BINDING_VERSION}},
    }


def _message(message: _Message, spec: TopicSpec) -> _Node:
    node: _Node = {
        "name": message.name,
        "title": message.title,
        "contentType": message.content_type,
    }
    if message.headers != "none":
        node["headers"] = {"$ref": f"#/components/schemas/{message.headers}Headers"}
    if message.schema is not None:
        reference = {"$ref": f"./{message.schema}.schema.json"}
        node["payload"] = {"schemaFormat": _SCHEMA_FORMAT, "schema": reference}
    node["bindings"] = {
        "kafka": {
            "key": {"type": "string", "description": f"Bytes: {spec.key}."},
            "bindingVersion": _BINDING_VERSION,
        }
    }
    return node


# --- headers ----------------------------------------------------------------------------------


def _headers() -> _Node:
    return {
        "requestHeaders": _object(_request_headers(), []),
        "rawRequestHeaders": _object(_request_headers(), ["content-type", "x-model"]),
        "responseHeaders": _object(_response_headers(), ["content-type", "x-status", "x-request"]),
        "recordResponseHeaders": _object(
            _response_headers(), ["content-type", "x-status", "x-request", "x-record-of"]
        ),
        "deadLetterHeaders": _object(_dead_letter_headers(), list(_dead_letter_headers())),
    }


def _request_headers() -> _Node:
    return {
        "content-type": _text(
            f"{MSGPACK} when absent (also application/vnd.msgpack, application/x-msgpack), {JSON}, "
            "or a payload's own type. Matched without regard to case and parameters."
        ),
        "content-encoding": _coding("Of the value; it is not compressed when absent."),
        "accept": _text(
            "Content types of the answer that the caller reads, with qualities as in HTTP: "
            f"{MSGPACK} or {JSON}, or what [answer] or pass_through in model.toml makes of a "
            "payload. As if absent, */* means any."
        ),
        "accept-encoding": _text(
            f"Codings that the caller reads, of {', '.join(CODINGS)}, with qualities as in HTTP. "
            "The answer is not compressed when absent."
        ),
        "kafka_replyTopic": _text("Where to answer; must be one that the settings allow."),
        "kafka_replyPartition": _bytes("int32, big-endian; 0 or more."),
        "x-deadline-ms": _digits("Epoch milliseconds after which no answer is of use."),
        "x-timeout-ms": _digits("The same, counted from the record's timestamp."),
        "x-priority": {
            "type": "string",
            "pattern": "^-?[0-9]{1,3}$",
            "description": f"Between -{MAX_PRIORITY} and {MAX_PRIORITY}; larger: more urgent.",
        },
        "x-tenant": _text("On whose behalf."),
        "x-cancel": _text(
            "The request that this record cancels, as topic/partition/offset, or empty: the one "
            "with its kafka_correlationId. The record is no request itself."
        ),
        "x-claim": _claim("Refers to the value, which is in a store; the record has none then."),
        "x-model": _text("A model's name, or name/version, or name@label."),
        **_passed_on(),
    }


def _response_headers() -> _Node:
    return {
        "content-type": _text(
            f"As accept chooses. Otherwise as the request's; {JSON} for a raw payload, or {PNG} if "
            "[answer.mask] in model.toml answers it, or the type of what the model's own code "
            f"returns, and {JSON} for the error of a value that begins with a brace."
        ),
        "x-record-of": _text(
            "Only if the value is no response with tensors: name and version of the model, with a "
            "slash between. The value is the request's record with the outputs of the model in it, "
            "in the request's content type, or what [answer] in model.toml says: JSON, a PNG, or "
            "what the model's own code returns."
        ),
        "content-encoding": _coding("Of the value, as the request accepts it; absent for none."),
        "x-claim": _claim("Refers to the value, which is in a store; the record has none then."),
        "x-claim-expires-ms": _digits("Epoch milliseconds after which that object may be gone."),
        "x-status": {"type": "string", "enum": ["ok", *map(str, Code)]},
        "x-request": _text("The request record, as topic/partition/offset."),
        **_passed_on(),
    }


def _passed_on() -> _Node:
    return {
        "kafka_correlationId": _bytes("Opaque; echoed."),
        "traceparent": _text("W3C Trace Context."),
        "tracestate": _text("W3C Trace Context."),
    }


def _dead_letter_headers() -> _Node:
    return {
        "kafka_dlt-original-topic": _text("Of the request."),
        "kafka_dlt-original-partition": _bytes("int32, big-endian."),
        "kafka_dlt-original-offset": _bytes("int64, big-endian."),
        "kafka_dlt-original-timestamp": _bytes("int64, big-endian; epoch milliseconds."),
        "kafka_dlt-exception-fqcn": {"type": "string", "enum": [*map(str, Code)]},
        "kafka_dlt-exception-message": _text("What was expected, what came, and where."),
        "x-stage": {"type": "string", "enum": [*map(str, Stage)]},
        "x-attempt": _digits("How often it was tried."),
    }


def _object(properties: _Node, required: list[str]) -> _Node:
    node: _Node = {"$schema": DIALECT, "type": "object", "properties": properties}
    return {**node, "required": required} if required else node


def _text(description: str) -> _Node:
    return {"type": "string", "description": description}


def _coding(description: str) -> _Node:
    return {"type": "string", "enum": [*CODINGS, "identity"], "description": description}


def _claim(description: str) -> _Node:
    return {
        "type": "string",
        "pattern": "^[!-~]+ [0-9]{1,15} [0-9a-fA-F]{64}$",
        "description": f"{description} Its URL, size in bytes and SHA-256.",
    }


def _bytes(description: str) -> _Node:
    return {"type": "string", "contentEncoding": "base64", "description": f"Bytes. {description}"}


def _digits(description: str) -> _Node:
    return {"type": "string", "pattern": "^[0-9]{1,15}$", "description": description}
