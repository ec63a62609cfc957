"""How far a command is, on stderr: a bar on a terminal, a line now and then otherwise."""

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
    """Shows how far a command is, and keeps the words for when it is interrupted.

    Attributes:
        text: the words that were shown last.
        draw: shows the part that is done, 0 to 1, and the words.
    """

    def __init__(self) -> None:
        self.text = "nothing was done"
        self.draw: Callable[[float, str], None] = lambda part, text: None

    def show(self, part: float, text: str) -> None:
        """Show the part that is done, and words."""
        self.text = text
        self.draw(min(max(part, 0.0), 1.0), text)


@contextmanager
def progress(afterwards: str = "") -> Iterator[Progress]:
    """Show a command's progress while the context lasts.

    On Ctrl-C the command ends with exit code 130, and says what was done and `afterwards`.
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
    """Add up what is done; the part that is done is measured in offsets, filtered ones too."""
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
    """Draw no more often than this, and for the first time after it."""
    next_s = time.monotonic() + every_s

    def draw_sometimes(part: float, text: str) -> None:
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + every_s
            draw(part, text)

    return draw_sometimes
