"""View of the running demo: a table that stays in place, or a line each second."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from headrace.tools.demo.tally import LiveStats

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


class View(Protocol):
    """Shows the state every `period_s` seconds."""

    @property
    def period_s(self) -> float: ...

    def show(self, glance: LiveStats) -> None: ...


class Lines:
    """Prints a line each second."""

    period_s = 1.0

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, glance: LiveStats) -> None:
        line = "  ".join(f"{name} {value}" for name, value in figures(glance))
        print(line, file=self._out, flush=True)


class Panel:
    """Redraws a table in place."""

    period_s = 0.25

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, glance: LiveStats) -> None:
        self._live.update(_table(glance), refresh=True)


@contextmanager
def open_view(out: TextIO | None = None) -> Iterator[View]:
    """Return the panel if `out` is a terminal and rich is installed; otherwise lines."""
    out = out or sys.stdout
    if not out.isatty() or importlib.util.find_spec("rich") is None:
        yield Lines(out)
        return
    from rich.console import Console
    from rich.live import Live

    # No thread of rich's own: the demo measures itself, and draws only on request.
    with Live(console=Console(file=out), auto_refresh=False) as live:
        yield Panel(live)


def figures(glance: LiveStats) -> list[tuple[str, str]]:
    """Return the displayed figures, by name."""
    return [
        ("time", f"{glance.elapsed_s:5.1f} s"),
        ("asked", f"{glance.asked:7,}"),
        ("answered", f"{glance.answered:7,}"),
        ("in flight", f"{glance.in_flight:4,}"),
        ("answers/s", f"{glance.answers_per_s:6,.0f}"),
        ("batch mean", f"{glance.batch_mean:4.1f}"),
        ("max", f"{glance.batch_max:3}"),
        ("queue", f"{glance.queue_ms:6.2f} ms"),
        ("p50", f"{glance.p50_ms:6.2f} ms"),
        ("p99", f"{glance.p99_ms:6.2f} ms"),
    ]


def _table(glance: LiveStats) -> Table:
    from rich.table import Table

    table = Table(title="headrace demo: the last second", title_justify="left")
    values = []
    for name, value in figures(glance):
        table.add_column(name, justify="right")
        values.append(value.strip())
    table.add_row(*values)
    return table
