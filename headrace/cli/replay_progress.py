"""How far a replay is, on stderr: a bar on a terminal with rich, lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import click

from headrace.log.port import TopicPartition
from headrace.replay.jobs import Advanced, Watch
from headrace.replay.recording import Recording

LINE_EVERY_S = 5.0


class _View(Protocol):
    """Shows the part that is done, 0 to 1, and words."""

    def show(self, part: float, text: str) -> None: ...


class _Lines:
    def __init__(self) -> None:
        self._next_s = time.monotonic() + LINE_EVERY_S

    def show(self, part: float, text: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s += LINE_EVERY_S
            click.echo(f"headrace: {part:.0%}, {text}", err=True)


@contextmanager
def progress() -> Iterator[Watch]:
    """A view of a run while the context lasts."""
    with _view() as view:

        def watch(recording: Recording) -> Advanced:
            return _advanced(view, recording)

        yield watch


def _advanced(view: _View, recording: Recording) -> Advanced:
    """Adds up what is sent; the part that is done is measured in offsets, filtered ones too."""
    begins = {span.partition: span.begin for span in recording.spans}
    offsets = sum(span.end - span.begin for span in recording.spans)
    reached: dict[TopicPartition, int] = {}
    total_records = total_bytes = 0

    def advanced(records: int, size: int, positions: Mapping[TopicPartition, int]) -> None:
        nonlocal total_records, total_bytes
        total_records += records
        total_bytes += size
        for partition, offset in positions.items():
            reached[partition] = max(offset, reached.get(partition, offset))
        done = sum(offset - begins[partition] for partition, offset in reached.items())
        text = f"{total_records} records, {total_bytes / 1e6:.1f} MB"
        view.show(done / offsets if offsets else 1.0, text)

    return advanced


@contextmanager
def _view() -> Iterator[_View]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ImportError:
        yield _Lines()
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        class Bar:
            def show(self, part: float, text: str) -> None:
                bar.update(task, completed=part, description=text)

        yield Bar()
