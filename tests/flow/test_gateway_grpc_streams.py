"""Streams and watches over gRPC whose callers are silent, do not read, or go."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from headrace.gateway import open_inference_pb2 as messages
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.gateways import Served, add_identities
from tests.support.grpc_callers import SERVICE, caller_of
from tests.support.python_models import BEGUN, GATE

LARGE = 3 * 1024 * 1024
"""Bytes of a tensor: a few are more than gRPC takes from a sender whose receiver does not read."""
COUNT = 6
SMALL_WINDOW = (("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0))
"""Options of a channel that takes little of what is not read: otherwise as much as the time between
two of its messages lets it estimate.
"""
APART = (*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1))
"""The same with a connection of its own."""


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    """A repository with models that return what they get."""
    add_identities(tmp_path)
    return tmp_path


def large() -> messages.ModelInferRequest:
    """A request with a large answer."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [LARGE // 8, 2]}
    content = np.zeros(LARGE, "u1").tobytes()
    return messages.ModelInferRequest(
        model_name="FP32", inputs=[tensor], raw_input_contents=[content]
    )


def gated_request() -> messages.ModelInferRequest:
    contents = messages.InferTensorContents(fp32_contents=[1.0])
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "contents": contents}
    return messages.ModelInferRequest(model_name="gated", inputs=[tensor])


async def _read_all(stream: Any, read: list[Any]) -> None:
    while (answer := await stream.read()) is not grpc.aio.EOF:
        read.append(answer)


async def _write_all(stream: Any) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended
        for _ in range(COUNT):
            await stream.write(large())


def _is_answered(served: Served, stream: Any, before: float) -> bool:
    return stream.done() or served.counted("OK") > before


async def test_answers_that_nobody_reads_count_as_bytes(identities: Path) -> None:
    """They count until they are written; their requests have ended by then."""
    async with caller_of(identities, *SMALL_WINDOW) as (served, caller):
        stream = caller.stream()
        for _ in range(COUNT):
            await stream.write(large())
        await eventually(lambda: served.counted("OK") == COUNT)
        unread = served.doors.snapshot()
        for _ in range(COUNT):
            await stream.read()
        await eventually(lambda: served.doors.snapshot().size_bytes == 0)
        await stream.done_writing()

        assert await stream.code() is grpc.StatusCode.OK
    assert unread.requests == 0
    assert unread.size_bytes >= LARGE


async def test_stream_at_rest_does_not_keep_its_last_answer(identities: Path) -> None:
    """Callers keep streams open for days, and what was read is counted no more."""

    def kept() -> int:
        gc.collect()
        tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
        return sum(each.get_name() == "grpc-stream-request" for each in tasks)

    async with caller_of(identities) as (_, caller):
        stream = caller.stream()
        await stream.write(large())
        await stream.read()

        await eventually(lambda: kept() == 0)


async def test_stream_that_nobody_reads_is_ended(identities: Path) -> None:
    """Its answers are dropped, and its caller learns why after those that were on their way."""
    async with caller_of(identities, *SMALL_WINDOW, idle_timeout_s=0.5) as (served, caller):
        stream = caller.stream()
        for _ in range(COUNT):
            await stream.write(large())
        await eventually(lambda: served.counted("OK") == COUNT)
        await eventually(lambda: served.doors.snapshot().size_bytes == 0)
        read: list[Any] = []
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await _read_all(stream, read)

    assert 0 < len(read) < COUNT
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "expected a message within 0.5 s, got none" in str(error.value.details())


