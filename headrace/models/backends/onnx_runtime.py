"""Backend for ONNX models: runs a session of ONNX Runtime.

`headrace.models.backends.onnx_session` opens the session. Two peculiarities, as seen in release
1.31: strings must be UTF-8, and bfloat16 works only through bound memory.

Inputs and outputs are bound by address where possible, once per batch size. A run with everything
bound costs two thirds of one with arrays in and out, which repeats checks and conversions each
time. Outputs can be bound if their shapes are fixed, and are copied out of the bound memory after
the run, since the next run overwrites it. Large outputs are not bound: for them the copy costs more
than the binding saves.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening, widen
from headrace.errors import Code, ConfigurationError, Fatal, Rejected
from headrace.models.backends.onnx_session import (
    SessionStream,
    first_line_of,
    open_session,
    run_options,
)
from headrace.models.backends.port import Arrays, ReusedInputs, WarmUp, check_outputs
from headrace.models.backends.warmup import warm_up
from headrace.models.config import CPU, ModelConfig
from headrace.models.inputs.tokens import TokenDecoder
from headrace.models.processing import Processing, name_texts, plan_processing
from headrace.models.signature import Signature, TensorSpec
from headrace.models.signature_child import read_large_signature
from headrace.protocol.tensors import DATATYPES
from headrace.tuning import TUNING, ModelTuning


class OnnxBackend:
    """One session of ONNX Runtime; see `headrace.models.backends.port.Backend`.

    Args:
        directory: directory of the version, with `model.onnx` in it.
        config: configuration of the model.
        signature: signature of the version.
        tuning: tuning values of the warm-up and the bindings.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        signature: Signature,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._tuning = tuning
        self._directory = directory
        self._config = config
        self._signature = signature
        self._session: Any = None
        self._options: Any = None
        self._adaptation: Processing | None = None
        self._stream: SessionStream | None = None
        self._bound_options: list[Any] = []
        self._bindings: OutputBindings | None = None
        self._converter: InputConverter | None = None
        self._decoder: TokenDecoder | None = None

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def processing(self) -> Processing:
        if self._adaptation is None:
            config, signature = self._config, self._signature
            if config.preprocess or config.postprocess or config.decoded:
                found = read_large_signature(self._directory / "model.onnx", self._tuning)
                self._adaptation = plan_processing(found, config, self._directory)
            else:
                self._adaptation = Processing(signature, signature, {}, None)
        return self._adaptation

    def load(self) -> None:
        path = self._directory / "model.onnx"
        self._choose_run_path()
        if self._bound and self._texts:
            raise ConfigurationError(
                f"{path}: expected no BYTES beside BF16, which ONNX Runtime cannot bind; "
                f"got {self._texts[0].name}"
            )
        if self._config.tokens is not None and self._config.decoded:
            self._decoder = TokenDecoder(self._config.tokens, self._directory)
        self._session = open_session(path, self._config, self.processing.appendix, self._stream)
        self._options = run_options()

    def _choose_run_path(self) -> None:
        """Decide how to run the session from its inputs and outputs."""
        config, own = self._config, self.processing.own
        if self.processing.widenings:
            self._converter = InputConverter(own, self.processing.widenings)
        specs = own.inputs + own.outputs
        self._output_names = [spec.name for spec in own.outputs]
        self._texts = [spec for spec in specs if spec.datatype == "BYTES"]
        self._bound = any(spec.datatype == "BF16" for spec in specs)
        if config.io_binding and config.execution_providers == (CPU,):
            self._bindings = OutputBindings(own, self._tuning.max_bound_output_bytes)

    def use_stream(self, address: int, *, graphs: bool) -> None:
        self._stream = SessionStream(address, graphs)

    def bind(
        self, rows: int, number: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> Callable[[], None]:
        device = self._config.device
        binding = bind_device_memory(
            self._session, self.processing.own, device, rows, (inputs, outputs)
        )
        has_graphs = self._stream is not None and self._stream.has_graphs
        options = run_options(number if has_graphs else -1, wait=False)
        self._bound_options.append(options)

        def enqueue() -> None:
            options.terminate = False  # a cancel was meant for an earlier run
            try:
                self._session.run_with_iobinding(binding, options)
            except Exception as error:
                if device != "cpu" and _is_cuda_error(error):
                    raise Fatal(f"{device}: {first_line_of(error)}") from error
                raise

        return enqueue

    def use_signature(self, signature: Signature) -> None:
        self._signature = signature

    def warm_up(self) -> WarmUp:
        return warm_up(self.run, self._signature, self._config, self._directory, self._tuning)

    def run(self, inputs: Arrays) -> Arrays:
        if self._options.terminate:
            # A cancel that arrived after its run had ended must not end this run.
            self._options = run_options()
        if self._converter is not None:
            inputs = self._converter.widen(inputs)
        if isinstance(inputs, ReusedInputs) and self._bindings is not None:
            return self._run_reused(inputs, self._bindings)
        return self._run(inputs)

    def _run_reused(self, inputs: ReusedInputs, bindings: OutputBindings) -> Arrays:
        """Run on addresses that are bound once; the first run on them determines what to bind."""
        if inputs.bound is None:
            outputs = self._run(inputs)
            batched = self._signature.batched  # which the probe may have corrected
            inputs.bound = bindings.bind(self._session, inputs, outputs, batched=batched)
            return outputs
        if inputs.bound is UNBOUND:
            return self._run(inputs)
        bound: Binding = inputs.bound
        self._session.run_with_iobinding(bound.binding, self._options)
        return self.label({name: array.copy() for name, array in bound.outputs.items()})

    def _run(self, inputs: Arrays) -> Arrays:
        feeds = self._decode_texts(inputs) if self._texts else inputs
        outputs = self._run_bound(feeds) if self._bound else self._run_plain(feeds)
        outputs = self.label(outputs)
        rows = len(inputs[self._signature.inputs[0].name]) if self._signature.batched else 1
        check_outputs(self._signature, outputs, rows)
        return outputs

    def _run_plain(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        arrays = self._session.run(self._output_names, feeds, self._options)
        outputs: dict[str, NDArray[Any]] = dict(zip(self._output_names, arrays, strict=True))
        for spec in self.processing.own.outputs:
            if spec.datatype == "BYTES":
                outputs[spec.name] = _convert_elements(outputs[spec.name], str.encode)
        return outputs

    def _decode_texts(self, inputs: Arrays) -> Arrays:
        """Decode `BYTES` to strings: given bytes, ONNX Runtime would use their `repr`."""
        feeds = dict(inputs)
        for spec in self.processing.own.inputs:
            if spec.datatype != "BYTES":
                continue
            try:
                feeds[spec.name] = _convert_elements(inputs[spec.name], bytes.decode)
            except UnicodeDecodeError as error:
                raise Rejected.mismatch(
                    Code.INVALID_TENSOR, spec.name, expected="UTF-8", got=str(error)
                ) from error
        return feeds

    def _run_bound(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Run with memory bound by element type, the only way that supports bfloat16."""
        from onnxruntime import OrtValue

        binding = self._session.io_binding()
        for spec in self.processing.own.inputs:
            array = feeds[spec.name]
            raw = array.view(np.uint16) if spec.datatype == "BF16" else array
            element_type = DATATYPES[spec.datatype].onnx
            value = OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element_type)
            binding.bind_ortvalue_input(spec.name, value)
        for name in self._output_names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding, self._options)
        values = binding.get_outputs_as_ortvaluevector()
        return {
            spec.name: _copy_value(spec, values[position])
            for position, spec in enumerate(self.processing.own.outputs)
        }

    def label(self, outputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        appendix = self.processing.appendix
        if appendix is not None and appendix.labels:
            outputs[appendix.labelled] = appendix.look_up_labels(outputs[appendix.indices])
        if self._decoder is not None:
            name = self._config.decoded
            outputs[name_texts(name)] = self._decoder.decode(outputs[name])
        return outputs

    def cancel(self) -> None:
        options = self._options
        if options is not None:
            options.terminate = True
        for bound in self._bound_options:
            bound.terminate = True

    def unload(self) -> None:
        self._session = None
        self._options = None
        self._bound_options.clear()


def _is_cuda_error(error: Exception) -> bool:
    """Return whether the device or its libraries failed, which makes the context unusable."""
    return bool(
        re.search(r"\b(CUDA|CUDNN|CUBLAS|CUFFT)( failure| error|_STATUS_|_ERROR_)", str(error))
    )


def _convert_elements(array: NDArray[Any], convert: Any) -> NDArray[Any]:
    converted = np.empty(array.size, dtype=object)
    converted[:] = [convert(element) for element in array.ravel()]
    return converted.reshape(array.shape)


def _copy_value(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """Copy a value of ONNX Runtime to an array; a bfloat16 value is read through its address."""
    if spec.datatype != "BF16":
        array: NDArray[Any] = value.numpy()
        return array
    shape = value.shape()
    size = 2 * int(np.prod(shape, dtype=np.int64))
    raw = ctypes.string_at(value.data_ptr(), size)
    return np.frombuffer(raw, DATATYPES["BF16"].dtype).reshape(shape)


UNBOUND: Final = "not bound"
"""Stored instead of a binding if binding is not possible."""


class Binding(NamedTuple):
    """A binding of ONNX Runtime, and the arrays at the bound output addresses."""

    binding: Any
    outputs: dict[str, NDArray[Any]]


class OutputBindings:
    """Memory for a session's outputs. Runs are sequential, so all sizes share it.

    Args:
        signature: signature of the model.
        max_bytes: outputs of a run that are larger in total are not bound.
    """

    def __init__(
        self, signature: Signature, max_bytes: int = TUNING.models.max_bound_output_bytes
    ) -> None:
        self._signature = signature
        self._max_bytes = max_bytes
        self._memory = [np.empty(0, np.uint8) for _ in signature.outputs]

    def bind(
        self, session: Any, inputs: ReusedInputs, outputs: Arrays, *, batched: bool
    ) -> Binding | str:
        """Bind a run's inputs, and outputs like those of its unbound run; `UNBOUND` if impossible.

        Args:
            session: session of ONNX Runtime, on the CPU.
            inputs: inputs of the run.
            outputs: outputs of the run.
            batched: dimension 0 of every output is the batch, as large as that of the inputs.
        """
        specs = self._signature.outputs
        fixed = all(_is_fixed(spec, outputs[spec.name], batched=batched) for spec in specs)
        if not fixed or sum(array.nbytes for array in outputs.values()) > self._max_bytes:
            return UNBOUND
        binding = session.io_binding()
        for spec in self._signature.inputs:
            binding.bind_ortvalue_input(spec.name, _make_value(spec, inputs[spec.name]))
        bound: dict[str, NDArray[Any]] = {}
        for position, spec in enumerate(specs):
            array = bound[spec.name] = self._allocate(position, outputs[spec.name])
            binding.bind_ortvalue_output(spec.name, _make_value(spec, array))
        return Binding(binding, bound)

    def _allocate(self, position: int, like: NDArray[Any]) -> NDArray[Any]:
        if self._memory[position].size < like.nbytes:
            # Earlier bindings keep their memory.
            self._memory[position] = np.empty(like.nbytes, np.uint8)
        memory = self._memory[position][: like.nbytes]
        return memory.view(like.dtype).reshape(like.shape)


def bind_device_memory(
    session: Any,
    own: Signature,
    device: str,
    rows: int,
    addresses: tuple[Mapping[str, int], Mapping[str, int]],
) -> Any:
    """Return a binding to device memory. ONNX Runtime does not keep that memory alive.

    Args:
        session: session of ONNX Runtime.
        own: the session's inputs and outputs, with fixed shapes except for the batch.
        device: such as `cpu` or `cuda:0`.
        rows: number of rows of each tensor.
        addresses: addresses of the inputs and of the outputs, by name.
    """
    kind, _, number = device.partition(":")
    inputs, outputs = addresses
    binding = session.io_binding()
    for specs, places, bind in (
        (own.inputs, inputs, binding.bind_input),
        (own.outputs, outputs, binding.bind_output),
    ):
        for spec in specs:
            element_type = DATATYPES[spec.datatype].onnx
            shape = [rows, *spec.shape[1:]]
            bind(spec.name, kind, int(number or 0), element_type, shape, places[spec.name])
    return binding


def _is_fixed(spec: TensorSpec, array: NDArray[Any], *, batched: bool) -> bool:
    """Return whether the output's size follows from its declaration, whatever the inputs are."""
    shape = (*array.shape[:1], *spec.shape[1:]) if batched else spec.shape
    return shape == array.shape and bool(DATATYPES[spec.datatype].itemsize)


def _make_value(spec: TensorSpec, array: NDArray[Any]) -> Any:
    """Return an OrtValue on an array's memory; ONNX Runtime does not know NumPy's bfloat16."""
    from onnxruntime import OrtValue

    raw = array.view(np.uint16) if spec.datatype == "BF16" else array
    return OrtValue.ortvalue_from_numpy_with_onnx_type(raw, DATATYPES[spec.datatype].onnx)


class InputConverter:
    """Reused memory of the model's own inputs, which every run overwrites.

    Args:
        own: the model's signature.
        widenings: by input name; other inputs are passed unchanged.
    """

    def __init__(self, own: Signature, widenings: Mapping[str, Widening]) -> None:
        self._widenings = widenings
        self._memory = {name: np.empty(0, np.uint8) for name in widenings}
        self._own = own

    def widen(self, inputs: Arrays) -> Arrays:
        """Return the model's inputs. `ReusedInputs` inputs always give the same `ReusedInputs`
        object.
        """
        if not isinstance(inputs, ReusedInputs):
            wide = self._allocate(inputs)
        elif inputs.bound is None:
            wide = inputs.bound = self._allocate(inputs)
        else:
            wide = inputs.bound
        for name, widening in self._widenings.items():
            widen(widening, inputs[name], wide[name])
        return wide if isinstance(inputs, ReusedInputs) else dict(wide)

    def _allocate(self, inputs: Arrays) -> ReusedInputs:
        """Return arrays with the shapes of the converted inputs."""
        wide = ReusedInputs()
        for spec in self._own.inputs:
            given = inputs[spec.name]
            widening = self._widenings.get(spec.name)
            if widening is None:
                wide[spec.name] = given
                continue
            shape = _target_shape(widening, given.shape)
            wide[spec.name] = self._allocate_array(spec.name, DATATYPES[spec.datatype].dtype, shape)
        return wide

    def _allocate_array(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        size_bytes = math.prod(shape) * dtype.itemsize
        if self._memory[name].size < size_bytes:
            # Arrays that were returned earlier keep their memory.
            self._memory[name] = np.empty(size_bytes, np.uint8)
        return self._memory[name][:size_bytes].view(dtype).reshape(shape)


def _target_shape(widening: Widening, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    sizes.insert(widening.target_channels, sizes.pop(widening.source_channels))
    return tuple(sizes)
