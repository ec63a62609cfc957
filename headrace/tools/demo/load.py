"""Load plan of the demo: an open loop, in which no request waits for an answer.

Requests come at random times (a Poisson process for each kind), plus bursts, so that batches of
many sizes form.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, cycle, takewhile
from random import Random
from typing import NamedTuple

from headrace.tools.demo.questions import MakeQuestion, Question, Questions

DIGITS_MSGPACK_PER_S = 200.0
DIGITS_JSON_PER_S = 100.0
MAX_FILES_PER_S = 40.0
FILES_SHARE = 0.35
"""Share of the file model's capacity on this machine; with the bursts, half of it is used."""

BURST_EVERY_S = 0.5
DIGITS_BURSTS = (8, 16, 32, 64)
FILE_BURSTS = (4, 8, 16)
FILE_BURSTS_SHARE = 0.15
MAX_ROWS = 4
WRONG_AT = (0.2, 0.5, 0.8)
"""Positions of the deliberately wrong requests, as shares of the whole time."""


class Due(NamedTuple):
    """Questions to send `at_s` seconds after the start."""

    at_s: float
    questions: tuple[Question, ...]


_Moment = tuple[float, Callable[[], Iterable[Question]]]


def plan_load(
    questions: Questions, seconds: float, seed: int, *, file_capacity_per_s: float
) -> Iterator[Due]:
    """Yield all questions in order of time; they are generated lazily.

    `file_capacity_per_s` is the number of files that the model can classify per second here; with
    0, none are sent. An open loop above that capacity would only show a growing queue.
    """
    random = Random(seed)  # noqa: S311 - arrivals, not secrets

    def some_digits() -> Question:
        return questions.digits_msgpack(random.randint(1, MAX_ROWS))

    streams = [
        _arrivals(some_digits, DIGITS_MSGPACK_PER_S, seconds, random),
        _arrivals(questions.digits_json, DIGITS_JSON_PER_S, seconds, random),
        _bursts(questions.digits_msgpack, DIGITS_BURSTS, BURST_EVERY_S, seconds),
        iter([(part * seconds, questions.wrong) for part in WRONG_AT]),
    ]
    files_per_s = min(FILES_SHARE * file_capacity_per_s, MAX_FILES_PER_S)
    if files_per_s:
        streams.append(_arrivals(questions.file, files_per_s, seconds, random))
        burst_files_per_s = files_per_s * FILE_BURSTS_SHARE / FILES_SHARE
        every_s = sum(FILE_BURSTS) / len(FILE_BURSTS) / burst_files_per_s
        streams.append(_bursts(questions.file, FILE_BURSTS, every_s, seconds))
    for at_s, make in heapq.merge(*streams, key=lambda moment: moment[0]):
        yield Due(at_s, tuple(make()))


def _arrivals(
    make: MakeQuestion, per_s: float, seconds: float, random: Random
) -> Iterator[_Moment]:
    gaps = iter(lambda: random.expovariate(per_s), None)
    for at_s in takewhile(lambda at_s: at_s < seconds, accumulate(gaps)):
        yield at_s, partial(_many, make, 1)


def _bursts(
    make: MakeQuestion, sizes: tuple[int, ...], every_s: float, seconds: float
) -> Iterator[_Moment]:
    at_s = every_s
    for size in cycle(sizes):
        if at_s >= seconds:
            return
        yield at_s, partial(_many, make, size)
        at_s += every_s


def _many(make: MakeQuestion, size: int) -> tuple[Question, ...]:
    return tuple(make() for _ in range(size))
