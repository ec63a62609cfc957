"""Port between the executor and the library that runs a model, and the check of a run's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError, Rejected
from headrace.models.signature import Signature
from headrace.protocol.tensors import datatype_of

if TYPE_CHECKING:
    from headrace.models.processing import Processing
    from headrace.models.signature import Signature


Arrays = Mapping[str, npt.NDArray[np.generic]]


class ReusedInputs(dict[str, npt.NDArray[np.generic]]):
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

    def use_signature(self, signature: Signature) -> None:
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
                model has one. `BYTES` inputs are object arrays of bytes. See `ReusedInputs`.

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
    def processing(self) -> Processing:
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


class RowsMismatch(ModelFailed):
    """An output does not have one row for each row of the run."""


def check_outputs(signature: Signature, outputs: Arrays, rows: int) -> None:
    """Check that every output is present, with its datatype and one row for each row of the run.

    Raises:
        RowsMismatch: an output has another number of rows.
        ModelFailed: any other fault; names the output, the expected value and the actual one.
    """
    for spec in signature.outputs:
        array = outputs.get(spec.name)
        if array is None:
            got = ", ".join(outputs) or "none"
            raise ModelFailed(f"outputs: expected {spec.name}, got {got}")
        try:
            datatype = datatype_of(array.dtype).name
        except Rejected:
            datatype = array.dtype.name
        if datatype != spec.datatype:
            raise ModelFailed(f"output {spec.name}: expected {spec.datatype}, got {datatype}")
        if signature.batched and (not array.ndim or array.shape[0] != rows):
            raise RowsMismatch(
                f"output {spec.name}: expected {rows} rows in dimension 0, "
                f"got shape {list(array.shape)}"
            )


def check_shapes(signature: Signature, outputs: Arrays) -> None:
    """Check that all outputs have the shapes that the signature declares.

    Raises:
        ModelFailed: with the output, its declared shape and its actual one.
    """
    for spec in signature.outputs:
        shape = outputs[spec.name].shape
        fits = len(shape) == len(spec.shape) and all(
            size in (-1, given) for size, given in zip(spec.shape, shape, strict=True)
        )
        if not fits:
            raise ModelFailed(
                f"output {spec.name}: expected shape {list(spec.shape)}, got {list(shape)}"
            )


def check_texts(signature: Signature, outputs: Arrays) -> None:
    """Check that `BYTES` outputs hold bytes or str; an object array may hold anything, and one of
    NumPy's `StringDType` a missing value.

    Raises:
        ModelFailed: with the first other element and its index.
    """
    for spec in signature.outputs:
        array = outputs[spec.name]
        if array.dtype.kind not in "OT":
            continue
        for index, element in enumerate(array.flat):
            if not isinstance(element, bytes | str):
                raise ModelFailed(
                    f"output {spec.name}: expected bytes or str, "
                    f"got {type(element).__name__} at element {index}"
                )
