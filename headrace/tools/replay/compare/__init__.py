"""Is the candidate the same model? The same recorded requests, answered by both.

The current model answers every request twice, and the candidate once. How far the current model
differs from itself is the noise floor; the candidate is judged against it.

- `arrays`: one output of two answers; `answers`: two answers to one request; pure
- `tally`: what all requests together show; `latency`: how long the answers took; pure
- `verdict`: what is allowed, and what exceeds it; pure
- `asking`: a pipeline, or recorded answers, that is asked; `run`: the run over a recording
- `summary`: all of it as plain values; `report`, `plots`, `style`: as an HTML page
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
