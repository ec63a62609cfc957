"""A record that ends its process is found, whichever stages run, and all others are answered."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.config import make_settings
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.errors import Code
from headrace.log.port import NewRecord, TopicInfo, TopicPartition
from headrace.topics import Stage, Topic
from tests.support.conditions import eventually
from tests.support.dying import (
    FUSED,
    POISON,
    Lives,
    add_dying_model,
    number_value,
    outcomes,
    records_of,
    restart_until,
    send_numbers,
    send_values,
)
from tests.support.logs import write_to
from tests.support.pipelines import PARTITIONS, Grouping, log_for, name_of, serving
from tests.support.python_models import add_python_model

COUNT = 1000


GROUPINGS: list[Grouping] = [
    [FUSED],
    [FUSED, FUSED],
    [(Stage.INGEST,), (Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)],
    [(Stage.INGEST, Stage.BATCHER), (Stage.EXECUTOR,), (Stage.RESPONDER,)],
]


DELIVERIES: dict[str, dict[str, str]] = {
    "at-least-once": {},
    "exactly-once": {"guarantee": "exactly_once"},
    "exactly-once-ordered": {"guarantee": "exactly_once", "order": "partition"},
    "ordered-by-key": {"order": "key"},
}
# The search runs in ingest and the executor, the delivery in the responder: each grouping has two
# deliveries, one of each guarantee, and each delivery two groupings, one with all stages in one
# process and one with the stages apart.
FORMS = [
    (GROUPINGS[0], "at-least-once"),
    (GROUPINGS[0], "exactly-once-ordered"),
    (GROUPINGS[1], "ordered-by-key"),
    (GROUPINGS[1], "exactly-once"),
    (GROUPINGS[2], "ordered-by-key"),
    (GROUPINGS[2], "exactly-once"),
    (GROUPINGS[3], "at-least-once"),
    (GROUPINGS[3], "exactly-once-ordered"),
]


@pytest.mark.parametrize(
    ("grouping", "delivery"),
    [pytest.param(each, DELIVERIES[name], id=f"{name_of(each)}-{name}") for each, name in FORMS],
)
async def test_record_that_ends_its_process_becomes_dead_letter(
    tmp_path: Path, grouping: Grouping, delivery: dict[str, str]
) -> None:
    """The record is found among a thousand within nine restarts; all others are answered."""
    add_dying_model(tmp_path)
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": delivery,
        }
    )
    log = await log_for(settings)
    numbers = [POISON if place == 617 else float(place % 100) for place in range(COUNT)]
    await send_numbers(settings, log, numbers)

    async def all_answered() -> bool:
        return len(await outcomes(settings, log)) == COUNT

    restarts = await restart_until(all_answered, settings, log, grouping)

    found = await outcomes(settings, log)
    assert found.pop(617) == {Code.MODEL_FAILED}
    assert found == {place: {2 * n} for place, n in enumerate(numbers) if n != POISON}
    (letter,) = await records_of(settings, log, Topic.DEAD_LETTERS)
    assert letter.value == number_value(POISON, "617")
    assert restarts <= 9
    if delivery.get("guarantee") == "exactly_once":
        assert len(await records_of(settings, log, Topic.RESPONSES)) == COUNT


@pytest.mark.parametrize("seed", range(4))
async def test_poison_search_continues_through_evictions_and_rebalances(
    tmp_path: Path, seed: int
) -> None:
    """Two culprits are found while partitions change hands, in good order and in bad."""
    random = Random(seed)
    add_dying_model(tmp_path)
    settings = make_settings(
        {"topics": {"partitions": PARTITIONS}, "models": {"repository": tmp_path}}
    )
    log = await log_for(settings)
    culprits = random.sample(range(COUNT), 2)
    numbers = [POISON if place in culprits else float(place % 100) for place in range(COUNT)]
    await send_numbers(settings, log, numbers)

    async def all_answered() -> bool:
        return len(await outcomes(settings, log)) == COUNT

    async def strike(lives: Lives) -> None:
        for deaths in range(1, 6):  # the two alone take more
            await lives.restarted(deaths)
            members = log.faults.groups.members(settings.namespace)
            if members and random.random() < 0.5:
                log.faults.groups.expire_session(settings.namespace, random.choice(members))
            else:
                log.faults.groups.force_rebalance(settings.namespace)

    await restart_until(all_answered, settings, log, GROUPINGS[seed % 3], strike)

    found = await outcomes(settings, log)
    assert {place: found.pop(place) for place in culprits} == {
        place: {Code.MODEL_FAILED} for place in culprits
    }
    assert found == {place: {2 * n} for place, n in enumerate(numbers) if n != POISON}


@pytest.mark.parametrize(
    "delivery",
    [{}, {"guarantee": "exactly_once"}, {"order": "partition"}],
    ids=["at-least-once", "exactly-once", "ordered"],
)
async def test_suspect_with_stalled_answer_delays_no_other_partition(
    tmp_path: Path, delivery: dict[str, str]
) -> None:
    """After an unclean end its reply partition has no leader; what comes later is answered."""
    add_dying_model(tmp_path)
    settings = make_settings(
        {
            "topics": {"partitions": PARTITIONS},
            "models": {"repository": tmp_path},
            "delivery": delivery,
        }
    )
    log = await log_for(settings)
    await log.create_topics([TopicInfo("headrace.mine", 1, {})], replication_factor=1)
    log.faults.topics.take_leaders("headrace.mine")
    requests = [TopicPartition(settings.topic(Topic.REQUESTS), each) for each in range(PARTITIONS)]
    reply = [("kafka_replyTopic", b"headrace.mine")]
    await write_to(log, requests[0], NewRecord(None, number_value(1.0, "0"), reply))
    marks = CrashMarkers(log, settings.namespace)
    await marks.write({each: CrashMarker(is_open=True) for each in requests}, NOBODY)
    async with serving(settings, log, [FUSED]):
        for place in range(1, PARTITIONS):
            await write_to(log, requests[place], NewRecord(None, number_value(1.0, str(place))))

        async def others_answered() -> bool:
            return len(await outcomes(settings, log)) == PARTITIONS - 1

        await eventually(others_answered)
        log.faults.topics.elect("headrace.mine")
        mine = TopicPartition("headrace.mine", 0)
        await eventually(lambda: log.faults.partitions.end_offset(mine))

    assert await outcomes(settings, log) == {place: {2.0} for place in range(1, PARTITIONS)}


async def test_suspect_of_unloaded_version_is_answered_and_delays_no_other(
    tmp_path: Path,
) -> None:
    """After unclean ends its model is removed where it would run: nobody would run it alone."""
    add_python_model(tmp_path / "ingest", "")
    add_python_model(tmp_path / "ingest", "", name="gone")
    add_python_model(tmp_path / "others", "")
    namespace: dict[str, Any] = {"topics": {"partitions": PARTITIONS}}
    settings, fewer = (
        make_settings({**namespace, "models": {"repository": tmp_path / name}})
        for name in ("ingest", "others")
    )
    log = await log_for(settings)
    async with serving(settings, log, [(Stage.INGEST,)]):
        await send_values(
            settings,
            log,
            [
                number_value(float(place), str(place), "gone" if place < PARTITIONS else "model")
                for place in range(2 * PARTITIONS)
            ],
        )
        items = [TopicPartition(settings.topic(Topic.ITEMS), each) for each in range(PARTITIONS)]
        await eventually(lambda: all(log.faults.partitions.end_offset(each) == 2 for each in items))
    group = f"{settings.namespace}.{Stage.BATCHER}"
    marker = CrashMarker(is_open=True, stop=2, ends=2, suspects=((0, 2),))
    await CrashMarkers(log, group).write(dict.fromkeys(items, marker), NOBODY)

    async def all_answered() -> bool:
        return len(await outcomes(settings, log)) == 2 * PARTITIONS

    rest: Grouping = [(Stage.BATCHER, Stage.EXECUTOR), (Stage.RESPONDER,)]
    async with serving(fewer, log, rest):
        await eventually(all_answered)

    assert await outcomes(settings, log) == {
        place: {str(Code.MODEL_NOT_READY)} if place < PARTITIONS else {2.0 * place}
        for place in range(2 * PARTITIONS)
    }


async def test_poison_record_of_replaced_version_is_found(tmp_path: Path) -> None:
    """It ends the executor with the next version as well, and is condemned for that."""
    add_dying_model(tmp_path)
    settings = make_settings(
        {"topics": {"partitions": PARTITIONS}, "models": {"repository": tmp_path}}
    )
    log = await log_for(settings)
    batches = [TopicPartition(settings.topic(Topic.BATCHES), each) for each in range(PARTITIONS)]
    async with serving(settings, log, [(Stage.INGEST, Stage.BATCHER)]):
        await send_numbers(settings, log, [POISON])
        await eventually(lambda: any(log.faults.partitions.end_offset(each) for each in batches))
    (tmp_path / "model" / "1").rename(tmp_path / "model" / "2")

    async def is_answered() -> bool:
        return bool(await outcomes(settings, log))

    await restart_until(is_answered, settings, log, GROUPINGS[3])

    assert await outcomes(settings, log) == {0: {Code.MODEL_FAILED}}
