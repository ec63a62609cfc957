"""Turns of the event loop, measured on the four services in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.config import make_settings
from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline, running
from headrace.runtime.topic_plan import plan_topics
from headrace.tools.replay import loop_measuring
from headrace.tools.replay.loop_measuring import measure_turns
from headrace.tools.replay.simulated_loop import LoopTime
from tests.support.models import add_version, digits


async def measured(directory: Path, model: str) -> LoopTime:
    """On a pipeline that serves digits; requests are to a model of this name."""
    add_version(directory, "digits", 1, digits())
    settings = make_settings({"models": {"repository": directory}, "topics": {"partitions": 2}})
    pixels = np.zeros((1, 64), np.float32)
    value = encode_request("application/msgpack", model, {"pixels": pixels})
    async with MemoryLog() as log:
        await log.create_topics(list(plan_topics(settings).values()), replication_factor=1)
        async with running(Pipeline(settings, log)):
            return (await measure_turns(log, settings, [value])).loop_time()


async def test_every_size_of_a_turn_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both times of each, and how often, without the turns that warm up; a stall is told apart."""
    monkeypatch.setattr(loop_measuring, "TURNS", 20)
    monkeypatch.setattr(loop_measuring, "SIZES", (1, 3, 8))

    found = await measured(tmp_path, "digits")

    assert [(each.rows, each.seen) for each in found.busy.points] == [(1, 20), (3, 20), (8, 20)]
    answered = found.answered.points
    assert [each.rows for each in answered] == [1, 3, 8]
    assert sum(each.seen for each in answered) + len(found.stalls.seen) == 60
    assert all(each.us > 0 for each in (*answered, *found.busy.points))


async def test_a_model_that_does_not_answer_well_is_no_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come quickly, and say nothing of what a run takes."""
    monkeypatch.setattr(loop_measuring, "TURNS", 1)

    with pytest.raises(ExceptionGroup) as raised:
        await measured(tmp_path, "nobody")

    assert raised.group_contains(ConfigurationError, match="expected an answer with its times")
