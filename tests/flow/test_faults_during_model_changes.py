"""Kills and outages at every step of changes of models, on the embedded log: a few seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.model_changes import FORMS, Trial, run_trial

SEEDS = (1, 2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", FORMS)
async def test_killed_processes_and_operators_and_failing_log_leave_wanted_state(
    tmp_path: Path, form: str, seed: int
) -> None:
    """`python -m tests.chaos.model_changes` runs more of them."""
    outcome = await run_trial(Trial(seed, form), tmp_path)
    assert outcome.faults == [], outcome.strikes
    assert outcome.strikes
    assert outcome.answers
