"""Which processes are certainly gone, as their successors see it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.crash_isolation.markers import CrashMarkers, Owner, is_gone, process_name
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from tests.support.conditions import eventually
from tests.support.logs import RecordingListener

ONE = TopicPartition("requests", 0)
SAYS_ITS_NAME = """
from headrace.crash_isolation.markers import process_name
print(process_name(), flush=True)
input()
"""


def started() -> tuple[subprocess.Popen[str], str]:
    """Another process, and its name."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS_ITS_NAME], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_ended_process_is_gone(how: str) -> None:
    """However it ends, and not before; a remainder that nobody has waited for does not count."""
    process, name = started()
    with process:
        while_it_lived = is_gone(name)
        if how == "exits":
            process.communicate("\n")
        else:
            process.kill()
            process.wait()

    assert not while_it_lived
    assert is_gone(name)


def test_this_process_is_not_gone() -> None:
    """A process without a name, or with a name of an unknown form, is not gone either."""
    assert not any(map(is_gone, [process_name(), "", "gpu-1/8d2c6f1e/4026531836/71/9273"]))


@pytest.mark.parametrize("part", [0, 1, 2], ids=["host", "boot", "network"])
def test_process_of_other_machine_or_boot_is_not_gone(part: int) -> None:
    """Another machine, another boot of it, or a container with a network of its own: a process
    there may live, though nobody here holds its name.
    """
    parts = process_name().split("/")
    parts[part] += "1"
    parts[3] = "0" * 16

    assert not is_gone("/".join(parts))


def test_process_names_are_unique() -> None:
    """Host name and process id, as in containers, need not be unique."""
    (first, one), (second, two) = started(), started()
    for process in (first, second):
        with process:
            process.communicate("\n")

    assert len({one, two, process_name()}) == 3
    assert one.split("/")[:3] == two.split("/")[:3] == process_name().split("/")[:3]


async def test_member_whose_process_is_gone_is_removed() -> None:
    """The group then lets its successor begin without waiting for a session."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("requests", 1, {})], replication_factor=1)
    process, name = started()
    with process:
        async with log.member("group", ["requests"], RecordingListener()) as member:
            await eventually(lambda: member.member_id)
            await CrashMarkers(log, "group").write(
                {ONE: CrashMarker(True)}, Owner(member.member_id, name)
            )
            await CrashMarkers(log, "group").remove_dead_members("requests")
            there = log.faults.groups.members("group")
            process.communicate("\n")

            await CrashMarkers(log, "group").remove_dead_members("requests")

            assert there == (member.member_id,)
            assert log.faults.groups.members("group") != there
