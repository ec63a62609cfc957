"""Spans of the changes of models in a process: versions that come and go, names that move.

Changes are rare and each one matters, so all of them have a span, each in a trace of its own.
`docs/tracing.md` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.clock import Clock, steady_clock_us, wall_clock_us
from headrace.errors import Code
from headrace.models.lifecycle import LoadOutcome, ModelObserver
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Failure
from headrace.protocol.trace_context import SpanId, new_span_id, new_trace
from headrace.telemetry import span_attributes as attributes_of
from headrace.telemetry.span_attributes import Attributes
from headrace.telemetry.tracing import FinishedSpan


class ModelSpans(ModelObserver):
    """Makes the spans.

    Args:
        write: receives each span, from any thread.
        generation: returns the last change on the control topic that the process has read; None if
            it follows none.
        clock: for the times of spans.
        steady: for durations.
    """

    def __init__(
        self,
        write: Callable[[FinishedSpan], None],
        generation: Callable[[], int] | None,
        clock: Clock = wall_clock_us,
        steady: Clock = steady_clock_us,
    ) -> None:
        self._write = write
        self._generation = generation
        self._clock = clock
        self._steady = steady
        self._began_us: dict[ModelVersion, int] = {}

    def load_began(self, version: ModelVersion) -> None:
        """Note when a version began to load; its span is made when it is done."""
        self._began_us[version] = self._steady()

    def load_ended(self, version: ModelVersion, outcome: LoadOutcome, reason: str) -> None:
        """Make the span of a load; `reason` is empty unless the version failed."""
        duration_us = self._steady() - self._began_us.pop(version, self._steady())
        attributes = attributes_of.load(version.version, outcome, version.load_s)
        self._make("load", version.name, attributes, reason, duration_us)

    def could_not_open(self, model: str, number: str, fault: str) -> None:
        """Make the span of a load that ended before it began; no number means the whole model."""
        self._make("load", model, attributes_of.load(number, "failed", None), fault)

    def unloaded(self, version: ModelVersion, reason: str) -> None:
        """Make the span of a version that was let go, or that failed for this reason."""
        self._make("unload", version.name, {attributes_of.VERSION: version.version}, reason)

    def names_moved(self, model: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Make the span of a change of numbers by label; under "" is the default."""
        self._make("label", model, attributes_of.label(before, after))

    def _make(
        self, change: str, model: str, own: Attributes, reason: str = "", duration_us: int = 0
    ) -> None:
        attributes: Attributes = {
            attributes_of.CHANGE: change,
            attributes_of.MODEL: model,
            **own,
        }
        if self._generation is not None:
            attributes[attributes_of.GENERATION] = self._generation()
        begun = new_trace()
        end_us = self._clock()
        self._write(
            FinishedSpan(
                name=f"{change} {model}",
                kind="INTERNAL",
                ids=SpanId(begun.trace_id, new_span_id()),
                parent_id=0,
                remote=False,
                flags=begun.flags,
                start_us=end_us - duration_us,
                end_us=end_us,
                attributes=attributes,
                # Requests for such a version get this code. They alone have a stage.
                failure=Failure(Code.MODEL_NOT_READY, reason, "") if reason else None,
            )
        )
