"""The gateway's door for gRPC, in front of the four stages on the embedded log."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace

from headrace.errors import ConfigurationError, Fatal
from headrace.gateway import open_inference_pb2 as messages
from headrace.log.port import TopicPartition
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.gateways import Served, gateway_of
from tests.support.grpc_callers import SERVICE, Caller, caller_of, pixels
from tests.support.logs import read
from tests.support.models import add_version, digits
from tests.support.python_models import BEGUN, GATE

OK, NO, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with `digits`, whose scores for 64 ones are 64 times 0 to 9."""
    add_version(tmp_path, "digits", 1, digits())
    return tmp_path


def number(value: float, **fields: Any) -> messages.ModelInferRequest:
    """A request for the gated model."""
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 1],
        "contents": {"fp32_contents": [value]},
    }
    return messages.ModelInferRequest(model_name="gated", inputs=[tensor], **fields)


def value_of(answer: messages.ModelInferResponse) -> float:
    """The one element of an answer."""
    (content,) = answer.raw_output_contents
    return float(np.frombuffer(content, "<f4").item())


async def test_tensors_of_both_forms_are_answered_raw(repository: Path) -> None:
    """The answer has the protocol's fields, and the caller's id; the outputs' bytes are apart."""
    tensor = {
        "name": "pixels",
        "datatype": "FP32",
        "shape": [1, 64],
        "contents": {"fp32_contents": [1.0] * 64},
    }
    async with caller_of(repository) as (_, caller):
        raw = await caller.infer(pixels(id="seven"))
        typed = await caller.infer(
            pixels(inputs=[tensor], raw_input_contents=[], model_version="1")
        )

    for answer in (raw, typed):
        (scores,) = answer.outputs
        assert (scores.name, scores.datatype, list(scores.shape)) == ("scores", "FP32", [1, 10])
        assert not scores.HasField("contents")
        content = np.frombuffer(answer.raw_output_contents[0], "<f4")
        np.testing.assert_allclose(content, 64.0 * np.arange(10))
    assert (raw.model_name, raw.model_version, raw.id) == ("digits", "1", "seven")
    assert raw.parameters["batch_size"].int64_param == 1


async def test_compressed_bomb_is_refused_as_too_large(repository: Path) -> None:
    """The limit of a message is that of its decompressed bytes."""
    async with caller_of(repository, max_body_bytes=65536) as (_, caller):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await caller.infer(pixels(id="x" * 10**7), compression=grpc.Compression.Gzip)
        small = await caller.infer(pixels(id="x" * 200), compression=grpc.Compression.Gzip)

    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert small.id == "x" * 200


UNSUPPORTED = {
    "RepositoryModelLoad": "models.repository",
    "RepositoryModelUnload": "models.repository",
    "SystemSharedMemoryStatus": "gateway.shared_memory",
    "SystemSharedMemoryRegister": "gateway.shared_memory",
    "SystemSharedMemoryUnregister": "gateway.shared_memory",
    "CudaSharedMemoryStatus": "only system",
    "CudaSharedMemoryRegister": "only system",
    "CudaSharedMemoryUnregister": "only system",
    "TraceSetting": "[telemetry]",
    "LogSettings": "[telemetry]",
}


async def test_method_that_is_not_supported_is_refused_by_name(repository: Path) -> None:
    """The status is UNIMPLEMENTED, and the sentence names the method and the reason."""
    async with caller_of(repository) as (_, caller):
        for method, reason in UNSUPPORTED.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await caller.call(method, b"")
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            told = error.value.details() or ""
            name = method.removeprefix("RepositoryModel")
            assert told.lower().startswith(f"{name} is not supported: ".lower())
            assert reason in told
        other: Any = caller.channel.unary_unary(f"/{SERVICE.full_name}/ModelTrain")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await other(b"")

    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_index_shows_ready_versions_and_faults(repository: Path) -> None:
    """A version that cannot be loaded is listed with its fault, unless only ready ones are."""
    version = repository / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"no model")
    async with caller_of(repository) as (_, caller):
        request = messages.RepositoryIndexRequest()
        everything = (await caller.call("RepositoryIndex", request)).models
        request = messages.RepositoryIndexRequest(ready=True)
        ready = (await caller.call("RepositoryIndex", request)).models

    (broken, digits_) = everything
    assert (broken.name, broken.version, broken.state) == ("broken", "1", "UNAVAILABLE")
    assert broken.reason
    assert [(each.name, each.state, each.reason) for each in ready] == [("digits", "READY", "")]
    assert digits_ == ready[0]


