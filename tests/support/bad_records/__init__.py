"""Records that cannot be served, each with the answer that it must get.

They are for a model `digits`, version 1, with the input `pixels` FP32 [-1, 64] and the outputs
`probabilities` FP32 [-1, 10] and `label` INT64 [-1], under a limit of `MAX_REQUEST_BYTES`.
Values in MessagePack are packed by the `msgpack` library, or byte by byte, never by the code
under test.
"""

from tests.support.bad_records.building import MAX_REQUEST_BYTES, BadRecord
from tests.support.bad_records.fields import fields
from tests.support.bad_records.headers import headers
from tests.support.bad_records.malformed import malformed_json, malformed_msgpack, too_large
from tests.support.bad_records.tensors import json_tensors, tensors

__all__ = ["BAD_RECORDS", "MAX_REQUEST_BYTES", "BadRecord"]

BAD_RECORDS: tuple[BadRecord, ...] = (
    *malformed_msgpack(),
    *malformed_json(),
    *too_large(),
    *fields(),
    *tensors(),
    *json_tensors(),
    *headers(),
)
