"""Pass the values of requests to other processes of this machine in shared memory.

A large value travels through no topic between stages (`refer_to_source`). Ingest writes it into a
ring, a file in shared memory, and its request says where. The process that runs the model copies it
from there, which takes a fraction of the time of reading the source record. This is only a short
cut: whatever is not in the ring, or no longer, is read from the source record
(`headrace.transport.source_values`). So any process may be on another machine, or lose the file.

Positions in a ring only grow; byte `p` is at `p % size` of the file, behind a head of one page. No
byte is written at a position beyond the head's *frontier*, so what lies `size` or more bytes before
the frontier may be overwritten, and nothing else. A reader copies a value first, and looks at the
frontier then. Before the file is cut off the frontier is moved beyond what goes, of which a reader
may get zeros meanwhile.

The head also has the position up to which any reader has read. The writer goes at most three
quarters of a ring beyond it: further values would overwrite others that were not read yet. The rest
of the ring is for values that are read later than others, such as those of a slow model. When
everything was read, the writer begins again at the start of the file, so that the file is small,
and in the processor's cache, unless values come faster than they are read. Beyond a quarter of the
ring it does so as soon as three quarters of the values from the start of the file on were read;
values that are read later than others are overwritten sooner then.

Values are read and written as in any file: a process that touches a mapped page beyond the end of
a file is killed. Only the head is mapped, which is never cut off, since its numbers must be stored
and loaded as a whole.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from headrace.protocol.ack import AckHandle
from headrace.protocol.codec import has_inputs_in_source, restore_values
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, TransportTuning

if sys.platform == "linux":
    import fcntl

log = structlog.get_logger(__name__)

_PREFIX = "headrace-values-"
_NAME = re.compile(r"[0-9a-f]{16}")
_HEAD_BYTES = mmap.PAGESIZE
_FRONTIER, _READ, _SIZE = range(3)
"""Numbers in the head, of eight bytes each."""
_NO_VALUES = b"\xff" * 8
"""A frontier that leaves all values behind it."""
_MOST_BUFFERS = 1024
"""Of one call of pwritev(2): `IOV_MAX` of Linux."""
_NOWHERE = ("", 0)

Value = bytes | memoryview


class _Ring:
    """An open file of a ring, with its head mapped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped = mmap.mmap(descriptor, _HEAD_BYTES)
        self.head = memoryview(self._mapped).cast("Q")

    def set_frontier(self, position: int) -> None:
        """Move the frontier. Raises `OSError`."""
        self.head[_FRONTIER] = position
        # A write of its own. The kernel locks the file for each, so that whoever sees what the next
        # one does sees the number above as well, whatever the processor.
        os.pwrite(self.descriptor, b"\0", _HEAD_BYTES - 1)

    def close(self) -> None:
        self.head.release()
        self._mapped.close()
        os.close(self.descriptor)


