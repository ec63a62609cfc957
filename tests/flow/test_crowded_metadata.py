"""Exactly once where a commit has room for very little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config import make_settings
from headrace.log.memory.faults import TransactionFault
from headrace.topics import STAGES, Stage
from tests.support.mixed import Mixed
from tests.support.models import add_version, embedding
from tests.support.pipelines import PARTITIONS, Grouping, log_for, serving
from tests.support.tuning import QUICK
from tests.support.visible import source_of

FUSED: Grouping = [STAGES]
THREE: Grouping = [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]

CROWDED = replace(
    QUICK,
    responder=replace(QUICK.responder, waiting_answers_retry_s=0.05),
    delivery=replace(
        QUICK.delivery, metadata_characters=10, safe_span_offsets=40, safe_unanswered_offsets=3
    ),
)
"""Three ranges fit, or a bitmap of 48 offsets; reading pauses a little before."""


@pytest.mark.parametrize("form", [FUSED, THREE], ids=["fused", "three"])
async def test_answers_out_of_order_are_given_once(tmp_path: Path, form: Grouping) -> None:
    """They wait for room, and reading for them; a change of owner and lost outcomes included."""
    add_version(tmp_path, "embedding", 1, embedding())
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": {"guarantee": "exactly_once"},
        }
    )
    log = await log_for(settings)
    caller = Mixed(settings, log)
    async with serving(settings, log, form, CROWDED):
        await caller.send(600)
        log.faults.transactions.fail(
            *[TransactionFault.UNKNOWN_BUT_COMMITTED, TransactionFault.UNKNOWN_AND_OPEN] * 2
        )
        log.faults.groups.force_rebalance("headrace")
        await caller.send(600)
        await caller.all_answered()

    counts = Counter(map(source_of, await caller.answers()))
    assert counts == Counter(list(caller.expected))
