"""Kills and broker restarts at steps of changes of models: their pairs, and a seed on a Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.protocol.events import ExecutorEvent, HostedModel
from headrace.tools.local_kafka import LocalKafka
from headrace.topics import Stage
from tests.chaos.model_changes import (
    REAL_MOMENTS_S,
    STEPS,
    VICTIMS,
    Pair,
    Steps,
    Trial,
    pair_of,
    run_trial,
)


@pytest.mark.parametrize("first_seed", [0, 1, 1000])
def test_consecutive_seeds_kill_each_victim_at_each_step(first_seed: int) -> None:
    """Consecutive seeds, as many as there are pairs, have each pair once."""
    every = {Pair(*victim, step) for victim in VICTIMS for step in STEPS}

    assert {pair_of(first_seed + number) for number in range(len(every))} == every


def _announcement(stage: Stage, generation: int, *, ready: bool) -> ExecutorEvent:
    hosted = [HostedModel(name="digits", version="2", instances=1, max_batch_size=8)]
    return ExecutorEvent(
        executor=stage,
        silent_after_ms=1000,
        models=hosted if ready else [],
        generation=generation,
        unready=[] if ready else ["digits/2: loading"],
        stages=[stage],
    )


def test_steps_are_reached_as_processes_announce_them() -> None:
    """Announcements from before the change do not count, and every process must have followed."""
    steps = Steps(processes=2, generation=4, version="2")
    announced = [
        _announcement(Stage.EXECUTOR, 3, ready=True),
        _announcement(Stage.EXECUTOR, 4, ready=False),
        _announcement(Stage.EXECUTOR, 4, ready=True),
        _announcement(Stage.BATCHER, 4, ready=True),
    ]
    reached = []
    for event in announced:
        before = set(steps.reached)
        steps.apply([event])
        reached.append(steps.reached - before)

    assert reached == [set(), {"written", "loading"}, {"ready"}, {"followed"}]


def test_step_between_two_announcements_is_passed_with_the_next_one() -> None:
    """A version may be loaded before its process says that it loads."""
    steps = Steps(processes=2, generation=4, version="2")
    steps.apply([_announcement(Stage.EXECUTOR, 4, ready=True)])

    assert [step for step in STEPS if steps.is_past(step)] == ["written", "loading", "ready"]


async def test_trial_that_takes_longer_than_its_limit_has_failed(tmp_path: Path) -> None:
    """A set of seeds goes on after one that hangs."""
    outcome = await run_trial(Trial(1, "fused", limit_s=0.0), tmp_path)
    assert (outcome.faults, outcome.is_cut) == (["not ended within 0 s"], True)


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
