"""Which versions take requests, through loading, failure and reload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import Code, ConfigurationError
from headrace.models.catalog import ModelCatalog, ModelEntry
from headrace.models.profiling.batch_safety import Batching, Verdict
from headrace.models.registry import Models
from headrace.models.version import ModelVersion, State
from tests.support.models import add_version, digits, settings_for, unbatched
from tests.unit.models.executor import Executor, refusal

Open = Callable[[], Models]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens the repository for a process without an executor."""

    def open_it() -> Models:
        models = Models(settings_for(tmp_path))
        models.open()
        return models

    return open_it


# --- look-up ----------------------------------------------------------------------------------


def test_lookup_without_version_returns_highest(tmp_path: Path, opened: Open) -> None:
    """Nine is before ten."""
    for number in (9, 10):
        add_version(tmp_path, "digits", number, digits(), 'versions = "all"')
    models = opened()
    assert models.catalog.lookup("digits").version == "10"
    assert models.catalog.lookup("digits", "").version == "10"
    assert models.catalog.lookup("digits", "9").version == "9"


def test_unknown_model_is_refused_with_known_names(tmp_path: Path, opened: Open) -> None:
    """The caller sees the names to choose from."""
    add_version(tmp_path, "digits", 1, digits())
    error = refusal(opened(), "digit")
    assert error.code == Code.UNKNOWN_MODEL
    assert error.message == 'model_name: expected one of digits, got "digit"'


def test_model_before_repository_is_read_may_be_asked_for_again(tmp_path: Path) -> None:
    """A gateway answers before that: reading may take minutes, and the model may be there."""
    error = refusal(Models(settings_for(tmp_path)), "digits")
    assert error.code == Code.MODEL_NOT_READY
    assert error.message == "model_name: the model repository has not been read yet"
    assert error.retry_after_ms


def test_unknown_model_in_empty_repository_is_refused(opened: Open) -> None:
    """An empty repository is said to be empty."""
    assert "expected a model, of which there is none" in refusal(opened(), "digits").message


def test_long_list_of_known_models_is_cut(tmp_path: Path, opened: Open) -> None:
    """An answer does not grow with the repository."""
    for number in range(23):
        (tmp_path / f"model{number:02}").mkdir()
    assert refusal(opened(), "x").message.endswith('model19 and 3 more, got "x"')


def test_unknown_version_is_refused_with_known_versions(tmp_path: Path, opened: Open) -> None:
    """A version that is not selected is not there."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits())
    error = refusal(opened(), "digits", "1")
    assert error.code == Code.UNKNOWN_MODEL
    assert error.message == 'model_version: expected one of 2 of digits, got "1"'


def test_request_without_model_is_refused(opened: Open) -> None:
    """The message says where the name belongs."""
    error = refusal(opened(), "")
    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith("model_name: expected a name, in the value or in the header")


def test_broken_model_is_not_ready_with_its_fault(tmp_path: Path, opened: Open) -> None:
    """It may be fixed, so it is not unknown; no path of this machine is told."""
    add_version(tmp_path, "digits", 1, digits(), "colour = 1\nshape = 2")
    error = refusal(opened(), "digits")
    assert (error.code, error.retry_after_ms) == (Code.MODEL_NOT_READY, None)
    assert error.message == ("model digits: digits/model.toml: colour: there is no such key")


def test_broken_version_is_not_ready_with_its_fault(tmp_path: Path, opened: Open) -> None:
    """The other versions are not affected."""
    add_version(tmp_path, "digits", 1, digits(), 'versions = "all"')
    (tmp_path / "digits" / "2").mkdir()
    models = opened()
    assert models.catalog.lookup("digits").version == "1"
    assert refusal(models, "digits", "2").message == (
        "model digits/2: digits/2/model.onnx: expected the model here, got no file"
    )


def test_missing_repository_is_refused(tmp_path: Path) -> None:
    """Without a repository a process does not start."""
    with pytest.raises(ConfigurationError, match=r"models\.repository"):
        Models(settings_for(tmp_path / "none")).open()


# --- limits -----------------------------------------------------------------------------------


def test_model_limits_come_from_configuration(tmp_path: Path, opened: Open) -> None:
    """`model.toml` over the settings."""
    add_version(tmp_path, "digits", 1, digits(), "max_batch_size = 4\nmax_queue_delay_ms = 2.5")
    version = opened().catalog.lookup("digits")
    assert (version.max_batch_size, version.max_queue_delay_ms) == (4, 2.5)
    assert (version.max_batch_bytes, version.batching_off) == (8388608, "")


def test_unbatched_model_has_batches_of_one(tmp_path: Path, opened: Open) -> None:
    """The version keeps the reason why it is not batched."""
    add_version(tmp_path, "fixed", 1, unbatched())
    version = opened().catalog.lookup("fixed")
    assert (version.max_batch_size, version.batching_off) == (1, "dimension 0 of x is fixed at 4")


def test_fault_at_warm_up_switches_batching_off(tmp_path: Path) -> None:
    """The executor found that larger runs fail."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    verdict = Verdict(Batching.NOT_BATCHABLE, "two rows fail")
    executor.models.lifecycle.mark_ready(executor.loading(), verdict)
    version = executor.models.catalog.lookup("digits")
    assert (version.max_batch_size, version.batching_off) == (1, "two rows fail")


