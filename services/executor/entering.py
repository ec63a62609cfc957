"""How runs begin after unclean ends: marked, or alone (see `headrace.crash_isolation.run_gate`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from headrace.crash_isolation.isolation import alone_of, is_isolated, places_of
from headrace.crash_isolation.run_gate import RunGate
from headrace.protocol.messages import Batch, Request
from headrace.services.executor.intake import PreparedBatch

Outcome: TypeAlias = tuple[list[Request], list[Batch]]
"""Requests that are done, and what is to be run apart."""


class Isolating(Protocol):
    """The part of `headrace.consumer.quarantine.QuarantineGate` that is needed here."""

    @property
    def gate(self) -> RunGate:
        """Where runs begin."""
        ...

    def has_run(self, requests: Sequence[Request]) -> None:
        """Acquit requests that were to run alone and have come to their end."""
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
    """Run requests when they may; only a run that ends leaves the gate (see there)."""
    gate, requests = isolating.gate, taken.batch.requests
    if is_isolated(requests[0]):
        await gate.enter_alone(alone_of(requests[0]))
        done = await run()
        gate.leave_alone()
        # It has survived before anything else enters: nothing was awaited since it left.
        isolating.has_run(done[0])
        return done
    entry = taken.entry
    if entry is None:
        entry = await gate.enter(places_of(requests)) if gate.is_marking else gate.begin()
    done = await run()
    gate.leave(entry)
    return done
