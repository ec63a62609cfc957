"""A broker's own disk is full: nothing is acknowledged, nothing is lost, and work goes on later."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tools.local_kafka import LocalKafka
from tests.support.conditions import eventually
from tests.support.deployments import ONE_NODE, deployments, unready

DISK_BYTES = 192 * 1024 * 1024

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, which only root can have."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system of its own size")
    directory = tmp_path / "disk"
    directory.mkdir()
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is free."""
    file = disk / "somebody-elses"
    with file.open("wb", buffering=0) as taken:
        try:
            while True:
                taken.write(bytes(1024 * 1024))
        except OSError:
            pass
    return file


async def test_full_broker_disk_loses_no_request(
    kafka_installed: None, disk: Path, unique_name: str
) -> None:
    """It ends, as Kafka does then; with room again, and started, it has all it acknowledged."""
    async with (
        LocalKafka(disk / "kafka", start_timeout_s=120.0) as cluster,
        deployments(cluster.bootstrap_servers, unique_name, ONE_NODE) as deployed,
    ):
        for each in deployed:
            await each.traffic.flows(100)
        taken = fill(disk)
        await eventually(lambda: not cluster.node().is_running, deadline_s=90, recheck_s=0.2)
        for each in deployed:
            await unready(each.process, 30)
        taken.unlink()
        await cluster.start_node()
        for each in deployed:
            await each.traffic.flows(100)
            await eventually(each.process.is_ready, deadline_s=30, recheck_s=0.2)
            await each.traffic.all_answered()
    for each in deployed:
        each.require_nothing_lost()
