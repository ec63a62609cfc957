"""Values that pass in shared memory: read as they were written, or not at all."""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.protocol.codec import (
    decode_items,
    encode_items,
    refer_all_to_source,
    restore_value,
)
from headrace.protocol.messages import Envelope, Request, Tensor
from headrace.telemetry.metrics import Metrics
from headrace.transport.shared_values import (
    SharedValuesReader,
    SharedValuesWriter,
    Value,
)
from headrace.tuning import TUNING, TransportTuning
from tests.support.work import TestReceipt

RING_BYTES = 16 * 1024
VALUE_BYTES = 500
"""At most a sixteenth of the ring is written at a time."""
UNREAD = RING_BYTES * 3 // 4 // VALUE_BYTES
"""So many values are written before one is read."""
ORPHAN = "0" * 16
"""Name of a ring whose writer has ended."""
TUNED = replace(TUNING.transport, shared_abandoned_s=10.0)
SMALL = replace(TUNED, shared_small_bytes=RING_BYTES // 8)


def metrics_of() -> Metrics:
    return Metrics(CollectorRegistry())


def sample(metrics: Metrics, name: str, outcome: str) -> float:
    found = metrics.registry.get_sample_value(name, {"outcome": outcome})
    return found or 0.0


def value_of(number: int, size_bytes: int = VALUE_BYTES) -> bytes:
    return number.to_bytes(4, "little") * (size_bytes // 4)


def released(*values: bytes) -> tuple[list[Request], dict[Request, Value]]:
    """Requests whose values were released, and the values."""
    requests: list[Request] = []
    for number, value in enumerate(values):
        request = Request(TestReceipt(), 0, number, number - 1, 0, b"key", value, [], Envelope())
        inside = memoryview(value)[4:]
        request.inputs = (Tensor("x", "UINT8", (1, len(inside)), inside),)
        requests.append(request)
    return requests, refer_all_to_source(requests, 1)


def put(writer: SharedValuesWriter, *values: bytes, now_s: float = 1.0) -> list[Request]:
    """Pass values; return their requests."""
    requests, held = released(*values)
    writer.put(requests, held, now_s)
    return requests


def read_values(reader: SharedValuesReader, requests: Sequence[Request]) -> list[bytes | None]:
    """Read values; None for those that are not in shared memory."""
    left = reader.read(requests)
    for request in requests:
        request.restore()
    return [None if each in left else bytes(each.value or b"") for each in requests]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def writer(directory: Path) -> Iterator[SharedValuesWriter]:
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), TUNED) as made:
        yield made


@pytest.fixture
def reader(directory: Path) -> Iterator[SharedValuesReader]:
    with SharedValuesReader(directory, metrics_of()) as made:
        yield made


def test_values_are_read_as_written(writer: SharedValuesWriter, reader: SharedValuesReader) -> None:
    """With the inputs in them, and by those that travelled in a record."""
    requests = put(writer, value_of(1), value_of(2, 100))
    requests = decode_items(encode_items(requests), TestReceipt())

    assert read_values(reader, requests) == [value_of(1), value_of(2, 100)]
    assert [bytes(each.inputs[0].data) for each in requests] == [
        value_of(1)[4:],
        value_of(2, 100)[4:],
    ]


def test_values_in_several_places_keep_their_places_in_record(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """Such as in a batch of requests that were written at different times, or not at all."""
    first, second = put(writer, value_of(1), value_of(2))
    (third,), _ = released(value_of(3))
    (fourth,) = put(writer, value_of(4))
    requests = [fourth, second, third, first]

    requests = decode_items(encode_items(requests), TestReceipt())

    assert read_values(reader, requests) == [value_of(4), value_of(2), None, value_of(1)]


def test_value_is_left_on_another_machine(writer: SharedValuesWriter, tmp_path: Path) -> None:
    """It has another directory, and reads the source record."""
    requests = put(writer, value_of(1))
    with SharedValuesReader(tmp_path / "another", metrics_of()) as elsewhere:
        assert read_values(elsewhere, requests) == [None]
    assert requests[0].shared is None


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "0123456789abcdef"])
def test_value_of_unknown_ring_is_left(reader: SharedValuesReader, name: str) -> None:
    """Whatever a record says, no other file is opened."""
    requests, _ = released(value_of(1))
    requests[0].shared = (name, 0)
    assert read_values(reader, requests) == [None]


