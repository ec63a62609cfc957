"""Answers in the order of their source offsets, through all that lets requests overtake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from headrace.config import Settings, make_settings
from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.memory.faults import TransactionFault
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import encode_request
from headrace.runtime.process import Pipeline
from headrace.runtime.shutdown import Stop
from headrace.topics import STAGES, Stage
from tests.support.conditions import eventually
from tests.support.logs import write_to
from tests.support.mixed import Mixed
from tests.support.models import add_version, embedding
from tests.support.pipelines import PARTITIONS, Grouping, log_for, serving
from tests.support.tuning import QUICK
from tests.support.visible import orders

FUSED: Grouping = [STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
DRAIN_TIMEOUT_S = 1.0
"""A rebalance of stages that are apart lasts as long: what they hold waits for one another."""

pytestmark = [
    pytest.mark.parametrize("form", [FUSED, THREE], ids=["fused", "three"]),
    pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"]),
    pytest.mark.parametrize("order", ["partition", "key"]),
]


@pytest.fixture
def settings(tmp_path: Path, guarantee: str, order: str) -> Settings:
    """Return settings with a model that fails on some values, so that its batches are halved."""
    add_version(tmp_path, "embedding", 1, embedding())
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": {"guarantee": guarantee, "order": order},
            "limits": {"drain_timeout_s": DRAIN_TIMEOUT_S},
        }
    )


async def test_answers_in_order_do_not_overtake(settings: Settings, form: Grouping) -> None:
    """Refused and late requests end at once, and a failed batch runs in halves; answers stay in
    order.
    """
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(400)
        await caller.all_answered()

    await caller.check()


async def test_answers_in_order_do_not_overtake_during_rebalance(
    settings: Settings, form: Grouping
) -> None:
    """Another process joins and leaves under load."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(150)
        async with serving(settings, log, form, QUICK):
            await caller.send(150)
        await caller.send(150)
        log.faults.groups.force_rebalance("headrace")
        await caller.all_answered()

    await caller.check()


async def test_answers_in_order_do_not_overtake_after_process_dies(
    settings: Settings, form: Grouping
) -> None:
    """The next owner continues in order from the committed offsets."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    dying = [
        asyncio.create_task(Pipeline(settings, log, each, tuning=QUICK).run(Stop()))
        for each in form
    ]
    await caller.send(120)  # they are run again one by one
    await eventually(caller.answers)
    for each in dying:
        each.cancel()
    await asyncio.wait(dying)
    async with serving(settings, log, form, QUICK):
        await caller.send(100)
        await caller.all_answered()

    await caller.check()


async def test_answers_in_order_do_not_overtake_after_failed_commit_or_send(
    settings: Settings, form: Grouping
) -> None:
    """Answers that are retried precede later ones."""
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form, QUICK):
        await caller.send(100)
        log.faults.transactions.fail(
            *[TransactionFault.UNKNOWN_AND_OPEN, TransactionFault.UNKNOWN_BUT_COMMITTED] * 3
        )
        await caller.send(100)
        log.faults.brokers.take_down()
        await asyncio.sleep(0)
        log.faults.brokers.bring_back()
        await caller.send(100)
        await caller.all_answered()

    await caller.check()


async def test_answers_in_order_do_not_overtake_behind_record_answered_before_restart(
    settings: Settings, form: Grouping
) -> None:
    """A former owner has passed over a cancellation whose predecessor it has not answered."""
    log = await log_for(settings)
    requests = TopicPartition("headrace.requests", 0)
    index = {"index": np.array([[1]], np.int64)}
    await write_to(
        log,
        requests,
        NewRecord(b"key", encode_request("application/msgpack", "embedding", index)),
        NewRecord(b"key", None, [("x-cancel", b"headrace.requests/0/0")]),
        NewRecord(b"key", encode_request("application/msgpack", "missing", index)),
    )
    await log.commit("headrace", {requests: AckedOffsets(0, [(1, 2)]).committable()})

    async def is_answered() -> bool:
        return len((await orders(log, settings))[0]) == 2

    async with serving(settings, log, form, QUICK):
        await eventually(is_answered)

    assert await orders(log, settings) == {0: [0, 2]}
