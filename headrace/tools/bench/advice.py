"""Rules that find the bottleneck in the results of a load test; pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BUSY = 0.7
"""A model that computes for this share of the time, or a core with this load, is
nearly saturated.
"""

KEPT_UP = 0.95
MUCH_COPIED_BYTES_PER_S = 400e6
FAILED_SHARE = 0.01


class Facts(NamedTuple):
    """Results of a load test. Times are means, in seconds.

    Attributes:
        offered_per_s: None if the load saturated the pipeline.
        computing: share of the time in which the model computed, over all its instances.
        rows_per_batch: rows per run; 0 if no answer has timings.
        max_batch_size: of the model; 0 if unknown.
        cores: number of cores that Headrace's processes kept busy; None if unknown.
    """

    offered_per_s: float | None
    answered_per_s: float
    failed_share: float
    queue_s: float
    batch_s: float
    compute_s: float
    outside_s: float
    rows_per_batch: float
    computing: float
    max_batch_size: int
    request_bytes: int
    as_json: bool
    cores: float | None = None


class Advice(NamedTuple):
    """A bottleneck as one word, and a sentence on what to do about it."""

    binds: str
    sentence: str


_UNTIMED = Advice(
    "unknown",
    "The answers have no timings, as those in a payload's own format have none: what binds is not "
    "known. `headrace top` shows the runs and their times.",
)


_UNANSWERED = Advice(
    "unknown",
    "No answer came in the measured time. `headrace doctor` finds faults in the set-up; "
    "/health/ready of each process says whether it reads requests.",
)


def advise(facts: Facts) -> list[Advice]:
    """Return the bottleneck first, and then other observations."""
    if not facts.answered_per_s:
        return [_UNANSWERED]
    found = list(_faults(facts))
    if facts.failed_share < 1 and not facts.rows_per_batch:
        found.append(_UNTIMED)
        return found
    if facts.offered_per_s is not None and facts.answered_per_s >= KEPT_UP * facts.offered_per_s:
        found.append(_unbound(facts))
    else:
        found.append(_binding(facts))
    if facts.as_json:
        found.append(
            Advice("json", "Requests are in JSON, whose numbers are text: MessagePack is cheaper.")
        )
    return found


def _faults(facts: Facts) -> Iterator[Advice]:
    if facts.failed_share > FAILED_SHARE:
        yield Advice(
            "errors",
            f"{facts.failed_share:.0%} of the answers are errors, which cost less than answers: "
            "look at those first.",
        )


def _unbound(facts: Facts) -> Advice:
    parts = {
        "waiting for a batch": facts.queue_s,
        "computing": facts.compute_s,
        "the rest of the batch": facts.batch_s,
        "Kafka and decoding": facts.outside_s,
    }
    largest = max(parts, key=parts.__getitem__)
    return Advice(
        "nothing",
        f"Nothing binds at this rate. Most of the time of a request goes to {largest}; "
        "--saturate finds what there is room for.",
    )


def _binding(facts: Facts) -> Advice:
    moved = facts.answered_per_s * facts.request_bytes
    if facts.computing >= BUSY:
        return Advice("compute", _about_computing(facts))
    if moved >= MUCH_COPIED_BYTES_PER_S:
        return Advice(
            "copying",
            f"{moved / 1e6:,.0f} MB of requests a second are moved: send UINT8 or FP16 and widen "
            "them in the model, or run ingest in processes of its own.",
        )
    if facts.cores is None or facts.cores >= BUSY:
        return Advice(
            "decoding",
            f"The model computes {facts.computing:.0%} of the time; the rest is decoding, batching "
            "and encoding in Python, on one core for each process: run more processes in the "
            "group, up to one for each partition, or put several rows into a request.",
        )
    return Advice(
        "broker",
        f"Headrace keeps {facts.cores:.1f} cores busy and the model computes "
        f"{facts.computing:.0%} of the time: they wait for the broker, or for the load itself. "
        "Look at its disks, its network and min.insync.replicas; more partitions overlap more.",
    )


def _about_computing(facts: Facts) -> str:
    begun = f"The model computes {facts.computing:.0%} of the time"
    limit = facts.max_batch_size
    if limit and facts.rows_per_batch >= 0.9 * limit:
        return (
            f"{begun}, in batches of {facts.rows_per_batch:.0f}, which is their limit: try a "
            "larger max_batch_size; after that it takes a faster device, or more of them."
        )
    return (
        f"{begun}, in batches of {facts.rows_per_batch:.1f}: it takes a faster device, or more "
        "of them; a larger batch only if more requests wait."
    )
