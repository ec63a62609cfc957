"""Tracing: which spans there are, when they begin and end, and how they are linked.

A sampled request has one `process` span for each stage, each the child of the one before, and
`send` spans for its answer and its dead letter. One that came through a gateway has a server span
around them, which `headrace.gateway.spans` makes. A batch has a span in a trace of its own, with
links to the spans of its requests in the executor, which have links back. `docs/tracing.md` has the
tables.

Ingest decides once whether a request is sampled, and the decision travels with it. A span is
created when its stage is done, in one step, from times that were taken anyway: nothing is kept open
across an `await`. A failed request is traced even if it was not sampled: the responder creates the
spans of the earlier stages from the times that the request carries. `Sampler` limits how many
there are of each.

This module does not depend on the SDK; `headrace.telemetry.trace_export` converts the spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from headrace.config import Settings, TelemetrySettings
from headrace.errors import Code
from headrace.log.port import TopicPartition
from headrace.primitives.token_bucket import TokenBucket
from headrace.protocol.messages import Batch, Failure, Request
from headrace.protocol.trace_context import (
    SAMPLED,
    Parent,
    SpanId,
    Trace,
    new_span_id,
    new_trace,
    parse_traceparent,
    until_sampled,
)
from headrace.telemetry import span_attributes as attributes_of
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.span_attributes import (
    AFTER_THE_FACT,
    Answering,
    Attributes,
    Input,
    ModelRun,
)
from headrace.topics import Stage, Topic

REPLY_TOPIC = "(reply topic)"
"""Replaces topics that callers choose in a span's name, since a name must have few values."""

Kind: TypeAlias = Literal["CONSUMER", "PRODUCER", "INTERNAL", "SERVER"]


class FinishedSpan(NamedTuple):
    """A complete span.

    Attributes:
        ids: its trace id and span id.
        parent_id: 0 for the root of a trace.
        remote: True if the parent is of another process.
        flags: of the trace.
        start_us, end_us: epoch microseconds.
        failure: the error in it.
        tracestate: the caller's, unchanged.
    """

    name: str
    kind: Kind
    ids: SpanId
    parent_id: int
    remote: bool
    flags: int
    start_us: int
    end_us: int
    attributes: Attributes
    links: Sequence[SpanId] = ()
    failure: Failure | None = None
    tracestate: bytes | None = None


