"""A seed of kills and broker restarts at every step of changes of models, on a real Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tools.local_kafka import LocalKafka
from tests.chaos.model_changes import REAL_MOMENTS_S, Trial, run_trial


@pytest.mark.timeout(400)
async def test_killed_processes_and_restarted_broker_leave_wanted_state(
    kafka_installed: None, tmp_path: Path
) -> None:
    """`python -m tests.chaos.model_changes --kafka` runs more of them."""
    trial = Trial(1, "four", changes=4, moments_s=REAL_MOMENTS_S, follow_s=120.0)
    async with LocalKafka() as kafka:
        outcome = await run_trial(trial, tmp_path, kafka)
    assert outcome.faults == [], outcome.strikes
    assert outcome.strikes
    assert outcome.answers
