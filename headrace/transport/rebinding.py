"""Rebind requests whose model version is not in this process to its current version.

Ingest binds a request to a version of its model. Batcher and executor may be other processes,
which read the repository at other times: they may not have the version yet, or not any more. A
request that names no version, or a label, is rebound to the version that this process would choose.
A request that names the number of its version, or does not fit the other one, is answered with a
retriable code: when it is sent again, ingest decides with what it knows by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from headrace.errors import Code, Rejected
from headrace.models.version import ModelVersion
from headrace.protocol.codec import find_label
from headrace.protocol.messages import IngestedRequest, InputTensor, RequestedOutput
from headrace.tuning import TUNING

Rebind: TypeAlias = Callable[[IngestedRequest, Rejected], None]
"""See `Rebinder.rebind`."""


class CurrentVersions(Protocol):
    """The part of `headrace.models.catalog.ModelCatalog` that rebinding uses."""

    def lookup_again(self, name: str) -> ModelVersion: ...


class Rebinder:
    """Bind requests to the current version of their model.

    Args:
        models: the models of this process.
        count: called for each request that was rebound.
    """

    def __init__(self, models: CurrentVersions, count: Callable[[], None]) -> None:
        self._models = models
        self._count = count

    def rebind(self, request: IngestedRequest, gone: Rejected) -> None:
        """Bind a request to the current version.

        Args:
            request: bound to a version that is not in this process.
            gone: error of the look-up of that version.

        Raises:
            Rejected: `MODEL_NOT_READY`: the request names the number of its version, or may do so
                in a value that is not here; there is no other version, or the request does not fit
                it.
        """
        request.restore()
        label = None if request.referenced else find_label(request.value, request.envelope)
        if label is None:
            raise version_not_ready(gone.message, gone)
        wanted = request.wanted
        try:
            named = f"{request.model}@{label}" if label else request.model
            version = self._models.lookup_again(named)
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
            raise version_not_ready(f"{gone.message}; {error.message}", error) from error
        request.version = version.version
        request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = (
            bound
        )
        request.item = request.places = None  # they name the inputs of the other version
        self._count()


def version_not_ready(message: str, error: Rejected) -> Rejected:
    """Return the error for a request that passed ingest but whose version is not here.

    A request that passed ingest never names an unknown model: a missing version is still being
    loaded, or was removed.
    """
    return Rejected(
        Code.MODEL_NOT_READY,
        message,
        retry_after_ms=error.retry_after_ms or TUNING.transport.rebind_retry_after_ms,
    )


def refuse_to_rebind(_request: IngestedRequest, gone: Rejected) -> None:
    """Rebind nothing: used where the process that runs the requests has bound them itself.

    Raises:
        Rejected: `MODEL_NOT_READY`.
    """
    raise version_not_ready(gone.message, gone)
