"""One request on its way: what it is at each step, from its record to its answer.

All four services are in one process, joined by memory channels; the log is embedded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.delivery.acked_offsets import AckedOffsets
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.logs import read, write_to
from tests.support.pipelines import log_for, serving, settings_of


async def test_single_request_is_answered_and_its_offset_committed(tmp_path: Path) -> None:
    """A record on `requests` becomes a record on `responses`, and then its offset is committed."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    requests = TopicPartition("headrace.requests", 3)
    responses = TopicPartition("headrace.responses", 3)

    # 1. A producer writes a record: a key of its own, headers, and the tensors in MessagePack.
    pixels = np.full((1, 64), 0.5, np.float32)
    value = encode_request("application/msgpack", "digits", {"pixels": pixels}, id="mine")
    headers = [("kafka_correlationId", b"c-1"), ("order-line", b"7")]
    await write_to(log, requests, NewRecord(b"customer-9", value, headers))

    async with log.reader([responses]) as reader, serving(settings, log, [STAGES]) as [pipeline]:
        # 2. Ingest reads it, the batcher lets a free instance pull it, the executor runs it and
        #    the responder writes its answer, in the request's partition number.
        (record,) = await read(reader, 1)

        # 3. The answer carries the request's key, says whose it is, and passes headers on.
        assert record.key == b"customer-9"
        assert dict(record.headers) == {
            "content-type": b"application/msgpack",
            "x-status": b"ok",
            "x-request": b"headrace.requests/3/0",
            "kafka_correlationId": b"c-1",
            "order-line": b"7",
        }

        # 4. Its value has the outputs: here sums of the pixels, weighted 0 to 9.
        answer = decode_response(record.headers, record.value)
        assert isinstance(answer, Answer)
        assert (answer.model_name, answer.model_version, answer.id) == ("digits", "1", "mine")
        assert answer.outputs["scores"].tolist() == [[32.0 * weight for weight in range(10)]]
        assert answer.parameters["batch_size"] == 1

        # 5. Only then is the request's offset committed, in the background.
        async def is_committed() -> bool:
            committed = (await log.committed("headrace", [requests]))[requests]
            return committed is not None and AckedOffsets.from_committed(committed) == AckedOffsets(
                1
            )

        await eventually(is_committed)
        assert pipeline.ready.is_set()
