"""Stages grouped into processes in every way give every request its one correct answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headrace.topics import STAGES, Stage
from tests.support.pipelines import (
    Caller,
    Grouping,
    groupings,
    log_for,
    name_of,
    serving,
    settings_of,
)

FUSED: Grouping = [STAGES]
APART: Grouping = [(stage,) for stage in STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]


def once(count: int) -> Counter[int]:
    """Each of so many requests, answered once."""
    return Counter(range(count))


@pytest.mark.parametrize("grouping", groupings(), ids=name_of)
async def test_every_stage_grouping_answers_every_request(
    tmp_path: Path, grouping: Grouping
) -> None:
    """500 requests, 500 answers, all of them right, and each process drains in time."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, grouping):
        await caller.send(500)
        await caller.all_answered()

    assert await caller.check() == once(500)


@pytest.mark.parametrize(
    ("first", "second"),
    [(FUSED, APART), (APART, FUSED), (FUSED, THREE), (THREE, APART), (APART, APART)],
    ids=lambda grouping: name_of(grouping) if isinstance(grouping, list) else None,
)
async def test_other_stage_grouping_takes_over_after_stop(
    tmp_path: Path, first: Grouping, second: Grouping
) -> None:
    """After a clean stop half-way the others go on: nothing is lost and nothing doubled."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    caller = Caller(settings, log)
    async with serving(settings, log, first):
        await caller.send(500)
    assert caller.answered() <= 500

    async with serving(settings, log, second):
        await caller.send(500)
        await caller.all_answered()

    assert await caller.check() == once(1000)
