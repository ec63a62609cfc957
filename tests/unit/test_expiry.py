"""The failure of a request whose deadline has passed."""

from __future__ import annotations

from headrace.delivery.failures import deadline_passed
from headrace.errors import Code
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.messages import Envelope, Request

DEADLINE_MS = 1_763_906_400_000


def _request(deadline_ms: int) -> Request:
    envelope = Envelope(deadline_ms=deadline_ms)
    return Request(NULL_ACK, 0, 0, -1, 0, None, b"", [], envelope)


def test_expired_request_says_by_how_much_and_at_which_stage() -> None:
    """The text has what happened, what was expected, and what came instead."""
    failure = deadline_passed(_request(DEADLINE_MS), (DEADLINE_MS + 12) * 1000, "batcher")
    assert failure is not None
    assert failure.code is Code.DEADLINE_EXCEEDED
    assert failure.message == (
        "deadline exceeded by 12 ms at the batcher stage: expected an answer by "
        "1763906400000 (epoch milliseconds)"
    )


def test_request_before_its_deadline_has_no_failure() -> None:
    """The deadline itself is the first moment that is too late."""
    request = _request(DEADLINE_MS)
    assert deadline_passed(request, DEADLINE_MS * 1000 - 1, "batcher") is None
    assert deadline_passed(request, DEADLINE_MS * 1000, "batcher") is not None


def test_request_without_deadline_never_expires() -> None:
    """A deadline of zero stands for none."""
    assert deadline_passed(_request(0), DEADLINE_MS * 1000, "batcher") is None
