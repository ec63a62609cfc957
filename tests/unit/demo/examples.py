"""Questions and answers to count."""

from __future__ import annotations

from headrace.log.port import NewRecord
from headrace.tools.demo.questions import DIGITS_MSGPACK, INVALID, OK, DemoAnswer, Question
from headrace.tools.demo.tally import Tally

RECORD = NewRecord(None, b"")


def question(*labels: str) -> Question:
    """Images with these labels."""
    subject = f"{len(labels)} images"
    return Question(DIGITS_MSGPACK, "digits", subject, RECORD, labels or ("7",))


def wrong_question(code: str) -> Question:
    """A request that must get this error."""
    return Question(INVALID, "digits", "a broken one", RECORD, code=code)


def answer(*labels: str, status: str = OK, batch_size: int = 1, queue_us: int = 0) -> DemoAnswer:
    """An answer with these labels, or an error."""
    return DemoAnswer(
        status,
        message="" if status == OK else "what was wrong",
        labels=labels or ("7",),
        queue_us=queue_us,
        batch_size=batch_size,
    )


def count(
    tally: Tally, question: Question, answer: DemoAnswer, latency_s: float = 0.1, at_s: float = 0.0
) -> None:
    """Count a question that is due at `at_s`, and its answer."""
    tally.send(question)
    tally.answer(question, answer, at_s, at_s + latency_s)
