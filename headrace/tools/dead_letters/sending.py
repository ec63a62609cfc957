"""Sending with a definite result: a record neither written nor refused ends the run."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import Rejected
from headrace.log.port import NewRecord, Producer, TopicPartition


async def send_once(
    producer: Producer, partition: TopicPartition, records: Sequence[NewRecord]
) -> dict[int, str]:
    """Write records to one partition and wait for their acknowledgements.

    If the topic refuses a group of records as a whole, nothing was written, and they are retried
    one by one. After any other failure there is no retry, since they may have been written.

    Returns:
        The indexes of the refused records with the reasons; all others are written.

    Raises:
        LogUnavailable: it is unknown which records were written.
    """
    try:
        runs = await producer.send(partition, records)
    except Rejected as error:
        return await _one_by_one(producer, partition, records, error)
    refused: dict[int, str] = {}
    start = 0
    for run in runs:
        part = records[start : start + run.size]
        try:
            await run.acknowledged
        except Rejected as error:
            of_part = await _one_by_one(producer, partition, part, error)
            refused |= {start + index: reason for index, reason in of_part.items()}
        start += run.size
    return refused


async def _one_by_one(
    producer: Producer, partition: TopicPartition, records: Sequence[NewRecord], error: Rejected
) -> dict[int, str]:
    if len(records) == 1:
        return {0: str(error)}
    refused: dict[int, str] = {}
    for index, record in enumerate(records):
        if (reason := (await send_once(producer, partition, [record])).get(0)) is not None:
            refused[index] = reason
    return refused
