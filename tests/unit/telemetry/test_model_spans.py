"""The spans of changes of models: what changed, when, and why it failed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from headrace.models.registry import Models
from headrace.models.version import State
from headrace.protocol.control import WantedModel
from headrace.telemetry.model_spans import ModelSpans
from tests.support.models import add_version, digits, settings_for
from tests.support.spans import Spans, T, parent_of, role_of, tracing_settings, tracing_spans


class Process:
    """The models of a process whose executor is the test; time stands still unless it is moved."""

    def __init__(self, repository: Path, observer: ModelSpans, *, executes: bool = True) -> None:
        self.models = Models(settings_for(repository), executes=executes, observer=observer)

    def load(self) -> None:
        """Have the one version that is loading become ready."""
        [version] = self.models.catalog.versions(State.LOADING)
        version.load_s = 0.25
        self.models.lifecycle.mark_ready(version)


class Time:
    """Microseconds that a test moves."""

    def __init__(self) -> None:
        self.now_us = T

    def __call__(self) -> int:
        return self.now_us


@contextmanager
def observed(
    repository: Path, generation: int | None = None, *, executes: bool = True
) -> Iterator[tuple[Process, Time, Spans]]:
    """A process whose changes have spans, though no request is ever sampled."""
    time = Time()
    with tracing_spans(tracing_settings(ratio=0.0, traces_per_second=0.0)) as (tracing, spans):
        follows = None if generation is None else (lambda: generation)
        observer = ModelSpans(tracing.write, follows, time, time)
        yield Process(repository, observer, executes=executes), time, spans


def attributes(span: ReadableSpan) -> dict[str, object]:
    """The attributes without the common beginning of their names."""
    return {
        name.removeprefix("headrace."): value for name, value in (span.attributes or {}).items()
    }


async def test_loaded_version_has_span_from_discovery_until_ready(tmp_path: Path) -> None:
    """It is the root of a trace of its own, sampled whatever the rates of requests are."""
    add_version(tmp_path, "digits", 1, digits())
    with observed(tmp_path, generation=7) as (process, time, spans):
        process.models.open()
        time.now_us += 300_000
        process.load()

    span = spans.one("load")
    assert (span.name, parent_of(span)) == ("load digits", None)
    assert (span.start_time, span.end_time) == (T * 1000, (T + 300_000) * 1000)
    assert span.status.status_code is StatusCode.UNSET
    assert attributes(span) == {
        "change": "load",
        "model.name": "digits",
        "model.version": "1",
        "control.generation": 7,
        "load.outcome": "ready",
        "load_us": 250_000,
    }


async def test_replacement_has_spans_of_load_default_and_unload_in_order(tmp_path: Path) -> None:
    """The new version is ready before the default moves, and the old one goes last."""
    add_version(tmp_path, "digits", 1, digits())
    with observed(tmp_path) as (process, _, spans):
        process.models.open()
        process.load()
        add_version(tmp_path, "digits", 2, digits())
        await process.models.reload()
        process.load()

    assert [(role_of(each), attributes(each).get("model.version")) for each in spans.all] == [
        ("load", "1"),
        ("label", None),
        ("load", "2"),
        ("label", None),
        ("unload", "1"),
    ]
    first, second = map(attributes, spans.of("label"))
    assert first == {"change": "label", "model.name": "digits", "default": "1"}
    assert second == {**first, "default": "2", "default.before": "1"}


async def test_moved_label_has_span_with_both_states(tmp_path: Path) -> None:
    """Wanting the same again makes none."""
    for number in (1, 2):
        add_version(tmp_path, "digits", number, digits())
    wanted = WantedModel(versions=["1", "2"], default="1", labels={"a": "1", "b": "2"})
    with observed(tmp_path, executes=False) as (process, _, spans):
        process.models.want({"digits": wanted})
        process.models.open()
        for _ in range(2):
            moved = WantedModel(versions=["1", "2"], default="1", labels={"a": "2"})
            process.models.want({"digits": moved})

    last = attributes(spans.of("label")[-1])
    assert (last["labels.before"], last["labels"]) == ("a=1, b=2", "a=2")
    assert last["default"] == last["default.before"] == "1"
    assert sum(attributes(each).get("labels") == "a=2" for each in spans.of("label")) == 1


async def test_version_that_cannot_be_opened_has_one_span_with_reason(tmp_path: Path) -> None:
    """A later scan that finds the same fault makes no second one."""
    add_version(tmp_path, "digits", 1, digits())
    (tmp_path / "digits" / "1" / "model.onnx").write_bytes(b"garbage")
    with observed(tmp_path) as (process, _, spans):
        process.models.open()
        await process.models.reload()

    span = spans.one("load")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == process.models.catalog.faults("digits")["1"]
    assert attributes(span)["load.outcome"] == "failed"
    assert attributes(span)["error.type"] == "MODEL_NOT_READY"


async def test_version_that_fails_while_loading_has_span_with_reason(tmp_path: Path) -> None:
    """The time that was spent on it is the span's."""
    add_version(tmp_path, "digits", 1, digits())
    with observed(tmp_path) as (process, time, spans):
        process.models.open()
        time.now_us += 9
        [version] = process.models.catalog.versions()
        process.models.lifecycle.mark_failed(version, "the probe failed")

    span = spans.one("load")
    assert span.status.description == "the probe failed"
    assert attributes(span)["load.outcome"] == "failed"
    assert (span.start_time, span.end_time) == (T * 1000, (T + 9) * 1000)


async def test_ready_version_that_fails_has_span_of_unload_with_reason(tmp_path: Path) -> None:
    """It takes no requests from then on."""
    add_version(tmp_path, "digits", 1, digits())
    with observed(tmp_path) as (process, _, spans):
        process.models.open()
        process.load()
        [version] = process.models.catalog.versions()
        process.models.lifecycle.mark_failed(version, "its thread hangs")

    assert spans.one("unload").status.description == "its thread hangs"


async def test_version_removed_while_loading_has_withdrawn_span(tmp_path: Path) -> None:
    """It was never ready, so there is nothing to unload."""
    add_version(tmp_path, "digits", 1, digits())
    with observed(tmp_path) as (process, _, spans):
        process.models.open()
        shutil.rmtree(tmp_path / "digits")
        await process.models.reload()

    assert attributes(spans.one("load"))["load.outcome"] == "withdrawn"
    assert spans.of("unload") == []
