"""Recorded requests for tests of what reads recordings."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from headrace.client.rpc import last_header
from headrace.log.port import Log, NewRecord, Record, TopicPartition
from headrace.tools.replay.recording import Recording, Span
from tests.support.forked import HEADRACE

START_MS = 1_700_000_000_000


def request(number: int, model: str = "digits") -> bytes:
    """The value of a request for the model of `tests.support.models.digits`."""
    tensor = {
        "name": "pixels",
        "datatype": "FP32",
        "shape": [1, 64],
        "data": np.full(64, number % 16, np.float32).tobytes(),
    }
    packed: bytes = msgpack.packb({"model_name": model, "id": str(number), "inputs": [tensor]})
    return packed


def recorded(number: int, partitions: int = 2, spacing_ms: int = 1, **fields: Any) -> Record:
    """The n-th of requests that came round robin, `spacing_ms` after one another."""
    return Record(
        "recorded",
        number % partitions,
        number // partitions,
        START_MS + number * spacing_ms,
        b"key-%d" % number,
        request(number),
        (("kafka_correlationId", b"%d" % number),),
    )._replace(**fields)


class GivenRecording(Recording):
    """A recording of given records, in chunks of a given size."""

    def __init__(self, records: Sequence[Record], chunk_records: int = 100) -> None:
        self.name = "given"
        self._records = list(records)
        self._chunk_records = chunk_records
        ends: dict[TopicPartition, int] = {}
        for record in records:
            ends[TopicPartition(record.topic, record.partition)] = record.offset + 1
        self.spans = [Span(partition, 0, ends[partition]) for partition in sorted(ends)]

    async def chunks(self) -> AsyncGenerator[list[Record], None]:
        for start in range(0, len(self._records), self._chunk_records):
            yield self._records[start : start + self._chunk_records]


async def write_recorded(log: Log, topic: str, records: Sequence[Record]) -> None:
    """Write records with their own timestamps, each into its partition of the topic."""
    shares: dict[TopicPartition, list[NewRecord]] = {}
    for each in records:
        partition = TopicPartition(topic, each.partition)
        new = NewRecord(each.key, each.value, each.headers, each.timestamp)
        shares.setdefault(partition, []).append(new)
    async with log.producer() as producer:
        for partition, share in shares.items():
            for sent in await producer.send(partition, share):
                await sent.acknowledged


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Return what the command has printed with `--json`."""
        return json.loads(self.stdout)


async def replay_process(
    arguments: Sequence[str], environment: dict[str, str]
) -> asyncio.subprocess.Process:
    """Start `headrace replay` as a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
    return await asyncio.create_subprocess_exec(
        HEADRACE,
        "replay",
        *arguments,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait until a process has ended."""
    async with asyncio.timeout(50):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, stdout.decode(), stderr.decode())


async def replay(arguments: Sequence[str], environment: dict[str, str]) -> Ended:
    """Run `headrace replay` to its end."""
    return await ended(await replay_process(arguments, environment))


def originals_of(records: Sequence[Record]) -> list[str]:
    """The identities that copies carry."""
    return [(last_header(record.headers, "x-replay-of") or b"").decode() for record in records]
