"""Cores are shared out so that no two instances of a model are on one."""

from __future__ import annotations

import pytest

from headrace.config import make_settings
from headrace.errors import ConfigurationError
from headrace.models.config import make_model_config
from headrace.models.cores import Cores, part_of
from tests.support.models import settings_for
from tests.support.tree import ROOT


def test_instances_get_disjoint_cores() -> None:
    """Each asks for cores that the others do not have."""
    cores = Cores(range(4))
    first = cores.reserve(2)
    second = cores.reserve(2, beside=first)
    assert first | second == {0, 1, 2, 3}


def test_second_model_gets_least_used_cores() -> None:
    """Models may share cores, but not while there are others."""
    cores = Cores(range(4))
    taken = cores.reserve(3)
    assert cores.reserve(1) == {0, 1, 2, 3} - taken


def test_returned_cores_are_free_again() -> None:
    """Another version can take the cores of one that was unloaded."""
    cores = Cores(range(2))
    first = cores.reserve(1)
    cores.release(first)
    assert cores.reserve(1) == first


def test_more_instances_than_cores_are_refused_with_counts() -> None:
    """They would not be apart."""
    cores = Cores(range(3))
    with pytest.raises(ConfigurationError, match=r"expected 2 cores .* got 1 of 3"):
        cores.reserve(2, beside=cores.reserve(2))


@pytest.mark.parametrize(
    ("part", "cores"),
    [("1/1", [0, 2, 4, 6, 8]), ("1/2", [0, 2]), ("2/2", [4, 6, 8]), ("2/8", [0]), ("8/8", [8])],
)
def test_processes_have_different_cores(part: str, cores: list[int]) -> None:
    """Processes share cores only if there are too few; each process has at least one."""
    assert part_of({8, 6, 4, 2, 0}, part) == cores


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/0", "a/b"])
def test_part_that_does_not_exist_is_refused(part: str) -> None:
    """Parts count from one."""
    with pytest.raises(ConfigurationError, match="cores: "):
        make_settings({"executor": {"cores": part}})


def test_more_than_one_instance_on_gpu_is_refused() -> None:
    """No measurement has shown a use for more than one instance on a GPU."""
    values = {"device": "cuda:0", "experimental_cuda": True, "instances": 2}
    with pytest.raises(ConfigurationError, match="instances: expected 1 on cuda:0"):
        make_model_config(values, settings_for(ROOT))


def test_gpu_instances_are_not_pinned() -> None:
    """There are no cores to choose from on a GPU."""
    values = {"device": "cuda:0", "experimental_cuda": True, "pinned": True}
    with pytest.raises(ConfigurationError, match="pinned: expected device cpu, got cuda:0"):
        make_model_config(values, settings_for(ROOT))
