"""Answer exactly once: answers, dead letters and offsets in one transaction.

Records that their topics are known to refuse are found while encoding, before the transaction
begins, and replaced by a fallback, by the same rules as without transactions. If the brokers
refuse a transaction all the same, it is halved until the refused answer is alone; only that
answer gets a fallback.

A transaction that times out is halved as well; see `TransactionSize`.

Answers for a partition without a leader are *stalled*: they are retried every few seconds, and
the other answers are committed without them. A transaction that does not end in time may have hit
a partition that is unavailable in another way. Then the answers of each reply partition are
committed separately, and those that fail again are stalled too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from headrace.delivery.failures import drop_revoked
from headrace.delivery.inflight import InFlightAck
from headrace.delivery.offset_store import PendingAnswer, by_offset
from headrace.delivery.transactions import PartitionLost, PartitionTransactions, TransactionAborted
from headrace.errors import Rejected, drop_tracebacks
from headrace.log.errors import (
    LogRefused,
    NoLeader,
    RecordsRefused,
    TopicForbidden,
    UnknownPartition,
)
from headrace.log.port import TopicPartition
from headrace.primitives.backoff import Backoff
from headrace.primitives.bounded_cache import BoundedCache
from headrace.services.responder.encoder import AnswerEncoder, TransactionRecords, record_sizes
from headrace.telemetry.logs import Event
from headrace.telemetry.metrics import Metrics
from headrace.tuning import TUNING, ResponderTuning

log = structlog.get_logger(__name__)


class TransactionSize:
    """The size of the next transactions of one partition; no I/O.

    A transaction that does not end within `transaction_timeout_ms` is aborted, and all of its
    answers must be written again. If a producer quota or a slow network is the cause, the same
    transaction would time out forever. So the next one is half as large; the size that worked is
    kept, and grows while transactions of that size end well within the timeout.

    Attributes:
        limit_bytes: largest size of one transaction; None if there is no limit.
    """

    def __init__(self, timeout_s: float, tuning: ResponderTuning = TUNING.responder) -> None:
        self._tuning = tuning
        self._quick_s = tuning.quick_transaction_share * timeout_s
        self._timed_out_bytes: int | None = None  # the ceiling: the smallest that has timed out
        self._worked_bytes = 0  # the largest below the ceiling that was committed
        self._quick = 0  # quick transactions since the last time-out
        self._patience = tuning.transaction_size_patience
        self.limit_bytes: int | None = None

    def count(self, sizes: Iterable[int]) -> int:
        """Return how many answers of these sizes, in order, fit into one transaction.

        At least 1, since an answer cannot be divided.
        """
        total = count = 0
        for size_bytes in sizes:
            total += size_bytes
            if count and self.limit_bytes is not None and total > self.limit_bytes:
                break
            count += 1
        return count

    def record_timeout(self, size_bytes: int, answers: int) -> None:
        """Halve the size, or return to the last size that worked; keep it for a single answer."""
        if answers <= 1:
            return
        self._quick = 0
        if self._timed_out_bytes is not None and size_bytes >= self._timed_out_bytes:
            # A failed try costs a whole timeout, so the next one waits twice as long.
            self._patience = min(2 * self._patience, self._tuning.max_transaction_size_patience)
            self.limit_bytes = max(size_bytes // 2, self._worked_bytes)
        else:
            self._patience = self._tuning.transaction_size_patience
            self._timed_out_bytes, self._worked_bytes = size_bytes, 0
            self.limit_bytes = size_bytes // 2

    def record_committed(self, size_bytes: int, took_s: float) -> None:
        """Grow if the transaction was quick and the limit kept it small.

        Near the size that has timed out the limit grows by an eighth, elsewhere it doubles.
        """
        limit, ceiling = self.limit_bytes, self._timed_out_bytes
        if limit is None:
            return
        if ceiling is not None and size_bytes >= ceiling:
            self._timed_out_bytes = ceiling = None
        self._worked_bytes = max(self._worked_bytes, size_bytes)
        if took_s > self._quick_s or 2 * size_bytes < limit:
            return
        self._quick += 1
        is_near = ceiling is not None and limit >= ceiling // 2
        grown = limit + (limit // 8 if is_near else limit) + 1
        if ceiling is not None and grown >= ceiling and self._quick < self._patience:
            return
        # From some size on there is no limit, since the queue itself is bounded.
        self.limit_bytes = grown if grown < self._tuning.unlimited_transaction_bytes else None


class TransactionLinger:
    """Rule for how long a partition's next transaction waits for more answers; no I/O.

    A transaction costs some milliseconds of processor time, most of it the broker's, for one
    answer or a thousand. While many requests are in flight, answers that end soon share a
    transaction. This lengthens the wait of each request by less than a tenth. Those that come while
    a transaction runs share the next one anyway, so where they are many, there is nothing to gain.
    """

    def __init__(self, tuning: ResponderTuning = TUNING.responder) -> None:
        self._tuning = tuning
        self._ended_s = float("-inf")
        self._linger_ended_s = float("-inf")

    def record_step(self, began_s: float, ended_s: float, answers: int, in_flight: int) -> float:
        """Record a step's transactions, and return how long to linger; 0 without a backlog.

        A step measures how quickly requests are answered only if it begins soon after the last
        one; a burst after a silence does not.

        Args:
            began_s: start of the step, in monotonic seconds.
            ended_s: end of its last transaction, in monotonic seconds.
            answers: number of requests that the step answered.
            in_flight: requests of the partition that were read and are not answered.
        """
        linger_s = 0.0
        if began_s - self._linger_ended_s < self._tuning.consecutive_steps_within_s:
            linger_s = linger_after(
                answers, ended_s - self._ended_s, ended_s - began_s, in_flight, self._tuning
            )
        self._ended_s, self._linger_ended_s = ended_s, ended_s + linger_s
        return linger_s


def linger_after(
    answers: int, elapsed_s: float, step_s: float, in_flight: int, tuning: ResponderTuning
) -> float:
    """Return the linger after so many answers in this time, in seconds; 0 without a backlog, and
    where enough answers come while a step takes its own `step_s`.
    """
    if answers <= 0 or elapsed_s <= 0.0:
        return 0.0
    each_s = elapsed_s / answers
    linger_s = min(
        tuning.linger_share * in_flight * each_s,
        tuning.linger_answers * each_s - step_s,
        tuning.max_linger_s,
    )
    # A short linger means that there is no backlog.
    return linger_s if linger_s >= tuning.min_linger_s else 0.0


class _Stall(NamedTuple):
    until_s: float
    retry_s: float


class UnavailableTargets:
    """Reply partitions that are not tried for now: stalled ones, and forbidden topics."""

    def __init__(self, tuning: ResponderTuning) -> None:
        self._tuning = tuning
        self._stalls: dict[TopicPartition, _Stall] = {}
        # Until when, in monotonic seconds.
        self._forbidden: BoundedCache[str, float] = BoundedCache(tuning.max_forbidden_topics)

    def stall(self, target: TopicPartition) -> None:
        """Stall a partition that is known to have no leader."""
        self._stall(target, self._tuning.stalled_target_retry_s)

    def stall_longer(self, target: TopicPartition) -> None:
        """Stall a partition; twice as long as the last time."""
        before = self._stalls.get(target)
        retry_s = self._tuning.stalled_target_retry_s if before is None else 2 * before.retry_s
        self._stall(target, min(retry_s, self._tuning.max_stalled_target_retry_s))

    def _stall(self, target: TopicPartition, retry_s: float) -> None:
        self._stalls[target] = _Stall(time.monotonic() + retry_s, retry_s)
        log.warning(Event.ANSWERS_STALLED, topic=str(target), again_in_s=retry_s)

    def forget_stalls(self, target: TopicPartition) -> None:
        """Forget the stalls of a partition that has taken its answers."""
        self._stalls.pop(target, None)

    def find_stalled(self, now_s: float) -> set[TopicPartition]:
        """Return the partitions that are stalled now."""
        return {target for target, stall in self._stalls.items() if now_s < stall.until_s}

    def forbid(self, topic: str) -> None:
        """Remember a forbidden topic: each attempt to write to it costs a producer."""
        self._forbidden.add(topic, time.monotonic() + self._tuning.forbidden_topic_retry_s)

    def find_forbidden(self, pending: Sequence[PendingAnswer], now_s: float) -> list[str]:
        """Return the topics of these answers that are forbidden now."""
        if not self._forbidden:
            return []
        topics = {target.topic for _, target in pending} & self._forbidden.keys()
        for topic in topics:
            if now_s >= self._forbidden[topic]:
                del self._forbidden[topic]
        return sorted(topics & self._forbidden.keys())


class _PartitionCommitter:
    """Commit the answers of one source partition in transactions that end in time.

    Args:
        number: number of the source partition.
        responses: the topic of default answers; they are stalled only if their partition has no
            leader.
        in_order: never stall answers, because later answers must not overtake them.
        timeout_s: timeout of a transaction.
        unavailable: targets not tried for now, for all source partitions.

    Attributes:
        linger: rule for the wait after a step.
    """

    def __init__(
        self,
        number: int,
        transactions: PartitionTransactions,
        metrics: Metrics,
        responses: str,
        *,
        in_order: bool,
        timeout_s: float,
        unavailable: UnavailableTargets,
        tuning: ResponderTuning,
    ) -> None:
        self._number = number
        self._transactions = transactions
        self._metrics = metrics
        self._responses = responses
        self._in_order = in_order
        self._unavailable = unavailable
        self._tuning = tuning
        self._size = TransactionSize(timeout_s, tuning)
        self._backoff = Backoff(tuning.transaction_retry_s, tuning.max_transaction_retry_s)
        self.linger = TransactionLinger(tuning)

    async def commit_all(
        self, pending: list[PendingAnswer], records: TransactionRecords
    ) -> Rejected | None:
        """Commit until all answers are committed or revoked; those that must wait stay listed.

        Returns:
            Why the log refuses a record of the answers left in the list; None if it does not.
        """
        size = self._size
        attempt = 0
        while pending:
            count = len(pending)
            if size.limit_bytes is not None:
                count = size.count(self._record_sizes(pending))
            part = pending[:count]
            try:
                done = await self._try_commit(part, records)
                if not done and self._may_blame_target(part):
                    done = await self._commit_by_target(part, records)
            except Rejected as error:
                drop_tracebacks(error)
                return error
            finally:
                # `part` has lost what was committed. The rest comes first again, also after an
                # error: the next transaction must hold the lowest offsets, which move the base.
                pending[:count] = part
            if done and part and not records.is_cut:
                return None  # the rest must wait: for room in the metadata, or a stalled target
            if done:
                attempt = 0
            elif part:
                await asyncio.sleep(self._backoff.pause_s(attempt))
                attempt += 1
        return None

    async def _try_commit(self, pending: list[PendingAnswer], records: TransactionRecords) -> bool:
        """Try one transaction; return False if it failed. Revoked answers are acknowledged
        without it; answers for partitions without leaders stay in the list.
        """
        size = self._size
        size_bytes = 0 if size.limit_bytes is None else sum(self._record_sizes(pending))
        left: list[PendingAnswer] = []
        records.is_cut = False
        began_s = time.monotonic()
        try:
            if not await self._commit_accepted(pending, records, left):
                return False
        except TransactionAborted as error:
            self._metrics.retried("send", len(pending))
            if error.timed_out:
                self._shrink(pending)
            return False
        except PartitionLost:
            # If it is only fenced once more, its requests stay ours.
            pending[:] = [
                (request, target)
                for request, target in pending
                if drop_revoked([request], self._metrics)
            ]
            return not pending
        finally:
            records.release()
            pending += left
        if size_bytes:
            size.record_committed(size_bytes, time.monotonic() - began_s)
        return True

    async def _commit_accepted(
        self,
        pending: list[PendingAnswer],
        records: TransactionRecords,
        left: list[PendingAnswer],
    ) -> bool:
        """Commit one transaction, after replacing answers that are refused before it begins.

        Answers for partitions without leaders move from `pending` to `left`, and so do those whose
        dead letters have no room.

        Returns:
            False if answers for a partition without a leader must not be left behind.
        """
        while pending:
            left += await records.read_values(pending)
            try:
                await self._transactions.commit_transaction(self._number, pending, records.encode)
            # Both refusals come before the transaction begins: the producer stays usable.
            except RecordsRefused as error:
                pending[:] = records.replace_refused(pending, error)
            except NoLeader as error:
                refused = [each for each in pending if each[1] == error.partition]
                if self._in_order or not refused:
                    return False
                self._unavailable.stall(error.partition)
                left += refused
                pending[:] = [each for each in pending if each[1] != error.partition]
            else:
                records.record_committed()  # after the commit: an aborted one answers nothing
                return True
        return True

    def _record_sizes(self, pending: Iterable[PendingAnswer]) -> Iterable[int]:
        return record_sizes(pending, self._tuning.answer_overhead_bytes)

    def _shrink(self, pending: Sequence[PendingAnswer]) -> None:
        """Make a partition's next transactions smaller than this one, which timed out."""
        size, size_bytes = self._size, sum(self._record_sizes(pending))
        size.record_timeout(size_bytes, len(pending))
        self._metrics.transaction_timeouts.inc()
        log.warning(
            Event.TRANSACTION_TIMED_OUT,
            partition=self._number,
            answers=len(pending),
            size_bytes=size_bytes,
            next_bytes=size.limit_bytes,
        )

    def _may_blame_target(self, pending: Sequence[PendingAnswer]) -> bool:
        has_reply_topics = any(target.topic != self._responses for _, target in pending)
        return has_reply_topics and not self._in_order

    async def _commit_by_target(
        self, pending: list[PendingAnswer], records: TransactionRecords
    ) -> bool:
        """Commit the answers of each reply partition separately; stall those that fail again.

        Returns:
            False if the answers for `responses` fail too: then no reply partition is at fault.
        """
        targets = {target for _, target in pending if target.topic != self._responses}
        default = [each for each in pending if each[1] not in targets]
        # `responses` first: only if it works can a failure be blamed on a reply partition.
        done = await self._try_commit(default, records)
        pending[:] = [*default, *(each for each in pending if each[1] in targets)]
        if not done:
            return False
        for target in sorted(targets):
            of_target = [each for each in pending if each[1] == target]
            count = self._size.count(self._record_sizes(of_target))
            part, rest = of_target[:count], of_target[count:]
            if not await self._try_commit(part, records):
                self._unavailable.stall_longer(target)
            elif not part:
                self._unavailable.forget_stalls(target)
            pending[:] = [*part, *rest, *(each for each in pending if each[1] != target)]
        return True


