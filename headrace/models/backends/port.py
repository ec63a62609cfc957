"""Port between the executor and the library that runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.models.adapting import Adaptation
    from headrace.models.signature import Signature

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Placed(dict[str, npt.NDArray[np.generic]]):
    """Inputs in reused memory.

    Every run of the same shapes from the same slot passes the same object, so a backend can cache
    on it what it has prepared for these addresses. The outputs of a run must not be views of these
    arrays.

    Attributes:
        bound: for the backend's own use; None at first.
    """

    __slots__ = ("bound",)

    def __init__(self) -> None:
        super().__init__()
        self.bound: Any = None


class ModelFailed(HeadraceError):
    """A run violated the model's signature: an output is missing, or its type or size is wrong."""


class WarmUp(NamedTuple):
    """Outcome of a warm-up.

    Attributes:
        batching_fault: reason why batching must be off; otherwise empty.
        omitted: reason why no warm-up with made-up inputs was possible; otherwise empty.
    """

    batching_fault: str = ""
    omitted: str = ""


class Backend(Protocol):
    """One instance of one model version.

    All calls except `signature` come from one thread, not necessarily the event loop's. Calls do
    not overlap, except with `cancel`.
    """

    @property
    def signature(self) -> Signature:
        """Inputs and outputs of the model."""
        ...

    def load(self) -> None:
        """Prepare to run.

        Raises:
            ConfigurationError: loading can never succeed like this: the device is missing, the file
                is broken, or another provider would silently be used.
        """
        ...

    def adopt(self, signature: Signature) -> None:
        """Use this signature from now on; probing the model found out more than its file states."""
        ...

    def warm_up(self) -> WarmUp:
        """Run once for each common batch size, so that the first request is not slow.

        Raises:
            ConfigurationError: not even one recorded row can be run.
        """
        ...

    def run(self, inputs: Arrays) -> Arrays:
        """Compute all outputs.

        Args:
            inputs: by name, little-endian, C-contiguous, with the batch dimension first if the
                model has one. `BYTES` inputs are object arrays of bytes. See `Placed`.

        Raises:
            Retriable: the same run may succeed later.
            Rejected: this input cannot be served.
            ModelFailed: the outputs do not match the signature.
            Exception: anything else counts as a failure of the model on one of these rows.
        """
        ...

    def cancel(self) -> None:
        """Make the current run end soon with an exception, if possible. Any thread may call it."""
        ...

    def unload(self) -> None:
        """Release all resources."""
        ...


class StreamBackend(Backend, Protocol):
    """A backend that can run on a given device stream, on device memory."""

    @property
    def adaptation(self) -> Adaptation:
        """Model-side and request-side signature. Available before `load`."""
        ...

    def use_stream(self, address: int, *, graphs: bool) -> None:
        """Run on this device stream and do not synchronize with it. Call before `load`.

        Args:
            address: the library's handle of the stream; 0 on the CPU.
            graphs: capture a CUDA graph for each binding.
        """
        ...

    def bind(
        self, rows: int, number: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> Callable[[], None]:
        """Return a function that enqueues a run of `rows` rows from and to fixed addresses.

        The function raises `Fatal` for a device error, and any other exception for an error of the
        model.

        Args:
            rows: number of rows of the run.
            number: number of the binding, from 1; each has its own CUDA graph.
            inputs: device addresses, by the model's own input names.
            outputs: device addresses, by the model's own output names.
        """
        ...

    def label(self, outputs: dict[str, npt.NDArray[Any]]) -> Arrays:
        """Add labels in place, so that a bound run's outputs match those of `run`."""
        ...
