"""Enter runs through the gate, marked or alone after a crash.

See `headrace.crash_isolation.run_gate`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from headrace.crash_isolation.isolation import alone_of, is_isolated, places_of
from headrace.crash_isolation.run_gate import RunGate
from headrace.protocol.messages import Batch, Request
from headrace.services.executor.prefetch import PreparedBatch

Outcome: TypeAlias = tuple[list[Request], list[Batch]]
"""Finished requests, and batches still to run."""


class Isolating(Protocol):
    """The part of `headrace.consumer.quarantine.QuarantineGate` that is needed here."""

    @property
    def gate(self) -> RunGate:
        """Gate that every run enters."""
        ...

    def has_run(self, requests: Sequence[Request]) -> None:
        """Clear isolated requests of suspicion once they have ended."""
        ...


class NotIsolating:
    """For an executor whose requests are never accused."""

    def __init__(self) -> None:
        self.gate = RunGate()

    def has_run(self, requests: Sequence[Request]) -> None:
        """Do nothing."""


async def enter_and_run(
    isolating: Isolating, taken: PreparedBatch, run: Callable[[], Awaitable[Outcome]]
) -> Outcome:
    """Enter the gate, run, and leave it; a run that is cancelled or raises does not leave it."""
    gate, requests = isolating.gate, taken.batch.requests
    if is_isolated(requests[0]):
        await gate.enter_alone(alone_of(requests[0]))
        done = await run()
        gate.leave_alone()
        # Clear it before any other run enters: there is no await since it left the gate.
        isolating.has_run(done[0])
        return done
    entry = taken.entry
    if entry is None:
        entry = await gate.enter(places_of(requests)) if gate.is_marking else gate.begin()
    done = await run()
    # Not in a `finally`: after a failed run the next one would seem to have run alone.
    gate.leave(entry)
    return done
