"""The project's metadata, its pinned versions and its make targets against each other."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headrace
from tests.support.tree import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOT_PINNED = {"gpu"}
"""Extras that exclude another one, and so cannot be installed beside it to be pinned."""


def test_version_is_equal_in_all_files() -> None:
    """The package says the version that its metadata has."""
    assert headrace.__version__ == PYPROJECT["project"]["version"]


def test_every_requirement_is_pinned_in_lock() -> None:
    """Each requirement of the package, its extras and its groups has a version in the lock that
    satisfies it; otherwise `make lock` is due.
    """
    pinned = dict(pins())
    unpinned = [
        str(requirement)
        for requirement in requirements(PYPROJECT)
        if not is_met(requirement, pinned.get(canonicalize_name(requirement.name)))
    ]

    assert not unpinned


def test_lock_names_versions_and_no_machine_path() -> None:
    """Every line of the lock is a name and a version: no path, no address, no option."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()

    strange = [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.+!]+", line)]

    assert strange == []


@pytest.mark.parametrize("file", ["Makefile", "tools/lock.sh"])
def test_setup_installs_every_extra_that_is_pinned(file: str) -> None:
    """A test of an extra that is not installed would be skipped, or fail."""
    text = (ROOT / file).read_text(encoding="utf-8")
    (extras,) = re.findall(r"--editable '\.\[([\w,-]+)\]'", text)

    assert set(extras.split(",")) == set(PYPROJECT["project"]["optional-dependencies"]) - NOT_PINNED


@pytest.mark.parametrize("script", [".ci/run", "tools/lock.sh"])
def test_scripts_stop_at_first_fault(script: str) -> None:
    """A shell script can be executed, and ends when one of its commands fails."""
    path = ROOT / script

    assert os.access(path, os.X_OK)
    assert "\nset -euo pipefail\n" in path.read_text(encoding="utf-8")


def test_ci_calls_targets_that_exist_and_ends_with_tests() -> None:
    """CI runs make targets that people have as well; pytest's closing line is last."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    calls = [line.split() for line in re.findall(r"^run (.+)$", script, flags=re.MULTILINE)]
    targets = [word for words in calls for word in words if not word.startswith("--")]

    assert set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert {"setup", "lint", "types", "schemas-check", "deploy-check", "test-tools"} <= set(targets)
    assert calls[-1] == ["test"]


def test_every_target_is_listed_by_help() -> None:
    """Each phony target has the comment from which `make help` makes its line."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.findall(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)

    explained = re.findall(r"^([a-z-]+):[^#\n]*## ", makefile, flags=re.MULTILINE)

    assert phony == explained


def is_met(requirement: Requirement, version: str | None) -> bool:
    """Whether there is a version, and it is one that the requirement allows."""
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def pins() -> Iterator[tuple[str, str]]:
    """The names and versions in the lock."""
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            yield canonicalize_name(name), version


def requirements(pyproject: dict[str, Any]) -> Iterator[Requirement]:
    """All that setup and `make lock` install."""
    extras = pyproject["project"]["optional-dependencies"]
    yield from map(Requirement, pyproject["build-system"]["requires"])
    yield from map(Requirement, pyproject["project"]["dependencies"])
    for extra in extras.keys() - NOT_PINNED:
        yield from map(Requirement, extras[extra])
    for group in pyproject["dependency-groups"].values():
        yield from map(Requirement, group)
