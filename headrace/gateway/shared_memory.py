"""Triton's extension for system shared memory: tensors in POSIX shared memory of this machine.

A caller registers a region, a range of an object such as `/headrace_camera`, under a name. Inputs
of its requests are then read from there, and outputs written there. Source:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md.

Objects are files of Linux's /dev/shm, and are read and written as files: a caller can truncate its
object at any time, and a process that touches a mapped page beyond the end of a file is killed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypedDict

from headrace.errors import Code, Rejected, Retriable
from headrace.protocol.codec.faults import shown
from headrace.protocol.messages import MAX_NAME_LENGTH, Parameter
from headrace.tuning import TUNING

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"
DIRECTORY = Path("/dev/shm")  # noqa: S108 - where Linux has POSIX shared memory (shm_overview(7))
OFF = "gateway.shared_memory does not allow it"
NO_CUDA = "only system shared memory is"

_OBJECT = re.compile(r"/?([A-Za-z0-9._-]{1,255})")
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer


class RegionStatus(TypedDict):
    """A registered region: a range of a shared memory object."""

    name: str
    key: str
    offset: int
    byte_size: int


class Place(NamedTuple):
    """Place of a tensor: bytes of a region, from an offset."""

    region: str
    offset: int
    byte_size: int


class _Region(NamedTuple):
    status: RegionStatus
    descriptor: int


class Regions:
    """The regions that callers have registered; leaving the context forgets them.

    Args:
        prefix: of the names of objects that may be registered, such as `/headrace_`; `off` for
            none.
        limit: of the regions.
    """

    def __init__(self, prefix: str = "off", limit: int = TUNING.gateway.max_regions) -> None:
        self._prefix = prefix
        self._limit = limit
        self._regions: dict[str, _Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a range of an object under a name.

        Raises:
            Rejected: `INVALID_REQUEST`: the name is taken, or too many are; the key has not the
                prefix; there is no such object of this user, or it is too small.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            _refuse("region", f"a name of 1 to {MAX_NAME_LENGTH} characters", len(name))
        if name in self._regions:
            _refuse("region", "a name that is not registered", shown(name))
        if len(self._regions) >= self._limit:
            _refuse("region", f"at most {self._limit} of them", "one more")
        if offset < 0 or byte_size < 1:
            _refuse("region", "offset 0 or more, byte_size 1 or more", f"{offset}, {byte_size}")
        descriptor = self._open(key)
        try:
            _check_object(descriptor, key, offset + byte_size)
        except BaseException:
            os.close(descriptor)
            raise
        status = RegionStatus(name=name, key=key, offset=offset, byte_size=byte_size)
        self._regions[name] = _Region(status, descriptor)

    def _open(self, key: str) -> int:
        found = _OBJECT.fullmatch(key)
        if self._prefix == "off" or not found or not f"/{found[1]}".startswith(self._prefix):
            _refuse("key", f"a name that begins with {self._prefix}", shown(key))
        try:
            return os.open(DIRECTORY / found[1], _OPEN)
        except OSError as error:
            _refuse("key", "a shared memory object of this user", f"{shown(key)}: {error.strerror}")

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not registered is no error."""
        for each in [name] if name else list(self._regions):
            if region := self._regions.pop(each, None):
                os.close(region.descriptor)

    def describe(self, name: str = "") -> list[RegionStatus]:
        """Return the status of a region, or of all. Raises `Rejected` if it is not registered."""
        if name:
            return [self._find(name, "region").status]
        return [region.status for region in self._regions.values()]

    def check(self, place: Place, where: str) -> None:
        """Check that a place is inside of its region, and its object still so large.

        Raises:
            Rejected: `INVALID_REQUEST`.
        """
        self._locate(place, place.byte_size, where)

    def read(self, place: Place, where: str) -> bytes:
        """Return the bytes at a place. Raises `Rejected`, see `check`."""
        descriptor, start = self._locate(place, place.byte_size, where)
        parts: list[bytes] = []
        missing = place.byte_size
        while missing:
            try:
                part = os.pread(descriptor, missing, start)
            except OSError as error:
                _refuse(where, f"{shown(place.region)} to be readable", error.strerror)
            if not part:  # truncated since the check
                _refuse(where, f"{place.byte_size} bytes of {shown(place.region)}", "fewer")
            parts.append(part)
            start += len(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, place: Place, content: bytes | memoryview, where: str) -> None:
        """Write bytes to the beginning of a place. Raises `Rejected`, see `check`, if they do not
        fit.
        """
        if len(content) > place.byte_size:
            _refuse(f"{where}.{BYTE_SIZE}", f"at least {len(content)}", place.byte_size)
        descriptor, start = self._locate(place, len(content), where)
        rest = memoryview(content)
        while rest:
            try:
                written = os.pwrite(descriptor, rest, start)
            except OSError as error:  # such as a file with holes on a full /dev/shm
                _refuse(where, f"{shown(place.region)} to be writable", error.strerror)
            start += written
            rest = rest[written:]

    def _locate(self, place: Place, size: int, where: str) -> tuple[int, int]:
        """Return the descriptor and the offset in its file of bytes that are there now."""
        status, descriptor = self._find(place.region, where)
        if place.offset + place.byte_size > status["byte_size"]:
            expected = f"at most the {status['byte_size']} bytes of {shown(place.region)}"
            got = f"{place.byte_size} from {place.offset}"
            _refuse(where, expected, got)
        start = status["offset"] + place.offset
        _check_object(descriptor, status["key"], start + size)
        return descriptor, start

    def _find(self, name: str, where: str) -> _Region:
        region = self._regions.get(name)
        if region is None:
            known = "a registered region" if self._prefix != "off" else f"none: {OFF}"
            _refuse(f"{where}.{REGION}", known, shown(name))
        return region


