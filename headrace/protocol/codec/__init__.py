"""Encode messages into records, and decode them.

- `requests`: requests from callers, in MessagePack or JSON;
- `responses`: answers to callers;
- `wire`: records between two stages in different processes; `wire_single`: those of one request;
- `views`: positions of views in a value;
- `client`: the caller's side of requests and responses;
- `json_data` and `faults`: tensors in JSON, and msgspec's errors as Headrace's.
"""

from headrace.protocol.codec.client import (
    RECORD,
    Answer,
    answer_takes_long,
    decode_response,
    encode_request,
)
from headrace.protocol.codec.json_data import bytes_to_data
from headrace.protocol.codec.requests import (
    Contradiction,
    callers_id,
    check_value,
    decode_request,
    find_label,
    plain_value,
    takes_long,
)
from headrace.protocol.codec.responses import encode_error, encode_response, encode_responses
from headrace.protocol.codec.wire import (
    ChunkLimits,
    decode_batch,
    decode_items,
    decode_results,
    divide_items,
    divide_results,
    encode_batch,
    encode_items,
    encode_results,
    has_inputs_in_source,
    refer_all_to_source,
    refer_to_source,
    restore_value,
    restore_values,
)

__all__ = [
    "RECORD",
    "Answer",
    "ChunkLimits",
    "Contradiction",
    "answer_takes_long",
    "bytes_to_data",
    "callers_id",
    "check_value",
    "decode_batch",
    "decode_items",
    "decode_request",
    "decode_response",
    "decode_results",
    "divide_items",
    "divide_results",
    "encode_batch",
    "encode_error",
    "encode_items",
    "encode_request",
    "encode_response",
    "encode_responses",
    "encode_results",
    "find_label",
    "has_inputs_in_source",
    "plain_value",
    "refer_all_to_source",
    "refer_to_source",
    "restore_value",
    "restore_values",
    "takes_long",
]
