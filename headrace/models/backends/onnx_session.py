"""Open sessions of ONNX Runtime: providers, threads and options.

Peculiarities, as seen in release 1.31: if the requested provider is unavailable, a session is
created on the CPU without an error, so the provider is checked afterwards; a failing run is retried
on another provider unless that is disabled; and a run without `gpu_graph_id` among its options pays
for a failed lookup when its inputs are bound.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ConfigurationError, NotLoadableHere
from headrace.models.config import CPU, CUDA, TENSORRT, ModelConfig
from headrace.models.cores import available_cores, part_of
from headrace.models.processing import Appendix, append_nodes

_EXTERNAL_DATA = "session.model_external_initializers_file_folder_path"
"""Folder of tensors in other files, for a model that is not loaded from a path."""
_ERRORS_OF_MODELS = frozenset(
    {"InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented"}
)
"""Names of ONNX Runtime's errors that only the model or its options cause, on whatever machine."""
_FATAL = 4  # errors are raised as exceptions; ONNX Runtime would also write each to stderr


class SessionStream(NamedTuple):
    """Stream of a device that a session runs on.

    Attributes:
        address: address of the stream.
        has_graphs: True if runs are captured as CUDA graphs.
    """

    address: int
    has_graphs: bool


def require_onnx_runtime() -> None:
    """Check that ONNX Runtime is installed. Two packages provide it, so neither is a dependency.

    Raises:
        NotLoadableHere: it is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise NotLoadableHere(
            "ONNX Runtime is not installed: pip install 'headrace[cpu]' "
            "(or 'headrace[gpu]' for CUDA)"
        )


def import_runtime() -> Any:
    """Import ONNX Runtime, and return it.

    As it is, a release from 1.29 on sends the names of models and more to Microsoft, from Linux as
    well, and keeps a number of the machine in the user's home. Its `disable_telemetry_events` comes
    too late for that.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def find_runtime() -> tuple[str, list[str]]:
    """Return the installed ONNX Runtime's version and the execution providers it was built with.

    That does not show which devices are present. Raises `ImportError`.
    """
    onnxruntime = import_runtime()
    return onnxruntime.__version__, onnxruntime.get_available_providers()


def open_session(
    path: Path, config: ModelConfig, appendix: Appendix | None, stream: SessionStream | None
) -> Any:
    """Return a session of ONNX Runtime on the providers of the model's device.

    Args:
        path: path of the model.
        config: configuration of the model.
        appendix: nodes to append to the model; None if there are none.
        stream: stream to run on; None for the session's own.

    Raises:
        NotLoadableHere: ONNX Runtime or a provider is missing, or has failed.
        ConfigurationError: the model, or an option in its configuration, is not valid.
    """
    require_onnx_runtime()
    onnxruntime = import_runtime()
    wanted = config.execution_providers
    available = onnxruntime.get_available_providers()
    if missing := [name for name in wanted if name not in available]:
        raise NotLoadableHere(
            f"{path}: expected {', '.join(missing)} for device {config.device}; the "
            f"installed onnxruntime has {', '.join(available)}"
        )
    if wanted[0] != CPU:
        onnxruntime.preload_dlls()  # CUDA and cuDNN from their wheels
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = intra_op_threads(config, available_cores())
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = _FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if config.extensions:
        options.register_custom_ops_library(_find_extensions())
    try:
        session = onnxruntime.InferenceSession(
            _path_or_content(path, appendix, options),
            sess_options=options,
            providers=list(wanted),
            provider_options=[_provider_options(name, config, stream) for name in wanted],
        )
    except Exception as error:  # its errors have no narrower common class
        is_of_model = type(error).__name__ in _ERRORS_OF_MODELS
        kind = ConfigurationError if is_of_model else NotLoadableHere
        raise kind(f"{path}: {first_line_of(error)}") from error
    got = session.get_providers()[0]
    if got != wanted[0]:
        raise NotLoadableHere(
            f"{path}: expected to run on {wanted[0]} ({config.device}), "
            f"got {got}: the device or a library that it needs is missing"
        )
    session.disable_fallback()
    return session


def _find_extensions() -> str:
    """Return the path of the library with the operators of onnxruntime-extensions."""
    try:
        import onnxruntime_extensions
    except ImportError as error:
        raise NotLoadableHere(
            "extensions: the operators need the package onnxruntime-extensions: "
            "pip install 'headrace[extensions]'"
        ) from error
    path: str = onnxruntime_extensions.get_library_path()
    return path


def _path_or_content(path: Path, appendix: Appendix | None, options: Any) -> Path | bytes:
    """Return the model's path, or its content with the appended nodes."""
    if appendix is None:
        return path
    import onnx

    model = onnx.load(path, load_external_data=False)
    append_nodes(model, appendix)
    options.add_session_config_entry(_EXTERNAL_DATA, str(path.parent))
    content: bytes = model.SerializeToString()
    return content


def _provider_options(
    provider: str, config: ModelConfig, stream: SessionStream | None
) -> dict[str, str]:
    options: dict[str, Any] = {}
    if provider in (CUDA, TENSORRT):
        options["device_id"] = config.device.removeprefix("cuda:")
    if provider == CUDA:
        options |= _cuda_options(config, stream)
    options |= config.provider_options.get(provider, {})  # type: ignore[call-overload]
    return {name: _format_option(value) for name, value in options.items()}


def _cuda_options(config: ModelConfig, stream: SessionStream | None) -> dict[str, Any]:
    """Return the defaults for all models; `provider_options` overrides them."""
    options: dict[str, Any] = {
        "arena_extend_strategy": "kSameAsRequested",  # buckets repeat, and so do sizes
        "cudnn_conv_algo_search": "HEURISTIC",  # the default was seen four times slower
    }
    if config.gpu_memory_limit_bytes:
        options["gpu_mem_limit"] = config.gpu_memory_limit_bytes
    if stream is not None:
        options["user_compute_stream"] = stream.address
        options["enable_cuda_graph"] = stream.has_graphs
    return options


def intra_op_threads(config: ModelConfig, cores: Collection[int]) -> int:
    """Return the threads of one run: as configured, or the instance's share of the process' part
    of the cores.
    """
    if config.intra_op_threads:
        return config.intra_op_threads
    if config.execution_providers[0] != CPU:
        return 1
    # A pinned instance's thread is already restricted to its share.
    if config.pinned:
        return len(cores)
    return max(1, len(part_of(cores, config.cores)) // config.instances)


def run_options(graph: int = -1, *, wait: bool = True) -> Any:
    """Return new options of a run.

    Args:
        graph: number of the CUDA graph that the run replays; -1 for none.
        wait: whether the run ends only when the device has finished.
    """
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL
    # Always set: looking up a missing entry costs more than most of what it would decide.
    options.add_run_config_entry("gpu_graph_id", str(graph))
    if not wait:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _format_option(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