class Tracing:
    """The spans of one process. The stages report events to it, a chunk at a time.

    Attributes:
        write: receives each span. A gateway has no events but whole spans of its own.
    """

    def __init__(
        self, write: Callable[[FinishedSpan], None], settings: Settings, metrics: Metrics
    ) -> None:
        self.write = write
        self._sampler = Sampler(settings.telemetry, metrics)
        # A system that the conventions do not list gets a name of its own.
        self._system = "headrace" if settings.kafka is None else "kafka"
        self._requests = settings.topic(Topic.REQUESTS)
        self._responses = settings.topic(Topic.RESPONSES)
        self._dead_letters = settings.topic(Topic.DEAD_LETTERS)
        self._inputs = {Stage.INGEST: Input(self._system, self._requests, "")}

    def reads(self, stage: Stage, topic: str, group: str) -> None:
        """Register that a stage of this process reads a topic, as a member of a group."""
        self._inputs[stage] = Input(self._system, topic, group)

    # --- events ------------------------------------------------------------------------------

    def ingested(self, requests: Sequence[Request], now_us: int) -> None:
        """Finish ingest for these requests, and decide which are sampled."""
        for request in requests:
            request.checked_us = now_us
        for request, parent in self._sampler.sample(requests, now_us):
            trace = request.trace = Trace(parent, _began_us(request))
            self._leave(
                Stage.INGEST, request, now_us, attributes_of.ingest(request, trace.since_us)
            )

    def formed(self, batch: Batch, now_us: int) -> None:
        """Record that a batch has closed."""
        for request in batch.requests:
            if request.trace is not None:
                self._leave(
                    Stage.BATCHER, request, now_us, attributes_of.batcher(request, now_us, batch)
                )

    def ended_waiting(self, requests: Sequence[Request], now_us: int) -> None:
        """Record requests that ended in the batcher, without a batch."""
        for request in requests:
            request.done_us = now_us
            if request.trace is not None:
                self._leave(
                    Stage.BATCHER, request, now_us, attributes_of.batcher(request, now_us, None)
                )

    def ran(self, run: ModelRun) -> None:
        """Record a model run. It gets a span if any of its requests is sampled."""
        members = [request.trace for request in run.requests if request.trace is not None]
        if not members:
            return
        begun = new_trace()
        ids = SpanId(begun.trace_id, new_span_id())
        attributes = attributes_of.run(run)
        for trace in members:
            trace.runs += (ids,)
            trace.run = {
                **attributes,
                attributes_of.WAIT_US: max(run.began_us - trace.since_us, 0),
            }
        model = {
            attributes_of.MODEL: run.batch.model,
            attributes_of.VERSION: run.batch.version,
        }
        self.write(
            FinishedSpan(
                name=f"run {run.batch.model}",
                kind="INTERNAL",
                ids=ids,
                parent_id=0,
                remote=False,
                flags=begun.flags,
                start_us=run.began_us,
                end_us=run.ended_us,
                attributes={**model, **attributes},
                links=[SpanId(trace.trace_id, trace.span_id) for trace in members],
                failure=run.failure,
            )
        )

    def executed(self, batch_id: str, requests: Sequence[Request], now_us: int) -> None:
        """Record requests that the executor is done with, however they ended."""
        for request in requests:
            request.done_us = now_us
            request.batch_id = batch_id
            trace = request.trace
            if trace is not None:
                attributes = attributes_of.executor(request, trace.run, trace.runs)
                self._leave(Stage.EXECUTOR, request, now_us, attributes, trace.runs)

    def keep(self, request: Request, now_us: int) -> None:
        """Start a trace for a failed request if it has none."""
        if request.trace is not None or not self._sampler.keep_failure(now_us):
            return
        header = request.envelope.traceparent
        parent = (None if header is None else parse_traceparent(header)) or new_trace()
        parent = parent._replace(flags=parent.flags | SAMPLED)
        request.trace = Trace(parent, _began_us(request))
        for stage, until_us in _stages_behind(request):
            attributes = self._looked_back(stage, request, until_us)
            self._leave(stage, request, until_us, {**attributes, AFTER_THE_FACT: True})

    def answered(
        self, requests: Sequence[Request], target: TopicPartition, times: Answering
    ) -> None:
        """Record that answers were acknowledged, and that their dead letters are kept."""
        answered_us = (times.encoded_us, times.acknowledged_us)
        dead_letters_us = (times.acknowledged_us, times.dead_letters_us)
        for request in requests:
            trace = request.trace
            if trace is None:
                continue
            self._send(request, trace.answer_id, target, answered_us)
            failure = request.failure
            if failure is not None and Code(failure.code).is_dead_letter:
                self._send(request, new_span_id(), self._dead_letters, dead_letters_us)
            attributes = attributes_of.responder(request, trace.since_us, times)
            self._leave(Stage.RESPONDER, request, times.dead_letters_us, attributes)

    # --- the spans ---------------------------------------------------------------------------

    def _leave(
        self,
        stage: Stage,
        request: Request,
        now_us: int,
        attributes: Attributes,
        links: Sequence[SpanId] = (),
    ) -> None:
        """Finish a stage for a sampled request: write its span, and begin the next stage."""
        trace = request.trace
        assert trace is not None
        failure = request.failure
        # The responder's span has the error of any stage: not all stages have spans.
        failed_here = failure is not None and stage in (failure.stage, Stage.RESPONDER)
        source = self._inputs.get(stage)
        if source is not None:
            attributes |= attributes_of.reading(stage, request, source)
        self.write(
            FinishedSpan(
                name=f"process {stage if source is None else source.topic}",
                kind="INTERNAL" if source is None else "CONSUMER",
                ids=SpanId(trace.trace_id, trace.span_id),
                parent_id=trace.parent_id,
                remote=trace.remote,
                flags=trace.flags,
                # The clock of the previous process may be ahead of ours.
                start_us=min(trace.since_us, now_us),
                end_us=now_us,
                attributes={
                    **attributes_of.common(stage, request, self._requests, now_us),
                    **attributes,
                },
                links=links,
                failure=failure if failed_here else None,
                tracestate=request.envelope.tracestate,
            )
        )
        trace.advance(now_us)

    def _send(
        self,
        request: Request,
        span_id: int,
        target: TopicPartition | str,
        times_us: tuple[int, int],
    ) -> None:
        """Write the span of a record that was acknowledged, as a child of the current stage's."""
        trace = request.trace
        assert trace is not None
        topic = target if isinstance(target, str) else target.topic
        attributes = attributes_of.sending(self._system, topic, request)
        if isinstance(target, TopicPartition):
            attributes[attributes_of.PARTITION] = str(target.partition)
        ours = topic in (self._responses, self._dead_letters)
        self.write(
            FinishedSpan(
                name=f"send {topic if ours else REPLY_TOPIC}",
                kind="PRODUCER",
                ids=SpanId(trace.trace_id, span_id),
                parent_id=trace.span_id,
                remote=False,
                flags=trace.flags,
                start_us=times_us[0],
                end_us=times_us[1],
                attributes=attributes,
                tracestate=request.envelope.tracestate,
            )
        )

    def _looked_back(self, stage: Stage, request: Request, until_us: int) -> Attributes:
        if stage is Stage.INGEST:
            return attributes_of.ingest(request, _began_us(request))
        if stage is Stage.BATCHER:
            return attributes_of.batcher(request, until_us, None)
        return attributes_of.executor(request, {}, ())