async def test_streams_that_read_nothing_do_not_take_bytes_of_others(identities: Path) -> None:
    """The one that has not read for longest ends when all have half of the bytes unread."""
    async with caller_of(identities, *SMALL_WINDOW, max_in_flight_bytes=4 * LARGE) as (
        served,
        caller,
    ):
        stream = caller.stream()
        writing = asyncio.create_task(_write_all(stream))
        await eventually(lambda: served.counted("OK") > 1)
        await eventually(lambda: served.doors.snapshot().size_bytes == 0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await _read_all(stream, [])
        await asyncio.wait([writing])

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "unread bytes" in str(error.value.details())


async def test_ended_streams_that_nobody_reads_leave_room_for_others(
    identities: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each counts until its caller takes its end: streams have a count of their own."""
    few = replace(TUNING.gateway, max_watches=1, max_quiet_streams=1, spare_calls=1)
    limits: dict[str, Any] = {"idle_timeout_s": 0.3, "max_in_flight": 3}
    async with caller_of(identities, *SMALL_WINDOW, tuning=few, **limits) as (served, caller):
        stub = health_pb2_grpc.HealthStub(caller.channel)
        streams: list[Any] = []
        for _ in range(8):
            streams.append(caller.stream())
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # beyond that count
                for _ in range(3):
                    answered = served.counted("OK")
                    await streams[-1].write(large())
                    await eventually(partial(_is_answered, served, streams[-1], answered))
        await eventually(lambda: served.doors.snapshot().size_bytes == 0)
        checked = await stub.Check(health_pb2.HealthCheckRequest())
        for each in streams:
            each.cancel()

    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    assert checked.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "quiet"])
async def test_ended_stream_keeps_no_answer_until_garbage_is_collected(
    identities: Path, is_cancelled: bool
) -> None:
    """Its error refers to no frame that refers to the error."""
    gc.collect()
    gc.disable()
    try:
        timeout_s = 60.0 if is_cancelled else 0.3
        limits = {"idle_timeout_s": timeout_s}
        async with caller_of(identities, *SMALL_WINDOW, **limits) as (served, caller):
            stream = caller.stream()
            for _ in range(COUNT):
                await stream.write(large())
            await eventually(lambda: served.counted("OK") == COUNT)
            if is_cancelled:
                stream.cancel()
            await eventually(lambda: served.doors.snapshot().size_bytes == 0)
            await eventually(lambda: not requests_of_streams())
    finally:
        gc.enable()


def requests_of_streams() -> list[asyncio.Task[Any]]:
    """Tasks of requests, with their answers, that something refers to."""
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    return [each for each in tasks if each.get_name() == "grpc-stream-request"]


async def test_answers_of_calls_that_nobody_reads_leave_room_for_others(identities: Path) -> None:
    """They count no longer once their requests have ended, whoever accepted them."""
    few = replace(TUNING.gateway, max_watches=1, max_quiet_streams=1, spare_calls=1)
    async with (
        caller_of(identities, *SMALL_WINDOW, tuning=few, max_in_flight=1) as (served, caller),
        grpc.aio.insecure_channel(served.grpc, options=APART) as channel,
    ):
        begin: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelInfer")
        stalled = []
        for _ in range(8):
            stalled.append(begin(iter([large().SerializeToString()])))
            await eventually(lambda: served.counted("OK") == len(stalled))
        small = messages.ModelInferRequest(
            model_name="FP32",
            inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 2]}],
            raw_input_contents=[bytes(8)],
        )
        answer = await caller.infer(small)
        checked = await health_pb2_grpc.HealthStub(caller.channel).Check(
            health_pb2.HealthCheckRequest()
        )
        for each in stalled:
            each.cancel()

    assert answer.raw_output_contents == [bytes(8)]
    assert checked.status == health_pb2.HealthCheckResponse.SERVING


async def test_untaken_answer_of_call_is_shown_until_its_caller_goes(identities: Path) -> None:
    """The metric of what waits for callers has the door for gRPC as well."""
    async with (
        caller_of(identities, *SMALL_WINDOW) as (served, _),
        grpc.aio.insecure_channel(served.grpc, options=APART) as channel,
    ):
        begin: Any = channel.stream_stream(f"/{SERVICE.full_name}/ModelInfer")
        stalled = begin(iter([large().SerializeToString()]))
        await eventually(lambda: served.doors.snapshot().untaken_bytes["grpc"] > LARGE)
        stalled.cancel()
        await eventually(lambda: served.doors.snapshot().untaken_bytes["grpc"] == 0)


async def test_silent_stream_ends_and_busy_one_stays(gated: Path) -> None:
    """The time begins again with each answer."""
    async with caller_of(gated, idle_timeout_s=0.2) as (_, caller):
        silent, busy = caller.stream(), caller.stream()
        await busy.write(gated_request())
        await eventually(BEGUN.is_set)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await silent.read()
        GATE.set()
        answer = await busy.read()
        busy.cancel()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "expected a message within 0.2 s, got none" in str(error.value.details())
    assert answer.infer_response.model_name == "gated"


async def test_stream_over_limit_replaces_the_one_quiet_for_longest(gated: Path) -> None:
    """One with a request under way is not quiet."""
    GATE.set()
    two = replace(TUNING.gateway, max_quiet_streams=2)
    async with caller_of(gated, tuning=two) as (_, caller):
        streams = []
        for _ in range(3):
            streams.append(caller.stream())
            await streams[-1].write(gated_request())
            await streams[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await streams[0].read()
        for each in streams[1:]:
            await each.write(gated_request())
            await each.read()
            each.cancel()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "expected at most 2 quiet ones, got one more" in str(error.value.details())


async def test_watches_of_one_caller_leave_room_for_others(gated: Path) -> None:
    """Checks are answered beside any number of watches, and a new watch ends the oldest."""
    two = replace(TUNING.gateway, max_watches=2, max_quiet_streams=1, spare_calls=1)
    async with caller_of(gated, tuning=two, max_in_flight=1) as (_, caller):
        stub = health_pb2_grpc.HealthStub(caller.channel)
        request = health_pb2.HealthCheckRequest()
        watches: list[Any] = []
        for _ in range(8):
            watches.append(stub.Watch(request))
            await watches[-1].read()
        ended = await asyncio.gather(*(each.code() for each in watches[:-2]))
        checked = await stub.Check(request)
        open_ = [each.done() for each in watches[-2:]]
        for each in watches:
            each.cancel()

    assert set(ended) == {grpc.StatusCode.UNAVAILABLE}
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    assert open_ == [False, False]


async def test_stream_cancelled_while_answer_is_written_logs_no_error(
    identities: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its caller is gone, which is no fault of the server; the requests of others go on."""
    async with caller_of(identities, *SMALL_WINDOW) as (served, caller):
        stream = caller.stream()
        for _ in range(COUNT):
            await stream.write(large())
        await eventually(lambda: served.counted("OK") == COUNT)
        stream.cancel()
        await eventually(lambda: served.doors.snapshot().size_bytes == 0)
        answer = await caller.infer(large())

    assert answer.model_name == "FP32"
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    assert "Traceback" not in capfd.readouterr().err
