"""Batch safety, measured when a model is loaded, before any requests share a run.

There are three questions, in this order. *Is dimension 0 the batch?* Two rows must give two rows.
*Leakage*: two rows keep their places in a batch of four while the other two are replaced by
ordinary ones, zeros, values 10,000 times as large, half-empty ones and NaN; the answers of the two
rows must stay the same to the bit, unless repeating the very same batch changes them as well.
*Rounding*: the answers to a row alone and in a batch may differ, since other kernels run, but only
within the tolerance of the precision that the model computes in.

Leakage is a fault of the model (a scale over the whole batch, statistics of the batch, attention
across rows); rounding is a property of the arithmetic. Comparing single with batched runs shows
both but cannot distinguish them, hence two measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from headrace.errors import HeadraceError, describe_error
from headrace.models.backends.port import Arrays, RowsMismatch
from headrace.models.backends.warmup import (
    Inputs,
    NoMadeUpInputsError,
    make_distinct_rows,
    neutral_value,
)
from headrace.models.config import ModelConfig
from headrace.models.profiling.batch_safety import (
    Array,
    Batching,
    Verdict,
    choose_tolerance,
    is_identical,
    output_scale,
    relative_difference,
)
from headrace.models.signature import Signature
from headrace.models.user_code import first_line, is_of_user_code
from headrace.tuning import TUNING, ModelTuning


class _VerdictReachedError(HeadraceError):
    """Ends the probe early with a verdict."""

    def __init__(self, batching: Batching, reason: str, *, has_no_batch: bool = False) -> None:
        super().__init__(reason)
        self.verdict = Verdict(batching, reason, has_no_batch=has_no_batch)


class _RunFailedError(HeadraceError):
    """The model raised an exception."""


def probe(
    run: Callable[[Arrays], Arrays],
    signature: Signature,
    config: ModelConfig,
    directory: Path,
    tuning: ModelTuning = TUNING.models,
    *,
    clock_s: Callable[[], float] = time.monotonic,
) -> Verdict:
    """Test whether a loaded model's rows may share runs. Blocks for about a dozen runs.

    Args:
        run: the backend's, which checks the outputs against the signature.
        signature: signature of the version.
        config: configuration of the model; with a `max_batch_size` of 1 only the first question is
            tested.
        directory: directory of the version, for its recorded inputs.
        tuning: number of rows, time limit and tolerances.
        clock_s: monotonic.

    Raises:
        ConfigurationError: a recorded input does not fit the signature.
    """
    if not signature.batched:
        return Verdict(Batching.NOT_BATCHABLE, signature.unbatched_reason)
    probing = _Probe(run, signature, config, tuning, clock_s)
    try:
        probing.find_rows(directory)
        probing.check_row_count()
        if config.max_batch_size > 1:
            probing.check_leakage()
            probing.check_rounding()
            probing.check_distinct_outputs()
    except _VerdictReachedError as decided:
        verdict = decided.verdict
    except NoMadeUpInputsError as error:
        verdict = Verdict(Batching.UNDECIDED, str(error))
    else:
        verdict = Verdict(Batching.BATCHABLE)
    return verdict._replace(
        rounding=probing.rounding, tolerance=probing.tolerance, seen_with=probing.seen_with
    )


class _Probe:
    """Runs of one probe and their results."""

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        signature: Signature,
        config: ModelConfig,
        tuning: ModelTuning,
        clock_s: Callable[[], float],
    ) -> None:
        self._run_model = run
        self._signature = signature
        self._config = config
        self._names = [spec.name for spec in signature.outputs]
        self._tuning = tuning
        self._clock_s = clock_s
        self._end_s = clock_s() + tuning.probe_budget_s
        self._staying = (0, tuning.probe_rows - 1)
        self._rows: Inputs = {}
        self._spare: Inputs = {}
        self._alone: list[dict[str, Array]] = []
        self._batched: dict[str, Array] = {}
        self._scales: dict[str, float] = {}
        self.tolerance = choose_tolerance(config, signature, tuning)
        self.rounding: float | None = None
        self.seen_with = ""

    def _run(self, inputs: Inputs) -> dict[str, Array]:
        if self._clock_s() >= self._end_s:
            budget_s = self._tuning.probe_budget_s
            raise _VerdictReachedError(
                Batching.UNDECIDED, f"{budget_s:.0f} s were not enough to try the model out"
            )
        try:
            outputs = self._run_model(inputs)
        except RowsMismatch as error:
            raise _VerdictReachedError(
                Batching.NOT_BATCHABLE,
                f"dimension 0 is not the batch: {error}",
                has_no_batch=True,
            ) from error
        except BaseException as error:  # a model may raise anything, SystemExit included
            if not is_of_user_code(error):
                raise
            raise _RunFailedError(describe_error(error)) from error
        # A backend may reuse the memory of a run's outputs for the next run.
        return {name: np.array(outputs[name]) for name in self._names}

    def find_rows(self, directory: Path) -> None:
        """Find rows that the model accepts, and run each of them alone."""
        fault = ""
        rows_per_batch = self._tuning.probe_rows
        candidates = make_distinct_rows(
            self._signature,
            self._config,
            directory,
            rows_per_batch + len(self._staying),
            self._tuning,
        )
        for self.seen_with, rows in candidates:
            self._rows = {name: array[:rows_per_batch] for name, array in rows.items()}
            self._spare = {name: array[rows_per_batch:] for name, array in rows.items()}
            try:
                self._alone = [
                    self._run({name: array[place : place + 1] for name, array in rows.items()})
                    for place in range(rows_per_batch)
                ]
            except _RunFailedError as error:
                fault = str(error)
            else:
                break
        else:
            reason = f"the model fails with {self.seen_with}: {first_line(fault)}"
            raise _VerdictReachedError(Batching.UNDECIDED, reason)
        for name in self._names:
            self._scales[name] = max(output_scale(outputs[name]) for outputs in self._alone)

    def check_row_count(self) -> None:
        """Check that two rows in give two rows out."""
        self._run_first(2)

    def _run_first(self, count: int) -> dict[str, Array]:
        """Run the first rows together; the model is not batchable if it fails."""
        try:
            return self._run({name: array[:count] for name, array in self._rows.items()})
        except _RunFailedError as error:
            raise _VerdictReachedError(
                Batching.NOT_BATCHABLE,
                f"a run of {count} rows failed with {self.seen_with}: {first_line(str(error))}",
            ) from error

    def check_leakage(self) -> None:
        """Check for leakage: two rows stay in place while the others are replaced."""
        count = self._tuning.probe_rows
        self._batched = self._run_first(count)
        noise = self._difference_of_repeats(self._batched, self._run_first(count))
        if noise > self.tolerance:
            raise _VerdictReachedError(
                Batching.NOT_BATCHABLE,
                f"two runs of the same batch differ by {noise:.1e} of the output's scale, so that "
                "the influence of rows on each other cannot be measured",
            )
        for kind, replacements in self._replacement_rows():
            batch = {name: array.copy() for name, array in self._rows.items()}
            for name, array in batch.items():
                array[1:-1] = replacements[name]
            try:
                outputs = self._run(batch)
            except _RunFailedError:  # the model does not accept this kind
                continue
            self._check_leak(kind, outputs, allowed=self.tolerance if noise else 0.0)

    def _check_leak(self, kind: str, outputs: dict[str, Array], *, allowed: float) -> None:
        for name in self._names:
            for place in self._staying:
                before, after = self._batched[name], outputs[name]
                before, after = before[place : place + 1], after[place : place + 1]
                if is_identical(before, after):
                    continue
                difference = relative_difference(before, after, self._scales[name])
                if difference > allowed or not allowed:
                    how = f"changes {_describe_change(difference, before, after)}"
                    raise _VerdictReachedError(
                        Batching.NOT_BATCHABLE,
                        f"rows leak: {name} of a row {how} when the other rows of its batch "
                        f"are {kind}",
                    )

    def _replacement_rows(self) -> Iterator[tuple[str, Inputs]]:
        """Yield each kind of replacement rows, with its description."""
        specs = self._signature.inputs
        still = {spec.name: neutral_value(spec, self._config) for spec in specs}
        floats = {name for name, array in self._rows.items() if array.dtype.kind not in "iubO"}
        yield "other ones", self._spare
        yield (
            "zeros",
            {name: np.full_like(self._spare[name], still[name]) for name in still},
        )
        factor = self._tuning.probe_magnification
        yield f"{factor:,.0f} times as large", {name: self._magnify(name) for name in self._rows}
        yield (
            "half empty",
            {name: _empty_second_half(self._spare[name], still[name]) for name in still},
        )
        if floats:
            yield (
                "not a number",
                {
                    name: np.full_like(array, np.nan) if name in floats else array
                    for name, array in self._spare.items()
                },
            )

    def _magnify(self, name: str) -> Array:
        array, limits = self._spare[name], self._config.range.get(name)
        if array.dtype == object:
            return np.full_like(array, b"z" * self._tuning.probe_text_bytes)
        if array.dtype.kind in "iub":
            return array if limits is None else np.full_like(array, limits[1])
        with np.errstate(over="ignore"):  # fp16 ends at 65,504
            large = array.astype(np.float64) * self._tuning.probe_magnification
            return large.clip(*(limits or (None, None))).astype(array.dtype)

    def check_rounding(self) -> None:
        """Compare the outputs of each row alone with those of the same row in the batch."""
        difference = {
            name: max(
                relative_difference(
                    alone[name], self._batched[name][place : place + 1], self._scales[name]
                )
                for place, alone in enumerate(self._alone)
            )
            for name in self._names
        }
        worst = max(difference, key=difference.__getitem__)
        self.rounding = difference[worst]
        if self.rounding > self.tolerance:
            raise _VerdictReachedError(
                Batching.NOT_BATCHABLE,
                f"rounding: {worst} of a row alone and in a batch differ by {self.rounding:.1e} of "
                f"the output's scale; batch_tolerance is {self.tolerance:.0e}",
            )

    def check_distinct_outputs(self) -> None:
        """Refuse to decide if different rows give the same outputs, which proves nothing."""
        first = self._alone[0]
        if all(
            is_identical(first[name], outputs[name])
            for outputs in self._alone[1:]
            for name in self._names
        ):
            raise _VerdictReachedError(Batching.UNDECIDED, "rows that differ give the same outputs")

    def _difference_of_repeats(self, one: dict[str, Array], other: dict[str, Array]) -> float:
        """Return the distance of two runs of the same batch; the smallest float if only bits
        differ.
        """
        least = 0.0
        for name in self._names:
            if not is_identical(one[name], other[name]):
                least = max(
                    least, relative_difference(one[name], other[name], self._scales[name]), 5e-324
                )
        return least


def _empty_second_half(array: Array, empty: object) -> Array:
    """Empty the second half of each row, as in a shorter sequence."""
    cut = array.copy()
    if cut.ndim > 1:
        cut[:, (cut.shape[1] + 1) // 2 :] = empty
    return cut


def _describe_change(difference: float, one: Array, other: Array) -> str:
    if one.shape != other.shape:
        return f"its shape, {list(one.shape)} to {list(other.shape)},"
    return f"by {difference:.1e} of the output's scale"