def _began_us(request: Request) -> int:
    """Return when the request began: at the record's timestamp, as for its deadline and latency."""
    if request.timestamp_ms < 0:
        return request.ingested_us
    return min(request.timestamp_ms * 1000, request.ingested_us)


def _stages_behind(request: Request) -> Iterator[tuple[Stage, int]]:
    """Yield the stages before the responder that have had a request, each with its end time."""
    yield Stage.INGEST, request.checked_us or request.ingested_us
    if request.batch.formed_us:
        yield Stage.BATCHER, request.batch.formed_us
        if request.done_us:
            yield Stage.EXECUTOR, request.done_us
    elif request.done_us:
        yield Stage.BATCHER, request.done_us


# --- sampling ------------------------------------------------------------------------------------


_SAMPLED_DIGITS = frozenset({b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f"})
"""The last digit of a `traceparent` of version 00 whose sampled flag is set."""


class Sampler:
    """Decides which requests of one process get a trace, within rates that limit the cost.

    Three kinds of requests can get a trace, and each has a token bucket of its own, so that none
    displaces another:

    - without a trace context: a share of them by chance (`sample_ratio`), at most
      `traces_per_second`;
    - with a trace context whose sampled flag is set: all, at most `caller_traces_per_second`. W3C
      Trace Context (section 3.2.2.5.1) lets a service record less than its callers ask for;
    - failed without a trace: all, at most `failure_traces_per_second`.

    `headrace_traces_rate_limited_total` counts the traces that a rate prevents.
    """

    def __init__(self, settings: TelemetrySettings, metrics: Metrics) -> None:
        self._ratio = settings.sample_ratio
        self._until_sampled = until_sampled(self._ratio)
        self._by_ratio = _bucket(settings.traces_per_second)
        self._by_caller = _bucket(settings.caller_traces_per_second)
        self._failed = _bucket(settings.failure_traces_per_second)
        limited = metrics.traces_rate_limited
        self._limited_by_ratio = limited.labels("ratio")
        self._limited_by_caller = limited.labels("caller")
        self._limited_failures = limited.labels("failure")

    def sample(self, requests: Sequence[Request], now_us: int) -> Iterator[tuple[Request, Parent]]:
        """Yield the requests that get a trace, each with the parent context of that trace.

        All requests without a trace pass this loop, so it calls nothing for most of them.
        """
        now_s = now_us / 1e6
        passing = self._until_sampled
        over_ratio = over_caller = 0
        for request in requests:
            header = request.envelope.traceparent
            # The limit does not rise within one chunk, so the other sampled ones need not be
            # parsed.
            if over_caller and header is not None and header[54:55] in _SAMPLED_DIGITS:
                over_caller += 1
                continue
            parent = None if header is None else parse_traceparent(header)
            if parent is None:
                if passing:
                    passing -= 1
                    continue
                passing = until_sampled(self._ratio)
                if not over_ratio and self._by_ratio.take(now_s):
                    yield request, new_trace()
                else:
                    over_ratio += 1
            elif parent.flags & SAMPLED:
                if self._by_caller.take(now_s):
                    yield request, parent
                else:
                    over_caller += 1
        self._until_sampled = passing
        if over_ratio:
            self._limited_by_ratio.inc(over_ratio)
        if over_caller:
            self._limited_by_caller.inc(over_caller)

    def sample_one(self, parent: Parent | None, now_us: int) -> bool:
        """Return whether a request with this trace context gets a trace; `sample` for many."""
        if parent is not None:
            if not parent.flags & SAMPLED:
                return False
            bucket, limited = self._by_caller, self._limited_by_caller
        elif self._until_sampled:
            self._until_sampled -= 1
            return False
        else:
            self._until_sampled = until_sampled(self._ratio)
            bucket, limited = self._by_ratio, self._limited_by_ratio
        if bucket.take(now_us / 1e6):
            return True
        limited.inc()
        return False

    def keep_failure(self, now_us: int) -> bool:
        """Return whether a failed request without a trace gets one now."""
        if self._failed.take(now_us / 1e6):
            return True
        self._limited_failures.inc()
        return False


def _bucket(per_second: float) -> TokenBucket:
    """Return a bucket of one second's worth, and of at least one token unless the rate is 0."""
    return TokenBucket(max(1.0, per_second) if per_second else 0.0, per_second)
