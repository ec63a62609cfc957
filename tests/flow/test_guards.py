"""The cost of a request, counted without a clock: calls, objects, garbage, copies.

Each ceiling is what was counted when it was last set, and a little room. A change that goes over
one has made the path of every request dearer: make it cheaper, or raise the ceiling and say why.
`docs/performance.md` has the same in microseconds.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import headrace
from headrace.config import LimitSettings
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.models.registry import Models
from headrace.models.signature import Signature, TensorSpec, make_signature
from headrace.protocol.codec import encode_request, encode_response
from headrace.protocol.messages import Request
from headrace.services.executor.buffers import gather, scatter
from headrace.services.ingest.decode import IngestRules, decode_records
from headrace.topics import STAGES
from headrace.tuning import TUNING, Tuning
from tests.support.models import add_version, identity, settings_for
from tests.support.pipelines import PARTITIONS, Caller, log_for, serving, settings_of
from tests.support.services import delivery, digits_models, digits_value, make_assignment
from tests.support.work import NOW_US

REQUESTS = 4096
FEW = 256
CALLS_PER_REQUEST = 14.0
LONE_WARM_UP = 50
LONE_REQUESTS = 100
CALLS_PER_LONE_REQUEST = 300
BLOCKS_PER_REQUEST = 6.1
GARBAGE_PER_REQUEST = 0.01

CODE = Path(headrace.__file__).parent
PLACES = (str(CODE), str(CODE.parent / "services"))
NOT_THE_PATH = str(CODE / "log" / "memory")


class CallCounter:
    """Counts calls of Headrace's own Python functions on this thread, without the test's log."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(PLACES) and not name.startswith(NOT_THE_PATH):
                self.of[frame.f_code.co_qualname] += 1


@contextmanager
def profiled() -> Iterator[CallCounter]:
    """Count while the context lasts."""
    counter = CallCounter()
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(before)