class SharedValuesWriter:
    """A ring that this process writes. It is made for the first values, and leaving the context
    removes it.

    Args:
        directory: of the file; nothing is shared if it does not exist.
        size_bytes: of the ring; 0 shares nothing.
        metrics: count the values, and show the size of the file.
    """

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        metrics: Metrics,
        tuning: TransportTuning = TUNING.transport,
    ) -> None:
        self._directory = directory
        self._size_bytes = size_bytes
        self._metrics = metrics
        self._tuning = tuning
        self._is_off = not size_bytes or sys.platform != "linux"
        self._ring: _Ring | None = None
        self._name = ""
        self._file_bytes = 0
        self._end = 0
        self._lap_end = 0  # where the values ended before those that begin at the start of the file
        self._last_read = 0
        self._regarded_as_read = 0
        self._read_at_s = 0.0

    def __enter__(self) -> SharedValuesWriter:
        with suppress(OSError):
            self._is_off = self._is_off or not self._directory.is_dir()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        self._is_off = True

    def put(
        self, requests: Sequence[Request], released: Mapping[Request, Value], now_s: float
    ) -> None:
        """Write the values of requests one after the other, and note in each request where its
        value is; unless there is no room for them, or no shared memory.

        Args:
            requests: those of one record. Other requests than those in `released`, and all if
                the first has no inputs in its value, are left out: no process needs these values.
            released: values of requests, see `refer_all_to_source`.
            now_s: monotonic.
        """
        if has_inputs_in_source(requests[0]):
            part = [request for request in requests if request in released]
            self._put_part(part, [released[request] for request in part], now_s)

    def is_far_ahead(self, now_s: float) -> bool:
        """Return True if more than a sixteenth of the ring was not read yet, unless nobody reads
        from it: whoever runs the model is on another machine then, or has ended.

        Args:
            now_s: monotonic.
        """
        if self._ring is None or now_s - self._read_at_s >= self._tuning.shared_abandoned_s:
            return False
        read = self._ring.head[_READ]
        unread_bytes = self._unread_bytes(read, self._end)
        return read > self._regarded_as_read and unread_bytes > self._size_bytes // 16

    def _put_part(self, requests: Sequence[Request], values: Sequence[Value], now_s: float) -> None:
        if self._is_off or not values:
            return
        # More at once would take the room of many others.
        if len(values) > 1 and sum(map(len, values)) > self._size_bytes // 16:
            middle = len(values) // 2
            self._put_part(requests[:middle], values[:middle], now_s)
            self._put_part(requests[middle:], values[middle:], now_s)
            return
        try:
            start = self._write(values, now_s)
        except OSError as error:
            log.warning(
                Event.SHARED_VALUES_OFF, directory=str(self._directory), reason=error.strerror
            )
            self._remove()
            self._is_off = True
            return
        self._metrics.shared_values.labels("full" if start is None else "written").inc(len(values))
        if start is None:
            return
        for request, value in zip(requests, values, strict=True):
            request.shared = (self._name, start)
            start += len(value)

    def _write(self, values: Sequence[Value], now_s: float) -> int | None:
        """Write values and return their position; None if there is no room. Raises `OSError`."""
        if self._ring is None:
            self._ring, self._read_at_s = self._make(), now_s
        ring, size_bytes = self._ring, sum(map(len, values))
        is_large = size_bytes > len(values) * self._tuning.shared_large_bytes
        start = self._find_room(ring, size_bytes, now_s)
        if start is None:
            return None
        if is_large and start % self._size_bytes + size_bytes > self._tuning.shared_small_bytes:
            return None
        end = start + size_bytes
        if end > ring.head[_FRONTIER]:
            ring.set_frontier(self._frontier(end))
        at = _HEAD_BYTES + start % self._size_bytes
        for first in range(0, len(values), _MOST_BUFFERS):
            part = values[first : first + _MOST_BUFFERS]
            written = os.pwritev(ring.descriptor, part, at)
            at += written
            if written < sum(map(len, part)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end = end
        status = os.fstat(ring.descriptor)
        self._file_bytes = status.st_size
        self._metrics.shared_values_bytes.set(self._file_bytes)
        if not status.st_nlink:  # somebody has removed the file, so make another one
            self._remove()
        return start

    def _find_room(self, ring: _Ring, size_bytes: int, now_s: float) -> int | None:
        """Return the position for values, which do not wrap around; None if there is no room."""
        ring_bytes, small_bytes = self._size_bytes, self._tuning.shared_small_bytes
        if size_bytes > ring_bytes // 16:
            return None
        read, start = ring.head[_READ], self._end
        if read != self._last_read:
            self._last_read, self._read_at_s = read, now_s
        at = start % ring_bytes
        can_go_on = at + size_bytes <= small_bytes and self._may_grow(ring, at + size_bytes)
        # Values that are larger than all of that part gain nothing by its start.
        if read >= start and at and not can_go_on and size_bytes <= small_bytes:
            start += ring_bytes - at
            read = self._regard_as_read(ring, start)
            if at > 2 * small_bytes:
                ring.set_frontier(start + ring_bytes)
                os.ftruncate(ring.descriptor, _HEAD_BYTES + small_bytes)
                self._file_bytes = _HEAD_BYTES + small_bytes
        elif at + size_bytes >= ring_bytes or ring_bytes // 4 <= at >= 4 * (start - read):
            self._lap_end = start
            start += ring_bytes - at
        end = start + size_bytes
        is_full = self._unread_bytes(read, end) > ring_bytes * 3 // 4
        if is_full or self._frontier(end) > read + ring_bytes:
            # Those who were to read them may have ended, or be on other machines.
            if now_s - self._read_at_s < self._tuning.shared_abandoned_s:
                return None
            self._regard_as_read(ring, start)
            self._read_at_s = now_s
        return start if self._may_grow(ring, start % ring_bytes + size_bytes) else None

    def _unread_bytes(self, read: int, end: int) -> int:
        """Return the size of the values between two positions."""
        lap_start = end - end % self._size_bytes
        return end - read - (lap_start - self._lap_end if read < lap_start else 0)

    def _frontier(self, end: int) -> int:
        """Return where the frontier goes for values up to `end`: it moves in steps."""
        return end + self._size_bytes // 128

    def _may_grow(self, ring: _Ring, to_bytes: int) -> bool:
        """Return True if the file already has so many bytes of values, or leaves enough space to
        others: a process that maps memory there is killed if there is none when it uses it.
        """
        growth_bytes = _HEAD_BYTES + to_bytes - self._file_bytes
        if growth_bytes <= 0:
            return True
        space = os.fstatvfs(ring.descriptor)
        left_bytes = space.f_bavail * space.f_frsize - growth_bytes
        return left_bytes >= self._tuning.shared_reserve_bytes

    def _regard_as_read(self, ring: _Ring, position: int) -> int:
        ring.head[_READ] = self._last_read = self._regarded_as_read = position
        return position

    def _make(self) -> _Ring:
        """Make the file of the ring. Raises `OSError`."""
        _remove_orphans(self._directory)
        self._name = secrets.token_hex(8)
        # Under another name until it is locked, since a file that nobody has locked is an orphan.
        path = self._directory / f"new-{_PREFIX}{self._name}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.pwrite(descriptor, bytes(_HEAD_BYTES), 0)
            ring = _Ring(descriptor)
            ring.head[_SIZE] = self._size_bytes
            path.rename(self._directory / f"{_PREFIX}{self._name}")
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return ring

    def _remove(self) -> None:
        if self._ring is None:
            return
        with suppress(OSError):
            (self._directory / f"{_PREFIX}{self._name}").unlink()
        _drop_values(self._ring.descriptor)
        self._ring.close()
        self._ring = None
        self._end = self._lap_end = self._file_bytes = 0
        self._last_read = self._regarded_as_read = 0
        self._metrics.shared_values_bytes.set(0)


def _remove_orphans(directory: Path) -> None:
    """Remove the files of this user's processes that have ended without doing so."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer has it locked
                path.unlink()
                _drop_values(descriptor)
            finally:
                os.close(descriptor)


def _drop_values(descriptor: int) -> None:
    """Cut off the values of a file: readers that have it open would keep its memory."""
    os.pwrite(descriptor, _NO_VALUES, _FRONTIER * 8)
    os.ftruncate(descriptor, _HEAD_BYTES)


class _Run(NamedTuple):
    """Values that lie one after the other in a ring."""

    name: str
    start: int
    requests: list[Request]


class SharedValuesReader:
    """Reads values from the rings of this machine.

    Args:
        directory: of the files; None reads none.
        metrics: count the values.
    """

    def __init__(
        self,
        directory: Path | None,
        metrics: Metrics,
        tuning: TransportTuning = TUNING.transport,
    ) -> None:
        self._directory = None if sys.platform != "linux" else directory
        self._metrics = metrics
        self._most_rings = tuning.shared_rings
        self._rings: OrderedDict[str, _Ring | None] = OrderedDict()

    def __enter__(self) -> SharedValuesReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._rings:
            self._close_oldest()

    def read(self, requests: Sequence[Request]) -> list[Request]:
        """Set the values of requests that are in a ring; return the other requests.

        A request that is returned names no ring any more.
        """
        left: list[Request] = []
        count = size_bytes = 0
        for name, start, run in _runs(requests):
            content = self._read_run(name, start, run) if name else None
            refused = run if content is None else restore_values(run, content)
            for request in run:
                request.shared = None
            for request in refused:
                request.chunk = None
            left += refused
            if content is not None:
                count += len(run) - len(refused)
                size_bytes += len(content) - sum([request.referenced for request in refused])
        if count:
            self._metrics.source_values.labels("shared").inc(count)
            self._metrics.source_value_bytes.inc(size_bytes)
        return left

    def _read_run(self, name: str, start: int, run: Sequence[Request]) -> memoryview | None:
        """Return the bytes of a run; None if they are not there, or no longer."""
        ring = self._open(name)
        if ring is None:
            return None
        head, wanted_bytes = ring.head, sum([request.referenced for request in run])
        ring_bytes, end = head[_SIZE], start + wanted_bytes
        if not _holds(head, start, end):
            return None
        at = start % ring_bytes
        content = os.pread(ring.descriptor, min(wanted_bytes, ring_bytes - at), _HEAD_BYTES + at)
        if at + wanted_bytes > ring_bytes:  # the run goes on at the beginning
            content += os.pread(ring.descriptor, at + wanted_bytes - ring_bytes, _HEAD_BYTES)
        # Again: what was overwritten meanwhile lies behind the frontier by a whole ring.
        if not _holds(head, start, end) or len(content) < wanted_bytes:
            return None
        head[_READ] = max(head[_READ], end)
        return memoryview(content)

    def _open(self, name: str) -> _Ring | None:
        """Return a ring; None if it is not on this machine."""
        if name in self._rings:
            self._rings.move_to_end(name)
            return self._rings[name]
        ring: _Ring | None = None
        if self._directory is not None and _NAME.fullmatch(name):
            with suppress(OSError):
                path = self._directory / f"{_PREFIX}{name}"
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    ring = _Ring(descriptor)
                except (OSError, ValueError):  # it is shorter than its head
                    os.close(descriptor)
        self._rings[name] = ring
        if len(self._rings) > self._most_rings:
            self._close_oldest()
        return ring

    def _close_oldest(self) -> None:
        _, ring = self._rings.popitem(last=False)
        if ring is not None:
            ring.close()


def _holds(head: memoryview, start: int, end: int) -> bool:
    """Return True if values from a position to another one may be in a ring, whatever it says."""
    frontier: int = head[_FRONTIER]
    return max(0, frontier - head[_SIZE]) <= start < end <= frontier


def _runs(requests: Sequence[Request]) -> Iterator[_Run]:
    """Divide requests into those of one record whose values lie one after the other in one ring.

    Their values share memory, which is charged to that record.
    """
    run: list[Request] = []
    name, start = _NOWHERE
    end = 0
    handle: AckHandle | None = None
    for request in requests:
        own_name, own_start = request.shared or _NOWHERE
        if own_name != name or (name and own_start != end) or request.ack_handle is not handle:
            if run:
                yield _Run(name, start, run)
            name, start, run, handle = own_name, own_start, [], request.ack_handle
        run.append(request)
        end = own_start + request.referenced
    if run:
        yield _Run(name, start, run)
