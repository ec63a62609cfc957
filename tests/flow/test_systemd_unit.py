"""The unit for systemd: what it starts, and how long it lets a process drain."""

from __future__ import annotations

import shlex
from configparser import ConfigParser, SectionProxy
from pathlib import Path

from headrace.config import Settings
from headrace.topics import STAGES
from tests.support.processes import Process
from tests.support.tree import ROOT

UNIT = ROOT / "deploy" / "systemd" / "headrace@.service"


def service() -> SectionProxy:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


async def test_command_of_unit_serves_until_sigterm(tmp_path: Path) -> None:
    """Started with its options, a process becomes ready, drains and ends with 0."""
    config = tmp_path / "headrace.toml"
    models = ROOT / "headrace" / "tools" / "demo" / "models"
    config.write_text(f'[models]\nrepository = "{models}"\n')
    command = service()["ExecStart"].replace("/etc/headrace/headrace.toml", str(config))
    program, run, *options, stages = shlex.split(command)
    assert (Path(program).name, run, stages) == ("headrace", "run", "$STAGES")

    async with Process(",".join(STAGES), {}, options) as process:
        assert await process.terminate() == 0


def test_unit_lets_process_drain() -> None:
    """SIGKILL comes ten seconds after the drain's own limit at the earliest, and SIGTERM once to
    each: processes of `--replicas` get it from the first one.
    """
    assert service()["KillMode"] == "mixed"
    assert float(service()["TimeoutStopSec"]) >= Settings().limits.drain_timeout_s + 10
