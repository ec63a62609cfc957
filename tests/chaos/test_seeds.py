"""A few seeds of the chaos suite, as a sample; `make chaos` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster import running_cluster
from tests.chaos.story import tell
from tests.chaos.trial import draw_trial, run_trial


@pytest.mark.timeout(1200)
async def test_random_faults_of_few_seeds_break_no_promise(
    kafka_installed: None, tmp_path: Path
) -> None:
    """Under kills, bad networks, a quota, a clock that is set back, bombs and a handover nothing is
    lost, invented, crossed or overtaken, and what is repeated is explained.

    In the last seed children with transforms crash, hang and are killed, and the store of claims
    fails, is slow and gives wrong bytes: each request is answered once, with its own outputs.
    """
    trials = [
        draw_trial(2, "at_least_once", "fused", "none", "tensors")._replace(requests=2000),
        draw_trial(3, "exactly_once", "four", "key", "tensors")._replace(requests=2000),
        draw_trial(1033, "exactly_once", "three", "none", "payloads")._replace(requests=300),
    ]
    async with running_cluster() as cluster:
        for trial in trials:
            outcome = await run_trial(trial, cluster, tmp_path / f"seed-{trial.seed}")
            stories = [tell(outcome.history, finding) for finding in outcome.findings[:3]]
            assert outcome.passed, "\n".join([str(outcome), *stories])
            assert len(outcome.history.sent) >= trial.requests
