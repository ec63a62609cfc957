"""Regions of shared memory: which objects may be registered, and what becomes of their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Rejected
from headrace.gateway.shared_memory import DIRECTORY, Place, RegionAccess, Regions, take_place

PREFIX = f"/headrace_test_{os.getpid()}_"
KEY = f"{PREFIX}object"
SIZE = 16


@pytest.fixture
def shm() -> Iterator[Path]:
    """An object of 16 bytes; whatever has the prefix is removed afterwards."""
    path = DIRECTORY / KEY[1:]
    path.write_bytes(bytes(range(SIZE)))
    yield path
    for each in DIRECTORY.glob(f"{PREFIX[1:]}*"):
        each.unlink()


@pytest.fixture
def regions() -> Iterator[Regions]:
    """Regions with the prefix of this file, at most two."""
    regions = Regions(PREFIX, 2)
    yield regions
    regions.unregister()


def is_open(path: Path) -> bool:
    """Return whether this process has a file open."""
    return any(each.exists() and each.samefile(path) for each in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("key", [KEY, KEY[1:]], ids=["with slash", "without slash"])
def test_registered_region_is_read_and_written(shm: Path, regions: Regions, key: str) -> None:
    """Offsets of the region and of the place add up; the slash before a name may be left out."""
    regions.register("r", key, 4, 8)

    assert regions.read(Place("r", 2, 3), "inputs[0]") == bytes([6, 7, 8])
    regions.write(Place("r", 6, 2), b"\xff", "output y")
    assert shm.read_bytes() == bytes([*range(10), 255, *range(11, 16)])
    assert regions.describe("r") == [{"name": "r", "key": key, "offset": 4, "byte_size": 8}]


@pytest.mark.parametrize(
    "key",
    [
        "/other",
        "",
        "/",
        f"{PREFIX}/../other",
        f"/..{PREFIX}x",
        f"/../tmp{PREFIX}x",
        f"//{KEY[1:]}",
        f"{KEY}\0",
        f"{KEY}\n",
        f"{PREFIX}{'x' * 300}",
    ],
    ids=lambda key: key.replace(PREFIX, "prefix_") or "empty",
)
def test_key_beside_prefix_is_refused(shm: Path, regions: Regions, key: str) -> None:
    """Nothing but a plain name with the prefix is opened."""
    with pytest.raises(Rejected, match="key: expected a name that begins with"):
        regions.register("r", key, 0, 1)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "absent"])
def test_object_of_other_kind_is_refused(shm: Path, regions: Regions, kind: str) -> None:
    """A link would lead out of the directory, and a pipe would wait."""
    path = DIRECTORY / f"{PREFIX[1:]}other"
    if kind == "link":
        path.symlink_to(shm)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    try:
        with pytest.raises(Rejected, match="key: expected a shared memory object of this user"):
            regions.register("r", f"/{path.name}", 0, 1)
    finally:
        if kind == "directory":
            path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give an object away")
def test_object_of_other_user_is_refused(shm: Path, regions: Regions) -> None:
    """Though the process could open it; also after it was registered."""
    regions.register("r", KEY, 0, SIZE)
    os.chown(shm, 65534, -1)

    with pytest.raises(Rejected, match="of this user"):
        regions.register("other", KEY, 0, SIZE)
    with pytest.raises(Rejected, match="of this user"):
        regions.read(Place("r", 0, 1), "inputs[0]")


def test_truncated_object_is_refused_at_each_use(shm: Path, regions: Regions) -> None:
    """The process lives on, and the object does not grow again."""
    regions.register("r", KEY, 0, SIZE)
    os.truncate(shm, 8)

    with pytest.raises(Rejected, match="expected at least 16 bytes, got 8"):
        regions.read(Place("r", 0, SIZE), "inputs[0]")
    with pytest.raises(Rejected, match="expected at least 12 bytes, got 8"):
        regions.write(Place("r", 4, SIZE - 4), bytes(8), "output y")
    assert regions.read(Place("r", 0, 8), "inputs[0]") == bytes(range(8))
    assert shm.stat().st_size == 8


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (Place("other", 0, 1), "shared_memory_region: expected a registered region"),
        (Place("r", 0, SIZE + 1), "expected at most the 16 bytes"),
        (Place("r", 2**80, 1), "expected at most the 16 bytes"),
    ],
)
def test_place_outside_of_regions_is_refused(
    shm: Path, regions: Regions, place: Place, told: str
) -> None:
    """Before anything is read; the sentence says where."""
    regions.register("r", KEY, 0, SIZE)
    with pytest.raises(Rejected, match=rf"inputs\[0\].*{told}|{told}"):
        regions.check(place, "inputs[0]")


@pytest.mark.parametrize(
    ("name", "offset", "size", "told"),
    [
        ("r", 0, SIZE + 1, "expected at least 17 bytes, got 16"),
        ("r", 2**70, 1, "bytes, got 16"),
        ("r", -1, 4, "offset 0 or more"),
        ("r", 0, 0, "byte_size 1 or more"),
        ("", 0, 1, "a name of 1 to 256 characters"),
        ("x" * 257, 0, 1, "a name of 1 to 256 characters"),
    ],
)
def test_bad_region_is_refused_without_open_file(
    shm: Path, regions: Regions, name: str, offset: int, size: int, told: str
) -> None:
    """The file opened to check the region is closed."""
    with pytest.raises(Rejected, match=told):
        regions.register(name, KEY, offset, size)

    assert len(regions) == 0
    assert not is_open(shm)


def test_regions_are_bounded_and_closed(shm: Path, regions: Regions) -> None:
    """A name is taken once, a third region is too many, and unregistering makes room."""
    regions.register("a", KEY, 0, 1)
    assert is_open(shm)
    with pytest.raises(Rejected, match="not registered"):
        regions.register("a", KEY, 0, 1)
    regions.register("b", KEY, 0, 1)
    with pytest.raises(Rejected, match="at most 2"):
        regions.register("c", KEY, 0, 1)
    regions.unregister("a")
    regions.unregister("never")
    regions.unregister()

    assert len(regions) == 0
    assert not is_open(shm)


def test_output_that_does_not_fit_is_refused(shm: Path, regions: Regions) -> None:
    """Nothing of it is written."""
    regions.register("r", KEY, 0, SIZE)
    with pytest.raises(Rejected, match=r"output y\.shared_memory_byte_size: expected at least 5"):
        regions.write(Place("r", 0, 4), bytes(5), "output y")

    assert shm.read_bytes() == bytes(range(SIZE))


def test_bytes_are_counted_before_they_are_read(shm: Path, regions: Regions) -> None:
    """A refusal costs no memory; a place that does not exist counts nothing."""
    regions.register("r", KEY, 0, SIZE)
    counted: list[int] = []
    access = RegionAccess(regions, counted.append)

    access.read(Place("r", 0, 8), "inputs[0]")
    with pytest.raises(Rejected):
        access.read(Place("r", 9, 8), "inputs[0]")
    assert counted == [8]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"shared_memory_byte_size": 4}, "shared_memory_region"),
        ({"shared_memory_offset": 4}, "shared_memory_region"),
        ({"shared_memory_region": 3, "shared_memory_byte_size": 4}, "shared_memory_region"),
        ({"shared_memory_region": "r"}, "shared_memory_byte_size"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": -4}, "shared_memory_byte_size"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": True}, "shared_memory_byte_size"),
        (
            {
                "shared_memory_region": "r",
                "shared_memory_byte_size": 4,
                "shared_memory_offset": -1,
            },
            "shared_memory_offset",
        ),
    ],
)
def test_bad_parameters_of_place_are_refused(parameters: dict[str, Any], name: str) -> None:
    """The sentence names the first that is wrong."""
    with pytest.raises(Rejected, match=rf"inputs\[0\]\.parameters\.{name}"):
        take_place(parameters, "inputs[0]")
