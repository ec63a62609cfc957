"""Child processes that run modules of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headrace.primitives.child_process import lower_priority, start_child


@pytest.mark.skipif(sys.platform != "linux", reason="sessions share the processor on Linux only")
def test_child_with_niceness_yields_to_other_sessions(tmp_path: Path) -> None:
    """Its session is a group of the scheduler, whose niceness is a number of its own."""
    endless = tmp_path / "model.onnx"
    os.mkfifo(endless)
    with start_child("headrace.models.signature_child", str(endless), niceness=10) as child:
        own = os.getpriority(os.PRIO_PROCESS, child.pid)
        group = Path(f"/proc/{child.pid}/autogroup")
        of_group = group.read_text(encoding="ascii") if group.exists() else "nice 10"
        child.kill()

    assert own == 10
    assert of_group.split()[-1] == "10"


def test_session_gives_way_where_process_may_not(tmp_path: Path) -> None:
    """There is no such process, so that its own niceness cannot be set."""
    pid = 2**22 + 1  # above the largest id that Linux gives
    group = tmp_path / str(pid) / "autogroup"
    group.parent.mkdir()
    group.touch()

    lower_priority(pid, 10, proc=tmp_path)

    assert group.read_text(encoding="ascii") == "10"
