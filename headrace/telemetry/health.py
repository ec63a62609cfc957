"""The phase of a process, for the tools that start and stop it and route requests to it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from headrace.errors import Fatal

Check: TypeAlias = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""


class Phase(StrEnum):
    """The phases of a process, in their order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT = {
    Phase.STARTING: (Phase.READY, Phase.DRAINING, Phase.STOPPED),
    Phase.READY: (Phase.DRAINING, Phase.STOPPED),
    Phase.DRAINING: (Phase.STOPPED,),
    Phase.STOPPED: (),
}


class Health:
    """The phase of this process, its reason, and whether the process makes progress.

    Liveness and readiness are separate: a process that starts or drains, or whose broker is
    unavailable, is not ready, but killing it would make things worse. All methods are safe to call
    from any thread.
    """

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._reason = ""
        self._live_checks: list[Check] = []
        self._ready_checks: list[Check] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def reason(self) -> str:
        """The reason for this phase, or the condition that the process waits for; may be empty."""
        return self._reason

    @property
    def live(self) -> bool:
        """True if the process works and need not be restarted."""
        return not self.live_fault()

    @property
    def ready(self) -> bool:
        """True if requests are read and answered now."""
        return self._phase is Phase.READY and not self.ready_fault()

    def live_fault(self) -> str:
        """Return why the process is not live; empty if it is."""
        if self._phase is Phase.STOPPED:
            return self._reason or "stopped"
        return next(filter(None, (check() for check in self._live_checks)), "")

    def ready_fault(self) -> str:
        """Return why the process is not ready; empty if it is, or if a phase has no reason."""
        if self._phase is not Phase.READY:
            return self._reason
        checks = (*self._live_checks, *self._ready_checks)
        return next(filter(None, (check() for check in checks)), "")

    def watch_live(self, check: Check) -> None:
        """Add a check; while it finds a fault the process is neither live nor ready."""
        self._live_checks.append(check)

    def watch_ready(self, check: Check) -> None:
        """Add a check; while it finds a fault the process is not ready."""
        self._ready_checks.append(check)

    def explain(self, reason: str) -> None:
        """Set what the current phase is waiting for."""
        self._reason = reason

    def enter(self, phase: Phase, reason: str = "") -> None:
        """Enter a later phase; entering the current one again changes the reason only.

        Raises:
            Fatal: there is no transition from the current phase to that one.
        """
        if phase is not self._phase and phase not in _NEXT[self._phase]:
            raise Fatal(f"health: cannot go from {self._phase} to {phase}")
        self._phase = phase
        self._reason = reason
