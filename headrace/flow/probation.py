"""Lets records in: all of them, or, after an unclean end, the suspects part by part.

While there are suspects, nothing is let in but the part that is running. The order of steps is what
makes a mark mean something: nothing is in flight → the mark is written and acknowledged → the part
is let in → all of it is answered → the next mark. What has run, and whose answer no broker takes,
is as good as answered here (`aside.py`). When no suspects are left, all partitions are
marked as open, and reading goes on as ever; from then on this costs nothing.

The source drives it: `assigned` and `revoked` come from the group, `look` and `let_in` from its
reading, which is the only one to seek. Partitions of which nothing may be let in are held: the
source pauses them, and what of them was polled is dropped and read again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from headrace.errors import Retriable
from headrace.flow.answered import Progress
from headrace.flow.aside import Aside
from headrace.flow.delivery import Trial
from headrace.flow.inflight import Assignment, Ledger
from headrace.flow.marks import Marks, Owner
from headrace.flow.predecessor import process_name
from headrace.flow.suspects import Part, Suspects
from headrace.log.port import Consumer, Record, TopicPartition
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

RETRY_S = 0.5
CLOSING_MARK_S = 1.0
"""For the mark at a revocation; without it, the next owner finds an unclean end."""


class _Opening:
    """How far one partition may be let in while a part runs."""

    __slots__ = ("assignment", "is_reached", "last", "stop")

    def __init__(self, assignment: Assignment | None, stop: int) -> None:
        self.assignment = assignment
        self.stop = stop
        self.last = -1
        self.is_reached = False

    def is_over(self, aside: Aside) -> bool:
        """All that was let in is answered, passed over, or aside."""
        if self.assignment is None or self.last < 0:
            return self.is_reached
        return self.is_reached and aside.has_all_below(self.assignment, self.last + 1)


class Probation:
    """The suspects of one source.

    Args:
        marks: where marks are kept.
        ledger: of what the source reads.
        max_attempts: see `Suspects`; 0: nothing is ever suspect, and nothing marked.

    Attributes:
        active: there are suspects; reading has to ask.
        held: partitions of which nothing may be let in now.
        aside: what has run and cannot be answered now.
    """

    def __init__(self, marks: Marks, ledger: Ledger, metrics: Metrics, max_attempts: int) -> None:
        self._marks = marks
        self._ledger = ledger
        self.aside = Aside(ledger)
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._member = ""
        self._suspects = Suspects(max_attempts)
        self._partitions: dict[TopicPartition, int] = {}
        self._openings: dict[TopicPartition, _Opening] = {}
        self._moved: set[TopicPartition] = set()
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._answered = asyncio.Event()
        self._trying: asyncio.Task[None] | None = None
        self.active = False
        self.held: frozenset[TopicPartition] = frozenset()

    @property
    def count(self) -> int:
        """How many offsets are suspect."""
        return self._suspects.count

    # --- the group ---------------------------------------------------------------------------

    async def joining(self, topic: str) -> None:
        """Before the group is joined: who is known to be dead does not hold it up."""
        if not self._max_attempts:
            return
        try:
            await self._marks.remove_dead_members(topic)
        except Retriable as error:
            log.warning(Event.MARK_DELAYED, reason=str(error))

    async def assigned(
        self, consumer: Consumer, progresses: Mapping[TopicPartition, Progress]
    ) -> None:
        """Partitions are ours. Returns when it is marked that they are read, or when there are
        suspects to be run first.

        Raises:
            LogUnavailable: the marks cannot be read or written now.
        """
        if not self._max_attempts:
            return
        self._member = consumer.member_id
        found = await self._marks.read(list(progresses))
        unclean = [each for each, (mark, _) in found.items() if mark.is_open or mark.stop]
        ends = await consumer.end_offsets(unclean) if unclean else {}
        for partition, progress in progresses.items():
            mark, _ = found[partition]
            self._suspects.take_up(partition, mark, progress, ends.get(partition, 0))
            self._partitions[partition] = progress.base
        if self._suspects.count:
            self.active = True
            self.held = frozenset(self._partitions)
            self._wanted.set()
            log.warning(Event.SUSPECTS_FOUND, partitions=_names(unclean), offsets=self.count)
        else:
            await self._write()
        self._tell()
        self._metrics.attempts.inc(sum(mark.alone is not None for mark, _ in found.values()))

    async def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Partitions are given up, or the process ends, in good order: marks what is left.

        Call it when what was in flight is answered or given up. What is still running then is no
        suspect: if it ends this process, that is an unclean end of the partitions that it holds,
        and if it ends the next owner's, that is one of this partition.
        """
        if not self._max_attempts:
            return
        self._interrupt()
        marks = {
            each: self._suspects.closing_mark(each)
            for each in partitions
            if each in self._partitions
        }
        for partition in partitions:
            self._suspects.give_up(partition)
            self._partitions.pop(partition, None)
            self._moved.discard(partition)
        self._tell()
        if self._suspects.count:
            self._wanted.set()
        else:
            self._finish()
        try:
            async with asyncio.timeout(CLOSING_MARK_S):
                await self._marks.write(marks, Owner(self._member, process_name()))
        except (Retriable, TimeoutError) as error:
            log.warning(Event.MARK_DELAYED, reason=str(error) or "no answer in time")

    # --- reading -----------------------------------------------------------------------------

    async def look(self, consumer: Consumer, *, waiting: bool) -> None:
        """Before each poll while `active`: seek to what is let in next, and see what is answered.

        Args:
            consumer: of the partitions.
            waiting: whether records wait that the first stage has not received yet.
        """
        try:
            for partition in [each for each in self._moved if each not in self.held]:
                consumer.seek(partition, self._partitions[partition])
                self._moved.discard(partition)
            for partition, opening in list(self._openings.items()):
                assignment = self._ledger.get(partition)
                if assignment is None:
                    return  # lost to another owner, of which the group will tell
                if opening.assignment is not assignment:
                    # The log has other records at these offsets now.
                    opening.assignment, opening.is_reached = None, True
                elif not opening.is_reached:
                    opening.is_reached = await consumer.position(partition) >= opening.stop
        except Retriable:
            return  # revoked this moment, or not known yet; the next look tells
        if not (self._moved or self.held or self._openings):
            self.active = False  # the last records that were dropped are read again from here on
        self.aside.look(asyncio.get_running_loop().time())
        if not waiting and self.aside.is_all:
            self._idle.set()
        if self._openings and all(each.is_over(self.aside) for each in self._openings.values()):
            self._answered.set()

    def let_in(
        self, partition: TopicPartition, records: Sequence[Record]
    ) -> tuple[Sequence[Record], Trial | None]:
        """What of these records, polled while `active`, goes to the first stage now.

        Nothing of a partition is let in after some of it was dropped, until reading has gone back
        there: what follows a gap counts as its end.
        """
        if partition in self._moved:
            return (), None
        opening = self._openings.get(partition)
        stop = opening.stop if opening is not None else records[0].offset
        mine = [record for record in records if record.offset < stop]
        if len(mine) < len(records):
            self._partitions[partition] = stop
            self._moved.add(partition)
            self.held |= {partition}
            if opening is not None:
                opening.is_reached = True
        if opening is None or not mine:
            return (), None
        opening.last = mine[-1].offset
        condemned = self._suspects.condemned(partition)
        for unit in sorted(condemned):
            if mine[0].offset <= unit[0] <= opening.last:
                self._metrics.condemned.inc()
                log.error(Event.REQUEST_CONDEMNED, record=f"{partition}/{unit[0]}", place=unit[1])
        run_place = self._run_place if self._suspects.is_alone else None
        return mine, Trial(condemned, run_place)

    async def _run_place(self, place: int) -> None:
        self._suspects.runs_alone(place)
        await self._write_until_kept()

    # --- the trial ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Try suspects whenever there are some; until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            async with asyncio.TaskGroup() as tasks:
                self._trying = tasks.create_task(self._try(), name="source-suspects")
            self._trying = None

    async def _try(self) -> None:
        while part := self._suspects.next():
            self._idle.clear()
            await self._idle.wait()  # runs have a deadline, and what does not end ends the process
            await self._write_until_kept()
            self._open(part)
            await self._answered.wait()
            self._close()
            self._suspects.survived()
            self._tell()
        await self._write_until_kept()
        self._finish()
        log.info(Event.SUSPECTS_CLEARED)

    def _open(self, part: Part) -> None:
        self._answered.clear()
        for span in part:  # the last one of a partition counts
            assignment = self._ledger.get(span.partition)
            self._openings[span.partition] = _Opening(assignment, span.stop)
        self.held = frozenset(self._partitions.keys() - self._openings.keys())

    def _close(self) -> None:
        self._openings.clear()
        self.held = frozenset(self._partitions)

    def _finish(self) -> None:
        """All may be let in; where records were dropped, reading goes back to them."""
        self._openings.clear()
        self.held = frozenset()
        self.active = bool(self._moved)

    def _interrupt(self) -> None:
        self._wanted.clear()
        self._close()
        if self._trying is not None:
            self._trying.cancel()

    def _tell(self) -> None:
        self._metrics.suspects.set(self._suspects.count)

    async def _write(self) -> None:
        marks = {each: self._suspects.mark(each) for each in self._partitions}
        await self._marks.write(marks, Owner(self._member, process_name()))

    async def _write_until_kept(self) -> None:
        while True:
            try:
                await self._write()
            except Retriable as error:
                log.warning(Event.MARK_DELAYED, reason=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return


def _names(partitions: Sequence[TopicPartition]) -> list[str]:
    return [str(each) for each in partitions]
