"""Preparation: the first backend of a version is asked, the others are made ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigurationError
from headrace.models.backends.port import Arrays, WarmUp
from headrace.models.cores import Cores
from headrace.models.loader import BackendLoader
from headrace.models.profiling.batch_safety import Batching
from headrace.models.registry import Models
from headrace.models.signature import Signature
from headrace.models.version import ModelVersion
from tests.support.models import add_version, digits, falsely_batched, settings_for, tokens


def version_of(repository: Path, config: str = "max_batch_size = 8") -> ModelVersion:
    """The one version in the repository, not loaded."""
    add_version(repository, "model", 1, digits(), config)
    return opened(repository)


def opened(repository: Path) -> ModelVersion:
    """See `version_of`."""
    models = Models(settings_for(repository), executes=True)
    models.open()
    [version] = models.catalog.versions()
    return version


class Counting:
    """A backend that counts its runs, and fails at warm-up when told to."""

    def __init__(self, signature: Signature, fault: str = "") -> None:
        self.signature = signature
        self.steps: list[str] = []
        self._fault = fault

    def load(self) -> None:
        self.steps.append("load")

    def use_signature(self, signature: Signature) -> None:
        self.signature = signature

    def warm_up(self) -> WarmUp:
        self.steps.append("warm up")
        return WarmUp(self._fault)

    def run(self, inputs: Arrays) -> Arrays:
        self.steps.append("run")
        return {"scores": np.asarray(inputs["pixels"])[:, :10]}

    def cancel(self) -> None:
        """Nothing runs."""

    def unload(self) -> None:
        """Nothing is held."""


def test_batch_probe_runs_only_first_backend(tmp_path: Path) -> None:
    """It runs before its warm-up, to be tried out, and after it, to be timed."""
    version = version_of(tmp_path)
    preparation = BackendLoader(version, Cores(()))
    first, second = Counting(version.signature), Counting(version.signature)
    preparation.load(first)
    preparation.load(second)
    assert first.steps[:2] == ["load", "run"]
    assert first.steps[-13:] == ["warm up", *["run"] * 12]  # 1, 2, 4 and 8 rows, thrice
    assert second.steps == ["load", "warm up"]


def test_loader_times_runs_for_batcher(tmp_path: Path) -> None:
    """Each size of the warm-up is known before the first request."""
    version = version_of(tmp_path)
    BackendLoader(version, Cores(())).load(version.new_backend())
    assert version.latency.predict_us((), 8) is not None


def test_loader_keeps_times_under_shape_class_of_requests(tmp_path: Path) -> None:
    """The sizes of all free dimensions of all inputs but the batch."""
    add_version(tmp_path, "model", 1, tokens())
    version = opened(tmp_path)
    BackendLoader(version, Cores(())).load(version.new_backend())
    assert version.latency.predict_us((1, 1), 1) is not None


def test_warm_up_fault_turns_batching_off(tmp_path: Path) -> None:
    """A size that was not tried out before may be too large."""
    version = version_of(tmp_path)
    preparation = BackendLoader(version, Cores(()))
    preparation.load(Counting(version.signature, fault="a run of 8 rows failed"))
    assert preparation.verdict is not None
    assert preparation.verdict.batching is Batching.NOT_BATCHABLE
    assert preparation.verdict.reason == "a run of 8 rows failed"


def test_model_without_probe_is_only_warmed_up(tmp_path: Path) -> None:
    """A model with `probe = false` is loaded and warmed up, and has no verdict."""
    version = version_of(tmp_path, "probe = false")
    preparation = BackendLoader(version, Cores(()))
    backend = Counting(version.signature)
    preparation.load(backend)
    assert backend.steps == ["load", "warm up"]
    assert preparation.verdict is None


def test_later_backends_use_verdict_of_first(tmp_path: Path) -> None:
    """A model whose dimension 0 is not the batch is none for all of them."""
    add_version(tmp_path, "model", 1, falsely_batched())
    version = opened(tmp_path)
    preparation = BackendLoader(version, Cores(()))
    first = version.new_backend(preparation.signature)
    preparation.load(first)
    second = version.new_backend(preparation.signature)
    preparation.load(second)
    for backend in (first, second):
        outputs = backend.run({"x": np.ones((5, 2), np.float32)})
        assert outputs["y"].tolist() == [[5.0, 5.0]]


def test_instances_without_own_cores_are_not_loaded(tmp_path: Path) -> None:
    """Nothing has run by then."""
    version = version_of(tmp_path, "pinned = true\nintra_op_threads = 2")
    backend = Counting(version.signature)
    with pytest.raises(ConfigurationError, match="pinned: expected 2 cores"):
        BackendLoader(version, Cores([])).load(backend)
    assert backend.steps == []
