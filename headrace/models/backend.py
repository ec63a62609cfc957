"""The port between the executor and whatever computes."""

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
    """Inputs that lie in memory which is filled again and again.

    The same object comes for every run of its shapes from its place, so that a backend can keep
    with it what it has prepared for these addresses. What it returns from a run must not be a
    view of them.

    Attributes:
        bound: the backend's own; None at first.
    """

    __slots__ = ("bound",)

    def __init__(self) -> None:
        super().__init__()
        self.bound: Any = None


class ModelFailed(HeadraceError):
    """A run broke the model's own signature: an output is missing, or of another type or size."""


class WarmUp(NamedTuple):
    """The outcome of a warm-up.

    Attributes:
        batching_fault: why batching must be off; empty otherwise.
        omitted: why it was not possible with made-up inputs; empty otherwise.
    """

    batching_fault: str = ""
    omitted: str = ""


class Backend(Protocol):
    """One instance of one version of a model.

    All calls but `signature` come from one thread, which may differ from the event loop's; none
    is made while another is under way, except `cancel`.
    """

    @property
    def signature(self) -> Signature:
        """What the model takes and gives."""
        ...

    def load(self) -> None:
        """Get ready to run.

        Raises:
            ConfigurationError: it can never load like this: the device is not there, the file is
                broken, a provider would silently be another.
        """
        ...

    def adopt(self, signature: Signature) -> None:
        """Go by this signature from now on: trying the model out showed more than its file says."""
        ...

    def warm_up(self) -> WarmUp:
        """Run once for each size that will be used often, so that the first request is not slow.

        Raises:
            ConfigurationError: not even one recorded row can be run.
        """
        ...

    def run(self, inputs: Arrays) -> Arrays:
        """Compute all outputs.

        Args:
            inputs: by name, little-endian, C-contiguous, with the batch dimension first where
                the model has one. `BYTES` inputs are object arrays of bytes. See `Placed`.

        Raises:
            Retriable: the same run may succeed later.
            Rejected: this input cannot be served.
            ModelFailed: the outputs are not what the signature says.
            Exception: anything else counts as the model's failure on one of these rows.
        """
        ...

    def cancel(self) -> None:
        """Make a run under way end soon, with an exception, if that can be done. Any thread."""
        ...

    def unload(self) -> None:
        """Let go of everything."""
        ...


class StreamBackend(Backend, Protocol):
    """A backend that can run between blocks of a device, on a stream that it is given."""

    @property
    def adaptation(self) -> Adaptation:
        """What the model takes and gives, and what requests see of it. Before `load` too."""
        ...

    def use_stream(self, address: int, *, graphs: bool) -> None:
        """Run on this stream of the device, without waiting for it. Before `load`.

        Args:
            address: the library's handle of the stream; 0 on the CPU.
            graphs: capture a CUDA graph for each binding.
        """
        ...

    def bind(
        self, rows: int, number: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> Callable[[], None]:
        """What enqueues a run of so many rows from and to fixed addresses.

        It raises `Fatal` for an error of the device's, anything else for the model's.

        Args:
            rows: of the run.
            number: of the binding, from 1; each has its own graph.
            inputs: addresses on the device, by the model's own names.
            outputs: likewise.
        """
        ...

    def label(self, outputs: dict[str, npt.NDArray[Any]]) -> Arrays:
        """Outputs of a bound run as `run` would have returned them, in place."""
        ...
