"""Encode messages into records, and decode them.

- `requests`: requests from callers, in MessagePack or JSON;
- `responses`: answers to callers;
- `wire`: records between two stages in different processes;
- `client`: the caller's side of requests and responses;
- `json_data` and `faults`: tensors in JSON, and msgspec's errors as Headrace's.
"""

from headrace.protocol.codec.client import Answer, decode_response, encode_request
from headrace.protocol.codec.json_data import bytes_to_data
from headrace.protocol.codec.requests import callers_id, check_value, decode_request, names_version
from headrace.protocol.codec.responses import encode_error, encode_response, encode_responses
from headrace.protocol.codec.wire import (
    decode_batch,
    decode_item,
    decode_result,
    encode_batch,
    encode_item,
    encode_result,
)

__all__ = [
    "Answer",
    "bytes_to_data",
    "callers_id",
    "check_value",
    "decode_batch",
    "decode_item",
    "decode_request",
    "decode_response",
    "decode_result",
    "encode_batch",
    "encode_error",
    "encode_item",
    "encode_request",
    "encode_response",
    "encode_responses",
    "encode_result",
    "names_version",
]
