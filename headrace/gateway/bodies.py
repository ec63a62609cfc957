"""Bodies of the door for HTTP beside those of inference; `schemas/openapi.json` is made from them.

Sources: the Open Inference Protocol, REST (https://github.com/kserve/open-inference-protocol),
Triton's extensions (https://github.com/triton-inference-server/server/tree/main/docs/protocol), and
TensorFlow Serving (https://www.tensorflow.org/tfx/serving/api_rest, "Model status API").
"""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

import msgspec

from headrace.gateway.statistics import ModelStatistics


class Live(TypedDict):
    """Whether the process is live."""

    live: bool


class Ready(TypedDict):
    """Whether the process takes requests."""

    ready: bool


class ServerMetadata(TypedDict):
    """The server, and its extensions of the protocol."""

    name: str
    version: str
    extensions: list[str]


class ModelNames(TypedDict):
    """The names of the ready models."""

    models: list[str]


class ModelReady(TypedDict):
    """A model that takes requests."""

    name: str
    ready: bool


class VersionStatusText(TypedDict):
    """Why a version is in its state."""

    error_code: str
    error_message: str


class VersionStatus(TypedDict):
    """The state of a version, as TensorFlow Serving describes it."""

    version: str
    state: str
    status: VersionStatusText


class ModelStatus(TypedDict):
    """A model as KServe (`name`, `ready`) and TensorFlow Serving describe it."""

    name: str
    ready: bool
    model_version_status: list[VersionStatus]


class AllStatistics(TypedDict):
    """The statistics of versions."""

    model_stats: list[ModelStatistics]


class Done(TypedDict):
    """It was done."""


class RegisterRequest(msgspec.Struct):
    """A range of a POSIX shared memory object."""

    key: str
    byte_size: Annotated[int, msgspec.Meta(ge=1)]
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class ErrorDetailsBody(TypedDict):
    """The part of an error for programs."""

    code: str
    retriable: bool
    retry_after_ms: NotRequired[int]


class ErrorBody(TypedDict):
    """An error: a text for people, and its details if the request reached the gateway."""

    error: str
    error_details: NotRequired[ErrorDetailsBody]
