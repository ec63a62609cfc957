"""Statistics of the models as Triton counts them, over the requests that one gateway has sent.

Source: Triton's statistics extension
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md).
A gateway knows of a run what each answer says: its rows and durations. A request with 2 of the 8
rows of a run counts as a quarter of an execution, so the executions add up to the number of runs if
all their requests have passed this gateway.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypedDict

from headrace.client import Response
from headrace.errors import Rejected
from headrace.protocol.messages import Parameter
from headrace.telemetry.http import ServedModels

_US_NS = 1000


class Duration(TypedDict):
    """How often something was done, and the time that it took in all."""

    count: int
    ns: int


class InferStatistics(TypedDict):
    """The parts of the time of all requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(TypedDict):
    """The runs of one size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(TypedDict):
    """The extension's `$model_stat`, whose fields are those of gRPC as well."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


@dataclass(slots=True)
class _RunsOfSize:
    """Runs of one size: how many, and their durations."""

    executions: float = 0.0
    input_us: float = 0.0
    infer_us: float = 0.0


@dataclass(slots=True)
class _Version:
    """Counts of one version of a model."""

    last_inference_ms: int = 0
    inferences: int = 0
    succeeded: int = 0
    succeeded_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    queue_us: int = 0
    input_us: int = 0
    infer_us: int = 0
    runs: dict[int, _RunsOfSize] = field(default_factory=dict)

    def add(self, answer: Response) -> None:
        """Count the rows and durations in an answer."""
        found = answer.parameters
        queue_us, input_us, infer_us, size = (
            _number(found.get(name))
            for name in ("queue_us", "batch_us", "compute_us", "batch_size")
        )
        rows = _rows(answer, size)
        share = rows / max(size, 1)
        self.inferences += rows
        self.queue_us += queue_us
        self.input_us += input_us
        self.infer_us += infer_us
        runs = self.runs.setdefault(size, _RunsOfSize())
        runs.executions += share
        runs.input_us += share * input_us
        runs.infer_us += share * infer_us

    def describe(self, name: str, version: str) -> ModelStatistics:
        """Return what was counted."""
        done = self.succeeded
        nothing = _duration(0, 0)
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": round(sum(runs.executions for runs in self.runs.values())),
            "inference_stats": {
                "success": _duration(done, self.succeeded_ns),
                "fail": _duration(self.failed, self.failed_ns),
                "queue": _duration(done, self.queue_us * _US_NS),
                "compute_input": _duration(done, self.input_us * _US_NS),
                "compute_infer": _duration(done, self.infer_us * _US_NS),
                "compute_output": _duration(done, 0),
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(runs.executions, runs.input_us * _US_NS),
                    "compute_infer": _duration(runs.executions, runs.infer_us * _US_NS),
                    "compute_output": _duration(runs.executions, 0),
                }
                for size, runs in sorted(self.runs.items())
            ],
        }


class Statistics:
    """Counts the requests that a gateway sends, by the version that answers.

    Args:
        models: those to show, with zeros before their first request. A request that fails counts
            for the version that it asked for, or would have got; for none if there is none.
    """

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._versions: dict[tuple[str, str], _Version] = {}

    async def counted(
        self, model: str, version: str | None, answer: Awaitable[Response]
    ) -> Response:
        """Await the answer to a request, count the request, and return the answer.

        Raises:
            Exception: that of the request, which counts as failed.
        """
        began_ns = time.monotonic_ns()
        try:
            found = await answer
        except BaseException:
            if (asked := self._asked_for(model, version)) is not None:
                asked.failed += 1
                asked.failed_ns += time.monotonic_ns() - began_ns
            raise
        counted = self._of(found.model_name, found.model_version)
        counted.succeeded += 1
        counted.succeeded_ns += time.monotonic_ns() - began_ns
        counted.add(found)
        return found

    def describe(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return the statistics of the ready versions of a model, of the one that a label names, or
        of all models.

        Raises:
            Rejected: `UNKNOWN_MODEL` or `MODEL_NOT_READY`: there is no such ready version.
        """
        if model:
            found = self._models.lookup(model, version or None)
            if model != found.name:  # it has a label
                model, version = found.name, found.version
        return [
            self._versions.get((each.name, each.version), _Version()).describe(
                each.name, each.version
            )
            for each in self._models.offered()
            if (not model or each.name == model) and (not version or each.version == version)
        ]

    def _of(self, model: str, version: str) -> _Version:
        counted = self._versions.setdefault((model, version), _Version())
        counted.last_inference_ms = time.time_ns() // 1_000_000
        return counted

    def _asked_for(self, model: str, version: str | None) -> _Version | None:
        try:
            found = self._models.lookup(model, version)
        except Rejected:
            return None
        return self._of(found.name, found.version)


def _duration(count: float, ns: float) -> Duration:
    return {"count": round(count), "ns": round(ns)}


def _number(value: Parameter | None) -> int:
    return value if type(value) is int else 0


def _rows(answer: Response, batch_size: int) -> int:
    """Return the rows of an answer; those of a model without a batch dimension have one row."""
    if batch_size <= 1:
        return 1
    first = next(iter(answer.outputs.values()), None)
    return min(first.shape[0], batch_size) if first is not None and first.ndim else 1
