"""The budget for the memory of loaded versions, and the measurement of what one takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.models.memory import GrowthMeter, ModelMemory, loaded_files_bytes

MIB = 2**20


def test_version_that_fits_exactly_is_admitted() -> None:
    """The bound is the last size that is allowed."""
    memory = ModelMemory(100 * MIB)
    memory.reserve("a/1", "", 60 * MIB)
    memory.reserve("b/1", "", 40 * MIB)
    assert memory.held_bytes == memory.limit_bytes


def test_version_whose_estimate_does_not_fit_is_refused_with_figures() -> None:
    """The reason names the need, the bound, and all holders, the largest first."""
    memory = ModelMemory(100 * MIB)
    memory.reserve("digits/1", "", 20 * MIB)
    memory.reserve("resnet/2", "", 60 * MIB)
    with pytest.raises(ConfigurationError) as refused:
        memory.reserve("large/1", "", 30 * MIB)
    assert str(refused.value) == (
        "models.memory_bytes: the version needs 30.0 MiB (files times instances), and 80.0 MiB of "
        "100.0 MiB are in use, held by resnet/2 (60.0 MiB), digits/1 (20.0 MiB)"
    )
    assert memory.held_bytes == 80 * MIB


def test_version_larger_than_bound_is_refused_when_nothing_is_held() -> None:
    """There are no holders to name."""
    with pytest.raises(ConfigurationError, match=r"0\.0 MiB of 1\.0 MiB are in use$"):
        ModelMemory(MIB).reserve("a/1", "", 2 * MIB)


def test_version_that_takes_more_than_is_left_is_refused_with_measured_figure() -> None:
    """Its own estimate does not count as used by others."""
    memory = ModelMemory(100 * MIB)
    memory.reserve("a/1", "", 60 * MIB)
    share = memory.reserve("b/1", "", 10 * MIB)
    memory.apply_measured(share, 40 * MIB)
    with pytest.raises(ConfigurationError, match=r"needs 41\.0 MiB \(measured\), and 60\.0 MiB"):
        memory.apply_measured(share, 41 * MIB)
    memory.release(share)
    assert memory.held_bytes == 60 * MIB


def test_version_measured_before_is_estimated_by_its_largest_measurement() -> None:
    """It is refused before it is loaded, also if it once took less, from memory freed by others."""
    memory = ModelMemory(100 * MIB)
    for measured in (50 * MIB, 0):
        share = memory.reserve("b/1", "stamp", MIB)
        memory.apply_measured(share, measured)
        assert share.held_bytes == 50 * MIB
        memory.release(share)
    memory.reserve("a/1", "", 60 * MIB)
    with pytest.raises(ConfigurationError, match=r"needs 50\.0 MiB \(measured before\)"):
        memory.reserve("b/1", "stamp", MIB)


def test_version_with_changed_files_is_estimated_by_their_size() -> None:
    """Memory measured with the old files says nothing about the new ones."""
    memory = ModelMemory(100 * MIB)
    share = memory.reserve("b/1", "old", MIB)
    memory.apply_measured(share, 50 * MIB)
    assert memory.reserve("b/1", "new", MIB).held_bytes == MIB


def test_refused_measurement_counts_as_estimate_of_next_attempt() -> None:
    """A version that is tried again is not loaded again only to find out the same."""
    memory = ModelMemory(10 * MIB)
    share = memory.reserve("b/1", "stamp", MIB)
    with pytest.raises(ConfigurationError):
        memory.apply_measured(share, 11 * MIB)
    memory.release(share)
    with pytest.raises(ConfigurationError, match="measured before"):
        memory.reserve("b/1", "stamp", MIB)


def test_versions_without_bound_are_never_refused() -> None:
    """The shares are kept nevertheless."""
    memory = ModelMemory()
    memory.apply_measured(memory.reserve("a/1", "", 2**50), 2**51)
    assert memory.held_bytes == 2**51


def test_growth_of_process_is_measured() -> None:
    """A process that became smaller has not taken memory."""
    sizes = iter([100, 130, 130, 90])
    meter = GrowthMeter(lambda: next(sizes))
    with meter.measure() as first:
        pass
    with meter.measure() as second:
        pass
    assert (first.grown_bytes, second.grown_bytes) == (30, 0)


def test_trim_during_measurement_does_not_reduce_growth() -> None:
    """What the heap returns then was freed by others; later measurements begin without it."""
    sizes = iter([100, 110, 110, 115])
    meter = GrowthMeter(lambda: next(sizes))
    with meter.measure() as trimmed:
        meter.add_trimmed(20)
    with meter.measure() as later:
        pass
    assert (trimmed.grown_bytes, later.grown_bytes) == (30, 5)


def test_growth_during_overlapping_loads_is_unknown_for_both() -> None:
    """It cannot be attributed; a later load alone is measured again."""
    sizes = iter([0, 10, 30, 40, 50, 55])
    meter = GrowthMeter(lambda: next(sizes))
    with meter.measure() as outer, meter.measure() as inner:
        pass
    with meter.measure() as alone:
        pass
    assert (outer.grown_bytes, inner.grown_bytes, alone.grown_bytes) == (None, None, 5)


def test_growth_is_unknown_where_system_reports_no_size() -> None:
    """Estimates alone count then."""
    with GrowthMeter(lambda: None).measure() as growth:
        pass
    assert growth.grown_bytes is None


def test_size_of_files_leaves_out_samples(tmp_path: Path) -> None:
    """Golden samples and warm-up inputs do not stay in memory, however large they are."""
    for name, size in (
        ("model.onnx", 3),
        ("data/weights", 5),
        ("golden/a.npz", 7),
        ("warmup/b", 9),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    assert loaded_files_bytes(tmp_path) == 8
