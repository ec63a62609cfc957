"""`headrace bench`: what its options take."""

from __future__ import annotations

import pytest

from headrace.cli.outcome import Exit
from tests.support.command_line import Call


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("option", ["--rate", "--seconds", "--warm-up"])
def test_bench_number_that_is_not_finite_is_wrong_usage(
    call: Call, option: str, number: str
) -> None:
    """A rate that is none ended with a traceback, and a load of no time with no requests."""
    given = {"--rate": "5", "--seconds": "1"} | {option: number}
    found = call("bench", "digits", *(part for pair in given.items() for part in pair))

    assert found.exit_code == Exit.USAGE
    shown = " ".join(found.output.replace("│", " ").split())
    assert f"expected a finite number, got '{number}'" in shown