# --- the executor's word ----------------------------------------------------------------------


def test_version_is_not_ready_before_executor_announces_it(tmp_path: Path) -> None:
    """Requests that come earlier are refused with a time after which to try again."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    error = refusal(executor.models, "digits")
    assert (error.code, error.message) == (Code.MODEL_NOT_READY, "model digits is loading")
    assert error.retry_after_ms
    executor.load()
    assert executor.models.catalog.lookup("digits", "1").state is State.READY


class EntryLookedUp(ModelEntry):
    """A model that another thread looks up while it is published."""

    def __init__(self, entry: ModelEntry, catalog: ModelCatalog) -> None:
        vars(self).update(vars(entry))
        self._catalog = catalog
        self.found: list[ModelVersion] = []

    def move_names(self) -> None:
        super().move_names()
        self.found.append(self._catalog.lookup("digits"))


def test_version_is_found_while_its_model_is_published(tmp_path: Path) -> None:
    """Requests are bound on other threads as well, at any moment of a change."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.load()
    catalog = executor.models.catalog
    entry = catalog.models["digits"] = EntryLookedUp(catalog.models["digits"], catalog)

    executor.models.lifecycle.publish_and_retire("digits")

    assert {*entry.found} == {version}


def test_version_that_fails_is_not_ready_with_reason(tmp_path: Path) -> None:
    """There is no use in waiting for it."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.lifecycle.mark_failed(executor.loading(), f"{tmp_path}/digits/1: no memory")
    error = refusal(executor.models, "digits", "1")
    assert (error.message, error.retry_after_ms) == ("model digits/1: digits/1: no memory", None)


def test_failed_version_refuses_requests(tmp_path: Path) -> None:
    """A device may be lost later."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    executor.models.lifecycle.mark_failed(executor.load(), "device lost")
    assert refusal(executor.models, "digits").message == "model digits: device lost"


def test_status_shows_versions_and_faults(tmp_path: Path, opened: Open) -> None:
    """The status has one entry for each version and for each fault."""
    add_version(tmp_path, "bad", 1, digits(), "colour = 1")
    add_version(tmp_path, "digits", 1, digits())
    bad, good = opened().catalog.status()
    assert (bad["name"], bad["version"], bad["state"]) == ("bad", "", "failed")
    assert good.pop("latency") == []
    assert good == {
        "name": "digits",
        "version": "1",
        "is_default": True,
        "labels": [],
        "state": "ready",
        "reason": "",
        "max_batch_size": 32,
        "batching_off": "",
        "contradiction": "",
        "warm_up_omitted": "",
        "load_s": None,
        "memory_bytes": {},
        "batching": None,
    }


@pytest.mark.parametrize(
    ("config", "inline"),
    [("", True), ('device = "cuda:0"\nexperimental_cuda = true', False)],
    ids=["cpu", "cuda"],
)
def test_cuda_sessions_are_bound_to_one_thread(
    tmp_path: Path, opened: Open, config: str, inline: bool
) -> None:
    """CUDA's state belongs to one thread."""
    add_version(tmp_path, "digits", 1, digits(), config)
    assert opened().catalog.lookup("digits").may_inline is inline


def test_declared_batch_size_overrides_probe(tmp_path: Path) -> None:
    """The model's file is believed, and what speaks against it is told."""
    add_version(tmp_path, "digits", 1, digits(), "max_batch_size = 8")
    executor = Executor(tmp_path)
    version = executor.loading()
    executor.models.lifecycle.mark_ready(version, Verdict(Batching.NOT_BATCHABLE, "rows leak"))
    assert (version.max_batch_size, version.batching_off) == (8, "")
    assert version.contradiction == ("max_batch_size is declared as 8; not batchable: rows leak")


def test_undecided_version_has_reduced_batch_size(tmp_path: Path) -> None:
    """Requests come a few at a time, so that they can decide."""
    add_version(tmp_path, "digits", 1, digits())
    executor = Executor(tmp_path)
    version = executor.loading()
    executor.models.lifecycle.mark_ready(version, Verdict(Batching.UNDECIDED, "all alike"))
    assert version.is_undecided
    assert (version.max_batch_size, version.batching_off) == (4, "undecided: all alike")


def test_unbatched_verdict_overrides_declared_batch_size(tmp_path: Path) -> None:
    """Declared or not: where two rows are not two answers, dimension 0 is one more dimension."""
    add_version(tmp_path, "digits", 1, digits(), "max_batch_size = 8")
    executor = Executor(tmp_path)
    version = executor.loading()
    verdict = Verdict(Batching.NOT_BATCHABLE, "one row comes back", has_no_batch=True)
    executor.models.lifecycle.mark_ready(version, verdict)
    assert version.max_batch_size == 1
    assert not version.signature.batched
