"""Exactly once: answers and the progress that they make, in one transaction.

Each source partition that is ours has a *seat*: a transactional producer whose id is the
partition's, and a turn, so that one transaction is under way at a time. Taking the seat fences the
former owner and ends what it left open; what is committed is read after that, never before.

A transaction that fails leaves a producer of no more use. Its successor takes the seat in the same
way, and the committed offsets then say whether the transaction was sealed: answers that were are
acknowledged, the others are sealed again. After a fence the group is asked first: one that still
counts us in has no other owner of the partition, and we go on; otherwise all that we hold is
revoked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from headrace.delivery.failures import any_void
from headrace.delivery.offset_store import Offsets, OffsetStore, Outgoing, by_offset, requests_of
from headrace.errors import HeadraceError, Rejected, Retriable, drop_tracebacks
from headrace.log.errors import Fenced, NoLeader, TransactionTimedOut
from headrace.log.port import Consumer, Log, NewRecord, TopicPartition, TransactionalProducer
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

RETRY_S = 0.5
CLOSE_TIMEOUT_S = 2.0

Records = Mapping[TopicPartition, Sequence[NewRecord]]
Compose = Callable[[Sequence[Outgoing]], Records]


class TransactionAborted(Retriable):
    """The transaction failed, a successor has taken the seat: what is not answered, seal again.

    Attributes:
        timed_out: the transaction took too long, as far as is known; a smaller one may not.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class PartitionLost(Retriable):
    """The partition is not ours any more: its answers are another's to give."""


class _Seat:
    """One source partition's, while it is ours.

    Attributes:
        spent: its producer must not be used again.
        closed: the partition is not ours any more.
    """

    def __init__(self, number: int, consumer: Consumer) -> None:
        self.number = number
        self.consumer = consumer
        self.producer: TransactionalProducer | None = None
        self.turn = asyncio.Lock()
        self.spent = True
        self.closed = False

    def require_ours(self) -> None:
        if self.closed:
            raise PartitionLost(f"source partition {self.number} is not ours any more")


