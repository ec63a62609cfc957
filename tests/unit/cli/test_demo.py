"""`headrace demo`: its exit code and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.cli import main
from headrace.demo import demo
from headrace.demo.demo import Outcome
from headrace.demo.tally import Tally
from tests.unit.demo.examples import answer, question


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """What the demo has counted, instead of a run."""
    tally = Tally()

    async def counted(seconds: float, say: Callable[[str], None], **options: Any) -> Outcome:
        say(f"{seconds:g} s, {options}")
        return Outcome(tally.result(), {})

    monkeypatch.setattr(demo, "run_demo", counted)
    return tally


def test_a_demo_that_went_well_exits_with_0(asked: Tally) -> None:
    """The summary is on stdout, words about the run on stderr."""
    asked.ask(question(1), 0.0)
    asked.answer(answer(1), 0.1)
    ended = CliRunner().invoke(main, ["demo", "--seconds", "3"])
    assert (ended.exit_code, ended.stderr) == (0, "headrace: 3 s, {'kafka': False}\n")
    assert "Every request was answered once" in ended.stdout


def test_a_demo_with_a_missing_answer_exits_with_1(asked: Tally) -> None:
    """What is wrong is in the summary."""
    asked.ask(question(1), 0.0)
    ended = CliRunner().invoke(main, ["demo", "--kafka"])
    assert (ended.exit_code, ended.stderr) == (1, "headrace: 10 s, {'kafka': True}\n")
    assert "requests without an answer: 1" in ended.stdout


def test_a_demo_of_no_time_is_refused() -> None:
    """Less than a second is a wrong call."""
    assert CliRunner().invoke(main, ["demo", "--seconds", "0"]).exit_code == 2
