"""How commands show how far they are, and what they say on Ctrl-C."""

from __future__ import annotations

import click
import pytest

from headrace.cli import Exit
from headrace.cli.progress import progress, watching
from headrace.log.port import TopicPartition
from tests.support.recordings import GivenRecording, recorded


def test_interrupted_command_prints_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """The line tells what was done; the exit code is that of a shell's SIGINT."""

    def work() -> None:
        with progress("the rest is left") as shown:
            shown.show(0.5, "3 of 6")
            raise KeyboardInterrupt

    with pytest.raises(click.exceptions.Exit) as ended:
        work()

    assert ended.value.exit_code == Exit.INTERRUPTED
    assert capsys.readouterr().err == "headrace: interrupted: 3 of 6; the rest is left\n"


def test_interrupted_recording_prints_number_of_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The number does not depend on the order of a partition's positions."""
    recording = GivenRecording([recorded(number) for number in range(4)])
    place = TopicPartition("recorded", 0)

    def work() -> None:
        with watching() as watch:
            advanced = watch(recording)
            advanced(1, 500_000, {place: 2})
            advanced(1, 500_000, {place: 1})
            raise KeyboardInterrupt

    with pytest.raises(click.exceptions.Exit):
        work()

    assert capsys.readouterr().err == "headrace: interrupted: 2 records, 1.0 MB\n"
