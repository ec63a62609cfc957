"""Loading of backends: choose cores, load, probe, warm up and time before the first request."""

from __future__ import annotations

import time

from headrace.errors import HeadraceError, describe_error
from headrace.models.backends.port import Backend
from headrace.models.backends.warmup import Inputs, NoMadeUpInputsError, make_sample_batches
from headrace.models.cores import Cores, pin_thread
from headrace.models.profiling.batch_safety import Batching, Verdict, choose_tolerance
from headrace.models.profiling.golden import check_golden_samples
from headrace.models.profiling.probe import probe
from headrace.models.signature import Signature, without_batching
from headrace.models.version import ModelVersion


class BackendLoader:
    """Prepares the backends of one version, one after the other; only the first is probed.

    Args:
        version: the version of the backends.
        cores: cores of the process, for pinned instances.
        is_known: the same files were loaded before by this process, so nothing is probed.

    Attributes:
        signature: signature of the version's backends, as corrected by the probe.
        verdict: whether the version's requests may share runs; None if it was not probed.
    """

    def __init__(self, version: ModelVersion, cores: Cores, *, is_known: bool = False) -> None:
        self._version = version
        self._cores = cores
        self._reserved: list[frozenset[int]] = []
        self._is_first = not is_known
        self.signature = version.signature
        self.verdict: Verdict | None = None

    def load(self, backend: Backend) -> None:
        """Make a backend ready to run. Blocks; call it on the backend's thread.

        Raises:
            ConfigurationError: it cannot be loaded, gives other outputs than its golden samples, or
                not even one recorded row can be run.
        """
        version = self._version
        if version.config.pinned:
            self._pin_to_cores()
        backend.load()
        if self._is_first:
            check_golden_samples(
                backend.run,
                backend.signature,
                version.directory,
                choose_tolerance(version.config, backend.signature, version.tuning),
            )
        probing = self._is_first and version.config.probe
        if probing:
            self._probe(backend)
        warmed_up = backend.warm_up()
        if warmed_up.omitted:
            version.warm_up_omitted = warmed_up.omitted
        fault = warmed_up.batching_fault
        if fault and not (self.verdict and self.verdict.batching is Batching.NOT_BATCHABLE):
            self.verdict = Verdict(Batching.NOT_BATCHABLE, fault)
        if probing:
            self._time_runs(backend)
        self._is_first = False

    def release_cores(self) -> None:
        """Release the cores of backends that are gone."""
        for cores in self._reserved:
            self._cores.release(cores)
        self._reserved.clear()

    def _pin_to_cores(self) -> None:
        """Pin this thread, and those that the backend starts, to cores no other instance uses."""
        config = self._version.config
        count = config.intra_op_threads or max(1, len(self._cores) // config.instances)
        cores = self._cores.reserve(count, beside=frozenset().union(*self._reserved))
        self._reserved.append(cores)
        pin_thread(cores)

    def _probe(self, backend: Backend) -> None:
        version = self._version
        try:
            verdict = probe(
                backend.run, backend.signature, version.config, version.directory, version.tuning
            )
        except HeadraceError:
            raise
        except Exception as error:  # noqa: BLE001 - outputs may be anything, and prove nothing then
            verdict = Verdict(Batching.UNDECIDED, f"the probe failed: {describe_error(error)}")
        if verdict.has_no_batch:
            self.signature = without_batching(version.signature, verdict.reason)
            backend.use_signature(self.signature)
        self.verdict = verdict

    def _time_runs(self, backend: Backend) -> None:
        """Measure run durations as initial data of the version's `latency`."""
        version, tuning = self._version, self._version.tuning
        end_s = time.monotonic() + tuning.timing_budget_s
        signature = backend.signature
        try:
            sizes = list(make_sample_batches(signature, version.config, version.directory, tuning))
        except NoMadeUpInputsError:
            return
        for rows, inputs in sizes * tuning.timed_runs:
            began_s = time.monotonic()
            if began_s >= end_s:
                return
            try:
                backend.run(inputs)
            except BaseException:  # noqa: BLE001 - of a model, SystemExit included; requests tell
                return
            took_us = int((time.monotonic() - began_s) * 1e6)
            version.latency.observe(_shape_class(signature, inputs), rows, took_us)


def _shape_class(signature: Signature, inputs: Inputs) -> tuple[int, ...]:
    """Return the shape class, as in `headrace.models.inputs.binding.Bound`."""
    return tuple(
        size
        for spec in signature.inputs
        for axis, size in enumerate(inputs[spec.name].shape)
        if spec.shape[axis] == -1 and not (signature.batched and axis == 0)
    )