class TransactionalStep:
    """Answer requests of one source partition in transactions; see `ordered.AnswerStep`.

    Args:
        responses: the topic of default answers.
        in_order: True if answers keep an order.
        timeout_s: timeout of a transaction.
    """

    def __init__(
        self,
        transactions: PartitionTransactions,
        encoder: AnswerEncoder,
        metrics: Metrics,
        responses: str,
        *,
        in_order: bool,
        timeout_s: float,
        tuning: ResponderTuning = TUNING.responder,
    ) -> None:
        self._encoder = encoder
        self._unavailable = UnavailableTargets(tuning)
        self._new_committer = partial(
            _PartitionCommitter,
            transactions=transactions,
            metrics=metrics,
            responses=responses,
            in_order=in_order,
            timeout_s=timeout_s,
            unavailable=self._unavailable,
            tuning=tuning,
        )
        self._committers: dict[int, _PartitionCommitter] = {}

    async def __call__(self, number: int, pending: list[PendingAnswer]) -> Sequence[PendingAnswer]:
        began_s = time.monotonic()
        first = pending[0][0].ack_handle if pending else None
        committer = self._committers.get(number)
        if committer is None:
            committer = self._committers[number] = self._new_committer(number)
        left = await self._answer_available(committer, pending)
        in_flight = 0
        if isinstance(first, InFlightAck) and not first.revoked:
            in_flight = first.assignment.in_flight
        answers = len(pending) - len(left)
        if linger_s := committer.linger.record_step(began_s, time.monotonic(), answers, in_flight):
            await asyncio.sleep(linger_s)
        return left

    async def _answer_available(
        self, committer: _PartitionCommitter, pending: list[PendingAnswer]
    ) -> Sequence[PendingAnswer]:
        """Answer requests except those of stalled targets; return those that must wait."""
        now_s, unavailable = time.monotonic(), self._unavailable
        stalled: list[PendingAnswer] = []
        if targets := unavailable.find_stalled(now_s):
            stalled = [each for each in pending if each[1] in targets]
            pending = [each for each in pending if each[1] not in targets]
        for topic in unavailable.find_forbidden(pending, now_s):
            pending = self._redirect(pending, TopicForbidden(topic))
        return [*stalled, *await self._answer(committer, by_offset(pending))]

    async def _answer(
        self, committer: _PartitionCommitter, left: list[PendingAnswer]
    ) -> Sequence[PendingAnswer]:
        """Answer requests; halve them while the brokers refuse them together."""
        await self._encoder.compress_answers([request for request, _ in left])
        records = TransactionRecords(self._encoder)
        while left:
            refusal = await committer.commit_all(left, records)
            if refusal is None:
                return left
            if isinstance(refusal, UnknownPartition | TopicForbidden):
                left = self._redirect(left, refusal)
                if isinstance(refusal, TopicForbidden):
                    self._unavailable.forbid(refusal.topic)
            elif len(left) == 1:
                await self._answer_refused(committer, left, records, refusal)
                return left
            else:
                middle = len(left) // 2
                waiting = await self._answer(committer, left[:middle])
                left = left[middle:]
                if waiting:  # no room in the commit's metadata, so none for higher offsets either
                    return [*waiting, *left]
        return []

    def _redirect(
        self, pending: Sequence[PendingAnswer], error: UnknownPartition | TopicForbidden
    ) -> list[PendingAnswer]:
        """Redirect answers that their topic does not accept to `responses`, as failures."""
        if isinstance(error, UnknownPartition):
            refused = [each for each in pending if each[1] == error.partition]
        else:
            refused = [each for each in pending if each[1].topic == error.topic]
        if not refused:
            raise LogRefused(error.message) from error
        targets = {}
        for request, target in refused:
            fallback = self._encoder.choose_fallback(request, target, error, minimal=False)
            assert fallback is not None, "only answers that are too large are given up"
            targets[request] = fallback[0]
        return [(request, targets.get(request, target)) for request, target in pending]

    async def _answer_refused(
        self,
        committer: _PartitionCommitter,
        pending: list[PendingAnswer],
        records: TransactionRecords,
        refusal: Rejected | None,
    ) -> None:
        """Replace one answer that the brokers refused by fallbacks until one is accepted.

        A refusal does not say whether the answer or its dead letter is at fault. So each form of
        the answer is tried with the dead letter, and then without it.
        """
        while refusal is not None:
            request, target = pending[0]
            if not records.omit_dead_letter(request):
                records.restore_dead_letter(request)
                pending[:] = [(request, records.choose_fallback(request, target, refusal))]
            refusal = await committer.commit_all(pending, records)