async def serve(repository: Path, count: int = REQUESTS, tuning: Tuning = TUNING) -> MemoryLog:
    """Answer so many requests that are in the log before the services start; the log."""
    settings = settings_of(repository)
    log = await log_for(settings)
    value = digits_value()
    async with log.producer() as producer:
        for partition in range(settings.topics.partitions):
            records = [NewRecord(None, value)] * (count // settings.topics.partitions)
            target = TopicPartition("headrace.requests", partition)
            for sent in await producer.send(target, records):
                await sent.acknowledged
    caller = Caller(settings, log)
    caller.sent = count
    async with serving(settings, log, [STAGES], tuning):
        await caller.all_answered()
    return log


UNTIMED = replace(
    TUNING,
    ingest=replace(TUNING.ingest, hold_loop_s=inf, double_records_for_s=inf),
    executor=replace(TUNING.executor, buffer_answers_s=inf, inline_max_run_us=10**9),
    models=replace(TUNING.models, batch_overhead_us=1e9),
)
"""Nothing is cut off because it took long, and the largest batch is the best one, so that a busy
machine makes neither other chunks nor other batches.
"""


async def test_function_calls_per_request_stay_under_ceiling(tmp_path: Path) -> None:
    """A backlog is answered with so many calls of Python functions for each request."""
    with profiled() as counter:
        await serve(tmp_path, tuning=UNTIMED)

    calls = counter.of
    assert calls.total() / REQUESTS <= CALLS_PER_REQUEST, calls.most_common(40)


RARE = replace(UNTIMED, delivery=replace(TUNING.delivery, commit_interval_s=3600.0))
"""Besides, nothing is committed before the end, so that a slow machine makes no more commits."""


async def test_function_calls_of_lone_requests_stay_under_ceiling(tmp_path: Path) -> None:
    """Requests that come one at a time, each a chunk of its own, take so many calls each."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    value = digits_value()
    answers = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]
    counts: list[int] = []
    async with (
        serving(settings, log, [STAGES], RARE),
        log.producer() as producer,
        log.reader(answers) as reader,
    ):
        for number in range(LONE_WARM_UP + LONE_REQUESTS):
            with profiled() as counter:
                target = TopicPartition("headrace.requests", number % PARTITIONS)
                await producer.send(target, [NewRecord(None, value)])
                while not await reader.poll(1.0, 1):
                    pass
            counts.append(counter.of.total())

    # The median: now and then something that does not belong to the request comes in between.
    assert median(counts[LONE_WARM_UP:]) <= CALLS_PER_LONE_REQUEST


def our_garbage() -> int:
    """How many objects of our own types only the garbage collector could find.

    Waits that end by their deadline leave some of the interpreter's own behind, more of them the
    longer the test takes.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(type(each).__module__.startswith("headrace") for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


async def test_request_leaves_no_cycles_of_references(tmp_path: Path) -> None:
    """Objects made for a request go away when it is answered: with more requests, the garbage
    collector finds no more. `headrace run` lets it look rarely, because of this.
    """
    await serve(tmp_path, FEW)
    gc.disable()
    try:
        found = []
        for count in (FEW, REQUESTS):
            gc.collect()
            log = await serve(tmp_path, count)  # what it holds is no garbage yet
            found.append(our_garbage())
            del log
    finally:
        gc.enable()

    assert (found[1] - found[0]) / (REQUESTS - FEW) <= GARBAGE_PER_REQUEST


def test_memory_blocks_of_waiting_request_stay_under_ceiling(tmp_path: Path) -> None:
    """Read and checked, it is so many pieces of memory."""
    rules = IngestRules(digits_models(tmp_path).catalog, LimitSettings(), lambda *_: None)
    assignment = make_assignment()
    records = delivery(*[digits_value() for _ in range(REQUESTS)], assignment=assignment).records
    decode_records(records[:3], make_assignment(), rules, NOW_US)  # fills what is remembered
    gc.collect()
    before = sys.getallocatedblocks()
    requests = decode_records(records, assignment, rules, NOW_US)
    held = sys.getallocatedblocks() - before

    assert len(requests) == REQUESTS
    assert held / REQUESTS <= BLOCKS_PER_REQUEST


# --- copies ------------------------------------------------------------------------------------

ROW = 256 * 1024
ROWS = 16
SIGNATURE: Signature = make_signature(
    [TensorSpec("x", "FP32", (-1, ROW), ("batch", ""))],
    [TensorSpec("y", "FP32", (-1, ROW), ("batch", ""))],
)
TENSOR_BYTES = 4 * ROW * ROWS


def copies(work: Callable[[], Any]) -> float:
    """How often the tensors' bytes were allocated anew, at the most at any time."""
    tracemalloc.start()
    try:
        kept = work()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak / TENSOR_BYTES


@pytest.fixture
def requests(tmp_path: Path) -> list[Request]:
    """Return requests of a MiB each, read and bound."""
    return read_all(tmp_path)()


def read_all(repository: Path) -> Callable[[], list[Request]]:
    """Reads records of a MiB each."""
    add_version(repository, "wide", 1, identity("FP32", ("batch", ROW)))
    models = Models(settings_for(repository))
    models.open()
    values = [
        encode_request("application/msgpack", "wide", {"x": row})
        for row in np.zeros((ROWS, 1, ROW), np.float32)
    ]
    assignment = make_assignment()
    records = delivery(*values, assignment=assignment).records
    rules = IngestRules(models.catalog, LimitSettings())
    return lambda: decode_records(records, assignment, rules, NOW_US)


def test_reading_copies_no_tensor(tmp_path: Path) -> None:
    """From the record to the batcher tensors are views of the record's value."""
    work = read_all(tmp_path)

    assert copies(work) <= 0.01


def test_gathering_copies_each_tensor_once(requests: list[Request]) -> None:
    """Into the memory that the model reads."""
    assert 0.99 <= copies(lambda: gather(requests, SIGNATURE)) <= 1.01


def test_sharing_out_copies_no_tensor(requests: list[Request]) -> None:
    """Each request gets a view of its rows."""
    outputs = {"y": np.zeros((ROWS, ROW), np.float32)}

    assert copies(lambda: scatter(requests, SIGNATURE, outputs)) <= 0.01


def test_encoding_copies_each_tensor_once(requests: list[Request]) -> None:
    """Into the value of the answer's record."""
    scatter(requests, SIGNATURE, {"y": np.zeros((ROWS, ROW), np.float32)})

    assert copies(lambda: [encode_response(each, NOW_US) for each in requests]) <= 1.01
