"""Progress of a command, on stderr: a bar on a terminal, otherwise an occasional line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import click

from headrace.cli.outcome import Exit
from headrace.cli.output import say
from headrace.log.port import TopicPartition
from headrace.tools.replay.jobs import Advanced, Watch
from headrace.tools.replay.recording import Recording

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
_STEPS = 1000


class Progress:
    """Shows the progress of a command, and keeps the text for an interruption.

    Attributes:
        text: the last text shown.
        draw: shows the completed share, 0 to 1, and a text.
    """

    def __init__(self) -> None:
        self.text = "nothing was done"
        self.draw: Callable[[float, str], None] = lambda part, text: None

    def show(self, part: float, text: str) -> None:
        """Show the completed share, and a text."""
        self.text = text
        self.draw(min(max(part, 0.0), 1.0), text)


@contextmanager
def progress(afterwards: str = "") -> Iterator[Progress]:
    """Show a command's progress during the context.

    On Ctrl-C the command ends with exit code 130, and prints what was done and `afterwards`.
    """
    shown = Progress()
    try:
        with _drawing() as shown.draw:
            yield shown
    except KeyboardInterrupt:
        done = f"{shown.text}; {afterwards}" if afterwards else shown.text
        say(f"headrace: interrupted: {done}", err=True)
        raise click.exceptions.Exit(Exit.INTERRUPTED) from None


@contextmanager
def watching(afterwards: str = "") -> Iterator[Watch]:
    """Show the progress through a recording; see `progress`."""
    with progress(afterwards) as shown:
        yield partial(_advanced, shown)


def _advanced(shown: Progress, recording: Recording) -> Advanced:
    """Sum up the progress; the completed share is measured in offsets, including filtered ones."""
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
        shown.show(done / offsets if offsets else 1.0, text)

    return advanced


@contextmanager
def _drawing() -> Iterator[Callable[[float, str], None]]:
    if not sys.stderr.isatty():
        yield _limited(
            LINE_EVERY_S, lambda part, text: say(f"headrace: {part:.0%}, {text}", err=True)
        )
        return
    with click.progressbar(
        length=_STEPS,
        item_show_func=lambda text: text,
        show_eta=False,
        update_min_steps=0,
        file=sys.stderr,
    ) as bar:
        yield _limited(
            BAR_EVERY_S, lambda part, text: bar.update(max(round(part * _STEPS) - bar.pos, 0), text)
        )


def _limited(every_s: float, draw: Callable[[float, str], None]) -> Callable[[float, str], None]:
    """Draw at most this often, and first after this period."""
    next_s = time.monotonic() + every_s

    def draw_sometimes(part: float, text: str) -> None:
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + every_s
            draw(part, text)

    return draw_sometimes
