"""Where a process is in its life, for whoever starts, stops and routes to it."""

from __future__ import annotations

from enum import StrEnum

from headrace.errors import Fatal


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
    """The phase of this process, and why it is in it.

    Liveness and readiness are apart: a process that starts or drains is not ready, but killing
    it would make things worse.
    """

    def __init__(self) -> None:
        self._phase = Phase.STARTING
        self._reason = ""

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def reason(self) -> str:
        """Why it is in this phase, or what it waits for; may be empty."""
        return self._reason

    @property
    def live(self) -> bool:
        """Whether the process is of use: it need not be restarted."""
        return self._phase is not Phase.STOPPED

    @property
    def ready(self) -> bool:
        """Whether requests are read and answered now."""
        return self._phase is Phase.READY

    def explain(self, reason: str) -> None:
        """Say what the present phase is waiting for."""
        self._reason = reason

    def enter(self, phase: Phase, reason: str = "") -> None:
        """Go on to a later phase; entering the present one again changes the reason only.

        Raises:
            Fatal: there is no way from the present phase to that one.
        """
        if phase is not self._phase and phase not in _NEXT[self._phase]:
            raise Fatal(f"health: cannot go from {self._phase} to {phase}")
        self._phase = phase
        self._reason = reason
