"""Requests whose version has gone, bound to the version that is there instead.

Ingest binds a request to a version of its model. Where batcher and executor are other processes,
they look at the repository at other times: the version may not have come to them yet, or may have
gone. A request that names no version is bound again, to the version that this process would give
it. One that names its version, or does not fit the other one, is answered with a retriable code:
when it is sent again, ingest decides with what it knows by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from headrace.errors import Code, Rejected
from headrace.models.version import ModelVersion
from headrace.protocol.codec import names_version
from headrace.protocol.messages import InputTensor, Request, RequestedOutput

RETRY_AFTER_MS = 1000

Rebind: TypeAlias = Callable[[Request, Rejected], None]
"""See `Rebinder.rebind`."""


class CurrentVersions(Protocol):
    """The part of `headrace.models.registry.Models` that is needed here."""

    def lookup(self, name: str, version: str | None = None) -> ModelVersion: ...


class Rebinder:
    """Binds requests to the current version of their model.

    Args:
        models: of this process.
        count: called for each request that was bound again.
    """

    def __init__(self, models: CurrentVersions, count: Callable[[], None]) -> None:
        self._models = models
        self._count = count

    def rebind(self, request: Request, gone: Rejected) -> None:
        """Bind a request to the current version.

        Args:
            request: bound to a version that is not here.
            gone: how the look-up of that version was refused.

        Raises:
            Rejected: `MODEL_NOT_READY`: it names its version, there is no other one, or it does
                not fit that.
        """
        if names_version(request.value, request.envelope):
            raise not_here(gone.message, gone)
        wanted = request.wanted
        try:
            version = self._models.lookup(request.model)
            bound = version.bind(
                [
                    InputTensor(
                        name=name, datatype=datatype, shape=list(shape), data=memoryview(data)
                    )
                    for name, datatype, shape, data in request.inputs
                ],
                None if wanted is None else [RequestedOutput(name=name) for name in wanted],
            )
        except Rejected as error:
            raise not_here(f"{gone.message}; {error.message}", error) from error
        request.version = version.version
        request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = (
            bound
        )
        request.item = None  # it names the other version
        self._count()


def not_here(message: str, error: Rejected) -> Rejected:
    """Return the refusal of a request that ingest let through, since its version is not here.

    No request that passed ingest names an unknown model: what is missing comes or goes.
    """
    return Rejected(
        Code.MODEL_NOT_READY, message, retry_after_ms=error.retry_after_ms or RETRY_AFTER_MS
    )


def refuse_to_rebind(_request: Request, gone: Rejected) -> None:
    """Bind nothing again: for where all requests are bound by the process that runs them.

    Raises:
        Rejected: `MODEL_NOT_READY`.
    """
    raise not_here(gone.message, gone)
