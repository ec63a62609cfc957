"""`headrace demo`: its exit code and what it prints."""

from __future__ import annotations

import sys

import pytest

from headrace.cli.demo import conclude
from headrace.cli.outcome import Unsuccessful
from headrace.tools.demo.tally import Tally
from tests.support.command_line import Call
from tests.unit.demo.examples import answer, count, question


def test_demo_without_faults_is_successful(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary is on stdout."""
    tally = Tally()
    count(tally, question(), answer())
    conclude(tally.result())
    assert "Every request was answered once" in capsys.readouterr().out


def test_demo_with_missing_answer_is_unsuccessful(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary names the fault."""
    tally = Tally()
    tally.send(question())
    with pytest.raises(Unsuccessful):
        conclude(tally.result())
    assert "requests without an answer: 1" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_demo_of_zero_or_endless_duration_is_refused(call: Call, seconds: str) -> None:
    """A duration below a second, or one that never ends, is wrong usage."""
    assert call("demo", "--seconds", seconds).exit_code == 2


def test_demo_without_onnx_runtime_says_how_to_install_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before anything is started."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    ended = call("demo", "--seconds", "1")
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("headrace: ONNX Runtime is not installed: pip install 'headrace[cpu]'")
