"""Totals of questions and answers: pure, with the time passed in seconds."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.tools.demo.questions import INVALID, OK, DemoAnswer, Question

WINDOW_S = 1.0
MIN_RIGHT = {"digits": 0.9, "magika": 0.85}
"""Lowest share of right answers that can still be due to chance."""


class LatencySummary(NamedTuple):
    """Milliseconds from when a request was due until its answer was read."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class LiveStats(NamedTuple):
    """Current state: totals, and the last second's rates and times."""

    elapsed_s: float
    sent: int
    answered: int
    in_flight: int
    answers_per_s: float
    batch_mean: float
    batch_max: int
    queue_ms: float
    p50_ms: float
    p99_ms: float


class GroupResult(NamedTuple):
    """One kind of request. `rows` counts the expected results: images, files, errors."""

    group: str
    sent: int
    answered: int
    rows: int
    right: int
    latency: LatencySummary | None


class BatchResult(NamedTuple):
    """Batches of one model, as reported by its answers. `sizes` counts batches by their rows."""

    model: str
    batches: int
    mean_rows: float
    sizes: dict[int, int]


class ErrorResult(NamedTuple):
    """One kind of expected error, with an example of its message."""

    subject: str
    code: str
    message: str
    answers: int
    dead_letters: int


class Result(NamedTuple):
    """Result of the demo. `faults` lists what is wrong; empty if all is well."""

    groups: tuple[GroupResult, ...]
    batches: tuple[BatchResult, ...]
    errors: tuple[ErrorResult, ...]
    faults: tuple[str, ...]


class _GroupCounts:
    def __init__(self, model: str) -> None:
        self.model = model
        self.sent = 0
        self.rows = 0
        self.right = 0
        self.latencies_ms = array("d")


class _Recent(NamedTuple):
    at_s: float
    latency_ms: float
    queue_ms: float
    batch_size: int