@pytest.mark.parametrize("start", [-100, 300, 1 << 70])
def test_value_at_place_that_was_not_written_is_left(
    writer: SharedValuesWriter, reader: SharedValuesReader, start: int
) -> None:
    """As a damaged record may have it."""
    (written,) = put(writer, value_of(1))
    (other,), _ = released(value_of(2))
    assert written.shared is not None
    other.shared = (written.shared[0], start)
    assert read_values(reader, [other]) == [None]


@pytest.mark.parametrize("size_bytes", [RING_BYTES + 1, 1 << 45, 1 << 63])
def test_value_of_impossible_size_is_left(
    writer: SharedValuesWriter, reader: SharedValuesReader, size_bytes: int
) -> None:
    """No memory is taken for it."""
    (request,) = put(writer, value_of(1))
    request.referenced = size_bytes
    assert read_values(reader, [request]) == [None]


def test_value_of_empty_file_is_left(directory: Path, reader: SharedValuesReader) -> None:
    """Such as one that is no ring, but has the name of one."""
    (directory / f"headrace-values-{ORPHAN}").write_bytes(bytes(RING_BYTES))
    requests, _ = released(value_of(1))
    requests[0].shared = (ORPHAN, 0)
    assert read_values(reader, requests) == [None]


def test_request_stays_as_it_was_after_a_wrong_value(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """So that its own can be read from its source record."""
    (other,) = put(writer, b"\7" * 100)
    own = b"\1" * 100
    request = Request(TestReceipt(), 0, 1, 0, 0, b"key", own, [], Envelope())
    request.inputs = (
        Tensor("behind", "UINT8", (1, 4), memoryview(b"1234")),
        Tensor("x", "BOOL", (1, 100), memoryview(own)),
    )
    refer_all_to_source([request], 1)
    request.shared = other.shared

    assert reader.read([request]) == [request]
    restore_value(request, own)
    assert [bytes(each.data) for each in request.inputs] == [b"1234", own]


def test_values_of_one_record_do_not_keep_those_of_another_in_memory(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """Only the bytes of its own record are charged as long as a slow request runs."""
    requests = put(writer, value_of(1), value_of(2))
    assert reader.read(requests) == []
    kept = [each.value.obj for each in requests if isinstance(each.value, memoryview)]
    assert kept == [value_of(1), value_of(2)]


def test_full_ring_takes_values_again_after_reading(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """What was not read is not overwritten by what could be read from the source record."""
    kept = [put(writer, value_of(number))[0] for number in range(UNREAD)]
    (refused,) = put(writer, value_of(99))
    found = read_values(reader, kept)
    (taken,) = put(writer, value_of(100))

    assert refused.shared is None
    assert found == [value_of(number) for number in range(UNREAD)]
    assert read_values(reader, [taken]) == [value_of(100)]


def test_unread_values_of_ended_reader_are_overwritten_later(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """Nobody reads them any more, so the others of its machine would get none for ever."""
    for number in range(UNREAD):
        put(writer, value_of(number))

    (early,) = put(writer, value_of(99), now_s=2.0)
    (soon,) = put(writer, value_of(99), now_s=10.9)
    (late,) = put(writer, value_of(100), now_s=13.0)

    assert (early.shared, soon.shared) == (None, None)
    assert read_values(reader, [late]) == [value_of(100)]


def test_overwritten_value_is_left(writer: SharedValuesWriter, reader: SharedValuesReader) -> None:
    """Such as that of a model whose batch was formed late."""
    (slow,) = put(writer, value_of(99))
    for number in range(4 * UNREAD):
        assert read_values(reader, put(writer, value_of(number))) == [value_of(number)]

    assert read_values(reader, [slow]) == [None]


def test_large_value_is_left_out(directory: Path, reader: SharedValuesReader) -> None:
    """It would take the room of many others, and takes no room of those that are read late."""
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), SMALL) as writer:
        requests = [put(writer, value_of(number))[0] for number in range(UNREAD)]
        read_values(reader, requests[-1:])
        (large,) = put(writer, value_of(1, RING_BYTES // 8))
        late = read_values(reader, requests[UNREAD // 2 : -1])
    assert large.shared is None
    assert late == [value_of(number) for number in range(UNREAD // 2, UNREAD - 1)]


def test_many_values_are_written_in_parts(
    writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """Those of a record may be more than is written at a time."""
    values = [value_of(number) for number in range(UNREAD)]
    requests = decode_items(encode_items(put(writer, *values)), TestReceipt())
    assert read_values(reader, requests) == values


def test_file_leaves_space_to_others(directory: Path, reader: SharedValuesReader) -> None:
    """What would grow it beyond is left out, and what is read makes room."""
    space = os.statvfs(directory)
    reserve_bytes = space.f_bavail * space.f_frsize
    scarce = replace(TUNED, shared_reserve_bytes=2 * reserve_bytes)
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), scarce) as writer:
        (left,) = put(writer, value_of(1))
    assert left.shared is None


def test_flood_of_large_values_is_left_to_the_log(
    directory: Path, reader: SharedValuesReader
) -> None:
    """The file stays small for them, and takes others once these are read."""
    large = replace(SMALL, shared_large_bytes=VALUE_BYTES - 1)
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), large) as writer:
        requests = [put(writer, value_of(number))[0] for number in range(5)]
        found = read_values(reader, requests)
        again = read_values(reader, put(writer, value_of(7)))
    assert found == [*(value_of(number) for number in range(4)), None]
    assert again == [value_of(7)]


def test_value_left_out_for_its_size_does_not_make_later_ones_count_as_read(
    directory: Path, reader: SharedValuesReader
) -> None:
    """They would be overwritten before they were read."""
    tuning = replace(TUNED, shared_small_bytes=800, shared_large_bytes=899)
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), tuning) as writer:
        read_values(reader, put(writer, value_of(1, 200)))
        (left,) = put(writer, value_of(2, 900))
        waiting = put(writer, value_of(3, 400))
        put(writer, value_of(4, 400))
        found = read_values(reader, waiting)

    assert left.shared is None
    assert found == [value_of(3, 400)]


def test_file_is_small_after_a_flood(directory: Path, reader: SharedValuesReader) -> None:
    """It grows while values come faster than they are read."""
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), SMALL) as writer:
        put(writer, value_of(1))
        (path,) = directory.iterdir()
        requests = [put(writer, value_of(number))[0] for number in range(UNREAD - 1)]
        flooded_bytes = path.stat().st_size
        read_values(reader, requests)
        for number in range(100):
            assert read_values(reader, put(writer, value_of(number))) == [value_of(number)]
        rested_bytes = path.stat().st_size
    assert flooded_bytes > RING_BYTES // 2
    assert rested_bytes < 4096 + RING_BYTES // 4


@pytest.mark.parametrize("tuning", [TUNED, SMALL], ids=["large", "small"])
def test_random_sizes_are_read_right_or_not_at_all(
    directory: Path, reader: SharedValuesReader, tuning: TransportTuning
) -> None:
    """Over many laps of the ring, in any order, however late."""
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), tuning) as writer:
        assert read_at_random(writer, reader) > 1000


