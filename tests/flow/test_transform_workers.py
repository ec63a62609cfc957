"""Transforms in child processes of a whole pipeline: requests, answers and the embedded log."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Literal

import pytest

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.errors import Code
from headrace.topics import STAGES
from tests.support.conditions import DEADLINE_S
from tests.support.models import add_version, identity
from tests.support.pipelines import log_for, serving
from tests.support.processes import transform_children

TRANSFORM = """
import os
import time

import numpy as np

from headrace.errors import Code, Rejected

class Unfit(Rejected):
    def __init__(self):
        self.code = "none"

def transform(payload, content_type):
    if payload == b"crash":
        os._exit(1)
    if payload == b"hang":
        time.sleep(3600)
    if payload == b"refused":
        message = "expected a number, got \\udc80"
        raise Rejected(Code.INVALID_REQUEST, message, retry_after_ms=np.int64(9))
    if payload == b"without code":
        raise Rejected("no code", "expected a number")
    if payload == b"unfit":
        raise Unfit
    if payload == b"at the end of time":
        raise Rejected(Code.OVERLOADED, "expected a number", retry_after_ms=2**70)
    time.sleep(0.01 if int(payload) % 10 == 0 else 0.001)
    return {"x": np.full((1, 4), int(payload), np.int64)}
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with two child processes, and a model that answers with its payload's number."""
    config = 'transform = "python"\nmax_execution_s = 2.0\n'
    directory = add_version(
        tmp_path / "models", "numbers", 1, identity("INT64", ("batch", 4)), config
    )
    (directory.parent / "transform.py").write_text(TRANSFORM)
    return make_settings(
        {
            "models": {"repository": str(tmp_path / "models")},
            "ingest": {"transform_workers": 2, "transform_isolation": "process"},
        }
    )


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_refusal_that_no_answer_can_hold_fails_alone(
    settings: Settings, isolation: Literal["thread", "process"]
) -> None:
    """Its text may quote bytes that are not UTF-8, and its code may not be in the contract."""
    ingest = settings.ingest.model_copy(update={"transform_isolation": isolation})
    settings = settings.model_copy(update={"ingest": ingest})
    log = await log_for(settings)
    async with serving(settings, log, [STAGES]), Client(log=log, settings=settings) as client:
        async with asyncio.timeout(DEADLINE_S):
            errors = [
                error
                for error in await asyncio.gather(
                    *[
                        client.infer_raw("numbers", each, "text/plain")
                        for each in (
                            b"refused",
                            b"1",
                            b"without code",
                            b"unfit",
                            b"at the end of time",
                        )
                    ],
                    return_exceptions=True,
                )
                if isinstance(error, InferenceError)
            ]
    assert [(error.code, error.message) for error in errors] == [
        (Code.INVALID_REQUEST, "expected a number, got ?"),
        (Code.INVALID_REQUEST, "transform: ValueError: 'no code' is not a valid Code"),
        (Code.INVALID_REQUEST, "Unfit: AttributeError: 'Unfit' object has no attribute 'message'"),
        (Code.OVERLOADED, "expected a number"),
    ]


async def test_payloads_that_crash_or_hang_in_children_fail_alone(settings: Settings) -> None:
    """All others are answered, by the same process."""
    log = await log_for(settings)
    payloads = [b"1", b"crash", b"2", b"hang", b"3"]
    async with serving(settings, log, [STAGES]), Client(log=log, settings=settings) as client:
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(
                *[client.infer_raw("numbers", each, "text/plain") for each in payloads],
                return_exceptions=True,
            )

    failed = [str(each) for each in answers if isinstance(each, InferenceError)]
    assert len(failed) == 2
    assert "the process ended (exit code 1)" in failed[0]
    assert "max_execution_s = 2 s" in failed[1]
    answered = [each for each in answers if not isinstance(each, BaseException)]
    assert [each.outputs["y"].ravel().tolist() for each in answered] == [[1] * 4, [2] * 4, [3] * 4]


async def test_no_request_is_lost_or_crossed_while_children_are_killed(settings: Settings) -> None:
    """Each answer has the number of its own request; a child is killed after every 100 answers."""
    log = await log_for(settings)
    answered, killed = 0, 0

    async def ask(client: Client, number: int) -> list[int]:
        nonlocal answered, killed
        answer = await client.infer_raw(
            "numbers", b"%d" % number, "text/plain", timeout_s=3 * DEADLINE_S
        )
        answered += 1
        if answered % 100 == 0 and (children := transform_children(os.getpid())):
            # The oldest: the payload of the last one may just be running alone in a new one, and is
            # given up if that ends as well.
            os.kill(min(children), signal.SIGKILL)
            killed += 1
        found: list[int] = answer.outputs["y"].ravel().tolist()
        return found

    async with serving(settings, log, [STAGES]), Client(log=log, settings=settings) as client:
        async with asyncio.timeout(3 * DEADLINE_S):
            answers = await asyncio.gather(*[ask(client, number) for number in range(800)])

    assert killed
    assert answers == [[number] * 4 for number in range(800)]


async def test_answers_keep_order_of_partition_with_several_children(settings: Settings) -> None:
    """One child is slower with its payloads than the other."""
    ordered = settings.model_copy(
        update={
            "delivery": settings.delivery.model_copy(update={"order": "partition"}),
            "topics": settings.topics.model_copy(update={"partitions": 1}),
        }
    )
    log = await log_for(ordered)
    arrived: list[int] = []

    async def ask(client: Client, number: int) -> None:
        answer = await client.infer_raw("numbers", b"%d" % number, "text/plain")
        arrived.append(int(answer.outputs["y"][0, 0]))

    async with serving(ordered, log, [STAGES]), Client(log=log, settings=ordered) as client:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*[ask(client, number) for number in range(100)])

    assert arrived == list(range(100))


async def test_stop_during_transforms_loses_no_request(settings: Settings) -> None:
    """Requests not answered before the stop are answered by the next process."""
    log = await log_for(settings)
    async with Client(log=log, settings=settings) as client, asyncio.timeout(DEADLINE_S):
        async with serving(settings, log, [STAGES]):
            asking = [
                asyncio.create_task(client.infer_raw("numbers", b"%d" % number, "text/plain"))
                for number in range(300)
            ]
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        async with serving(settings, log, [STAGES]):
            answers = await asyncio.gather(*asking)

    assert [each.outputs["y"].ravel().tolist() for each in answers] == [
        [number] * 4 for number in range(300)
    ]
