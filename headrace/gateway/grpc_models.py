"""The methods for models of the door for gRPC: all of the service beside inference.

They answer from the models, the health and the regions of shared memory of this process, and change
the models of the deployment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from headrace import __version__
from headrace.errors import Code, Rejected
from headrace.gateway import open_inference_pb2 as messages
from headrace.gateway.gateway import Gateway, answer_of_error
from headrace.gateway.grpc_calls import (
    Context,
    credentials_of,
    parse_message,
    refusal_of_error,
)
from headrace.gateway.shared_memory import NO_CUDA, OFF
from headrace.models.metadata import describe_config, describe_model

_UNSUPPORTED = {
    "SystemSharedMemoryStatus": OFF,
    "SystemSharedMemoryRegister": OFF,
    "SystemSharedMemoryUnregister": OFF,
    "CudaSharedMemoryStatus": NO_CUDA,
    "CudaSharedMemoryRegister": NO_CUDA,
    "CudaSharedMemoryUnregister": NO_CUDA,
    "TraceSetting": "traces are set in [telemetry] of the settings",
    "LogSettings": "logs are set in [telemetry] of the settings",
}


class GrpcModels:
    """The methods of the service beside `ModelInfer` and `ModelStreamInfer`.

    Args:
        gateway: an open one.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tuning = gateway.tuning

    def methods(self) -> dict[str, Any]:
        """Return the methods by name, which take bytes and return bytes."""
        shown: dict[str, Callable[[Any], Message]] = {
            "ServerLive": self._show_live,
            "ServerReady": self._show_ready,
            "ServerMetadata": self._show_server,
            "ModelReady": self._show_model_ready,
            "ModelMetadata": self._show_model,
            "ModelConfig": self._show_config,
            "ModelStatistics": self._show_statistics,
        }
        if self._gateway.has_shared_memory:
            shown["SystemSharedMemoryStatus"] = self._show_regions
            shown["SystemSharedMemoryRegister"] = self._register
            shown["SystemSharedMemoryUnregister"] = self._unregister
        methods: dict[str, Any] = {
            "RepositoryIndex": grpc.unary_unary_rpc_method_handler(self._show_index),
            "RepositoryModelLoad": grpc.unary_unary_rpc_method_handler(self._load),
            "RepositoryModelUnload": grpc.unary_unary_rpc_method_handler(self._unload),
        }
        for name, show in shown.items():
            kind = getattr(messages, f"{name}Request")
            answer = partial(self._show, kind, show)
            methods[name] = grpc.unary_unary_rpc_method_handler(answer)
        for name, reason in _UNSUPPORTED.items():
            if name in methods:
                continue
            refuse = partial(_refuse_method, f"{name} is not supported: {reason}")
            methods[name] = grpc.unary_unary_rpc_method_handler(refuse)
        return methods

    # --- health and metadata ------------------------------------------------------------------

    async def _show(
        self, kind: type[Message], show: Callable[[Any], Message], message: bytes, context: Context
    ) -> bytes:
        """Answer a method that only shows something."""
        try:
            answer = show(parse_message(kind, message))
        except Rejected as error:
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))
        return answer.SerializeToString()

    def _show_live(self, request: messages.ServerLiveRequest) -> Message:
        return messages.ServerLiveResponse(live=self._gateway.health.live)

    def _show_ready(self, request: messages.ServerReadyRequest) -> Message:
        return messages.ServerReadyResponse(ready=self._gateway.health.ready)

    def _show_server(self, request: messages.ServerMetadataRequest) -> Message:
        return messages.ServerMetadataResponse(
            name="headrace", version=__version__, extensions=self._gateway.extensions
        )

    def _show_model_ready(self, request: messages.ModelReadyRequest) -> Message:
        """A model that is not known is not ready, and no error: so does Triton."""
        try:
            self._gateway.models.lookup(request.name, request.version or None)
        except Rejected:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=True)

    def _show_model(self, request: messages.ModelMetadataRequest) -> Message:
        models = self._gateway.models
        version = models.lookup(request.name, request.version or None)
        described: dict[str, Any] = {**describe_model(version, models.offered())}
        del described["batching"]
        return messages.ModelMetadataResponse(**described)

    def _show_config(self, request: messages.ModelConfigRequest) -> Message:
        version = self._gateway.models.lookup(request.name, request.version or None)
        config = messages.ModelConfig(**describe_config(version))
        return messages.ModelConfigResponse(config=config)

    def _show_statistics(self, request: messages.ModelStatisticsRequest) -> Message:
        found = self._gateway.statistics.describe(request.name, request.version)
        return messages.ModelStatisticsResponse(
            model_stats=[messages.ModelStatistics(**each) for each in found]
        )

    # --- the repository of models -------------------------------------------------------------

    async def _show_index(self, message: bytes, context: Context) -> bytes:
        index = messages.RepositoryIndexResponse()
        try:
            request = parse_message(messages.RepositoryIndexRequest, message)
            for entry in await self._gateway.repository.index(ready_only=request.ready):
                index.models.add(**entry)
        except Rejected as error:
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))
        return index.SerializeToString()

    async def _load(self, message: bytes, context: Context) -> bytes:
        """Answer `RepositoryModelLoad`."""
        await self._change(messages.RepositoryModelLoadRequest, message, context)
        return messages.RepositoryModelLoadResponse().SerializeToString()

    async def _unload(self, message: bytes, context: Context) -> bytes:
        """Answer `RepositoryModelUnload`."""
        await self._change(messages.RepositoryModelUnloadRequest, message, context)
        return messages.RepositoryModelUnloadResponse().SerializeToString()

    async def _change(
        self,
        kind: type[messages.RepositoryModelLoadRequest | messages.RepositoryModelUnloadRequest],
        message: bytes,
        context: Context,
    ) -> None:
        """Change the models, and return when all processes have followed."""
        gateway = self._gateway
        repository = gateway.repository
        try:
            who = self._changer(context) if repository.can_change else ""
            with gateway.under_way.counting() as counted:
                counted.add(len(message))
                request = parse_message(kind, message)
                if request.repository_name:
                    expected = "none, since models.repository has all"
                    got = repr(request.repository_name[:80])
                    raise Rejected.mismatch(
                        Code.INVALID_REQUEST, "repository_name", expected=expected, got=got
                    )
                loads = kind is messages.RepositoryModelLoadRequest
                change = repository.load if loads else repository.unload
                given = {name: _choice_of(each) for name, each in request.parameters.items()}
                await change(request.model_name, given, who, context.time_remaining())
        except Exception as error:  # noqa: BLE001 - the caller gets it as an answer, and it is logged
            await context.abort(*refusal_of_error(answer_of_error(error), self._tuning))

    def _changer(self, context: Context) -> str:
        """Return who changes the models. Raises `Denied`."""
        callers = self._gateway.callers
        given = credentials_of(context, use_certificates=callers.use_certificates)
        return callers.admit_change(given).tenant or f"address {given.address}"

    # --- shared memory ------------------------------------------------------------------------

    def _show_regions(self, request: messages.SystemSharedMemoryStatusRequest) -> Message:
        status = messages.SystemSharedMemoryStatusResponse()
        for each in self._gateway.regions.describe(request.name):
            kind = messages.SystemSharedMemoryStatusResponse.RegionStatus
            status.regions[each["name"]].CopyFrom(kind(**each))
        return status

    def _register(self, request: messages.SystemSharedMemoryRegisterRequest) -> Message:
        self._gateway.regions.register(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    def _unregister(self, request: messages.SystemSharedMemoryUnregisterRequest) -> Message:
        self._gateway.regions.unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()


def _choice_of(parameter: messages.ModelRepositoryParameter) -> object:
    """Return the value of a parameter; None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


async def _refuse_method(message: str, request: bytes, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