def read_at_random(writer: SharedValuesWriter, reader: SharedValuesReader) -> int:
    """Pass values of random sizes, and read them later; return how many were there."""
    rng = Random(7)
    waiting: list[Request] = []
    sent: dict[Request, bytes] = {}
    read = 0
    for number in range(3000):
        values = [value_of(number, 4 * rng.randint(2, 100)) for _ in range(rng.randint(1, 2))]
        requests = put(writer, *values)
        sent |= zip(requests, values, strict=True)
        waiting += requests
        rng.shuffle(waiting)
        while len(waiting) > rng.randint(0, 30):
            request = waiting.pop()
            (value,) = read_values(reader, [request])
            assert value in (None, sent[request])
            read += value is not None
    return read


def test_file_stays_small_while_values_are_read_soon(
    directory: Path, reader: SharedValuesReader
) -> None:
    """Also if one of them was not read yet at any time."""
    most_bytes = 0
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), SMALL) as writer:
        waiting = put(writer, value_of(0))
        for number in range(1, 200):
            waiting += put(writer, value_of(number))
            assert read_values(reader, [waiting.pop(0)]) == [value_of(number - 1)]
            (path,) = directory.glob("headrace-values-*")
            most_bytes = max(most_bytes, path.stat().st_size)

    assert most_bytes < RING_BYTES * 3 // 4


