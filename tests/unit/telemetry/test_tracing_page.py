"""`docs/tracing.md` against the spans: every name, every attribute, and no other."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from types import SimpleNamespace
from typing import cast

import pytest
from opentelemetry.semconv._incubating.attributes import messaging_attributes

from headrace.errors import Code
from headrace.models.version import ModelVersion
from headrace.protocol.messages import Failure
from headrace.telemetry.model_spans import ModelSpans
from headrace.telemetry.span_attributes import SCHEMA_URL
from headrace.telemetry.tracing import Tracing
from headrace.topics import Stage
from tests.support.spans import (
    Spans,
    T,
    answer,
    form,
    make_traced,
    pass_through,
    role_of,
    run,
    split,
    traceparent,
    tracing_settings,
    tracing_spans,
)
from tests.support.tree import ROOT

PAGE = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
EXPIRED = Failure(Code.DEADLINE_EXCEEDED, "late", Stage.BATCHER)
INVALID = Failure(Code.INVALID_TENSOR, "wrong", Stage.INGEST)
BROKEN = Failure(Code.MODEL_FAILED, "broken", Stage.EXECUTOR)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def change_models(tracing: Tracing) -> None:
    """Load, move names, fail and unload, as with a control topic."""
    spans = ModelSpans(tracing.write, lambda: 7)
    version = cast("ModelVersion", SimpleNamespace(name="digits", version="2", load_s=0.5))
    spans.load_ended(version, "ready", "")
    spans.names_moved("digits", {"": "1", "canary": "1"}, {"": "2", "canary": "2"})
    spans.could_not_open("digits", "3", "broken")
    spans.unloaded(version, "")
    spans.unloaded(version, "broken")


@pytest.fixture(scope="module")
def spans() -> list[Spans]:
    """Return spans of requests that succeed, fail at each stage, or are traced after the fact."""
    deadline_ms = T // 1000 + 100
    with tracing_spans() as (tracing, apart):
        split(tracing)
        pass_through(tracing, make_traced(traceparent(), deadline_ms=deadline_ms))
        refused, expired = make_traced(traceparent()), make_traced(traceparent())
        refused.fail(INVALID)
        tracing.ingested([refused, expired], T + 1000)
        expired.fail(EXPIRED)
        tracing.ended_waiting([expired], T + 2000)
        failed = make_traced(traceparent())
        form(tracing, [failed])
        run(tracing, [failed], BROKEN)
        answer(tracing, [refused, expired, failed])
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, after):
        late = make_traced(None)
        form(tracing, [late])
        run(tracing, [late], BROKEN)
        answer(tracing, [late])
    with tracing_spans() as (tracing, changes):
        change_models(tracing)
    return [apart, after, changes]


def test_tracing_page_lists_exactly_span_attributes(spans: list[Spans]) -> None:
    """The attributes seen on each kind of span are those of the table."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for run_ in spans:
        for span in run_.all:
            seen[role_of(span)] |= set(span.attributes or {})
    described: defaultdict[str, set[str]] = defaultdict(set)
    for attribute, on, _ in rows("Attributes"):
        for role in on.split(", "):
            described[role].add(attribute.strip("`"))

    assert dict(seen) == dict(described)


def test_tracing_page_lists_every_span_name_and_kind(spans: list[Spans]) -> None:
    """Placeholders in braces stand for a topic or a model."""
    forms = {
        role.strip("`"): (
            [
                re.sub(r"\\\{\w+\\\}", r"[\\w.-]+", re.escape(name))
                for name in re.findall(r"`(.+?)`", names)
            ],
            kinds,
        )
        for role, names, kinds, _ in rows("Spans")
    }

    for run_ in spans:
        for span in run_.all:
            names, kinds = forms[role_of(span)]
            assert any(re.fullmatch(name, span.name) for name in names), span.name
            assert span.kind.name in kinds


def test_messaging_attributes_follow_current_conventions() -> None:
    """Each is in the conventions' own list, and not among the deprecated ones."""
    source = inspect.getsource(messaging_attributes)
    entries = re.findall(r'^MESSAGING_\w+: Final = "(.+)"\n"""\n(.+)', source, flags=re.MULTILINE)
    current = {name for name, text in entries if not text.startswith("Deprecated")}
    ours = {cells[0].strip("`") for cells in rows("Attributes")}

    assert {name for name in ours if name.startswith("messaging.")} - current == set()


def test_spans_name_version_of_conventions(spans: list[Spans]) -> None:
    """The page names it as well."""
    assert {
        span.instrumentation_scope.schema_url
        for run_ in spans
        for span in run_.all
        if span.instrumentation_scope is not None
    } == {SCHEMA_URL}
    assert SCHEMA_URL in PAGE
