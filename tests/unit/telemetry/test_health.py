"""The phases of a process."""

from __future__ import annotations

import pytest

from headrace.errors import Fatal
from headrace.telemetry.health import Health, Phase


@pytest.mark.parametrize(
    ("phases", "live", "ready"),
    [
        ([], True, False),
        ([Phase.READY], True, True),
        ([Phase.READY, Phase.DRAINING], True, False),
        ([Phase.READY, Phase.DRAINING, Phase.STOPPED], False, False),
    ],
    ids=["starting", "ready", "draining", "stopped"],
)
def test_liveness_is_apart_from_readiness(phases: list[Phase], live: bool, ready: bool) -> None:
    """A process that starts or drains is alive, but takes no traffic."""
    health = Health()
    for phase in phases:
        health.enter(phase)
    assert (health.live, health.ready) == (live, ready)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([Phase.READY, Phase.STARTING], "cannot go from ready to starting"),
        ([Phase.DRAINING, Phase.READY], "cannot go from draining to ready"),
        ([Phase.STOPPED, Phase.DRAINING], "cannot go from stopped to draining"),
    ],
)
def test_draining_process_never_becomes_ready_again(phases: list[Phase], message: str) -> None:
    """A process that drains never becomes ready again."""
    health = Health()
    health.enter(phases[0])
    with pytest.raises(Fatal, match=message):
        health.enter(phases[1])


def test_new_phase_replaces_reason() -> None:
    """A new phase has a new reason, and the present one can be explained."""
    health = Health()
    health.explain("loading models")
    assert health.reason == "loading models"
    health.enter(Phase.READY)
    assert health.reason == ""


def test_phase_can_be_entered_twice() -> None:
    """A second signal to drain is no fault."""
    health = Health()
    health.enter(Phase.DRAINING, "SIGTERM")
    health.enter(Phase.DRAINING, "SIGINT")
    assert (health.phase, health.reason) == (Phase.DRAINING, "SIGINT")