@pytest.mark.parametrize("tuning", [TUNED, SMALL])
def test_values_that_are_read_in_order_are_never_overwritten(
    directory: Path, reader: SharedValuesReader, tuning: TransportTuning
) -> None:
    """Wherever in the file the writer begins again, and however far behind their reader is."""
    rng = Random(11)
    waiting: deque[tuple[Request, bytes]] = deque()
    outcomes = Counter[bool]()
    pace = 0.0
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), tuning) as writer:
        for number in range(20_000):
            if number % 50 == 0:
                pace = rng.choice([0.2, 0.5, 0.6, 0.9])
            value = value_of(number, 4 * rng.randint(2, 100))
            (request,) = put(writer, value)
            outcomes[request.shared is not None] += 1
            if request.shared is not None:
                waiting.append((request, value))
            while waiting and rng.random() < pace:
                request, value = waiting.popleft()
                assert read_values(reader, [request]) == [value]

    assert outcomes[True] > 10_000
    assert outcomes[False] > 500


def test_value_that_is_overwritten_during_reading_is_left(directory: Path) -> None:
    """A reader gets the bytes of its request or none, while a writer overwrites at full speed."""
    sent: deque[tuple[bytes, bytes]] = deque(maxlen=40)
    is_done = threading.Event()

    def write() -> None:
        with SharedValuesWriter(directory, RING_BYTES, metrics_of(), TUNED) as writer:
            for number in count():
                value = value_of(number)
                # At such times no value is regarded as unread.
                requests = put(writer, value, now_s=number * 20.0)
                sent.append((encode_items(requests), value))
                if is_done.is_set():
                    return

    thread = threading.Thread(target=write)
    thread.start()
    outcomes = Counter[bool]()
    try:
        with SharedValuesReader(directory, metrics_of()) as reader:
            while min(outcomes[True], outcomes[False]) < 500 and thread.is_alive():
                for record, value in sent.copy():
                    found = read_values(reader, decode_items(record, TestReceipt()))
                    assert found in ([None], [value])
                    outcomes[found == [value]] += 1
    finally:
        is_done.set()
        thread.join()


def test_file_is_removed_with_its_writer(directory: Path) -> None:
    """And readers that have it open find nothing."""
    with SharedValuesReader(directory, metrics_of()) as reader:
        with SharedValuesWriter(directory, RING_BYTES, metrics_of()) as writer:
            requests = put(writer, value_of(1), value_of(2))
            assert read_values(reader, requests[:1]) == [value_of(1)]
        assert list(directory.iterdir()) == []
        assert read_values(reader, requests[1:]) == [None]


@contextmanager
def held_open(path: Path) -> Iterator[None]:
    """Let a file get its size back at the end, with zeros in place of what was cut off. A reader
    may find them while a file is being cut off.
    """
    with path.open("r+b") as file:
        size_bytes = path.stat().st_size
        yield
        file.truncate(size_bytes)


def test_zeros_at_the_end_of_a_file_are_left(directory: Path, reader: SharedValuesReader) -> None:
    """They are no values, whatever a reader finds when the file is removed."""
    with ExitStack() as stack, SharedValuesWriter(directory, RING_BYTES, metrics_of()) as writer:
        requests = put(writer, value_of(1), value_of(2))
        read_values(reader, requests[:1])
        (path,) = directory.iterdir()
        stack.enter_context(held_open(path))
    assert read_values(reader, requests[1:]) == [None]


