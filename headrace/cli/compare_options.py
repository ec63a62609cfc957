"""Options of `headrace replay compare`: the models, and how far they may differ."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from headrace.cli.options import ANSWERS_FILE
from headrace.tools.replay.compare.run import DEFAULT_CONCURRENCY, DEFAULT_TOP_K
from headrace.tools.replay.compare.verdict import COMPARABLE_UNRECORDED, Thresholds

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_SHARE = click.FloatRange(min=0, max=1)
_POSITIVE = click.FloatRange(min=0)


class Compared(NamedTuple):
    """Values of the options, as given."""

    models: Path | None
    candidate: Path | None
    candidate_version: int | None
    current_version: int | None
    answers: str | None
    answers_file: Path | None
    without_current: bool
    margin: float
    max_difference: float | None
    max_mismatched: float | None
    min_top1: float | None
    max_code_changes: float | None
    max_latency_ratio: float
    min_recorded: float
    min_comparable: float | None
    top_k: int
    concurrency: int

    def check(self) -> None:
        """Raise `click.UsageError` if options conflict."""
        if (self.candidate is None) == (self.candidate_version is None):
            raise click.UsageError("give either --candidate or --candidate-version")
        if self.current_version is not None and self.candidate_version is None:
            raise click.UsageError("--current-version goes with --candidate-version")
        if self.without_current and self.answers is None and self.answers_file is None:
            raise click.UsageError("--without-current goes with --answers or --answers-file")

    @property
    def thresholds(self) -> Thresholds:
        """Return the user's limits."""
        return Thresholds(
            self.margin,
            self.max_difference,
            self.max_mismatched,
            self.min_top1,
            self.max_code_changes,
            self.max_latency_ratio,
            self.min_recorded,
            self.min_comparable,
        )


COMPARE_OPTIONS = (
    click.option(
        "--models",
        type=_DIRECTORY,
        metavar="DIR",
        help="The current models.  [default: models.repository]",
    ),
    click.option("--candidate", type=_DIRECTORY, metavar="DIR", help="The candidate's models."),
    click.option(
        "--candidate-version",
        type=click.IntRange(min=1),
        metavar="N",
        help="The candidate is this version of the current models.",
    ),
    click.option(
        "--current-version",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --candidate-version: the current one.  [default: the one that is served]",
    ),
    click.option(
        "--answers",
        metavar="TOPIC",
        help="The reference is answers that were recorded on this topic.",
    ),
    ANSWERS_FILE,
    click.option(
        "--without-current",
        is_flag=True,
        help="With recorded answers: do not run the current models.",
    ),
    click.option(
        "--margin", type=_POSITIVE, default=4.0, show_default=True, help="Times the noise."
    ),
    click.option("--max-difference", type=_POSITIVE, metavar="X", help="Of any float output."),
    click.option(
        "--max-mismatched", type=_SHARE, metavar="SHARE", help="Of labels, texts, integers."
    ),
    click.option("--min-top1", type=_SHARE, metavar="SHARE", help="Of rows with the same largest."),
    click.option("--max-code-changes", type=_SHARE, metavar="SHARE", help="Of answers' codes."),
    click.option(
        "--max-latency-ratio",
        type=_POSITIVE,
        default=1.5,
        show_default=True,
        help="Of the medians, candidate to current.",
    ),
    click.option(
        "--min-recorded",
        type=_SHARE,
        default=1.0,
        show_default=True,
        metavar="SHARE",
        help="Of requests, with a recorded answer.",
    ),
    click.option(
        "--min-comparable",
        type=_SHARE,
        metavar="SHARE",
        help="Of requests, with outputs on both sides.  [default: as many as were recorded with "
        f"outputs, or {COMPARABLE_UNRECORDED:g} without recorded answers]",
    ),
    click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True),
    click.option(
        "--concurrency",
        type=click.IntRange(min=1, max=1024),
        default=DEFAULT_CONCURRENCY,
        show_default=True,
        help="Requests under way at once.",
    ),
)
