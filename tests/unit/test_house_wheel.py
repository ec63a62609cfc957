"""The published files: the source distribution, and the wheel built from it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.tree import ROOT, files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built as a release is: the wheel from the unpacked source distribution.

    Without isolation, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> set[str]:
    """The names of the files in the wheel."""
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_wheel_has_every_file_of_package(wheel: set[str]) -> None:
    """Code and the files beside it (models, samples, locks, markers) are all inside."""
    assert {str(path) for path in files("headrace")} - wheel == set()


def test_wheel_has_services_under_package(wheel: set[str]) -> None:
    """The files of services/ are installed as headrace/services/."""
    assert {f"headrace/{path}" for path in files("services")} - wheel == set()


def test_wheel_installs_one_top_level_package(wheel: set[str]) -> None:
    """Nothing but headrace is installed, so that no package of a user's is hidden."""
    tops = {name.split("/")[0] for name in wheel}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}


def test_wheel_brings_its_licence_and_its_command(wheel: set[str]) -> None:
    """The licence text and the entry point are part of the metadata."""
    metadata = {name.split("/", 1)[1] for name in wheel if ".dist-info/" in name}

    assert {"licenses/LICENSE", "entry_points.txt"} <= metadata


def test_source_distribution_has_contract_files(distributions: Path) -> None:
    """The schemas travel with the source, and so does all that the wheel was built from."""
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}

    assert {str(path) for path in files("schemas")} - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
