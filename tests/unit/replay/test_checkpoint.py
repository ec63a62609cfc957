"""The file that says how far a run has come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.log.port import TopicInfo, TopicPartition
from headrace.tools.replay import checkpoint as resume
from headrace.tools.replay.checkpoint import (
    Checkpoint,
    CheckpointFault,
    read_checkpoint,
    write_checkpoint,
)
from headrace.tools.replay.recording import Selection, Span, Window
from tests.support.logs import write_to

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
OPTIONS = {"source": "t", "limit": None, "from_offsets": {"None": 3}}
CHECKPOINT = Checkpoint("run", OPTIONS, (Span(P0, 3, 10), Span(P1, 0, 5)), {0: 7, 1: 0}, 4)


def test_checkpoint_survives_round_trip(tmp_path: Path) -> None:
    """Every field comes back."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, CHECKPOINT)
    assert read_checkpoint(path, OPTIONS) == replace(CHECKPOINT, spans=list(CHECKPOINT.spans))


def test_missing_checkpoint_file_starts_new_run(tmp_path: Path) -> None:
    """A run that finds none begins."""
    assert read_checkpoint(tmp_path / "checkpoint", OPTIONS) is None


def test_checkpoint_of_run_with_other_options_is_refused(tmp_path: Path) -> None:
    """The error names the option, its former value and its value now."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, CHECKPOINT)
    with pytest.raises(ConfigurationError, match=r"another run: limit: expected None, got 5"):
        read_checkpoint(path, OPTIONS | {"limit": 5})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 2}'])
def test_foreign_file_as_checkpoint_is_refused(tmp_path: Path, content: str) -> None:
    """A file that is not a checkpoint is not taken for the beginning of a run."""
    path = tmp_path / "checkpoint"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="expected a checkpoint"):
        read_checkpoint(path, OPTIONS)


def test_failed_checkpoint_write_keeps_last_one(tmp_path: Path) -> None:
    """It is put in place whole, or not at all."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, CHECKPOINT)
    (tmp_path / "checkpoint.new").mkdir()
    with pytest.raises(CheckpointFault, match="checkpoint: Is a directory"):
        write_checkpoint(path, replace(CHECKPOINT, records=5))
    assert read_checkpoint(path, OPTIONS) == replace(CHECKPOINT, spans=list(CHECKPOINT.spans))


def test_resumed_selection_leaves_out_done_offsets() -> None:
    """Offsets that are done, and those that came after the run began, are left out."""
    advanced = CHECKPOINT.advanced({P0: 8})
    rest = advanced.rest_of(Selection(Window(from_offsets={None: 2}), limit=6))
    assert rest.limit == 2
    assert rest.window.span(P0, 0, 99) == Span(P0, 8, 10)
    assert rest.window.span(P1, 0, 99) == Span(P1, 2, 5)
    assert rest.window.span(TopicPartition("t", 2), 0, 99) == Span(TopicPartition("t", 2), 0, 0)


async def test_checkpoint_floor_waits_for_all_sent_records(tmp_path: Path) -> None:
    """End offsets become the floor when nothing below them is unknown to the checkpoint."""
    log = MemoryLog()
    await log.create_topics([TopicInfo("t", 1, {})], replication_factor=1)
    await write_to(log, P0, b"before the run")
    path = tmp_path / "checkpoint"
    begun = Checkpoint("run", {}, (Span(P0, 0, 10),), {})
    floors = []
    async with resume.keeping(log, path, begun, ("t", 1), is_new=True, write_every_s=0.0) as keeper:
        floors.append(keeper.checkpoint.floor)
        for turn in (1, 2):
            assert keeper.hand_over() == turn
            await write_to(log, P0, b"copy")
        for turn in (1, 2):
            await keeper.acknowledged(turn, 1, {P0: turn})
            floors.append(keeper.checkpoint.floor)
    written = read_checkpoint(path, {})

    assert floors == [{0: 1}, {0: 1}, {0: 3}]
    assert written is not None
    assert (written.records, written.spans[0].begin, written.floor) == (2, 2, {0: 3})
