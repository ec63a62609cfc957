"""Two transformers that differ in nothing but quantisation: one shares runs, the other must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from headrace.log.port import NewRecord, TopicPartition
from headrace.models.profiling.batch_safety import is_identical, output_scale, relative_difference
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.topics import STAGES
from tests.support.logs import read, write_to
from tests.support.models import add_version
from tests.support.pipelines import PARTITIONS, log_for, serving, settings_of
from tests.support.transformer import VOCABULARY, quantised, transformer

REQUESTS = 120
TOKENS = 8


def sentences() -> list[dict[str, NDArray[Any]]]:
    """A row of tokens each."""
    choice = np.random.default_rng(3)
    return [
        {
            "input_ids": choice.integers(0, VOCABULARY, (1, TOKENS)),
            "attention_mask": np.ones((1, TOKENS), np.int64),
            "shift": choice.standard_normal((1, 1)).astype(np.float32),
            "rounds": np.zeros((1, 1), np.int64),
        }
        for _ in range(REQUESTS)
    ]


async def served(repository: Path, model: onnx.ModelProto) -> list[Answer]:
    """The answers of the model to all sentences, which wait when it begins; in their order."""
    add_version(repository, "encoder", 1, model, "intra_op_threads = 1")
    settings = settings_of(repository)
    log = await log_for(settings)
    for number, inputs in enumerate(sentences()):
        value = encode_request("application/msgpack", "encoder", inputs, id=str(number))
        target = TopicPartition("headrace.requests", number % PARTITIONS)
        await write_to(log, target, NewRecord(None, value))
    topics = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]
    async with log.reader(topics) as reader, serving(settings, log, [STAGES]):
        records = await read(reader, REQUESTS)
    answers = [decode_response(record.headers, record.value) for record in records]
    fine = [answer for answer in answers if isinstance(answer, Answer)]
    assert len(fine) == REQUESTS, answers
    return sorted(fine, key=lambda answer: int(answer.id or -1))


def alone(repository: Path) -> list[NDArray[Any]]:
    """The summaries of single runs, without Headrace."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    path = repository / "encoder" / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return [session.run(["summary"], inputs)[0] for inputs in sentences()]


async def test_transformer_answers_in_shared_runs_equal_single_runs(tmp_path: Path) -> None:
    """Answers of shared runs equal those of single runs within the tolerance of FP32."""
    answers = await served(tmp_path, transformer())
    assert max(int(answer.parameters["batch_size"]) for answer in answers) > 1
    for answer, expected in zip(answers, alone(tmp_path), strict=True):
        assert (
            relative_difference(expected, answer.outputs["summary"], output_scale(expected)) <= 1e-4
        )


async def test_quantised_model_runs_each_request_alone(tmp_path: Path) -> None:
    """Each answer is bit for bit that of a single run, since no other request shares its scale."""
    answers = await served(tmp_path, quantised(transformer(), tmp_path))
    assert {answer.parameters["batch_size"] for answer in answers} == {1}
    for answer, expected in zip(answers, alone(tmp_path), strict=True):
        assert is_identical(expected, answer.outputs["summary"])
