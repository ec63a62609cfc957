"""Inference over gRPC: `ModelInfer` of the Open Inference Protocol, `ModelStreamInfer` of Triton.

`GrpcInference._take` is a request's whole way through the door, alone or in a stream.
Sources: https://github.com/kserve/open-inference-protocol (gRPC), and Triton's extensions of it
(https://github.com/triton-inference-server/server/tree/main/docs/protocol).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import grpc

from headrace.access.callers import ApiGroup, Caller
from headrace.errors import Rejected, drop_tracebacks
from headrace.gateway import open_inference_pb2 as messages
from headrace.gateway.call_groups import CallGroups
from headrace.gateway.gateway import Gateway, answer_of_error, read_priority
from headrace.gateway.grpc_calls import (
    Context,
    Drain,
    Refusal,
    begin_answers,
    credentials_of,
    end_quiet,
    headers_in,
    parse_message,
    refusal_of_error,
    text_of,
    write_answer,
)
from headrace.gateway.grpc_codec import (
    decode_call,
    encode_answer,
    find_places,
    has_texts_in_regions,
    is_decoded_by_element,
)
from headrace.gateway.quiet_calls import EndedQuiet, QuietCall, QuietCalls, Room
from headrace.protocol.headers import HeaderName
from headrace.telemetry.span_attributes import Attributes

DOOR: Final = "grpc"
SERVICE: Final = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
FINAL: Final = "triton_final_response"
WANTS_FINAL: Final = "triton_enable_empty_final_response"

_SERVERS_FAULTS = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Statuses that make the span of a call an error, by OpenTelemetry's conventions for gRPC."""


