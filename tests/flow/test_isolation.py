"""Good and poisonous requests share batches on a transformer: only the poisonous ones suffer.

The poisons: a token id beyond the vocabulary, work without end, NaN and an infinity, an answer that
does not fit into its topic, a value out of its range, and a model that leaves out an output or
gives it in another datatype.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from headrace.config import Settings, make_settings
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, TopicPartition
from headrace.models.profiling.batch_safety import output_scale, relative_difference
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.protocol.messages import ErrorResponse
from headrace.topics import STAGES
from tests.support.logs import read, write_to
from tests.support.models import add_version
from tests.support.pipelines import PARTITIONS, log_for, serving
from tests.support.transformer import VOCABULARY, transformer

GOOD = 1000
OF_EACH_POISON = 6
TOKENS = 8
LEAVES_OUT, CHANGES_TYPE = VOCABULARY - 1, VOCABULARY - 2
TOLERANCE = 1e-4

ENCODER_TOML = """
finite_outputs = true
max_execution_s = 0.15
intra_op_threads = 1
range.attention_mask = [0, 1]
"""
WRAPPED_TOML = """
backend = "python"
inputs = [
  { name = "input_ids", datatype = "INT64", shape = [-1, -1] },
  { name = "attention_mask", datatype = "INT64", shape = [-1, -1] },
  { name = "shift", datatype = "FP32", shape = [-1, 1] },
  { name = "rounds", datatype = "INT64", shape = [-1, 1] },
]
outputs = [{ name = "summary", datatype = "FP32", shape = [-1, 32] }]
"""
WRAPPED = f"""
from pathlib import Path
import numpy as np
import onnxruntime

class Model:
    def load(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = Path(__file__).with_name("encoder.onnx")
        self.session = onnxruntime.InferenceSession(path, options)

    def run(self, inputs):
        [summary] = self.session.run(["summary"], inputs)
        if ({LEAVES_OUT} == inputs["input_ids"]).any():
            return {{}}
        if ({CHANGES_TYPE} == inputs["input_ids"]).any():
            return {{"summary": summary.astype(np.float64)}}
        return {{"summary": summary}}
"""

Inputs = dict[str, NDArray[Any]]
Told = Answer | ErrorResponse


class Case(NamedTuple):
    """A request, and what has to come of it: None for the outputs of a run of its own."""

    model: str
    inputs: Inputs
    code: Code | None = None


def sentence(choice: np.random.Generator, rows: int = 1) -> Inputs:
    """Tokens that the encoder takes, and the wrapped one as well."""
    mask = np.ones((rows, TOKENS), np.int64)
    mask[:, choice.integers(1, TOKENS) :] = 0
    return {
        "input_ids": choice.integers(0, VOCABULARY - 2, (rows, TOKENS)),
        "attention_mask": mask,
        "shift": choice.standard_normal((rows, 1)).astype(np.float32),
        "rounds": np.zeros((rows, 1), np.int64),
    }


def spoiled(choice: np.random.Generator, name: str, value: float, rows: int = 1) -> Inputs:
    """A sentence with one wrong value."""
    inputs = sentence(choice, rows)
    inputs[name][rows // 2, 0] = value
    return inputs


def poisons(choice: np.random.Generator) -> Iterator[Case]:
    """Return one poison request of each kind."""
    failed = Code.MODEL_FAILED
    yield Case("encoder", spoiled(choice, "input_ids", VOCABULARY + 7), failed)
    yield Case("encoder", spoiled(choice, "shift", np.nan, rows=2), failed)
    yield Case("encoder", spoiled(choice, "shift", -np.inf), failed)
    yield Case("encoder", spoiled(choice, "attention_mask", 7), Code.INVALID_TENSOR)
    yield Case("encoder", sentence(choice, rows=20), Code.TOO_LARGE)
    yield Case("wrapped", spoiled(choice, "input_ids", LEAVES_OUT), failed)
    yield Case("wrapped", spoiled(choice, "input_ids", CHANGES_TYPE), failed)


def cases() -> list[Case]:
    """All requests, mixed."""
    choice = np.random.default_rng(5)
    found = [
        Case("wrapped" if number % 5 == 0 else "encoder", sentence(choice))
        for number in range(GOOD)
    ]
    for _ in range(OF_EACH_POISON):
        found += poisons(choice)
    found += [
        Case("encoder", spoiled(choice, "rounds", 10**12), Code.MODEL_FAILED) for _ in range(4)
    ]
    found += [
        Case("encoder", spoiled(choice, "input_ids", -VOCABULARY - 1), Code.MODEL_FAILED)
        for _ in range(4)
    ]
    random.Random(6).shuffle(found)
    return found


def settings_of(repository: Path) -> Settings:
    """Both models, and answers that have to be small."""
    directory = add_version(repository, "encoder", 1, transformer(), ENCODER_TOML)
    wrapped = repository / "wrapped" / "1"
    wrapped.mkdir(parents=True)
    (repository / "wrapped" / "model.toml").write_text(WRAPPED_TOML)
    (wrapped / "model.py").write_text(WRAPPED)
    onnx.save(onnx.load(directory / "model.onnx"), wrapped / "encoder.onnx")
    return make_settings(
        {
            "topics": {"partitions": PARTITIONS, "max_message_bytes": 16384},
            "models": {"repository": repository},
        }
    )


async def send(log: MemoryLog, asked: list[Case]) -> None:
    """The requests, numbered, over all partitions."""
    for number, case in enumerate(asked):
        value = encode_request("application/msgpack", case.model, case.inputs, id=str(number))
        target = TopicPartition("headrace.requests", number % PARTITIONS)
        await write_to(log, target, NewRecord(None, value))


async def answers(log: MemoryLog, settings: Settings, asked: list[Case]) -> dict[int, Told]:
    """Return the answers by request number."""
    topics = [TopicPartition("headrace.responses", number) for number in range(PARTITIONS)]
    async with log.reader(topics) as reader, serving(settings, log, [STAGES]):
        records = await read(reader, len(asked))
    told = [decode_response(record.headers, record.value) for record in records]
    return {int(answer.id or -1): answer for answer in told}


def single_runs(repository: Path) -> Any:
    """The encoder, without Headrace."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = repository / "encoder" / "1" / "model.onnx"
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


async def test_poison_request_fails_alone(tmp_path: Path) -> None:
    """Each poison gets its code, and 1,000 good requests get what they get alone."""
    settings = settings_of(tmp_path)
    log = await log_for(settings)
    asked = cases()
    await send(log, asked)

    told = await answers(log, settings, asked)

    session = single_runs(tmp_path)
    batch_rows: Counter[int] = Counter()
    for number, case in enumerate(asked):
        answer = told[number]
        if case.code is not None:
            assert isinstance(answer, ErrorResponse), (number, case)
            assert answer.error_details.code == case.code, (number, case, answer)
            continue
        assert isinstance(answer, Answer), (number, case, answer)
        names = list(answer.outputs)
        alone = session.run(names, case.inputs)
        for name, expected in zip(names, alone, strict=True):
            apart = relative_difference(expected, answer.outputs[name], output_scale(expected))
            assert apart <= TOLERANCE, (number, name)
        batch_rows[int(answer.parameters["batch_size"])] += 1
    assert sum(batch_rows.values()) == GOOD
    shared = sum(count for rows, count in batch_rows.items() if rows > 1)
    assert shared > GOOD / 2, batch_rows
