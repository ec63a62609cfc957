"""Models change on a real broker under load, with each stage apart, behind a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.model_changes import Plan, measure
from headrace.tools.local_kafka import LocalKafka


@pytest.mark.timeout(240)
async def test_requests_during_changes_are_answered_by_versions_of_their_names(
    kafka: LocalKafka, unique_name: str, tmp_path: Path
) -> None:
    """Load, label, default, rollback and unload; `benchmarks.model_changes` makes more of them."""
    plan = Plan(
        "four", per_s=40, rounds=1, periods=1, quiet_share=0.0, warm_s=0.5, keep_replaced_s=3.0
    )
    found = await measure(plan, kafka.bootstrap_servers, unique_name, tmp_path)
    assert found.faults() == []
    assert [each.action for each in found.made] == [
        "load",
        "label",
        "default",
        "rollback",
        "unload",
    ]
    assert found.answered
