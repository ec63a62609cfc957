"""Where the time of answered requests went: recorded by chunk, and counted in bulk.

Recording a request stores three integers. NumPy sorts them into buckets once there are a few
thousand, or when the histograms are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.protocol.messages import Request
from headrace.telemetry.bulk import BatchedHistogram


class _Noted(NamedTuple):
    """Columns; a row of the first three is a request.

    Attributes:
        answered_us: the time at which each group of them was answered.
        slack_us: the time left until the deadline, for requests that have one.
    """

    timestamp_ms: list[int]
    ingested_us: list[int]
    formed_us: list[int]
    answered_us: list[tuple[int, int]]
    slack_us: list[int]


class RequestTimes:
    """Fills four histograms, each with the label `model`.

    Args:
        total: from the record's timestamp until the answer.
        in_log: from the record's timestamp until ingest.
        queued: from ingest until the batch closed, for requests that joined one.
        slack: from the answer until the deadline, for requests that have one.
        max_buffered: after this many requests of a model, their times are counted.
    """

    def __init__(
        self,
        total: BatchedHistogram,
        in_log: BatchedHistogram,
        queued: BatchedHistogram,
        slack: BatchedHistogram,
        max_buffered: int,
    ) -> None:
        self._total = total
        self._in_log = in_log
        self._queued = queued
        self._slack = slack
        self._max_buffered = max_buffered
        self._noted: dict[str, _Noted] = {}
        for histogram in (total, in_log, queued, slack):
            histogram.before_reading(self.count)

    def note(self, model: str, requests: Sequence[Request], now_us: int) -> None:
        """Record requests that were answered now."""
        noted = self._noted.get(model)
        if noted is None:
            noted = self._noted[model] = _Noted([], [], [], [], [])
        timestamps_ms, ingested_us, formed_us, answered_us, slack_us = noted
        timestamps_ms += [request.timestamp_ms for request in requests]
        ingested_us += [request.ingested_us for request in requests]
        formed_us += [request.formed_us for request in requests]
        answered_us.append((now_us, len(requests)))
        slack_us += [
            deadline_ms * 1000 - now_us
            for request in requests
            if (deadline_ms := request.envelope.deadline_ms)
        ]
        if len(timestamps_ms) >= self._max_buffered:
            self.count()

    def count(self) -> None:
        """Move the recorded times into the histograms."""
        pending, self._noted = self._noted, {}
        for model, noted in pending.items():
            labels = (model,)
            written_us = _column(noted.timestamp_ms) * 1000
            ingested_us, formed_us = _column(noted.ingested_us), _column(noted.formed_us)
            moments_us, counts = np.array(noted.answered_us, np.int64).T
            self._total.observe_all(labels, _seconds(np.repeat(moments_us, counts) - written_us))
            self._in_log.observe_all(labels, _seconds(ingested_us - written_us))
            formed = formed_us > 0
            self._queued.observe_all(labels, _seconds((formed_us - ingested_us)[formed]))
            self._slack.observe_all(labels, _seconds(_column(noted.slack_us)))


def _column(numbers: list[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, np.int64, len(numbers))


def _seconds(microseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert to seconds; negative times count as 0, since the clocks of machines differ."""
    return np.maximum(microseconds, 0) / 1e6
