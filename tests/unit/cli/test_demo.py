"""`headrace demo`: its exit code and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.tools.demo import demo
from headrace.tools.demo.tally import Result, Tally
from tests.support.command_line import Call
from tests.unit.demo.examples import answer, count, question


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tally]:
    """Replace the run of the demo by these counts."""
    tally = Tally()

    async def counted(seconds: float, say: Callable[[str], None], **options: Any) -> Result:
        say(f"{seconds:g} s, {options}")
        return tally.result()

    monkeypatch.setattr(demo, "run_demo", counted)
    before = sys.getswitchinterval()
    yield tally
    sys.setswitchinterval(before)


def test_demo_without_faults_exits_with_0(call: Call, tally: Tally) -> None:
    """The summary is on stdout, words about the run on stderr."""
    count(tally, question(), answer())
    ended = call("demo", "--seconds", "3")
    assert (ended.exit_code, ended.stderr) == (0, "headrace: 3 s, {'kafka': False}\n")
    assert "Every request was answered once" in ended.stdout


def test_demo_with_missing_answer_exits_with_1(call: Call, tally: Tally) -> None:
    """The summary names the fault."""
    tally.send(question())
    ended = call("demo", "--kafka")
    assert (ended.exit_code, ended.stderr) == (1, "headrace: 10 s, {'kafka': True}\n")
    assert "requests without an answer: 1" in ended.stdout


def test_demo_of_zero_duration_is_refused(call: Call) -> None:
    """A duration below a second is wrong usage."""
    assert call("demo", "--seconds", "0").exit_code == 2


def test_demo_without_onnx_runtime_says_how_to_install_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before anything is started."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ended = call("demo", "--seconds", "1")
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("headrace: ONNX Runtime is not installed: pip install 'headrace[cpu]'")