def test_zeros_after_a_flood_are_left(directory: Path, reader: SharedValuesReader) -> None:
    """When the file is made small, for those who read late."""
    with SharedValuesWriter(directory, RING_BYTES, metrics_of(), SMALL) as writer:
        requests = [put(writer, value_of(number))[0] for number in range(UNREAD)]
        read_values(reader, requests[-1:])
        (path,) = directory.iterdir()
        with held_open(path):
            (next_one,) = put(writer, value_of(99))
        assert read_values(reader, [requests[-2], next_one]) == [None, value_of(99)]


def test_zeros_of_killed_process_are_left(
    directory: Path, writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """When the next one removes its file."""
    first, second = put(writer, value_of(1), value_of(2))
    (path,) = directory.iterdir()
    orphan = directory / f"headrace-values-{ORPHAN}"
    orphan.write_bytes(path.read_bytes())
    for request in (first, second):
        assert request.shared is not None
        request.shared = (ORPHAN, request.shared[1])
    assert read_values(reader, [first]) == [value_of(1)]
    with (
        held_open(orphan),
        SharedValuesWriter(directory, RING_BYTES, metrics_of()) as another,
    ):
        put(another, value_of(3))
    assert not orphan.exists()
    assert read_values(reader, [second]) == [None]


def test_file_of_killed_process_is_removed_by_next_one(
    directory: Path, writer: SharedValuesWriter
) -> None:
    """Files of processes that run stay."""
    orphan = directory / f"headrace-values-{ORPHAN}"
    orphan.write_bytes(bytes(RING_BYTES))
    put(writer, value_of(1))
    (own,) = directory.iterdir()
    with SharedValuesWriter(directory, RING_BYTES, metrics_of()) as another:
        put(another, value_of(1))
        assert len(list(directory.iterdir())) == 2
    assert list(directory.iterdir()) == [own]


def test_removed_file_is_replaced(
    directory: Path, writer: SharedValuesWriter, reader: SharedValuesReader
) -> None:
    """Such as by somebody who tidies up, after a while."""
    for number in range(UNREAD + 1):
        read_values(reader, put(writer, value_of(number)))
    (path,) = directory.iterdir()
    path.unlink()
    (lost,), (found,) = put(writer, value_of(2)), put(writer, value_of(3))

    assert read_values(reader, [lost]) == [None]
    assert read_values(reader, [found]) == [value_of(3)]


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a file system that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_memory_turns_sharing_off(directory: Path) -> None:
    """With a line in the log; all values are then read from their source records."""
    metrics = metrics_of()
    with (
        SharedValuesWriter(directory, RING_BYTES, metrics) as writer,
        capture_logs() as logs,
        files_limited_to(os.sysconf("SC_PAGESIZE") + VALUE_BYTES),
    ):
        taken, refused, later = (put(writer, value_of(1))[0] for _ in range(3))
    assert taken.shared is not None
    assert (refused.shared, later.shared) == (None, None)
    assert [each["event"] for each in logs] == ["shared_values.off"]
    assert list(directory.iterdir()) == []


def test_values_are_counted(directory: Path) -> None:
    """By outcome, at both ends."""
    written, read = metrics_of(), metrics_of()
    with (
        SharedValuesWriter(directory, RING_BYTES, written) as writer,
        SharedValuesReader(directory, read) as reader,
    ):
        requests = [put(writer, value_of(number))[0] for number in range(UNREAD + 1)]
        reader.read(requests)
        size_bytes = written.registry.get_sample_value("headrace_shared_values_bytes")
    outcomes = [
        sample(written, "headrace_shared_values_total", outcome) for outcome in ("written", "full")
    ]
    assert outcomes == [UNREAD, 1]
    assert sample(read, "headrace_source_values_total", "shared") == UNREAD
    assert size_bytes == os.sysconf("SC_PAGESIZE") + UNREAD * VALUE_BYTES