class GrpcInference:
    """The methods of the service that answer requests; `GrpcModels` has the others.

    Args:
        gateway: an open one.
        drain: says when the door stops.
        port: returns the port on which the door listens, for spans.
    """

    def __init__(self, gateway: Gateway, drain: Drain, port: Callable[[], int]) -> None:
        self._gateway = gateway
        self._tuning = gateway.tuning
        self._drain = drain
        self._port = port
        self._groups = CallGroups(gateway.tuning)
        settings = gateway.settings
        self._quiet_streams = QuietCalls(
            "ModelStreamInfer",
            self._tuning.max_quiet_streams,
            settings.idle_timeout_s,
            max_unread_bytes=settings.max_in_flight_bytes // 2,  # the rest is for others
        )

    def methods(self) -> dict[str, Any]:
        """Return the methods by name, which take bytes and return bytes."""
        return {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._infer_stream),
        }

    async def _infer(self, message: bytes, context: Context) -> bytes:
        """Answer `ModelInfer`."""
        answer = await self._take(message, context, "ModelInfer")
        if isinstance(answer, Refusal):
            await context.abort(*answer)
        return answer.SerializeToString()

    async def _infer_stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Answer each request of a `ModelStreamInfer`, in the order of the requests.

        So many are under way at once. An error is the answer to its request alone; the stream ends
        when its caller ends it, when it is quiet for too long, or when the door stops listening.
        """
        try:
            async with self._quiet_streams.opened() as call:
                await begin_answers(context)
                await self._answer_each(requests, context, call)
        except asyncio.CancelledError as error:
            drop_tracebacks(error)  # a frame of the task group refers to it, others to the answers
            raise
        except EndedQuiet as error:
            drop_tracebacks(error)
            await end_quiet(context, error, self._tuning.stop_timeout_s)
        if self._drain.begun.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway stops; open a new stream")

    async def _answer_each(
        self, requests: AsyncIterator[bytes], context: Context, call: QuietCall
    ) -> None:
        """Answer the requests of a stream until it ends, or the door stops listening."""
        permits = asyncio.Semaphore(self._tuning.requests_per_stream)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        room = Room(self._tuning.unread_bytes_per_stream)

        async def take(message: bytes) -> bytes:
            call.begin()
            try:
                answer = await self._take_from_stream(message, context)
            finally:
                call.done()
            held.add(len(answer))
            room.take(len(answer) - len(message))
            call.hold(len(answer))
            return answer

        async def read() -> None:
            await permits.acquire()
            async for message in requests:
                room.take(len(message))
                answers.put_nowait(tasks.create_task(take(message), name="grpc-stream-request"))
                del message  # while this waits for the next one
                await permits.acquire()
                await room.wait()

        async def read_until_stop() -> None:
            stopping = asyncio.create_task(self._drain.begun.wait(), name="grpc-stream-stop")
            reading = asyncio.create_task(read(), name="grpc-stream-read")
            try:
                await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                reading.cancel()
            answers.put_nowait(None)

        with self._gateway.under_way.holding() as held:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read_until_stop(), name="grpc-stream")
                while (answer := await answers.get()) is not None:
                    content = await answer
                    await write_answer(context, content)  # until its caller reads, see `QuietCalls`
                    held.remove(len(content))
                    room.take(-len(content))
                    call.read(len(content))
                    call.rest()
                    permits.release()
                    # Otherwise a stream at rest would keep its last answer in memory.
                    del answer, content

    async def _take_from_stream(self, message: bytes, context: Context) -> bytes:
        answer = await self._take(message, context, "ModelStreamInfer")
        if isinstance(answer, Refusal):
            return messages.ModelStreamInferResponse(
                error_message=answer.message,
                infer_response=messages.ModelInferResponse(id=_id_of(message)),
            ).SerializeToString()
        answer.parameters[FINAL].bool_param = True
        return messages.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    async def _take(
        self, message: bytes, context: Context, method: str
    ) -> messages.ModelInferResponse | Refusal:
        """Parse a request, send it to the log, wait for its answer, and encode that.

        gRPC cancels this when the caller cancels, when its deadline passes, and when it is gone;
        that cancels the request.
        """
        gateway, conversions = self._gateway, self._gateway.conversions
        began_s = time.monotonic()
        status = grpc.StatusCode.CANCELLED
        found = headers_in(context.invocation_metadata())
        given = (
            text_of(found.get(name)) for name in (HeaderName.TRACEPARENT, HeaderName.TRACESTATE)
        )
        span = gateway.spans.begin(*given)
        try:
            if self._drain.begun.is_set():
                await self._drain.refuse()
            caller = self._caller_of(context)
            with gateway.under_way.counting(caller, len(message)) as counted:
                left_s = context.time_remaining()
                counted.add(len(message))
                request = parse_message(messages.ModelInferRequest, message)
                regions = gateway.access(counted)
                by_element = is_decoded_by_element(request)
                call = await conversions.decode(
                    partial(decode_call, request),
                    partial(find_places, request),
                    regions,
                    takes_long=conversions.parsing_takes_long(
                        message,
                        by_element=by_element,
                        texts_in_regions=has_texts_in_regions(request),
                    ),
                )
                call.parameters.pop(WANTS_FINAL, None)  # each answer is the final one
                await self._groups.join()
                given_s = [call.timeout_us / 1e6] if call.timeout_us else []
                if left_s is not None:
                    given_s.append(max(left_s, 0.0))
                passed_s = time.monotonic() - counted.came_s
                priority = text_of(found.get(HeaderName.PRIORITY))
                urgency = gateway.urgency(
                    given_s, passed_s, read_priority(HeaderName.PRIORITY, priority)
                )
                model, version = request.model_name, request.model_version or None
                headers = gateway.record_headers(span, caller, found.get)
                answer = await gateway.infer(model, version, call, urgency, headers)
                span.answered(answer)
                encoded = await conversions.encode(
                    partial(encode_answer, answer, call),
                    regions,
                    takes_long=conversions.encoding_takes_long(answer, call),
                )
            status = grpc.StatusCode.OK
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            described = answer_of_error(error)
            refusal = refusal_of_error(described, self._tuning)
            status = refusal.status
            at_fault = status in _SERVERS_FAULTS
            span.failed(described.code, described.message, is_callers_fault=not at_fault)
            return refusal
        else:
            return encoded
        finally:
            gateway.metrics.ended_at_door(DOOR, status.name, time.monotonic() - began_s)
            span.end(partial(self._describe_call, method, status))

    def _caller_of(self, context: Context) -> Caller | None:
        """Return who sends a request; None if all callers are alike. Raises `Denied`."""
        callers = self._gateway.callers
        if callers.are_all_alike:
            return None
        given = credentials_of(context, use_certificates=callers.use_certificates)
        return callers.admit(ApiGroup.INFERENCE, given)

    def _describe_call(self, method: str, status: grpc.StatusCode) -> tuple[str, Attributes]:
        """Return the name and the attributes of the span of a call."""
        name = f"{SERVICE.full_name}/{method}"
        return name, {
            "rpc.system.name": "grpc",
            "rpc.method": name,
            "rpc.response.status_code": status.name,
            "server.address": self._gateway.settings.grpc_host,
            "server.port": self._port(),
        }


def _id_of(message: bytes) -> str:
    try:
        return parse_message(messages.ModelInferRequest, message).id
    except Rejected:
        return ""
