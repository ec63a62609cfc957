"""Exactly once: commit answers and the source offsets they acknowledge in one transaction.

Each assigned source partition has a *partition producer*: a transactional producer whose id is
derived from the partition, and a lock, so that one transaction runs at a time. Initialising it
fences the former owner and ends its open transaction; committed offsets are read after that,
never before.

Partitions *share* transactions: what several of them have to commit goes into one transaction, with
the producer of one of them. A former owner may then have written a partition's offsets with the
producer of another partition. So they carry the member's generation, and the group refuses them
once it is over; and reading committed offsets waits until no open transaction commits them.

A producer cannot be used after a failed transaction. A new one is initialised in the same way, and
the committed offsets then show whether the transaction was committed: if so, its requests are
acknowledged; if not, they are committed again. After a fence the group membership is checked
first: while this process is a member, the partition has no other owner, and work continues;
otherwise all its requests are revoked.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, overload

import structlog

from headrace.delivery.failures import any_revoked
from headrace.delivery.offset_store import (
    Offsets,
    OffsetStore,
    PendingAnswer,
    by_offset,
    requests_of,
)
from headrace.errors import HeadraceError, Rejected, Retriable, drop_tracebacks
from headrace.log.errors import Fenced, LogUnavailable, NoLeader, TransactionTimedOut
from headrace.log.port import (
    Consumer,
    Log,
    Membership,
    NewRecord,
    TopicPartition,
    TransactionalProducer,
)
from headrace.primitives.backoff import Backoff, Pauses
from headrace.protocol.messages import Request
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, DeliveryTuning

log = structlog.get_logger(__name__)

Records = Mapping[TopicPartition, Sequence[NewRecord]]
Compose = Callable[[Sequence[PendingAnswer]], Records]


class AnswersToEncode(Sequence[NewRecord]):
    """The answers of one target, each encoded whenever it is read.

    A transaction has thousands of answers. Encoded all together, and then packed into batches, they
    would have left the processor's caches in between; a producer reads some at a time instead.

    Args:
        requests: ended requests.
        encode: returns the answer of each request, in order.
        size_bytes: approximate size of their values together.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        encode: Callable[[Sequence[Request]], Sequence[NewRecord]],
        size_bytes: int,
    ) -> None:
        self._requests = requests
        self._encode = encode
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> NewRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NewRecord]: ...

    def __getitem__(self, index: int | slice) -> NewRecord | Sequence[NewRecord]:
        if isinstance(index, slice):
            return self._encode(self._requests[index])
        return self._encode([self._requests[index]])[0]

    def __iter__(self) -> Iterator[NewRecord]:
        return iter(self[:])


