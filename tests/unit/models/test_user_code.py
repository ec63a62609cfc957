"""Loading of the Python files of a model."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.models.user_code import Interrupted, Interruptible, load_module


def test_file_changed_within_second_is_loaded_as_it_is(tmp_path: Path) -> None:
    """Bytecode of the same size and second is not taken for that of the changed file."""
    path = tmp_path / "model.py"
    found = []
    for factor in (2, 3):
        path.write_text(f"factor = {factor}", encoding="utf-8")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        found.append(load_module(path).factor)
    assert found == [2, 3]


def test_loading_leaves_no_bytecode_in_repository(tmp_path: Path) -> None:
    """A repository may be read-only, and a manifest vouches for each file in it."""
    path = tmp_path / "model.py"
    path.write_text("factor = 2", encoding="utf-8")
    load_module(path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.py"]


def wait_deafly(until: threading.Event) -> None:
    """Wait in code that catches everything."""
    while not until.is_set():
        try:  # noqa: SIM105 - as a user may write it
            time.sleep(0.001)
        except BaseException:  # noqa: BLE001
            pass


def wait(until: threading.Event) -> None:
    """Wait in code that an interruption ends."""
    while not until.is_set():
        time.sleep(0.001)


@pytest.mark.parametrize("code_of_user", [wait, wait_deafly])
def test_interrupted_code_ends_with_interruption_and_thread_goes_on(
    code_of_user: Callable[[threading.Event], None],
) -> None:
    """The interruption ends the code, or the code catches it."""
    code = Interruptible()
    has_begun, may_end = threading.Event(), threading.Event()
    found: list[str] = []

    def work() -> None:
        has_begun.set()
        code_of_user(may_end)

    def serve() -> None:
        try:
            code.run(work)
        except Interrupted:
            found.append("interrupted")
        found.append("went on")

    thread = threading.Thread(target=serve, name="user code", daemon=True)
    thread.start()
    has_begun.wait()
    code.interrupt(thread)
    may_end.set()
    thread.join()

    assert found == ["interrupted", "went on"]


def test_code_that_has_ended_is_not_interrupted() -> None:
    """Otherwise the interruption would reach what the thread does next."""
    code = Interruptible()
    code.run(lambda: None)
    code.interrupt(threading.current_thread())
    for _ in range(1000):  # in which an interruption would arrive
        pass

    assert not code.is_interrupted


def test_code_that_is_interrupted_before_it_begins_never_begins() -> None:
    """Otherwise the interruption would reach what the thread does until then."""
    code = Interruptible()
    begun: list[bool] = []
    code.interrupt(threading.current_thread())
    for _ in range(1000):  # in which an interruption would arrive
        pass
    with pytest.raises(Interrupted):
        code.run(lambda: begun.append(True))

    assert begun == []
