"""Where the time of answered requests went: noted a chunk at a time, counted many at a time.

To note a request costs three integers. They are sorted into buckets by NumPy once a few thousand
have come together, or when somebody wants to see the histograms.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from headrace.messages import Request
from headrace.telemetry.bulk import BulkHistogram

MAX_NOTED = 4096

_timestamp_ms = attrgetter("timestamp_ms")
_ingested_us = attrgetter("ingested_us")
_formed_us = attrgetter("formed_us")


class _Noted:
    """Four columns; a row is a request."""

    __slots__ = ("answered_us", "formed_us", "ingested_us", "timestamp_ms")

    def __init__(self) -> None:
        self.timestamp_ms = array("q")
        self.ingested_us = array("q")
        self.formed_us = array("q")
        self.answered_us = array("q")


class RequestTimes:
    """Fills three histograms, each with the label `model`.

    Args:
        total: from the record's timestamp until the answer.
        in_log: from the record's timestamp until ingest.
        queued: from ingest until the batch closed, for those that came into one.
    """

    def __init__(self, total: BulkHistogram, in_log: BulkHistogram, queued: BulkHistogram) -> None:
        self._total = total
        self._in_log = in_log
        self._queued = queued
        self._noted: dict[str, _Noted] = {}
        for histogram in (total, in_log, queued):
            histogram.before_reading(self.count)

    def note(self, model: str, requests: Sequence[Request], now_us: int) -> None:
        """These were answered now."""
        noted = self._noted.get(model)
        if noted is None:
            noted = self._noted[model] = _Noted()
        noted.timestamp_ms.extend(map(_timestamp_ms, requests))
        noted.ingested_us.extend(map(_ingested_us, requests))
        noted.formed_us.extend(map(_formed_us, requests))
        noted.answered_us.extend((now_us,) * len(requests))
        if len(noted.answered_us) >= MAX_NOTED:
            self.count()

    def count(self) -> None:
        """Move what was noted into the histograms."""
        pending, self._noted = self._noted, {}
        for model, noted in pending.items():
            labels = (model,)
            written_us = _column(noted.timestamp_ms) * 1000
            ingested_us, formed_us = _column(noted.ingested_us), _column(noted.formed_us)
            self._total.observe_all(labels, _seconds(_column(noted.answered_us) - written_us))
            self._in_log.observe_all(labels, _seconds(ingested_us - written_us))
            formed = formed_us > 0
            self._queued.observe_all(labels, _seconds((formed_us - ingested_us)[formed]))


def _column(numbers: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(numbers, np.int64)


def _seconds(microseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    """The clocks of machines differ: no time is taken for less than none."""
    return np.maximum(microseconds, 0) / 1e6
