"""Results of a load: latencies, outcomes, and the timings reported by answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.client.rpc import last_header
from headrace.log.port import Record
from headrace.protocol.headers import HeaderName
from headrace.tools.bodies import BodyReader
from headrace.tools.histogram import Histogram


class _Timings(msgspec.Struct):
    """Timings as written by `headrace.protocol.codec.responses.encode_response`."""

    queue_us: int = 0
    batch_us: int = 0
    compute_us: int = 0
    batch_size: int = 0


class _Timed(msgspec.Struct):
    parameters: _Timings = msgspec.field(default_factory=_Timings)


_answers = BodyReader(_Timed)


class LoadResult:
    """Filled while a load runs.

    Attributes:
        latency: from a request's due time until its answer was read, in seconds.
        lateness: delay of sending after the due time, in seconds; it is part of the latency, since
            a caller that has to queue waits as well.
        statuses: answers by `x-status`.
        batch_sizes: decoded answers with timings, by the rows of their batch.
        duplicates: repeated answers.
        sent, answered: numbers of requests.
        counted, seconds: the answers in `latency`, and the time from the first of them being due
            until the last of them was read.
    """

    def __init__(self) -> None:
        self.latency = Histogram()
        self.lateness = Histogram()
        self.queue = Histogram()
        self.batch = Histogram()
        self.compute = Histogram()
        self.outside = Histogram()
        self.statuses: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.duplicates = 0
        self.sent = 0
        self.answered = 0
        self.counted = 0
        self.seconds = 0.0

    @property
    def unanswered(self) -> int:
        """Number of requests without an answer in time."""
        return self.sent - self.answered

    @property
    def per_s(self) -> float:
        """Return the answers per second."""
        return self.counted / self.seconds if self.seconds else 0.0

    @property
    def rows_per_batch(self) -> float:
        """Return the mean rows per run: each batch counts once, whatever its size."""
        batches = sum(count / size for size, count in self.batch_sizes.items())
        return sum(self.batch_sizes.values()) / batches if batches else 0.0

    def decode_timings(self, answers: Sequence[tuple[Record, float]]) -> None:
        """Decode the timings of a few answers, each with its latency in seconds."""
        found: list[tuple[_Timings, float]] = []
        for record, latency_s in answers:
            if last_header(record.headers, HeaderName.STATUS) != b"ok":
                continue
            # An answer that cannot be read is counted; a consumer that reads it gets the error.
            # One in the format of the request's payload has no timings.
            if (answer := _answers.read(record)) is not None and answer.parameters.batch_size:
                found.append((answer.parameters, latency_s))
        for timings, _ in found:
            self.batch_sizes[timings.batch_size] += 1
        self.queue.add([each.queue_us / 1e6 for each, _ in found])
        self.batch.add([each.batch_us / 1e6 for each, _ in found])
        self.compute.add([each.compute_us / 1e6 for each, _ in found])
        self.outside.add(
            [
                max(0.0, latency_s - (each.queue_us + each.batch_us + each.compute_us) / 1e6)
                for each, latency_s in found
            ]
        )
