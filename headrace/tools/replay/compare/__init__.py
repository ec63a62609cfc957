"""Comparison of a candidate with the current model on the same recorded requests.

The current model answers every request twice, and the candidate once. The difference between the
current model's own answers is the noise floor; the candidate is judged against it.

- `arrays`: one output of two answers; `answers`: two answers to one request; pure
- `tally`: totals over all requests; `latency`: durations of the answers; pure
- `verdict`: thresholds and findings; pure
- `asking`: the sides: a pipeline, or recorded answers; `run`: the run over a recording
- `summary`: results as plain values; `report`, `plots`, `style`: as an HTML page
"""

from headrace.tools.replay.compare.asking import Asked, PipelineSubject, RecordedSubject, Subject
from headrace.tools.replay.compare.run import Comparison, compare
from headrace.tools.replay.compare.verdict import Finding, Thresholds, judge

__all__ = [
    "Asked",
    "Comparison",
    "Finding",
    "PipelineSubject",
    "RecordedSubject",
    "Subject",
    "Thresholds",
    "compare",
    "judge",
]
