"""Transforms in child processes: one that crashes or hangs fails its own request."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.errors import Code
from headrace.models.version import ModelVersion
from headrace.primitives.backoff import Backoff
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import NO_HEADERS
from headrace.protocol.messages import Request
from headrace.telemetry.instruments import Instruments
from headrace.transforms.process import TransformProcess
from headrace.transforms.workers import PendingTransform, TransformPool
from headrace.tuning import TUNING
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.processes import transform_children
from tests.support.services import counted, digits_models, make_instruments

TRANSFORM = """
import ctypes
import os
import time

import numpy as np

from headrace.errors import Code, Rejected

DIRECTORY = os.path.dirname(__file__)

def transform(payload, content_type):
    if payload == b"exit":
        os._exit(3)
    if payload == b"segfault":
        ctypes.string_at(0)
    if payload == b"deaf":
        ctypes.PyDLL(None).sleep(3600)  # native code that keeps the interpreter's lock
    if payload == b"wrong":
        raise ValueError("wrong")
    if payload == b"later":
        raise Rejected(Code.OVERLOADED, "later", retry_after_ms=500)
    if payload == b"sockets":
        kinds = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{each}")]
        return {"pixels": np.full((1, 64), sum("socket" in each for each in kinds), np.float32)}
    if payload == b"stays":
        with open(os.path.join(DIRECTORY, f"{os.getpid()}.begun"), "w"):
            pass
        time.sleep(3600)
    if payload == b"once":
        begun = os.path.join(DIRECTORY, "once.begun")
        if not os.path.exists(begun):
            with open(begun, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(3600)
    rows = int(payload) if payload.isdigit() else 1
    return {"pixels": np.full((rows, 64), len(payload), np.float32)}
"""
MIB = 1024 * 1024
TUNING_HERE = replace(TUNING.transforms, restart=Backoff(0.001, 0.001))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With `digits` and its transform."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "transform.py").write_text(TRANSFORM)
    return tmp_path


def make_version(repository: Path, max_execution_s: float = 60.0) -> ModelVersion:
    """The version of `digits`."""
    config = f'transform = "python"\nmax_execution_s = {max_execution_s}\n'
    return digits_models(repository, config).catalog.lookup("digits", None)


def pending(version: ModelVersion, *values: bytes) -> list[PendingTransform]:
    """Payloads that wait."""
    return [
        PendingTransform(
            Request(NULL_ACK, 0, place, place - 1, 0, None, value, [], NO_HEADERS),
            version,
            value,
            "text/plain",
        )
        for place, value in enumerate(values)
    ]


@contextmanager
def pool_of(
    workers: int = 1, instruments: Instruments | None = None, *, max_bytes: int = 1 << 30
) -> Iterator[TransformPool]:
    """Child processes, ended when the context is left."""
    metrics = (instruments or make_instruments()).metrics
    children = [TransformProcess(3, max_bytes, metrics, TUNING_HERE) for _ in range(workers)]
    pool = TransformPool(children)
    try:
        yield pool
    finally:
        pool.close()


def resident_bytes_of(pid: int) -> int:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def lengths(payloads: Sequence[PendingTransform]) -> list[float | None]:
    """The first number of the inputs; None for a payload without."""
    return [
        float(np.frombuffer(each.inputs[0].data, np.float32)[0]) if each.inputs else None
        for each in payloads
    ]


async def run_all(pool: TransformPool, payloads: Sequence[PendingTransform]) -> None:
    """Transform payloads, as often as it takes."""
    left = list(payloads)
    async with asyncio.timeout(DEADLINE_S):
        while left:
            left = left[await pool.run(left) :]


@pytest.mark.parametrize("workers", [1, 2])
async def test_child_returns_inputs_of_thread(repository: Path, workers: int) -> None:
    """Small ones through its socket, large ones in shared memory."""
    version = make_version(repository)
    payloads = pending(version, b"a", b"bb", b"5000", b"wrong", b"ccc")
    with pool_of(workers) as pool:
        await run_all(pool, payloads)

    assert lengths(payloads) == [1, 2, 4, None, 3]
    expected = version.transform(b"5000", "text/plain")[0]
    assert payloads[2].inputs is not None
    (made,) = payloads[2].inputs
    assert (made.name, made.datatype, made.shape) == ("pixels", "FP32", [5000, 64])
    assert bytes(made.data) == bytes(expected.data)
    assert payloads[3].error is not None
    assert payloads[3].error.code == Code.INVALID_REQUEST
    assert payloads[3].error.message == "transform: ValueError: wrong"


async def test_refusal_of_child_says_when_caller_may_retry(repository: Path) -> None:
    """As that of a thread does."""
    (payload,) = pending(make_version(repository), b"later")
    with pool_of() as pool:
        await run_all(pool, [payload])

    assert payload.error is not None
    assert (payload.error.code, payload.error.retry_after_ms) == (Code.OVERLOADED, 500)


@pytest.mark.parametrize(("value", "how"), [(b"exit", "exit code 3"), (b"segfault", "SIGSEGV")])
async def test_payload_that_ends_its_child_is_refused_alone(
    repository: Path, value: bytes, how: str
) -> None:
    """After three children, each of which is replaced."""
    instruments = make_instruments()
    payloads = pending(make_version(repository), b"a", value, b"bb")
    with pool_of(1, instruments) as pool:
        await run_all(pool, payloads)

    assert lengths(payloads) == [1, None, 2]
    error = payloads[1].error
    assert error is not None
    assert error.code == Code.MODEL_FAILED
    assert how in error.message
    assert counted(instruments, "transform_restarts_total", reason="crash") == 3


async def test_child_that_hangs_in_native_code_is_killed(repository: Path) -> None:
    """Its payload is refused with the limit, and the process goes on."""
    instruments = make_instruments()
    payloads = pending(make_version(repository, 1.0), b"deaf", b"bb")
    with pool_of(1, instruments) as pool:
        await run_all(pool, payloads)

    assert lengths(payloads) == [None, 2]
    assert payloads[0].error is not None
    assert "max_execution_s = 1 s" in payloads[0].error.message
    assert counted(instruments, "transform_restarts_total", reason="hang") == 1


async def test_payload_whose_child_is_killed_from_outside_is_transformed_again(
    repository: Path,
) -> None:
    """Nobody's request fails because of the kernel, or an operator."""
    payloads = pending(make_version(repository), b"once", b"bb")
    begun = repository / "digits" / "once.begun"
    with pool_of() as pool:
        running = asyncio.create_task(run_all(pool, payloads))
        await eventually(lambda: begun.exists() and bool(begun.read_text()))
        os.kill(int(begun.read_text()), signal.SIGKILL)
        await running

    assert lengths(payloads) == [4, 2]
    assert [each.error for each in payloads] == [None, None]


async def test_inputs_over_limit_are_too_large(repository: Path) -> None:
    """They are not sent."""
    payloads = pending(make_version(repository), b"5000", b"1")
    with pool_of(max_bytes=1_000_000) as pool:
        await run_all(pool, payloads)

    assert lengths(payloads) == [None, 1]
    assert payloads[0].error is not None
    assert payloads[0].error.code == Code.TOO_LARGE


async def test_workers_stop_when_inputs_of_some_size_are_made(repository: Path) -> None:
    """Each may exceed the size by one payload; the others are made once these are charged."""
    payloads = pending(make_version(repository), *[b"20000"] * 8)  # 5 MB each
    with pool_of(2) as pool:
        done = await pool.run(payloads)

    assert 2 <= done <= 3
    assert [each.inputs is None for each in payloads] == [False] * done + [True] * (8 - done)


async def test_idle_child_keeps_nothing_of_its_last_payload(repository: Path) -> None:
    """It may be idle for long, and the budget of its process no longer counts the payload."""
    version = make_version(repository)
    with pool_of() as pool:
        await run_all(pool, pending(version, b"a"))
        (child,) = transform_children(os.getpid())
        before = resident_bytes_of(child)
        await run_all(pool, pending(version, bytes(64 * MIB)))
        await eventually(lambda: resident_bytes_of(child) < before + 32 * MIB)


async def test_child_inherits_no_socket(repository: Path) -> None:
    """It has the one to its parent."""
    payloads = pending(make_version(repository), b"sockets")
    with pool_of() as pool:
        await run_all(pool, payloads)

    assert lengths(payloads) == [1]


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.services.test_transform_process import make_version, pending, pool_of

async def main():
    payloads = pending(make_version(Path(sys.argv[1])), b"stays")
    with pool_of() as pool:
        await pool.run(payloads)

asyncio.run(main())
"""


async def test_child_dies_with_its_parent(repository: Path) -> None:
    """The child ends with a parent that is killed, even in the middle of a payload."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(repository))
    try:
        await eventually(lambda: bool(list((repository / "digits").glob("*.begun"))))
    finally:
        parent.kill()
        await parent.wait()
    (begun,) = (repository / "digits").glob("*.begun")

    await eventually(lambda: not is_running(int(begun.stem)))


def is_running(pid: int) -> bool:
    """Return False for a process that has ended, whether or not it was waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
