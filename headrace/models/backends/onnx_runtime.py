"""Backend for ONNX models, on ONNX Runtime.

Peculiarities, as seen in release 1.31: if the requested provider is unavailable, a session is
silently created on the CPU; a failing run is retried on another provider unless that is disabled; a
run without `gpu_graph_id` among its options pays for a failed lookup when its inputs are bound;
strings must be UTF-8; and bfloat16 works only through bound memory.

Inputs and outputs are bound by address where possible, once per batch size. A run with everything
bound costs two thirds of one with arrays in and out, which repeats checks and conversions each
time. Outputs can be bound if their shapes are fixed, and are copied out of the bound memory after
the run, since the next run overwrites it. Large outputs are not bound: for them the copy costs more
than the binding saves.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.device.widening import Widening, widen
from headrace.errors import Code, ConfigurationError, Fatal, Rejected
from headrace.models.backends.port import Arrays, ReusedInputs, WarmUp, check_outputs
from headrace.models.backends.warmup import warm_up
from headrace.models.config import CPU, CUDA, TENSORRT, ModelConfig
from headrace.models.processing import Processing, append_nodes, plan_processing
from headrace.models.signature import Signature, TensorSpec, read_onnx_signature
from headrace.protocol.tensors import DATATYPES
from headrace.tuning import TUNING, ModelTuning


class OnnxBackend:
    """One session of ONNX Runtime; see `headrace.models.backends.port.Backend`.

    Args:
        directory: of the version, with `model.onnx` in it.
        config: of the model.
        signature: of the version.
        tuning: for the warm-up and the bindings.
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
        self._stream: int | None = None
        self._graphs = False
        self._bound_options: list[Any] = []
        self._bindings: OutputBindings | None = None
        self._converter: InputConverter | None = None

    @property
    def signature(self) -> Signature:
        return self._signature

    @property
    def processing(self) -> Processing:
        if self._adaptation is None:
            config, signature = self._config, self._signature
            if config.preprocess or config.postprocess:
                found = read_onnx_signature(self._directory / "model.onnx")
                self._adaptation = plan_processing(found, config, self._directory)
            else:
                self._adaptation = Processing(signature, signature, {}, None)
        return self._adaptation

    def load(self) -> None:
        require_onnx_runtime()
        import onnxruntime

        path = self._directory / "model.onnx"
        self._choose_run_path()
        if self._bound and self._texts:
            raise ConfigurationError(
                f"{path}: expected no BYTES beside BF16, which ONNX Runtime cannot bind; "
                f"got {self._texts[0].name}"
            )
        wanted = self._config.execution_providers
        available = onnxruntime.get_available_providers()
        if missing := [name for name in wanted if name not in available]:
            raise ConfigurationError(
                f"{path}: expected {', '.join(missing)} for device {self._config.device}; the "
                f"installed onnxruntime has {', '.join(available)}"
            )
        if wanted[0] != CPU:
            onnxruntime.preload_dlls()  # CUDA and cuDNN from their wheels
        session = self._open_session(path, wanted)
        got = session.get_providers()[0]
        if got != wanted[0]:
            raise ConfigurationError(
                f"{path}: expected to run on {wanted[0]} ({self._config.device}), "
                f"got {got}: the device or a library that it needs is missing"
            )
        session.disable_fallback()
        self._session = session
        self._options = _run_options()

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

    def _open_session(self, path: Path, providers: tuple[str, ...]) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = intra_op_threads(self._config)
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = _FATAL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        try:
            return onnxruntime.InferenceSession(
                self._path_or_content(path, options),
                sess_options=options,
                providers=list(providers),
                provider_options=[self._provider_options(name) for name in providers],
            )
        except Exception as error:  # its errors have no narrower common class
            raise ConfigurationError(f"{path}: {_first_line_of(error)}") from error

    def _path_or_content(self, path: Path, options: Any) -> Path | bytes:
        """Return the model's path, or its content with the appended nodes."""
        appendix = self.processing.appendix
        if appendix is None:
            return path
        import onnx

        model = onnx.load(path, load_external_data=False)
        append_nodes(model, appendix)
        options.add_session_config_entry(_EXTERNAL_DATA, str(path.parent))
        content: bytes = model.SerializeToString()
        return content

    def _provider_options(self, provider: str) -> dict[str, str]:
        options: dict[str, Any] = {}
        if provider in (CUDA, TENSORRT):
            options["device_id"] = self._config.device.removeprefix("cuda:")
        if provider == CUDA:
            options |= self._cuda_options()
        options |= self._config.provider_options.get(provider, {})  # type: ignore[call-overload]
        return {name: _format_option(value) for name, value in options.items()}

    def _cuda_options(self) -> dict[str, Any]:
        """Return the defaults for all models; `provider_options` overrides them."""
        options: dict[str, Any] = {
            "arena_extend_strategy": "kSameAsRequested",  # buckets repeat, and so do sizes
            "cudnn_conv_algo_search": "HEURISTIC",  # the default was seen four times slower
        }
        if self._config.gpu_memory_limit_bytes:
            options["gpu_mem_limit"] = self._config.gpu_memory_limit_bytes
        if self._stream is not None:
            options["user_compute_stream"] = self._stream
            options["enable_cuda_graph"] = self._graphs
        return options

    def use_stream(self, address: int, *, graphs: bool) -> None:
        self._stream, self._graphs = address, graphs

    def bind(
        self, rows: int, number: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> Callable[[], None]:
        device = self._config.device
        binding = bind_device_memory(
            self._session, self.processing.own, device, rows, (inputs, outputs)
        )
        options = _run_options(number if self._graphs else -1, wait=False)
        self._bound_options.append(options)

        def enqueue() -> None:
            options.terminate = False  # a cancel was meant for an earlier run
            try:
                self._session.run_with_iobinding(binding, options)
            except Exception as error:
                if device != "cpu" and _is_cuda_error(error):
                    raise Fatal(f"{device}: {_first_line_of(error)}") from error
                raise

        return enqueue

    def use_signature(self, signature: Signature) -> None:
        self._signature = signature

    def warm_up(self) -> WarmUp:
        return warm_up(self.run, self._signature, self._config, self._directory, self._tuning)

    def run(self, inputs: Arrays) -> Arrays:
        if self._options.terminate:
            # A cancel that arrived after its run had ended must not end this run.
            self._options = _run_options()
        if self._converter is not None:
            inputs = self._converter.widen(inputs)
        if isinstance(inputs, ReusedInputs) and self._bindings is not None:
            return self._run_reused(inputs, self._bindings)
        return self._run(inputs)

    def _run_reused(self, inputs: ReusedInputs, bindings: OutputBindings) -> Arrays:
        """Run on addresses that are bound once; the first run on them determines what to bind."""
        if inputs.bound is None:
            outputs = self._run(inputs)
            inputs.bound = bindings.bind(self._session, inputs, outputs)
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


def require_onnx_runtime() -> None:
    """Check that ONNX Runtime is installed. Two packages provide it, so neither is a dependency.

    Raises:
        ConfigurationError: it is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigurationError(
            "ONNX Runtime is not installed: pip install 'headrace[cpu]' "
            "(or 'headrace[gpu]' for CUDA)"
        )


def find_runtime() -> tuple[str, list[str]]:
    """Return the installed ONNX Runtime's version and the execution providers it was built with.

    That does not show which devices are present. Raises `ImportError`.
    """
    import onnxruntime

    return onnxruntime.__version__, onnxruntime.get_available_providers()


_EXTERNAL_DATA = "session.model_external_initializers_file_folder_path"
"""Folder of tensors in other files, for a model that is not loaded from a path."""
_FATAL = 4  # errors are raised as exceptions; ONNX Runtime would also write each to stderr


def intra_op_threads(config: ModelConfig) -> int:
    """Return the threads of one run: as configured, or the instance's share of our cores."""
    if config.intra_op_threads:
        return config.intra_op_threads
    if config.execution_providers[0] != CPU:
        return 1
    # Affinity exists on Linux only; in a container with pinned cores it is smaller than the
    # machine.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # A pinned instance's thread is already restricted to its share.
    return max(1, cores if config.pinned else cores // config.instances)


def _run_options(graph: int = -1, *, wait: bool = True) -> Any:
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL
    # Always set: looking up a missing entry costs more than most of what it would decide.
    options.add_run_config_entry("gpu_graph_id", str(graph))
    if not wait:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


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


def _format_option(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _first_line_of(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


UNBOUND: Final = "not bound"
"""Stored instead of a binding if binding is not possible."""


class Binding(NamedTuple):
    """A binding of ONNX Runtime, and the arrays at the bound output addresses."""

    binding: Any
    outputs: dict[str, NDArray[Any]]


class OutputBindings:
    """Memory for a session's outputs. Runs are sequential, so all sizes share it.

    Args:
        signature: of the model.
        max_bytes: outputs of a run that are larger in total are not bound.
    """

    def __init__(
        self, signature: Signature, max_bytes: int = TUNING.models.max_bound_output_bytes
    ) -> None:
        self._signature = signature
        self._max_bytes = max_bytes
        self._memory = [np.empty(0, np.uint8) for _ in signature.outputs]

    def bind(self, session: Any, inputs: ReusedInputs, outputs: Arrays) -> Binding | str:
        """Bind a run's inputs, and outputs like those of its unbound run; `UNBOUND` if impossible.

        Args:
            session: of ONNX Runtime, on the CPU.
            inputs: inputs of the run.
            outputs: outputs of the run.
        """
        specs = self._signature.outputs
        fixed = all(_is_fixed(spec, outputs[spec.name]) for spec in specs)
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
        session: of ONNX Runtime.
        own: the session's inputs and outputs, with fixed shapes except for the batch.
        device: such as `cpu` or `cuda:0`.
        rows: number of rows of each tensor.
        addresses: of the inputs and of the outputs, by name.
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


def _is_fixed(spec: TensorSpec, array: NDArray[Any]) -> bool:
    """Return whether the output's size follows from its declaration, whatever the inputs are."""
    fits = spec.shape[1:] == array.shape[1:] and spec.shape[:1] in ((-1,), array.shape[:1])
    return fits and bool(DATATYPES[spec.datatype].itemsize)


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
