"""Load the instances of a version on its device, and log when it is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TypeVar

import structlog

from headrace.device.cpu import CpuDevice
from headrace.device.port import Device
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.loader import BackendLoader
from headrace.models.memory import MemoryShort, ModelMemory, loaded_files_bytes
from headrace.models.repository import files_of, stamp_files
from headrace.models.version import ModelVersion, State
from headrace.primitives.worker_thread import run_on_daemon_thread
from headrace.services.executor.device.instance import DeviceInstance, DevicePlacement
from headrace.services.executor.instance import HostBlockSize, Instance
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, ExecutorTuning

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Withdrawn(Exception):
    """A version was removed before it was loaded, and no request waits for it."""


class InstanceLoader:
    """Loads the instances of versions within the memory of the models.

    Args:
        memory: the budget, and the measured memory of each version.
        unload_idle: unloads idle versions to free a number of bytes; returns False if these do not
            hold that many.
        loads_in_turn: returns True if versions are loaded one after the other without a budget,
            too.
        is_withdrawn: returns True for a version that need not be loaded any more.
    """

    def __init__(
        self,
        memory: ModelMemory,
        unload_idle: Callable[[int], Awaitable[bool]],
        loads_in_turn: Callable[[], bool],
        is_withdrawn: Callable[[ModelVersion], bool],
        tuning: ExecutorTuning,
    ) -> None:
        self._memory = memory
        self._unload_idle = unload_idle
        self._loads_in_turn = loads_in_turn
        self._is_withdrawn = is_withdrawn
        self._tuning = tuning
        self._turn = asyncio.Lock()

    async def load(
        self, version: ModelVersion, loader: BackendLoader, count: int
    ) -> tuple[AsyncExitStack, list[Instance]]:
        """Load the instances of a version, and measure their memory.

        If there is too little memory, a version for which requests wait waits for others to become
        idle, and other versions are loaded meanwhile.

        Returns:
            The stack that unloads the instances, and the instances.

        Raises:
            MemoryShort: the memory of all does not suffice, and no idle version can be unloaded.
            ConfigurationError: one cannot be loaded; they are unloaded then.
            Withdrawn: the version need not be loaded any more; none of them is loaded then.
        """
        end_s = time.monotonic() + self._tuning.memory_wait_s
        while True:
            try:
                return await self._try_to_load(version, loader, count)
            except MemoryShort:
                if version.state is not State.UNLOADED or time.monotonic() >= end_s:
                    raise
            await asyncio.sleep(self._tuning.memory_check_s)

    async def _try_to_load(
        self, version: ModelVersion, loader: BackendLoader, count: int
    ) -> tuple[AsyncExitStack, list[Instance]]:
        """Load once; see `load`. The memory that a failed attempt measured counts in the next."""
        memory = self._memory
        # With a budget, versions are loaded one after the other: otherwise the growth of each could
        # not be measured, and several could exceed the budget together. The turn ends after a
        # version that failed, or was withdrawn, is unloaded, so that its memory is free before the
        # next is measured.
        in_turn = bool(memory.limit_bytes) or self._loads_in_turn()
        async with self._turn if in_turn else nullcontext(), AsyncExitStack() as stack:
            began_s = time.monotonic()
            self._require_wanted(version)
            stack.callback(loader.release_cores)
            await run_on_daemon_thread(version.check_again)
            stamp = await run_on_daemon_thread(partial(stamp_files, version.directory))
            size_bytes = await run_on_daemon_thread(partial(loaded_files_bytes, version.directory))
            share = await self._fit(
                lambda: memory.reserve(
                    f"{version.name}/{version.version}", version.stamp, size_bytes * count
                )
            )
            stack.callback(memory.release, share)
            taken: dict[str, list[int]] = {}
            instances: list[Instance] = []
            for number in range(count):
                with memory.growth.measure() as growth:
                    instance = make_instance(version, number, loader, self._tuning)
                    instances.append(await stack.enter_async_context(instance))
                self._require_wanted(version)
                grown = dict(instance.device_growth())
                if growth.grown_bytes is not None:
                    grown["host"] = growth.grown_bytes
                for device, grown_bytes in grown.items():
                    taken.setdefault(device, []).append(grown_bytes)
                measured_bytes = sum(taken.get("host", ()))
                await self._fit(partial(memory.apply_measured, share, measured_bytes))
            version.load_s, version.memory_bytes = time.monotonic() - began_s, taken
            version.loaded_stamp = stamp
            return stack.pop_all(), instances

    def _require_wanted(self, version: ModelVersion) -> None:
        if self._is_withdrawn(version):
            raise Withdrawn

    async def _fit(self, take: Callable[[], T]) -> T:
        """Take memory of the budget, and unload idle versions for it if there is too little.

        Raises:
            MemoryShort: there is too little.
        """
        while True:
            try:
                return take()
            except MemoryShort as short:
                if not await self._unload_idle(short.missing_bytes):
                    raise


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