class Places(NamedTuple):
    """The places that a request names, each with its path in the request."""

    inputs: list[tuple[Place, str]]
    outputs: list[tuple[Place, str]]


NO_PLACES = Places([], [])


class RegionAccess:
    """The regions as one request uses them.

    Args:
        regions: those of the gateway.
        count: called with the bytes of an input before it is read; refuses too many.
    """

    def __init__(self, regions: Regions, count: Callable[[int], None]) -> None:
        self._regions = regions
        self._count = count

    def check(self, place: Place, where: str) -> None:
        """See `Regions.check`."""
        self._regions.check(place, where)

    def read(self, place: Place, where: str) -> bytes:
        """Count the bytes of a place, and return them; see `Regions.read`."""
        self._regions.check(place, where)
        self._count(place.byte_size)
        return self._regions.read(place, where)

    def write(self, place: Place, content: bytes | memoryview, where: str) -> None:
        """See `Regions.write`."""
        self._regions.write(place, content, where)


class StagedAccess(RegionAccess):
    """The regions for a conversion on a thread, where they must not be touched.

    What the conversion reads is read before, and what it writes is written afterwards, both on the
    event loop. An error is raised where the conversion comes to its place: a fault before that is
    told of first.
    """

    def __init__(self, access: RegionAccess) -> None:
        self._access = access
        self._contents: dict[tuple[Place, str], bytes] = {}
        self._refused: dict[tuple[Place, str], Rejected | Retriable] = {}
        self._written: list[tuple[Place, bytes | memoryview, str]] = []

    def load(self, places: Places) -> None:
        """Read the inputs at their places, and check those of the outputs, up to one refused."""
        for place, where in places.inputs:
            try:
                self._contents[place, where] = self._access.read(place, where)
            except (Rejected, Retriable) as error:
                self._refused[place, where] = error
                return
        for place, where in places.outputs:
            try:
                self._access.check(place, where)
            except Rejected as error:
                self._refused[place, where] = error
                return

    def store(self) -> None:
        """Write what was written. Raises `Rejected`, see `Regions.write`."""
        for place, content, where in self._written:
            self._access.write(place, content, where)

    def check(self, place: Place, where: str) -> None:
        """Raise what `load` has found."""
        if error := self._refused.get((place, where)):
            raise error

    def read(self, place: Place, where: str) -> bytes:
        """Return what `load` has read, or raise what it has found."""
        self.check(place, where)
        return self._contents[place, where]

    def write(self, place: Place, content: bytes | memoryview, where: str) -> None:
        """Keep the bytes for `store`."""
        self._written.append((place, content, where))


NO_REGIONS = RegionAccess(Regions(), lambda _: None)
"""Access for callers that may not use shared memory."""


def take_place(parameters: dict[str, Parameter], where: str) -> Place | None:
    """Remove the place of a tensor from its parameters and return it; None if it has none.

    Raises:
        Rejected: `INVALID_REQUEST`: they are incomplete, or of other types.
    """
    region = parameters.pop(REGION, "")
    offset, size = parameters.pop(OFFSET, 0), parameters.pop(BYTE_SIZE, 0)
    if not region and not offset and not size:
        return None
    if type(region) is not str or not region:
        _refuse(f"{where}.parameters.{REGION}", "the name of a region", shown(region))
    if type(offset) is not int or offset < 0:
        _refuse(f"{where}.parameters.{OFFSET}", "bytes, 0 or more", shown(offset))
    if type(size) is not int or size < 1:
        _refuse(f"{where}.parameters.{BYTE_SIZE}", "bytes, 1 or more", shown(size))
    return Place(region, offset, size)


def parameters_of(place: Place, size: int) -> dict[str, Parameter]:
    """Return the parameters of an output that was written to a place."""
    parameters: dict[str, Parameter] = {REGION: place.region, BYTE_SIZE: size}
    if place.offset:
        parameters[OFFSET] = place.offset
    return parameters


def _check_object(descriptor: int, key: str, end: int) -> None:
    """Check that an object is a file of this user that reaches to `end`, at this moment."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        _refuse("key", "a shared memory object of this user", shown(key))
    if found.st_size < end:
        _refuse(f"shared memory {shown(key)}", f"at least {end} bytes", found.st_size)


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    raise Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=str(got))
