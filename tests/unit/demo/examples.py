"""Questions and answers to count."""

from __future__ import annotations

from headrace.log.port import NewRecord
from headrace.tools.demo.answers import OK, Answer
from headrace.tools.demo.questions import DIGITS_MSGPACK, WRONG, Question

RECORD = NewRecord(None, b"")


def question(number: int, *labels: str) -> Question:
    """Images with these labels."""
    subject = f"{len(labels)} images"
    return Question(b"%d" % number, DIGITS_MSGPACK, "digits", subject, RECORD, labels or ("7",))


def wrong_question(number: int, code: str) -> Question:
    """A request that must get this error."""
    return Question(b"%d" % number, WRONG, "digits", "a broken one", RECORD, code=code)


def answer(
    number: int, *labels: str, status: str = OK, batch_size: int = 1, queue_us: int = 0
) -> Answer:
    """An answer with these labels, or an error."""
    return Answer(
        b"%d" % number,
        f"headrace.requests/0/{number}",
        status,
        message="" if status == OK else "what was wrong",
        labels=labels or ("7",),
        queue_us=queue_us,
        batch_us=200,
        compute_us=300,
        batch_size=batch_size,
    )