async def test_models_are_described_as_clients_expect(repository: Path) -> None:
    """Metadata, configuration, index and health have the protocol's and Triton's names."""
    async with caller_of(repository) as (_, caller):
        live = await caller.call("ServerLive", messages.ServerLiveRequest())
        ready = await caller.call("ServerReady", messages.ServerReadyRequest())
        server = await caller.call("ServerMetadata", messages.ServerMetadataRequest())
        named = messages.ModelReadyRequest(name="digits", version="1")
        model_ready = await caller.call("ModelReady", named)
        other_ready = await caller.call("ModelReady", messages.ModelReadyRequest(name="letters"))
        about = messages.ModelMetadataRequest(name="digits")
        metadata = await caller.call("ModelMetadata", about)
        answer = await caller.call("ModelConfig", messages.ModelConfigRequest(name="digits"))
        index = await caller.call("RepositoryIndex", messages.RepositoryIndexRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="letters"):
            await caller.call("ModelMetadata", messages.ModelMetadataRequest(name="letters"))

    assert (live.live, ready.ready, server.name) == (True, True, "headrace")
    assert set(server.extensions) >= {"model_configuration", "model_repository", "statistics"}
    assert (model_ready.ready, other_ready.ready) == (True, False)
    (tensor,) = metadata.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("pixels", "FP32", [-1, 64])
    assert (list(metadata.versions), metadata.platform) == (["1"], "onnxruntime_onnx")
    (configured,) = answer.config.input
    assert (configured.data_type, list(configured.dims)) == (messages.TYPE_FP32, [64])
    assert answer.config.max_batch_size == 32
    assert [(each.name, each.version, each.state) for each in index.models] == [
        ("digits", "1", "READY")
    ]


