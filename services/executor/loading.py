"""Create the instances of a version on its device, and log when it is ready."""

from __future__ import annotations

from functools import partial

import structlog

from headrace.device.cpu import CpuDevice
from headrace.device.port import Device
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.loader import BackendLoader
from headrace.models.repository import files_of
from headrace.models.version import ModelVersion
from headrace.services.executor.device.instance import DeviceInstance, DevicePlacement
from headrace.services.executor.instance import HostBlockSize, Instance
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)


def make_instance(
    version: ModelVersion,
    number: int,
    loader: BackendLoader,
    tuning: ExecutorTuning = TUNING.executor,
) -> Instance:
    """Return one instance of a version, not yet entered.

    Raises:
        ConfigurationError: the files of a version for a device cannot be listed.
    """
    config = version.config
    name = f"{version.name}-{version.version}-{number}"
    backend = version.new_backend(loader.signature)
    if isinstance(backend, OnnxBackend) and (config.ring or config.device != "cpu"):
        return DeviceInstance(
            backend,
            name,
            _placement_of(version),
            max_execution_s=config.max_execution_s,
            max_load_s=config.max_load_s,
            prepare=loader.load,
            tuning=tuning,
        )
    return Instance(
        backend,
        name,
        max_execution_s=config.max_execution_s,
        max_load_s=config.max_load_s,
        may_inline=version.may_inline,
        prepare=loader.load,
        block_size=_block_size_of(version),
        tuning=tuning,
    )


def _block_size_of(version: ModelVersion) -> HostBlockSize | None:
    """Return the size of its host blocks; None for Python models, which may keep their inputs."""
    config = version.config
    if config.backend == "python" or not config.io_binding:
        return None
    return HostBlockSize(config.max_batch_size, config.max_batch_bytes)


def _placement_of(version: ModelVersion) -> DevicePlacement:
    config = version.config
    with files_of(version.directory) as files:
        weights_bytes = sum(path.stat().st_size for path in files)
    return DevicePlacement(
        open_device=partial(open_device, config.device),
        max_rows=config.max_batch_size,
        ring=config.ring,
        graphs=config.cuda_graphs and config.device != "cpu",
        needs={
            "weights": weights_bytes,
            "arena": config.gpu_memory_limit_bytes,
        },
    )


def open_device(name: str) -> Device:
    """Open a device by its name; call this on the thread that will use it.

    Raises:
        ConfigurationError: the device does not exist.
    """
    if name == "cpu":
        return CpuDevice()
    from headrace.device.cuda import CudaDevice

    return CudaDevice(int(name.removeprefix("cuda:")))


def log_ready(version: ModelVersion) -> None:
    """Log that a version is ready, and the findings about it."""
    log.info(
        Event.MODEL_READY,
        model=version.name,
        version=version.version,
        batching=version.verdict and version.verdict.description,
    )
    for event, reason in (
        (Event.MODEL_NOT_WARMED_UP, version.warm_up_omitted),
        (Event.MODEL_CONTRADICTED, version.contradiction),
    ):
        if reason:
            log.warning(event, model=version.name, version=version.version, reason=reason)
