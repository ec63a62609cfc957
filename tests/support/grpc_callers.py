"""A gRPC client of a gateway that can send anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from headrace.gateway import grpc_inference
from headrace.gateway import open_inference_pb2 as messages
from tests.support.gateways import Served, gateway_of

SERVICE = grpc_inference.SERVICE
RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
"""Options of a channel that tries again soon after its server has ended."""


class Caller:
    """A gRPC client of the service, by the names of its methods."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def call(self, method: str, request: Message | bytes, **options: Any) -> Any:
        """Begin a call; awaiting it gives the answer, and `code()` the status."""
        kind = getattr(messages, SERVICE.methods_by_name[method].output_type.name)
        path = f"/{SERVICE.full_name}/{method}"
        begin: Any = self.channel.unary_unary(path, response_deserializer=kind.FromString)
        sent = request if isinstance(request, bytes) else request.SerializeToString()
        return begin(sent, **options)

    def infer(self, request: Message | bytes, **options: Any) -> Any:
        return self.call("ModelInfer", request, **options)

    def stream(self, **options: Any) -> Any:
        """Begin a stream."""
        return self.channel.stream_stream(
            f"/{SERVICE.full_name}/ModelStreamInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelStreamInferResponse.FromString,
        )(**options)


@asynccontextmanager
async def caller_of(
    repository: Path, *options: tuple[str, Any], **gateway: Any
) -> AsyncIterator[tuple[Served, Caller]]:
    """A gateway with a door for gRPC, and a client of it."""
    async with (
        gateway_of(repository, grpc_port=0, **gateway) as served,
        grpc.aio.insecure_channel(served.grpc, options=options) as channel,
    ):
        yield served, Caller(channel)


def pixels(**fields: Any) -> messages.ModelInferRequest:
    """A request for `digits`, with raw contents unless there are others."""
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64]}
    defaults = {
        "model_name": "digits",
        "inputs": [tensor],
        "raw_input_contents": [np.ones(64, "<f4").tobytes()],
    }
    return messages.ModelInferRequest(**{**defaults, **fields})
