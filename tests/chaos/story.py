"""The smallest story of a finding: what happened to its requests, in time order, in words.

Everything that does not concern the requests is left out: of the commits, all but the last that
did not cover a request and the first that did; of the faults, all that were over before the
requests were sent, or began after the last thing that happened to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.chaos.checker import Breach, Finding
from tests.chaos.history import NO_NUMBER, Answered, Committed, Fault, History, Identity, Sent


class _Line(NamedTuple):
    at_ms: int
    words: str


def tell(history: History, finding: Finding) -> str:
    """The finding in one line, and below it its story, times in seconds from the first event."""
    lines = sorted({line for each in finding.requests for line in _own(history, each)})
    lines = sorted([*lines, *_faults(history, finding, lines)])
    began_ms = lines[0].at_ms if lines else 0
    story = [f"  {(line.at_ms - began_ms) / 1000:8.3f} s  {line.words}" for line in lines]
    return "\n".join([f"{finding.breach}: {finding.sentence}", *story])


def _own(history: History, identity: Identity) -> Iterator[_Line]:
    """Return the events that name the request, or cover it."""
    for request in history.sent:
        if request.identity == identity:
            yield _Line(request.at_ms, _told_sent(request))
    for answer in history.answered:
        if answer.identity == identity:
            yield _Line(answer.at_ms, _told_answer(answer))
    for deleted in history.deleted:
        if deleted.partition == identity.partition and identity.offset < deleted.end:
            yield _Line(deleted.at_ms, f"the record of {identity} is deleted")
    for skipped in history.skipped:
        if skipped.partition == identity.partition and (
            skipped.first <= identity.offset < skipped.end
        ):
            yield _Line(skipped.at_ms, f"ingest says that {identity} was deleted unread")
    yield from _commits(history, identity)


def _commits(history: History, identity: Identity) -> Iterator[_Line]:
    last: Committed | None = None
    for commit in sorted(history.committed):
        if commit.partition != identity.partition:
            continue
        if commit.covers(identity.offset):
            if last is not None:
                yield _Line(last.at_ms, _told_commit(last, identity, "does not cover"))
            yield _Line(commit.at_ms, _told_commit(commit, identity, "covers"))
            return
        last = commit
    if last is not None:
        yield _Line(last.at_ms, _told_commit(last, identity, "does not cover"))


def _faults(history: History, finding: Finding, lines: list[_Line]) -> Iterator[_Line]:
    if not lines:
        return
    first_ms, last_ms = lines[0].at_ms, lines[-1].at_ms
    for fault in history.faults:
        if finding.breach is Breach.LOST and not _covered(history, finding):
            last_ms = max(last_ms, fault.ended_ms)
        if fault.began_ms <= last_ms and first_ms <= fault.ended_ms:
            yield from _told_fault(fault)


def _covered(history: History, finding: Finding) -> bool:
    return any(
        commit.partition == identity.partition and commit.covers(identity.offset)
        for identity in finding.requests
        for commit in history.committed
    )


def _told_sent(request: Sent) -> str:
    return f"request {request.identity} (number {request.number}) is written"


def _told_answer(answer: Answered) -> str:
    output = "" if answer.output == NO_NUMBER else f", output {answer.output}"
    where = f"{answer.topic}/{answer.partition}/{answer.offset}"
    return (
        f"answer {answer.status!r} to {answer.identity} stands at {where} "
        f"(correlation id {answer.number}{output})"
    )


def _told_commit(commit: Committed, identity: Identity, verb: str) -> str:
    above = sum(stop - start for start, stop in commit.answered)
    return (
        f"the commit of partition {commit.partition}, base {commit.base} and {above} above it, "
        f"{verb} {identity}"
    )


def _told_fault(fault: Fault) -> Iterator[_Line]:
    who = f" ({', '.join(fault.stages)})" if fault.stages else ""
    yield _Line(fault.began_ms, f"{fault.kind}{who}")
    if fault.ended_ms > fault.began_ms:
        yield _Line(fault.ended_ms, f"{fault.kind}{who}: over")