async def test_callers_over_grpc_http_and_kafka_share_batches(gated: Path) -> None:
    """Requests of all kinds that wait for a model run together, and each gets its own answer."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [2]}
    async with caller_of(gated) as (served, caller), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(_awaited(caller.infer(number(0))))
        await eventually(BEGUN.is_set)
        over_grpc = tasks.create_task(_awaited(caller.infer(number(1))))
        over_http = tasks.create_task(served.infer("gated", {"inputs": [tensor]}))
        array = np.full((1, 1), 3, np.float32)
        over_kafka = tasks.create_task(served.kafka.infer("gated", {"x": array}))
        await eventually(lambda: served.waiting() == 3)
        GATE.set()
        answer, reply, response = await over_grpc, (await over_http).json, await over_kafka
        await first

    assert value_of(answer) == 2
    assert reply["outputs"][0]["data"] == [4]
    assert response.outputs["y"].item() == 6
    assert answer.parameters["batch_size"].int64_param == 3
    assert reply["parameters"]["batch_size"] == response.parameters["batch_size"] == 3


async def test_calls_that_come_one_after_the_other_share_batches(repository: Path) -> None:
    """An idle instance takes each call at once, as gRPC passes on one in a turn of the loop."""
    callers = 8
    patient = replace(
        TUNING.gateway, grouped_pause_s=0.2, grouped_most_s=DEADLINE_S, grouped_most_passed=0
    )
    async with caller_of(repository, tuning=patient) as (_, caller):

        async def all_share_batch() -> bool:
            answers = await asyncio.gather(*(caller.infer(pixels()) for _ in range(callers)))
            sizes = {answer.parameters["batch_size"].int64_param for answer in answers}
            return sizes == {callers}

        await eventually(all_share_batch)


async def test_calls_that_are_accepted_one_by_one_are_answered(repository: Path) -> None:
    """With a release of grpcio that lacks the private names, calls are accepted in this way."""
    single = replace(TUNING.gateway, accepted_at_once=0)
    async with caller_of(repository, tuning=single) as (_, caller):
        answers = await asyncio.gather(*(caller.infer(pixels()) for _ in range(20)))

    assert {answer.model_name for answer in answers} == {"digits"}


async def test_deadline_is_answered_in_time_and_nothing_runs(gated: Path) -> None:
    """The call's deadline and the parameter `timeout` are the request's; it never runs."""
    async with caller_of(gated) as (served, caller), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(_awaited(caller.infer(number(0))))
        await eventually(BEGUN.is_set)
        by_deadline = caller.infer(number(1), timeout=0.05)
        by_parameter = caller.infer(number(2, parameters={"timeout": {"int64_param": 50_000}}))
        for call in (by_deadline, by_parameter):
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        GATE.set()
        assert value_of(await first) == 0
        await eventually(lambda: served.doors.snapshot().requests == 0)

    assert served.ended("ok") == 1


async def test_cancelled_call_cancels_its_request(gated: Path) -> None:
    """The stages answer it with CANCELLED, and so the door counts it."""
    async with caller_of(gated) as (served, caller), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(_awaited(caller.infer(number(0))))
        await eventually(BEGUN.is_set)
        second = caller.infer(number(1))
        await eventually(lambda: served.waiting() == 1)
        second.cancel()
        await eventually(lambda: served.ended("CANCELLED") == 1)
        GATE.set()
        await first

    assert served.counted("CANCELLED") == 1
    assert served.doors.snapshot().late_answers == 1


async def _awaited(call: Any) -> Any:
    """The answer of a call, for a task."""
    return await call


async def test_full_gateway_refuses_and_says_when_to_return(gated: Path) -> None:
    """The status has the pushback that gRPC's clients heed, and the reason as details."""
    async with caller_of(gated, max_in_flight=1) as (served, caller), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(_awaited(caller.infer(number(0))))
        await eventually(lambda: served.doors.snapshot().requests == 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await caller.infer(number(1))
        GATE.set()
        await first

    metadata = dict(error.value.trailing_metadata() or ())
    content = metadata["grpc-status-details-bin"]
    assert isinstance(content, bytes)
    reason, retry = ErrorInfo(), RetryInfo()
    details = Status.FromString(content).details
    assert details[0].Unpack(reason)
    assert details[1].Unpack(retry)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (reason.reason, reason.metadata["retriable"]) == ("UNAVAILABLE", "true")
    assert (metadata["grpc-retry-pushback-ms"], retry.retry_delay.seconds) == ("1000", 1)


async def test_metadata_that_comes_twice_reaches_request_whole(repository: Path) -> None:
    """As headers over HTTP do: `tracestate`, and what `gateway.forward_headers` names."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    states = (("tracestate", "a=1"), ("tracestate", "b=2"))
    baggage = (("baggage", "c=3"), ("baggage", "d=4"))
    async with caller_of(repository, forward_headers=["baggage"]) as (served, caller):
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            await caller.infer(pixels(), metadata=(("traceparent", parent), *states, *baggage))
            (record,) = await read(reader, 1)

    assert ("tracestate", b"a=1, b=2") in record.headers
    assert ("baggage", b"c=3, d=4") in record.headers


async def test_trace_context_and_priority_of_caller_are_requests(repository: Path) -> None:
    """`traceparent` is written to the request record unchanged, beside `x-priority`."""
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    async with caller_of(repository) as (served, caller):
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            metadata = (("traceparent", parent), ("x-priority", "7"), ("x-tenant", "other"))
            await caller.infer(pixels(), metadata=metadata)
            (record,) = await read(reader, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="x-priority"):
            await caller.infer(pixels(), metadata=(("x-priority", "101"),))
        with pytest.raises(grpc.aio.AioRpcError, match="got '7, 9'"):
            await caller.infer(pixels(), metadata=(("x-priority", "7"), ("x-priority", "9")))

    assert ("traceparent", parent.encode()) in record.headers
    assert ("x-priority", b"7") in record.headers
    assert "x-tenant" not in [name for name, _ in record.headers]


async def test_only_named_metadata_of_caller_reach_request(repository: Path) -> None:
    """The record has the entries of `gateway.forward_headers`, binary ones as their bytes."""
    given = (("x-request-id", "seven"), ("trail-bin", b"\x00\xff"), ("x-other", "0"))
    names = ["x-request-id", "trail-bin"]
    async with caller_of(repository, forward_headers=names) as (served, caller):
        reader = served.log.reader([TopicPartition("headrace.requests", n) for n in range(4)])
        async with reader:
            await caller.infer(pixels(), metadata=given)
            (record,) = await read(reader, 1)

    assert ("x-request-id", b"seven") in record.headers
    assert ("trail-bin", b"\x00\xff") in record.headers
    assert "x-other" not in [name for name, _ in record.headers]


async def test_stream_answers_each_request_in_their_order(repository: Path) -> None:
    """An error is the answer to its request alone: the stream stays open."""
    async with caller_of(repository) as (_, caller):
        stream = caller.stream()
        for case in ("a", "b", "c"):
            model = "letters" if case == "b" else "digits"
            await stream.write(pixels(id=case, model_name=model))
        answers = [await stream.read() for _ in range(3)]
        await stream.write(pixels(id="d"))
        answers.append(await stream.read())
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK

    assert [answer.infer_response.id for answer in answers] == ["a", "b", "c", "d"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, False, False]
    assert "letters" in answers[1].error_message
    assert answers[0].infer_response.parameters["triton_final_response"].bool_param


async def test_requests_of_one_stream_share_batches(gated: Path) -> None:
    """The next request of a stream does not wait for the answer to the one before."""
    async with caller_of(gated) as (served, caller):
        stream = caller.stream()
        await stream.write(number(0))
        await eventually(BEGUN.is_set)
        for value in range(1, 5):
            await stream.write(number(value))
        await eventually(lambda: served.waiting() == 4)
        GATE.set()
        answers = [(await stream.read()).infer_response for _ in range(5)]
        await stream.done_writing()

    assert [value_of(answer) for answer in answers] == [0, 2, 4, 6, 8]
    assert answers[4].parameters["batch_size"].int64_param == 4


async def test_cancelled_stream_cancels_its_requests(gated: Path) -> None:
    """Nothing of a stream whose caller is gone stays at the door."""
    async with caller_of(gated) as (served, caller):
        stream = caller.stream()
        for value in range(3):
            await stream.write(number(value))
        await eventually(lambda: served.doors.snapshot().requests == 3)
        stream.cancel()
        await eventually(lambda: served.doors.snapshot().requests == 0)
        GATE.set()


async def test_health_is_checked_and_watched(repository: Path) -> None:
    """`grpc.health.v1` knows the server and the service; a watch is told when they drain."""
    seen: list[int] = []

    async def watch(stub: Any) -> None:
        watched = stub.Watch(health_pb2.HealthCheckRequest())
        while (answer := await watched.read()) is not grpc.aio.EOF:
            seen.append(answer.status)

    async with asyncio.TaskGroup() as tasks:
        async with caller_of(repository) as (served, _):
            other = grpc.aio.insecure_channel(served.grpc)
            stub = health_pb2_grpc.HealthStub(other)
            for service in ("", SERVICE.full_name):
                request = health_pb2.HealthCheckRequest(service=service)
                assert (await stub.Check(request)).status == OK
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Check(health_pb2.HealthCheckRequest(service="letters"))
            watching = tasks.create_task(watch(stub))
            await eventually(lambda: seen == [OK])
        await watching
        await other.close()

    assert seen == [OK, NO]
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_describes_the_services(repository: Path) -> None:
    """Tools such as grpcurl and ghz find each service, its methods and their messages."""
    async with caller_of(repository) as (_, caller):
        stub = reflection_pb2_grpc.ServerReflectionStub(caller.channel)
        stream = stub.ServerReflectionInfo()
        kind = reflection_pb2.ServerReflectionRequest
        await stream.write(kind(list_services=""))
        listed = await stream.read()
        names = [service.name for service in listed.list_services_response.service]
        files: dict[str, FileDescriptorProto] = {}
        for name in (*names, f"{SERVICE.full_name}.ModelInfer"):
            await stream.write(kind(file_containing_symbol=name))
            answer = (await stream.read()).file_descriptor_response
            files[name] = FileDescriptorProto.FromString(answer.file_descriptor_proto[0])
        await stream.write(kind(file_containing_symbol=f"{SERVICE.full_name}.Nothing"))
        unknown = (await stream.read()).error_response
        await stream.done_writing()

    assert {SERVICE.full_name, "grpc.health.v1.Health"} < set(names)
    assert len(files[SERVICE.full_name].service[0].method) == 20
    assert files[f"{SERVICE.full_name}.ModelInfer"] == files[SERVICE.full_name]
    assert unknown.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_drain_under_load_answers_all_that_was_taken(repository: Path) -> None:
    """Calls of callers who wait for nothing, and try again at once, end as retriable ones."""
    answered: list[str] = []
    ended = asyncio.Event()

    async def ask(channel: grpc.aio.Channel) -> None:
        caller = Caller(channel)
        while not ended.is_set():
            try:
                await caller.infer(pixels())
            except grpc.aio.AioRpcError as error:
                answered.append(error.code().name)
            else:
                answered.append("OK")

    own = [("grpc.use_local_subchannel_pool", 1)]  # each channel has a connection of its own
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        async with caller_of(repository) as (served, _):
            for _ in range(4):
                channel = grpc.aio.insecure_channel(served.grpc, options=own)
                await stack.enter_async_context(channel)
                for _ in range(2):
                    tasks.create_task(ask(channel))
            await eventually(lambda: len(answered) >= 50)
        ended.set()

    assert set(answered) == {"OK", "UNAVAILABLE"}
    assert answered.count("OK") == served.counted("OK")
    assert served.doors.snapshot().late_answers == 0


async def test_drain_answers_open_stream_and_ends_it(gated: Path) -> None:
    """Requests already sent in a stream are answered; the caller is told to open a new stream."""
    async with asyncio.TaskGroup() as tasks:
        async with gateway_of(gated, grpc_port=0) as served:
            channel = grpc.aio.insecure_channel(served.grpc)
            stream = Caller(channel).stream()
            await stream.write(number(3))
            await eventually(lambda: served.doors.snapshot().requests == 1)
            answered = tasks.create_task(stream.read())
            tasks.create_task(_open_gate_when_draining(served))
        assert value_of((await answered).infer_response) == 6
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        await channel.close()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "new stream" in (error.value.details() or "")


async def test_callers_that_wait_at_end_of_drain_are_told_why(repository: Path) -> None:
    """A call and a request of a stream both get the reason, with its details."""
    async with asyncio.TaskGroup() as tasks:
        async with gateway_of(
            repository, stages=(), grpc_port=0, sections={"limits": {"drain_timeout_s": 0.1}}
        ) as served:
            channel = grpc.aio.insecure_channel(served.grpc)
            stream = Caller(channel).stream()
            await stream.write(pixels(id="a"))
            call = Caller(channel).infer(pixels())
            streamed = tasks.create_task(stream.read())
            await eventually(lambda: served.doors.snapshot().requests == 2)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        answer = await streamed
        await channel.close()

    reason = "gateway: it stops, and waits for no more answers"
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, reason)
    assert (answer.error_message, answer.infer_response.id) == (reason, "a")


async def test_drain_ends_open_reflection(repository: Path) -> None:
    """Its caller is told to begin another one, elsewhere."""
    async with gateway_of(repository, grpc_port=0) as served:
        channel = grpc.aio.insecure_channel(served.grpc)
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await stream.read()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stream.read()
    await channel.close()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the gateway stops" in (error.value.details() or "")


async def _open_gate_when_draining(served: Served) -> None:
    await eventually(lambda: not served.pipeline.health.ready)
    GATE.set()


async def test_port_that_is_taken_is_named(repository: Path) -> None:
    """A second server on a port is an error, and not a silent share of its connections."""
    async with gateway_of(repository, grpc_port=0) as served:
        port = served.doors.ports["grpc"]
        with pytest.raises(Fatal, match=rf"gateway\.grpc_port: cannot listen on 127.0.0.1:{port}"):
            async with gateway_of(repository, grpc_port=port):
                pass


async def test_door_that_is_off_does_not_listen(repository: Path) -> None:
    """Each door can be off; a gateway without any is refused."""
    async with gateway_of(repository) as served:
        assert list(served.doors.ports) == ["http"]
    with pytest.raises(ConfigurationError, match="expected a door that is open"):
        async with gateway_of(repository, http_port="off"):
            pass
