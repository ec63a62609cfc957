"""Memory that was freed goes back to the system, but not between two requests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from headrace.primitives.resident_memory import resident_bytes
from headrace.runtime.heap import TrimRule, find_trim
from headrace.tuning import TUNING

MIB = 1024 * 1024
TUNED = replace(
    TUNING.runtime,
    heap_check_interval_s=0.01,
    heap_growth_bytes=32 * MIB,
    heap_idle_bytes=MIB,
    heap_busy_interval_s=60.0,
)


def rule_at(resident: int) -> TrimRule:
    """A rule that has seen the process this large, at 0 s."""
    rule = TrimRule(TUNED)
    assert not rule.is_due(0.0, resident, 0)
    return rule


def test_heap_of_grown_idle_process_is_trimmed() -> None:
    """The heap is trimmed only once the process is idle, and only after a large growth."""
    rule = rule_at(100 * MIB)

    assert not rule.is_due(1.0, 120 * MIB, 0)
    assert not rule.is_due(1.0, 200 * MIB, 2 * MIB)
    assert rule.is_due(1.0, 200 * MIB, MIB)


def test_heap_of_busy_process_is_trimmed_once_per_minute() -> None:
    """One that is never idle would grow without a bound."""
    rule = rule_at(100 * MIB)

    assert rule.is_due(61.0, 200 * MIB, 50 * MIB)
    rule.trimmed(61.0, 110 * MIB)
    assert not rule.is_due(62.0, 200 * MIB, 50 * MIB)
    assert rule.is_due(121.0, 200 * MIB, 50 * MIB)


def test_heap_in_use_is_not_trimmed_again() -> None:
    """Growth counts from the size after the last trim."""
    rule = rule_at(100 * MIB)
    rule.trimmed(1.0, 300 * MIB)

    assert not rule.is_due(100.0, 310 * MIB, 0)


FRAGMENTING = """
import asyncio

from headrace.runtime.heap import trimming
from tests.support.conditions import eventually
from tests.unit.test_heap import MIB, TUNED


async def main():
    released = []
    async with trimming(lambda: 0, released.append, TUNED):
        await asyncio.sleep(0)  # the first look
        blocks = [bytes(64 * 1024 + place % 999) for place in range(3000)]
        kept = blocks[::50]
        del blocks
        await eventually(lambda: sum(released) > 100 * MIB)
        assert len(kept) == 60


asyncio.run(main())
"""


@pytest.mark.skipif(find_trim() is None or resident_bytes() is None, reason="needs glibc on Linux")
def test_trimming_returns_fragmented_heap() -> None:
    """Blocks that stay keep the allocator from giving back all that lies between them.

    In a process of its own, because a heap in which other tests have left room does not grow.
    """
    done = subprocess.run(
        [sys.executable, "-c", FRAGMENTING], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


REUSING = """
import resource

from headrace.runtime.heap import keep_freed_memory
from tests.unit.test_heap import MIB


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (MIB + place) for place in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


keep_freed_memory()
faults()
print(sum(faults() for _ in range(10)))
"""


def page_faults(**variables: str) -> int:
    """Page faults of a process that allocates 16 MiB ten times, after the first time."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", REUSING],
        capture_output=True,
        text=True,
        check=True,
        env=environment | variables,
    )
    return int(done.stdout)


@pytest.mark.skipif(find_trim() is None, reason="needs glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """Otherwise each of the 4,096 pages is faulted in each time."""
    assert page_faults() < 4096


@pytest.mark.skipif(find_trim() is None, reason="needs glibc")
def test_thresholds_of_environment_stay() -> None:
    """Whoever has set them knows why."""
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > 5 * 4096
