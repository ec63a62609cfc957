"""Display of `headrace top`: tables of text, both for rich and for plain lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.cli.top_figures import Figures, ProcessFigures
from headrace.printable import printable

NONE = "–"
MAX_ERRORS = 5
TITLED = 3
"""Lines of a table besides its rows: the title, the headings and a blank one."""
_UNITS = ("_per_s", "_bytes", "_s")


class Table(NamedTuple):
    """A table; `numeric` are the right-aligned columns."""

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()


def number(value: float) -> str:
    """Format a number with about three digits, with separators."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    size = abs(seconds)
    for limit, unit, factor in ((0.001, "µs", 1e6), (1, "ms", 1e3), (120, "s", 1)):
        if 0 < size < limit:
            return f"{number(seconds * factor)} {unit}"
    if size < 120:
        return number(seconds)
    return f"{number(seconds / 60)} min" if size < 7200 else f"{number(seconds / 3600)} h"


def size(value: float) -> str:
    """Format bytes in binary units."""
    exponent = min(int(math.log(value, 1024)), 4) if value >= 1 else 0
    return f"{number(value / 1024**exponent)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def shown(name: str, value: float | None) -> str:
    """Format a figure by the unit at the end of its name."""
    if value is None:
        return NONE
    if name.endswith("_per_s"):
        return f"{number(value)}/s"
    if name.endswith("_bytes"):
        return size(value)
    return duration(value) if name.endswith("_s") else number(value)


def label(name: str) -> str:
    """Return a figure's name for display, without its unit."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    return name.removesuffix(unit).replace("_", " ")


def tables(processes: Sequence[ProcessFigures]) -> list[Table]:
    """Return everything as printable text, without empty tables."""
    parts = (_processes(processes), *_stages(processes), _models(processes))
    return [
        table._replace(rows=[tuple(map(printable, row)) for row in table.rows])
        for table in (*parts, _sources(processes), _errors(processes))
        if table.rows
    ]


def fit(shown_tables: Sequence[Table], height: int) -> list[Table]:
    """Shorten tables to `height` lines, as far as one line for each table allows.

    First titles move into the headings. Then the longest tables lose their last rows, and state how
    many; the first table, that of the processes themselves, is the last to lose any.
    """
    if sum(len(table.rows) + TITLED for table in shown_tables) <= height:
        return list(shown_tables)
    kept = [len(table.rows) for table in shown_tables]
    while sum(kept) + len(kept) > height and max(kept) > 1:
        later = range(1 if max(kept[1:], default=0) > 1 else 0, len(kept))
        kept[max(later, key=lambda place: kept[place])] -= 1
    return [
        table._replace(
            title="", heads=(table.title, *table.heads[1:]), rows=_clipped(table.rows, rows)
        )
        for table, rows in zip(shown_tables, kept, strict=True)
    ]


def _clipped(rows: list[tuple[str, ...]], kept: int) -> list[tuple[str, ...]]:
    if kept == len(rows):
        return rows
    more = len(rows) - kept + 1
    return [*rows[: kept - 1], (f"… {more} more", *[""] * (len(rows[0]) - 1))]


def _processes(processes: Sequence[ProcessFigures]) -> Table:
    rows = [
        (each.url, each.fault, "", "", "", "")
        if each.fault
        else (
            each.url,
            each.condition,
            each.version,
            ", ".join(each.stages),
            *(shown(name, each.figures[name]) for name in ("uptime_s", "event_loop_lag_s")),
        )
        for each in processes
    ]
    heads = ("process", "state", "version", "stages", "up for", "loop late by")
    return Table("headrace top", heads, rows, frozenset({4, 5}))


def _stages(processes: Sequence[ProcessFigures]) -> list[Table]:
    """Return one table for each stage, with a row for each process that has it."""
    found: dict[str, list[tuple[str, Figures]]] = {}
    closed: dict[str, str] = {}
    for each in processes:
        for stage, figures in each.stages.items():
            found.setdefault(stage, []).append((each.url, figures))
        closed[each.url] = ", ".join(f"{why} {part:.0%}" for why, part in each.closed.items())
    made = []
    for stage, entries in found.items():
        names = list(entries[0][1])
        rows = [(url, *(shown(name, each[name]) for name in names)) for url, each in entries]
        heads = ("process", *map(label, names))
        if stage == "batcher":
            heads = (*heads, "closed")
            rows = [(*row, closed[row[0]]) for row in rows]
        made.append(Table(stage, heads, rows, frozenset(range(1, len(names) + 1))))
    return made


def _models(processes: Sequence[ProcessFigures]) -> Table:
    names = ("answers_per_s", "rows_per_s", "rows_of_a_run", "run_s", "largest_batch")
    rows = [
        (
            each.url,
            f"{model.name}/{model.version}",
            model.state,
            *(shown(name, model.figures[name]) for name in names),
            "; ".join(model.remarks),
        )
        for each in processes
        for model in each.models
    ]
    heads = ("process", "model", "state", *map(label, names), "remarks")
    return Table("models", heads, rows, frozenset(range(3, 8)))


def _sources(processes: Sequence[ProcessFigures]) -> Table:
    names = ("read_per_s", "in_flight", "backlog", "throughput_per_s", "time_to_drain_s")
    rows = [
        (
            each.url,
            source.topic,
            *(shown(name, source.figures[name]) for name in names),
            " of ".join(
                shown(name, source.figures[name]) for name in ("in_flight_bytes", "limit_bytes")
            ),
            shown("commit_age_s", source.figures["commit_age_s"]),
            "; ".join(source.remarks),
        )
        for each in processes
        for source in each.sources
    ]
    heads = ("process", "topic", *map(label, names), "budget", "commit age", "remarks")
    return Table("reading", heads, rows, frozenset(range(2, 9)))


def _errors(processes: Sequence[ProcessFigures]) -> Table:
    newest = sorted(
        ((each.url, error) for each in processes for error in each.last_errors),
        key=lambda entry: str(entry[1].get("time", "")),
        reverse=True,
    )
    told = ("time", "level", "event", "reason", "trace_id")
    rows = [
        (url, *(str(error.get(name) or "") for name in told))
        for url, error in ((url, _with_reason(error)) for url, error in newest[:MAX_ERRORS])
    ]
    return Table("last errors", ("process", "time", "level", "event", "reason", "trace"), rows)


def _with_reason(error: dict[str, Any]) -> dict[str, Any]:
    """Return a request's line, which has no message, with its code and position instead."""
    place = "/".join(str(error[name]) for name in ("partition", "offset") if name in error)
    return error | {"reason": error.get("reason") or f"{error.get('code', '')} {place}".strip()}


def lines(shown_tables: Sequence[Table]) -> list[str]:
    """Return the tables as plain lines of text."""
    made: list[str] = []
    for table in shown_tables:
        grid = [table.heads, *table.rows]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        made += ["", table.title] if made else [table.title]
        for row in grid:
            cells = (
                cell.rjust(width) if column in table.numeric else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            made.append(f"  {'  '.join(cells)}".rstrip())
    return made
