"""Errors as they end a gRPC call."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from google.rpc.status_pb2 import Status
from msgspec.structs import replace

from headrace.errors import Code
from headrace.gateway.gateway import ErrorAnswer
from headrace.gateway.grpc_calls import DETAILS, refusal_of_error
from headrace.tuning import TUNING

LIMIT = 30
SHORT = replace(TUNING.gateway, error_characters=LIMIT)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a" * 31, "a" * 30),
        ("a" * 30, "a" * 30),
        ("é" * 31, "é" * 5),
        ("a漢" * 31, "a漢" * 3),
        ("\U0001f600" * 31, "\U0001f600" * 2),
        ("%" * 31, "%" * 10),
        ("\n" * 31, "\n" * 10),
    ],
    ids=["one more", "as long", "two bytes", "mixed", "four bytes", "percent", "control"],
)
def test_text_of_error_has_limit_as_grpc_encodes_it(text: str, kept: str) -> None:
    """Both the header and the details have the same beginning of it."""
    refusal = refusal_of_error(ErrorAnswer(Code.UNKNOWN_MODEL, text, retriable=False), SHORT)
    details = Status.FromString(dict(refusal.metadata)[DETAILS])

    assert (refusal.message, details.message) == (kept, kept)
    assert len(quote(kept, safe="")) <= LIMIT