class PartitionTransactions:
    """The seats of a process, and the transactions made from them.

    Args:
        group: whose offsets are committed.
        on_lost: called when the group does not count us in any more: all assignments are revoked.
    """

    def __init__(
        self,
        log_: Log,
        books: OffsetStore,
        group: str,
        metrics: Metrics,
        on_lost: Callable[[], None],
    ) -> None:
        self._log = log_
        self._books = books
        self._group = group
        self._metrics = metrics
        self._on_lost = on_lost
        self._seats: dict[int, _Seat] = {}

    async def fence(self, consumer: Consumer, numbers: Sequence[int]) -> None:
        """Take the seats of source partitions; their committed offsets can be read after it.

        Raises:
            Retriable: the log gave not all of them.
        """
        await self.release(numbers)
        seats = [_Seat(number, consumer) for number in numbers]
        self._seats |= {seat.number: seat for seat in seats}
        failures: list[Retriable] = []

        async def take(seat: _Seat) -> None:
            try:
                async with seat.turn:  # a step of the last assignment may come back now
                    await self._take(seat)
            except Retriable as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for seat in seats:
                tasks.create_task(take(seat), name=f"fence-{seat.number}")
        if failures:
            await self.release(numbers)
            raise failures[0]

    async def release(self, numbers: Iterable[int] | None = None) -> None:
        """Give seats up, or all; what a transaction leaves open their next owner ends."""
        leaving = list(self._seats if numbers is None else numbers)
        seats = [self._seats.pop(number) for number in leaving if number in self._seats]
        for seat in seats:
            seat.closed = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for seat in seats:
                    if seat.producer is not None:
                        tasks.create_task(seat.producer.close(), name=f"release-{seat.number}")
        except TimeoutError:
            log.warning(Event.SEAT_LEFT_OPEN, partitions=[seat.number for seat in seats])

    async def seal(self, number: int, outgoing: list[Outgoing], compose: Compose) -> None:
        """Answer requests of one source partition, and acknowledge them.

        Those that are revoked, or answered already, are acknowledged without an answer.

        Args:
            number: of the partition.
            outgoing: in any order. What is acknowledged is taken out of the list. What stays in it,
                without an error, has to wait: in the commit's metadata is no room for its offset.
            compose: makes the answers and dead letters.

        Raises:
            TransactionAborted: nothing was committed; what is left in the list is to be sent again.
            PartitionLost: what is left is revoked.
            NoLeader: a partition takes nothing for now; nothing has begun.
            RecordsRefused: with all records that their topics never take; nothing has begun.
            Rejected: the log refuses one of the records, or all of them together.
        """
        seat = self._seats.get(number)
        if seat is None:
            raise PartitionLost(f"source partition {number} is not ours")
        async with seat.turn:
            seat.require_ours()
            if seat.spent:  # somebody was cancelled
                await self._succeed(seat, None)
            outgoing[:] = self._fresh(number, outgoing)
            if not outgoing:  # and where we are about to be assigned the partition, no books
                return
            fitting, source = self._books.fit(number, outgoing)
            if source is None or not fitting:
                return
            offsets = self._books.offsets(number, source, fitting)
            # No variable here refers to the failure: its traceback would refer to this frame.
            await self._recover(
                seat, await self._transact(seat, compose(fitting), offsets), fitting
            )
            self._books.ack(requests_of(fitting))
            outgoing[:] = outgoing[len(fitting) :]

    async def seal_rest(self, number: int) -> None:
        """Commit what no answer carries: what was skipped, duplicates that were dropped.

        Raises:
            TransactionAborted, PartitionLost: see `seal`.
        """
        seat = self._seats.get(number)
        if seat is None:
            raise PartitionLost(f"source partition {number} is not ours")
        async with seat.turn:
            seat.require_ours()
            if seat.spent:
                await self._succeed(seat, None)
            offsets = self._books.unsealed(number)
            if offsets:
                await self._recover(seat, await self._transact(seat, {}, offsets), ())

    def _fresh(self, number: int, outgoing: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """By rising offset, without those that are revoked or answered, which are acknowledged."""
        progress = self._books.progress(number)
        ordered = by_offset(outgoing)
        is_above = progress is not None and ordered and ordered[0][0].offset >= progress.highest
        if is_above and not any_void([request for request, _ in ordered]):
            return ordered
        fresh: list[Outgoing] = []
        for each in ordered:
            request = each[0]
            if request.ack_handle.revoked or progress is None:
                self._metrics.revoked.inc()
                request.ack_handle.ack()
            elif request.offset in progress:
                self._metrics.duplicates.inc()
                self._books.ack([request])
            else:
                fresh.append(each)
        return fresh

    def _are_answered(self, number: int, outgoing: Sequence[Outgoing]) -> bool:
        progress = self._books.progress(number)
        return progress is not None and all(each[0].offset in progress for each in outgoing)

    async def _transact(
        self, seat: _Seat, records: Records, offsets: Offsets
    ) -> Retriable | Rejected | None:
        """Make one transaction.

        Returns:
            what ended it, without a traceback, so that the records are free before the recovery
            begins, which can take as long as an outage of the brokers.

        Raises:
            NoLeader, Rejected: nothing has begun.
            PartitionLost: the partition was given up meanwhile.
        """
        producer = seat.producer
        assert producer is not None
        try:
            with self._metrics.commit():
                await producer.seal(records, offsets)
        except BaseException as error:
            if isinstance(error, NoLeader | Rejected) and producer.is_usable:
                raise
            seat.spent = True
            if not isinstance(error, Exception):
                raise
            if seat.closed:
                raise PartitionLost(
                    f"source partition {seat.number} was given up meanwhile"
                ) from error
            if not isinstance(error, Rejected | Retriable):
                raise
            log.warning(Event.SEAL_FAILED, partition=seat.number, reason=str(error))
            drop_tracebacks(error)
            return error
        self._books.sealed(offsets)
        return None

    async def _recover(
        self, seat: _Seat, failure: Retriable | Rejected | None, outgoing: Sequence[Outgoing]
    ) -> None:
        """Replace a producer that has failed, and learn whether its answers were committed.

        Raises:
            TransactionAborted: they were not, or the transaction had none.
            Rejected: the log refuses one of the records.
        """
        if failure is None:
            return
        await self._succeed(seat, failure)
        try:
            if isinstance(failure, Rejected):
                raise failure
            # All of a transaction is visible, or nothing: here perhaps its end was not heard of.
            if not (outgoing and self._are_answered(seat.number, outgoing)):
                timed_out = isinstance(failure, TransactionTimedOut | Fenced)
                raise TransactionAborted(str(failure), timed_out=timed_out)
        finally:
            del failure

    async def _succeed(self, seat: _Seat, error: HeadraceError | None) -> None:
        """Put a successor in the place of a producer that is spent, and learn what it sealed."""
        fenced = isinstance(error, Fenced)
        while True:
            seat.require_ours()
            try:
                if fenced and not await seat.consumer.is_member():
                    seat.require_ours()  # a rebalance was quicker: others are ours by now
                    self._lose(seat)
                await self._take(seat)
                source = self._books.source(seat.number)
                committed = await seat.consumer.committed([source])
            except PartitionLost:
                raise
            except Retriable as unavailable:
                fenced = fenced or isinstance(unavailable, Fenced)
                seat.spent = True
                log.warning(Event.SEAL_DELAYED, partition=seat.number, reason=str(unavailable))
                await asyncio.sleep(RETRY_S)
            else:
                seat.require_ours()
                self._books.unite(seat.number, committed[source])
                return

    async def _take(self, seat: _Seat) -> None:
        former, seat.producer = seat.producer, None
        if former is not None:
            await former.close()
        transactional_id = f"{self._group}.{self._books.source(seat.number).topic}.{seat.number}"
        producer = self._log.transactional_producer(transactional_id, self._group)
        await producer.__aenter__()
        if seat.closed:
            await producer.close()
            seat.require_ours()
        seat.producer = producer
        seat.spent = False

    def _lose(self, seat: _Seat) -> None:
        """We are a zombie. The member finds out by its heartbeats, and joins the group again."""
        log.warning(Event.LOST, partitions=sorted(self._seats))
        for each in self._seats.values():
            each.closed = True
        self._on_lost()
        seat.require_ours()