class TransactionAborted(Retriable):
    """The transaction was not committed and its producer was replaced: retry what is unanswered.

    Attributes:
        timed_out: the transaction probably took too long; a smaller one may succeed.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class PartitionLost(Retriable):
    """The partition is no longer assigned to this process: its new owner will answer it."""


class _PartitionProducer:
    """The producer of one assigned source partition.

    Args:
        number: number of the source partition.
        consumer: the member of the group to which it is assigned.
        membership: the membership to which it is assigned. Never a later one of the same member:
            that could be one in which the partition has another owner.

    Attributes:
        turn: held during a transaction, so that one runs at a time.
        is_spent: the producer must not be used again.
        is_same_assignment: says whether the partition still has the assignment, with or without a
            rebalance, for which its last transaction was made.
        closed: the partition is no longer assigned to this process.
        alone_until_s: until then, in monotonic seconds, it shares no transaction.
    """

    def __init__(self, number: int, consumer: Consumer, membership: Membership | None) -> None:
        self.number = number
        self.consumer = consumer
        self.membership = membership
        self.alone_until_s = float("-inf")
        self.producer: TransactionalProducer | None = None
        self.turn = asyncio.Lock()
        self.is_spent = True
        self.is_same_assignment: Callable[[], bool] = lambda: True
        self.closed = False

    def require_assigned(self) -> None:
        if self.closed:
            raise PartitionLost(
                f"source partition {self.number} is no longer assigned to this process"
            )

    def stay_alone(self, for_s: float) -> None:
        """Share no transaction from now on for at least so long."""
        self.alone_until_s = max(self.alone_until_s, time.monotonic() + for_s)


class _Part:
    """The records and offsets that one partition commits in its next transaction.

    Attributes:
        woken: set when it is its turn to commit what waits, or when it has ended.
        is_begun: it no longer waits: from here on its transaction may have been committed.
        ended: set when the shared transaction that it is part of no longer runs here.
        is_committed: the transaction has been committed.
        failure: why a shared transaction, which was begun, was not, or may not have been.
    """

    def __init__(self, owned: _PartitionProducer, records: Records, offsets: Offsets) -> None:
        self.owned = owned
        self.records = records
        self.offsets = offsets
        self.woken = asyncio.Event()
        self.is_begun = False
        self.ended = asyncio.Event()
        self.is_committed = False
        self.failure: Retriable | None = None

    def is_current(self) -> bool:
        """Return False once the partition was released, or assigned anew: then nothing of this may
        be written any more.
        """
        return not self.owned.closed and self.owned.is_same_assignment()

    def size_bytes(self) -> int:
        """Return the approximate size of the values to write."""
        return sum(
            records.size_bytes
            if isinstance(records, AnswersToEncode)
            else sum([len(record.value or b"") for record in records])
            for records in self.records.values()
        )

    async def commit(self) -> None:
        """Commit it in a transaction of its own."""
        self.is_begun = True
        await _commit(self.owned, self.records, self.offsets)
        self.is_committed = True


class _Outcome(NamedTuple):
    """The outcome of a partition's transaction, without its records.

    Attributes:
        is_committed: it has been committed.
        failure: why it was not, or may not have been; None if it was not begun, either, because
            the partition was released or assigned anew.
        is_shared: the transaction that failed was shared with other partitions.
    """

    is_committed: bool
    failure: Retriable | Rejected | None = None
    is_shared: bool = False


class _SharedTransactions:
    """Transactions that several partitions of a process share; one runs at a time.

    What becomes ready meanwhile waits for the next one, which uses the producer of the partition
    that has waited longest. A partition whose step is cancelled meanwhile, or whose transaction has
    failed, knows what was committed only after `wait_ended`, and after reading its offsets.
    """

    def __init__(self, metrics: Metrics, tuning: DeliveryTuning) -> None:
        self._metrics = metrics
        self._tuning = tuning
        self._waiting: list[_Part] = []
        self._leader: _Part | None = None  # its step commits, or is about to
        self._running: list[_Part] = []

    async def commit(self, part: _Part) -> None:
        """Commit a part together with those that wait, or alone; or not, if it is not current.

        Raises:
            see `TransactionalProducer.commit_transaction`. If a shared transaction fails, all its
            partitions get a `Retriable`, and commit alone next, so that the cause concerns only
            the partition that has it.
        """
        is_large = part.size_bytes() > self._tuning.max_shared_part_bytes
        if not is_large and time.monotonic() >= part.owned.alone_until_s:
            await self._commit_or_wait(part)
            if part.failure is not None:
                raise part.failure
        # Otherwise it goes alone: others would wait for what is large, or it has waited too long
        # itself, or a record of the shared transaction is refused, whichever partition's it is.
        if not part.is_committed and part.is_current():
            await part.commit()

    async def wait_ended(self, numbers: Sequence[int]) -> None:
        """Wait until no shared transaction runs that has offsets of these source partitions."""
        for part in [each for each in self._running if each.owned.number in numbers]:
            await part.ended.wait()  # as long as a transaction can take

    async def _commit_or_wait(self, part: _Part) -> None:
        """Wait for the turn, and commit what waits then; or let another partition commit it.

        The part has no outcome if it has waited too long, is no longer current, or if the
        transaction was not begun.
        """
        self._waiting.append(part)
        try:
            if self._leader is None:
                self._leader = part
            else:
                await self._wait_for_turn(part)
            if self._leader is part:
                await self._commit_waiting(part)
            elif part.is_begun:
                await part.ended.wait()  # however long: only its own transaction can end it now
            else:
                # The one that runs may take much longer: do not wait for it with each step.
                part.owned.stay_alone(self._tuning.unshared_after_delay_s)
        finally:
            if not part.is_begun:
                self._waiting.remove(part)
            if self._leader is part:
                self._leader = self._waiting[0] if self._waiting else None
                if self._leader is not None:
                    self._leader.woken.set()

    async def _wait_for_turn(self, part: _Part) -> None:
        try:
            async with asyncio.timeout(self._tuning.max_shared_wait_s):
                await part.woken.wait()
        except TimeoutError:
            pass  # it may have become its turn all the same

    async def _commit_waiting(self, first: _Part) -> None:
        """Commit what waits, with the producer of the first part. Sets the outcome of each.

        None of them has an outcome if the transaction was not begun.
        """
        if not first.is_current():
            return
        # A request has room for one membership. Parts of others, and those that are no longer
        # current, stay until it is their turn.
        others = [
            each
            for each in self._waiting
            if each is not first
            and each.owned.membership == first.owned.membership
            and each.is_current()
        ]
        # The offsets of all are one batch of the group's, which has a largest size.
        parts = [first, *others][: self._tuning.max_shared_parts]
        for part in parts:
            part.is_begun = True
        self._waiting = [each for each in self._waiting if not each.is_begun]
        self._running = parts
        try:
            if len(parts) == 1:
                await first.commit()
            else:
                await self._commit_together(parts)
        finally:
            self._running = []
            for part in parts:
                part.ended.set()
                part.woken.set()

    async def _commit_together(self, parts: Sequence[_Part]) -> None:
        found: dict[TopicPartition, list[Sequence[NewRecord]]] = defaultdict(list)
        offsets: Offsets = {}
        for part in parts:
            offsets |= part.offsets
            for target, of_target in part.records.items():
                found[target].append(of_target)
        records = {
            target: each[0] if len(each) == 1 else list(chain.from_iterable(each))
            for target, each in found.items()
        }
        owned = parts[0].owned
        producer = owned.producer
        assert producer is not None
        try:
            await _commit(owned, records, offsets)
        except BaseException as error:
            if isinstance(error, NoLeader | Rejected) and producer.is_usable:
                return
            if isinstance(error, TransactionTimedOut | Fenced):
                self._metrics.transaction_timeouts.inc()
            _fail(parts, error)
            if not isinstance(error, Retriable | Rejected):
                raise
        else:
            for part in parts:
                part.is_committed = True


class PartitionTransactions:
    """The partition producers of a process, and their transactions.

    Args:
        group: the consumer group whose offsets are committed.
        on_lost: called when this process is no longer a member of the group; revokes all its
            assignments.
    """

    def __init__(
        self,
        log_: Log,
        offset_store: OffsetStore,
        group: str,
        metrics: Metrics,
        on_lost: Callable[[], None],
        tuning: DeliveryTuning = TUNING.delivery,
    ) -> None:
        self._tuning = tuning
        self._backoff = Backoff(tuning.retry_first_s, tuning.retry_max_s)
        self._log = log_
        self._offset_store = offset_store
        self._group = group
        self._metrics = metrics
        self._on_lost = on_lost
        self._producers: dict[int, _PartitionProducer] = {}
        self._shared = _SharedTransactions(metrics, tuning)
        self._fencing = asyncio.Lock()

    async def fence(self, consumer: Consumer, numbers: Sequence[int]) -> None:
        """Initialise the producers of source partitions, which fences their former owners.

        Committed offsets may be read only after this: a former owner could still change them.

        Raises:
            Retriable: not all producers could be initialised, or the group has rebalanced
                meanwhile.
        """
        membership = consumer.membership  # before anything is awaited
        async with self._fencing:
            # Close the producers of the last assignment first: from here on its steps raise
            # `PartitionLost`, instead of writing under the new assignment.
            await self.release(numbers)
            # Then let a shared transaction end that has offsets of them, with the producer of a
            # partition that stays: it may write them only after they are read here.
            await self._shared.wait_ended(numbers)
            # Do not fence an owner of a later generation.
            if consumer.membership != membership:
                raise Fenced("expected to stay in the group's generation, and it has rebalanced")
            await self._init_producers(
                [_PartitionProducer(number, consumer, membership) for number in numbers]
            )

    async def _init_producers(self, producers: Sequence[_PartitionProducer]) -> None:
        self._producers |= {owned.number: owned for owned in producers}
        failures: list[Retriable] = []

        async def init(owned: _PartitionProducer) -> None:
            try:
                async with owned.turn:  # a step may already wait for it
                    await self._init_producer(owned)
            except Retriable as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for owned in producers:
                tasks.create_task(init(owned), name=f"fence-{owned.number}")
        if failures:
            await self.release([owned.number for owned in producers])
            raise failures[0]

    async def release(self, numbers: Iterable[int] | None = None) -> None:
        """Close the producers of `numbers`, or all.

        An open transaction is ended by the next owner of the partition whose producer it uses.
        """
        leaving = list(self._producers if numbers is None else numbers)
        producers = [self._producers.pop(number) for number in leaving if number in self._producers]
        for owned in producers:
            owned.closed = True
        # Do not wait for running transactions: what is not committed is aborted when the next
        # owner initialises its producer.
        try:
            limit_s = self._tuning.producer_close_timeout_s
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for owned in producers:
                    if owned.producer is not None:
                        tasks.create_task(owned.producer.close(), name=f"release-{owned.number}")
        except TimeoutError:
            log.warning(
                Event.TRANSACTION_LEFT_OPEN, partitions=[owned.number for owned in producers]
            )

    async def commit_transaction(
        self, number: int, pending: list[PendingAnswer], compose: Compose
    ) -> None:
        """Commit the answers of one source partition in one transaction, then acknowledge.

        Revoked and already answered requests are acknowledged without an answer.

        Args:
            number: the source partition.
            pending: pending answers in any order. Acknowledged ones are removed from the list.
                Those left without an error must wait: the commit metadata has no room for their
                offsets.
            compose: makes the answer and dead-letter records.

        Raises:
            TransactionAborted: nothing was committed; send what is left in the list again.
            PartitionLost: the requests left in the list are revoked, or their partition is being
                fenced once more.
            NoLeader: a partition cannot be written to for now; no transaction was begun.
            RecordsRefused: holds all records that their topics never accept; no transaction was
                begun.
            Rejected: the log refuses one of the records, or all of them together.
        """
        owned = self._producers.get(number)
        if owned is None:
            raise PartitionLost(f"source partition {number} is not assigned to this process")
        async with owned.turn:
            # A failed transaction that was shared with other partitions is repeated alone: the next
            # failure has its cause in this partition.
            while not await self._try_commit(owned, pending, compose):
                compose(())  # nothing of the last try is committed

    async def _try_commit(
        self, owned: _PartitionProducer, pending: list[PendingAnswer], compose: Compose
    ) -> bool:
        """Run one transaction; see `commit_transaction`.

        Returns:
            False if it was not committed because of other partitions, or because the partition has
            been assigned anew.
        """
        number = owned.number
        # Check after the wait for the lock: a rebalance may have come meanwhile.
        owned.require_assigned()
        if owned.is_spent:  # a former transaction was cancelled: its outcome is unknown
            await self._reinit_producer(owned, None)
        # Only after that, since the last outcome decides which answers are duplicates.
        pending[:] = self._drop_answered(number, pending)
        if not pending:  # also while an assignment is pending: offsets unknown
            return True
        fitting, source = self._offset_store.fit_commit_metadata(number, pending)
        if source is None or not fitting:
            return True
        # The offsets say what is answered once these answers are: both become visible together.
        offsets = self._offset_store.offsets(number, source, fitting)
        # Bind no variable to the outcome: the traceback of its failure would refer to this frame.
        if not await self._recover(
            owned, await self._transact(owned, compose(fitting), offsets), fitting
        ):
            return False
        # Acknowledge only after the commit: an aborted transaction is sent again.
        self._offset_store.ack(requests_of(fitting))
        pending[:] = pending[len(fitting) :]
        return True

    async def commit_remaining(self, number: int) -> None:
        """Commit progress that no answer carries: skipped offsets and dropped duplicates.

        Raises:
            TransactionAborted, PartitionLost: see `commit_transaction`.
        """
        owned = self._producers.get(number)
        if owned is None:
            raise PartitionLost(f"source partition {number} is not assigned to this process")
        async with owned.turn:
            owned.require_assigned()
            if owned.is_spent:
                await self._reinit_producer(owned, None)
            while offsets := self._offset_store.uncommitted(number):
                if await self._recover(owned, await self._transact(owned, {}, offsets), ()):
                    return

    def _drop_answered(
        self, number: int, pending: Sequence[PendingAnswer]
    ) -> Sequence[PendingAnswer]:
        """Return answers by offset; acknowledge and drop revoked and already answered requests."""
        progress = self._offset_store.progress(number)
        ordered = by_offset(pending)
        is_above = progress is not None and ordered and ordered[0][0].offset >= progress.highest
        if is_above and not any_revoked([request for request, _ in ordered]):
            return ordered
        unanswered: list[PendingAnswer] = []
        for each in ordered:
            request = each[0]
            if request.ack_handle.revoked or progress is None:
                self._metrics.revoked.inc()
                request.ack_handle.ack()
            elif request.offset in progress:
                self._metrics.duplicates.inc()
                self._offset_store.ack([request])
            else:
                unanswered.append(each)
        return unanswered

    def _are_answered(self, number: int, pending: Sequence[PendingAnswer]) -> bool:
        progress = self._offset_store.progress(number)
        return progress is not None and all(each[0].offset in progress for each in pending)

    async def _transact(
        self, owned: _PartitionProducer, records: Records, offsets: Offsets
    ) -> _Outcome:
        """Run one transaction.

        Returns:
            the outcome. A failure has no traceback: its frames would hold the records until the
            garbage collector runs.

        Raises:
            NoLeader, Rejected: no transaction was begun.
            PartitionLost: the partition was released meanwhile.
        """
        producer = owned.producer
        assert producer is not None
        owned.is_same_assignment = self._offset_store.same_assignment(owned.number)
        part = _Part(owned, records, offsets)
        try:
            with self._metrics.commit():
                await self._shared.commit(part)
        except BaseException as error:
            if not part.is_begun:  # cancelled while it waited
                raise
            if isinstance(error, NoLeader | Rejected) and producer.is_usable:
                # What is refused now may be refused again: let no other partition repeat its own.
                owned.stay_alone(self._tuning.unshared_after_refusal_s)
                raise
            # Mark it before anything else, also when cancelled: the transaction may still be
            # committed, and nothing may be sent with this producer before that is known.
            owned.is_spent = True
            if not isinstance(error, Exception):
                raise
            if owned.closed:
                drop_tracebacks(error)
                raise PartitionLost(
                    f"source partition {owned.number} was released meanwhile"
                ) from error
            if not isinstance(error, Rejected | Retriable):
                raise
            log.warning(Event.TRANSACTION_FAILED, partition=owned.number, reason=str(error))
            drop_tracebacks(error)
            return _Outcome(is_committed=False, failure=error, is_shared=part.failure is not None)
        if part.is_committed:
            self._offset_store.note_committed(offsets)
        return _Outcome(is_committed=part.is_committed)

    async def _recover(
        self,
        owned: _PartitionProducer,
        outcome: _Outcome,
        pending: Sequence[PendingAnswer],
    ) -> bool:
        """Replace a failed producer, and find out whether its answers were committed.

        Returns:
            False if nothing was committed, or offsets alone may not have been, for a reason that is
            not this partition's.

        Raises:
            TransactionAborted: the same, and the reason may be this partition's.
            PartitionLost: the partition was released meanwhile.
            Rejected: the log refuses one of the records.
        """
        failure = outcome.failure
        if failure is None:
            if not outcome.is_committed:
                owned.require_assigned()
            return outcome.is_committed
        await self._reinit_producer(owned, failure)
        # From now on: the recovery itself may have taken minutes.
        owned.stay_alone(
            self._tuning.unshared_after_timeout_s
            if isinstance(failure, TransactionTimedOut)
            else self._tuning.unshared_after_failure_s
        )
        try:
            if isinstance(failure, Rejected):
                raise failure
            # A transaction is committed whole or not at all; if its offsets are committed, only
            # the broker's confirmation was lost.
            if pending and self._are_answered(owned.number, pending):
                return True
            if outcome.is_shared:
                return False
            timed_out = isinstance(failure, TransactionTimedOut | Fenced)
            raise TransactionAborted(str(failure), timed_out=timed_out)
        finally:
            del failure, outcome

    async def _reinit_producer(
        self, owned: _PartitionProducer, error: HeadraceError | None
    ) -> None:
        """Replace a spent producer, and merge the offsets that it committed."""
        fenced = isinstance(error, Fenced)
        pauses = Pauses(self._backoff)
        # The step of a partition that shares one may have been cancelled before the other's ended.
        await self._shared.wait_ended([owned.number])
        while True:
            owned.require_assigned()
            try:
                # Ask before a new producer is initialised: a process that lost its membership would
                # fence the new owner with it, and both would fence each other forever. A member was
                # fenced by the broker's own abort only, and continues.
                if fenced and not await self._is_member(owned):
                    owned.require_assigned()  # a rebalance came first: the assignment is a new one
                    self._on_fenced(owned)
                # Initialise before reading: it ends the open transaction, so that the committed
                # offsets are final.
                await self._init_producer(owned)
                source = self._offset_store.source(owned.number)
                committed = await owned.consumer.committed([source])
            except PartitionLost:
                raise
            except Retriable as unavailable:
                fenced = fenced or isinstance(unavailable, Fenced)
                owned.is_spent = True
                log.warning(
                    Event.TRANSACTION_DELAYED, partition=owned.number, reason=str(unavailable)
                )
                await pauses.sleep()
            else:
                owned.require_assigned()
                # Merge only into the assignment for which the offsets were committed.
                if owned.is_same_assignment():
                    self._offset_store.merge(owned.number, committed[source])
                return

    @staticmethod
    async def _is_member(owned: _PartitionProducer) -> bool:
        """Return whether the partition's membership is that of this process, and still counts."""
        consumer = owned.consumer
        return await consumer.is_member() and consumer.membership == owned.membership

    async def _init_producer(self, owned: _PartitionProducer) -> None:
        # Close the former one first: it has the same id, and the new one fences it.
        former, owned.producer = owned.producer, None
        if former is not None:
            await former.close()
        topic = self._offset_store.source(owned.number).topic
        transactional_id = f"{self._group}.{topic}.{owned.number}"
        producer = self._log.transactional_producer(transactional_id, self._group)
        await producer.__aenter__()
        if owned.closed:  # released while it was initialised: nothing else would close it
            await producer.close()
            owned.require_assigned()
        owned.producer = producer
        owned.is_spent = False

    def _on_fenced(self, owned: _PartitionProducer) -> None:
        """Revoke everything: this process is no longer a member, and others own its partitions.

        Its consumer notices by its heartbeats and joins the group again.
        """
        log.warning(Event.LOST, partitions=sorted(self._producers))
        for each in self._producers.values():
            each.closed = True
        self._on_lost()
        owned.require_assigned()


def _fail(parts: Iterable[_Part], error: BaseException) -> None:
    """Fail the parts of a shared transaction that was begun, each with an error of its own."""
    kind = type(error) if isinstance(error, Fenced | TransactionTimedOut) else LogUnavailable
    for part in parts:
        part.failure = kind(f"transaction shared with other partitions: {error!r}")


async def _commit(owned: _PartitionProducer, records: Records, offsets: Offsets) -> None:
    """Run a transaction with a partition's producer."""
    if owned.membership is None:
        raise Fenced("expected to be a member of the consumer group, and am none")
    assert owned.producer is not None
    await owned.producer.commit_transaction(records, offsets, owned.membership)