class Tally:
    """Counts questions, answers and dead letters.

    Attributes:
        surplus_answers: answers besides one to each question.
        surplus_dead_letters: dead letters of questions that must not have one.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _GroupCounts] = {}
        self._recent: deque[_Recent] = deque()
        self._rows_by_size: dict[str, Counter[int]] = {}
        self._errors: dict[str, ErrorResult] = {}
        self._missing_dead_letters = 0
        self._sent = 0
        self._answered = 0
        self.surplus_answers = 0
        self.surplus_dead_letters = 0
        self._unexpected: list[str] = []

    @property
    def in_flight(self) -> int:
        """Number of questions without an answer."""
        return self._sent - self._answered

    def send(self, question: Question) -> None:
        """Count a question that is about to be sent."""
        self._sent += 1
        self._groups.setdefault(question.group, _GroupCounts(question.model)).sent += 1
        self._missing_dead_letters += question.dead_letter

    def answer(self, question: Question, answer: DemoAnswer, due_s: float, now_s: float) -> None:
        """Count an answer that was read; its latency counts from the question's due time."""
        latency_ms = (now_s - due_s) * 1000
        self._answered += 1
        group = self._groups[question.group]
        group.latencies_ms.append(latency_ms)
        group.rows += len(question.labels) or 1
        if question.code:
            self._count_error(group, question, answer)
        elif answer.status != OK:
            self._unexpected.append(f"{question.subject}: {answer.status}: {answer.message}")
        else:
            self._count_labels(group, question, answer)
            queue_ms = answer.queue_us / 1000
            self._recent.append(_Recent(now_s, latency_ms, queue_ms, answer.batch_size))

    def dead_letter(self, question: Question, code: str) -> None:
        """Count a dead letter that was read; `code` is its `kafka_dlt-exception-fqcn`."""
        self._missing_dead_letters -= 1
        if question.code != code:
            self._unexpected.append(f"{question.subject}: a dead letter with code {code}")
            return
        seen = self._error(question)
        self._errors[question.subject] = seen._replace(dead_letters=seen.dead_letters + 1)

    def live_stats(self, now_s: float, started_s: float) -> LiveStats:
        """Return the state at `now_s`, and forget data older than the window."""
        recent = self._recent
        while recent and recent[0].at_s < now_s - WINDOW_S:
            recent.popleft()
        elapsed_s = now_s - started_s
        sizes = [each.batch_size for each in recent]
        latencies_ms = [each.latency_ms for each in recent] or [0.0]
        return LiveStats(
            elapsed_s=elapsed_s,
            sent=self._sent,
            answered=self._answered,
            in_flight=self.in_flight,
            answers_per_s=len(recent) / max(min(elapsed_s, WINDOW_S), 1e-3),
            batch_mean=sum(sizes) / max(len(sizes), 1),
            batch_max=max(sizes, default=0),
            queue_ms=sum(each.queue_ms for each in recent) / max(len(recent), 1),
            p50_ms=float(np.quantile(latencies_ms, 0.5)),
            p99_ms=float(np.quantile(latencies_ms, 0.99)),
        )

    def result(self) -> Result:
        """Return the result."""
        groups = tuple(
            GroupResult(
                name,
                group.sent,
                len(group.latencies_ms),
                group.rows,
                group.right,
                _latency(group.latencies_ms),
            )
            for name, group in self._groups.items()
        )
        batches = tuple(_batches(model, rows) for model, rows in self._rows_by_size.items())
        errors = tuple(self._errors.values())
        return Result(groups, batches, errors, tuple(self._faults()))

    def _count_error(self, group: _GroupCounts, question: Question, answer: DemoAnswer) -> None:
        if answer.status != question.code:
            self._unexpected.append(
                f"{question.subject}: expected {question.code}, got {answer.status}"
            )
            return
        group.right += 1
        seen = self._error(question)
        self._errors[question.subject] = seen._replace(
            answers=seen.answers + 1, message=answer.message
        )

    def _error(self, question: Question) -> ErrorResult:
        fresh = ErrorResult(question.subject, question.code, "", 0, 0)
        return self._errors.get(question.subject, fresh)

    def _count_labels(self, group: _GroupCounts, question: Question, answer: DemoAnswer) -> None:
        if len(answer.labels) != len(question.labels):
            self._unexpected.append(
                f"{question.subject}: expected {len(question.labels)} rows, "
                f"got {len(answer.labels)}"
            )
            return
        pairs = zip(answer.labels, question.labels, strict=True)
        group.right += sum(given == true for given, true in pairs)
        sizes = self._rows_by_size.setdefault(question.model, Counter())
        sizes[answer.batch_size] += len(question.labels)

    def _faults(self) -> list[str]:
        faults = list(self._unexpected)
        counts = {
            "requests without an answer": self.in_flight,
            "dead letters that are missing": self._missing_dead_letters,
            "answers besides one to each request": self.surplus_answers,
            "dead letters of requests that must not have one": self.surplus_dead_letters,
        }
        faults += [f"{name}: {count}" for name, count in counts.items() if count]
        for name, group in self._groups.items():
            least = MIN_RIGHT[group.model] if name != INVALID else 1.0
            if group.rows and group.right < least * group.rows:
                faults.append(f"{name}: only {group.right} of {group.rows} right")
        return faults


def _latency(latencies_ms: Sequence[float]) -> LatencySummary | None:
    if not latencies_ms:
        return None
    return LatencySummary(
        *(float(part) for part in np.quantile(latencies_ms, (0.5, 0.9, 0.99, 1.0)))
    )


def _batches(model: str, rows_by_size: Counter[int]) -> BatchResult:
    """Count batches: one of n rows appears as n rows whose answers report it, so divide by n."""
    sizes = {size: round(rows / size) for size, rows in sorted(rows_by_size.items())}
    batches = sum(sizes.values())
    return BatchResult(model, batches, rows_by_size.total() / max(batches, 1), sizes)
