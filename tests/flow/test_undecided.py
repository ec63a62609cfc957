"""A model that made-up inputs say nothing of: its own requests decide whether they share runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace.log.port import NewRecord, TopicPartition
from headrace.models.profiling.batch_safety import Batching
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.conditions import eventually
from tests.support.logs import read, write_to
from tests.support.models import add_version, make_model
from tests.support.pipelines import PARTITIONS, log_for, serving, settings_of

REQUESTS = 200


def far_off() -> onnx.ModelProto:
    """`x` FP32 [batch, 2] to `y`, which is `x` where that is above 1000, and 0 elsewhere."""
    limit = numpy_helper.from_array(np.array(1000, np.float32), "limit")
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    return make_model(
        [
            helper.make_node("Greater", ["x", "limit"], ["above"]),
            helper.make_node("Where", ["above", "x", "zero"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["batch", 2])],
        [("y", TensorProto.FLOAT, ["batch", 2])],
        [limit, zero],
    )


async def test_undecided_model_runs_requests_alone_until_they_decide_batching(
    tmp_path: Path,
) -> None:
    """Each is answered rightly throughout, and in the end they share runs."""
    add_version(tmp_path, "model", 1, far_off())
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    for number in range(REQUESTS):
        x = np.array([[2000 + number, number]], np.float32)
        value = encode_request("application/msgpack", "model", {"x": x}, id=str(number))
        target = TopicPartition("headrace.requests", number % PARTITIONS)
        await write_to(log, target, NewRecord(None, value))
    topics = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]

    async with log.reader(topics) as reader, serving(settings, log, [STAGES]) as [pipeline]:
        version = pipeline.models.catalog.lookup("model")
        assert version.verdict is not None
        first = version.verdict
        records = await read(reader, REQUESTS)
        await eventually(lambda: version.max_batch_size == 32)

    assert first.batching is Batching.UNDECIDED
    assert version.verdict.batching is Batching.BATCHABLE
    assert version.verdict.seen_with == "16 batches of requests"
    for record in records:
        answer = decode_response(record.headers, record.value)
        assert isinstance(answer, Answer)
        assert answer.outputs["y"].tolist() == [[2000 + int(answer.id or -1), 0]]
