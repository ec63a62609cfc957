"""Calls: arrays in, arrays out, and what travels in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.client import Client, InferenceError
from headrace.config import Settings
from headrace.errors import ConfigurationError
from headrace.log.memory import MemoryLog
from headrace.log.partitioner import partition_for_key
from headrace.log.port import Record
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import join_elements
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.responder import Responder, answer, header

MANY = TUNING.protocol.converted_inline_bytes // 4 + 1
"""Empty elements of BYTES, or numbers, in a large answer."""
PIXELS = np.arange(6, dtype=np.float32).reshape(2, 3)


def body(record: Record) -> dict[str, object]:
    assert record.value is not None
    decoded = msgspec.msgpack.decode(record.value)
    assert isinstance(decoded, dict)
    return decoded


async def test_client_sends_and_returns_arrays(client: Client, responder: Responder) -> None:
    """An echo gives back the same values, shape and dtype, by name."""
    response = await client.infer("digits", {"pixels": PIXELS})
    np.testing.assert_array_equal(response.outputs["pixels"], PIXELS, strict=True)
    assert (response.model_name, response.model_version) == ("digits", "1")
    assert response.parameters == {"batch_size": 1}


async def test_client_sends_and_returns_text(client: Client, responder: Responder) -> None:
    """Strings travel as BYTES and come back as bytes."""
    response = await client.infer("m", {"text": ["größer", "b"]})
    assert response.outputs["text"].tolist() == ["größer".encode(), b"b"]


async def test_client_bytes_keep_trailing_zeros(client: Client, responder: Responder) -> None:
    """A list of bytes is not cut where NumPy's own type for bytes would cut it."""
    response = await client.infer("m", {"files": [[b"\x01\x00"], [b"\x00"]]})
    assert response.outputs["files"].tolist() == [[b"\x01\x00"], [b"\x00"]]


async def test_client_sends_and_returns_json(
    log: MemoryLog, settings: Settings, responder: Responder
) -> None:
    """A client may speak JSON, and is answered in it."""
    responder.script = lambda record: [
        b'{"model_name": "m", "model_version": "1", "outputs":'
        b' [{"name": "label", "datatype": "INT64", "shape": [2], "data": [7, 8]}]}'
    ]
    async with Client(log=log, settings=settings, content_type="application/json") as client:
        response = await client.infer("m", {"x": PIXELS})
    np.testing.assert_array_equal(
        response.outputs["label"], np.array([7, 8], np.int64), strict=True
    )
    (request,) = responder.seen
    assert msgspec.json.decode(request.value or b"")["inputs"][0]["data"] == [0, 1, 2, 3, 4, 5]
    assert header(request.headers, "content-type") == b"application/json"


async def test_client_options_become_headers(client: Client, responder: Responder) -> None:
    """Version, id, parameters and wanted outputs are in the body; urgency is in headers."""
    response = await client.infer(
        "m",
        {"x": PIXELS},
        version="3",
        id="mine",
        parameters={"top": 5},
        outputs=["label"],
        priority=7,
        tenant="clinic",
        headers=[("traceparent", b"00-1-2-01"), ("ward", b"4b")],
    )
    (request,) = responder.seen
    sent = body(request)
    assert (sent["model_version"], sent["id"], sent["parameters"]) == ("3", "mine", {"top": 5})
    assert [wanted["name"] for wanted in sent["outputs"]] == ["label"]  # type: ignore[attr-defined]  # decoded without a type
    assert header(request.headers, "x-priority") == b"7"
    assert header(request.headers, "x-tenant") == b"clinic"
    assert header(request.headers, "traceparent") == b"00-1-2-01"
    assert response.id == "mine"
    assert header(response.headers, "ward") == b"4b"


async def test_client_reply_headers_are_those_of_spring(
    client: Client, responder: Responder
) -> None:
    """The reply topic is text, its partition 4 bytes big-endian, the correlation id ours."""
    await client.infer("m", {"x": PIXELS})
    (request,) = responder.seen
    assert header(request.headers, "kafka_replyTopic") == b"headrace.responses"
    assert header(request.headers, "kafka_replyPartition") == b"\x00\x00\x00\x01"
    assert header(request.headers, "kafka_correlationId")


async def test_client_timeout_becomes_deadline(client: Client, responder: Responder) -> None:
    """`x-deadline-ms` is the time of the call plus its timeout."""
    before_ms = time.time() * 1000
    await client.infer("m", {"x": PIXELS}, timeout_s=5)
    after_ms = time.time() * 1000
    deadline_ms = int(header(responder.seen[0].headers, "x-deadline-ms") or 0)
    assert before_ms + 5000 - 1 <= deadline_ms <= after_ms + 5000


async def test_client_sends_raw_payload_unchanged(client: Client, responder: Responder) -> None:
    """A file is the record's value; headers say its type, the model and the version."""
    responder.script = lambda record: [b'{"model_name": "m", "model_version": "2", "outputs": []}']
    await client.infer_raw("m", b"\xff\xd8raw", "image/jpeg", version="2")
    (request,) = responder.seen
    assert request.value == b"\xff\xd8raw"
    assert header(request.headers, "content-type") == b"image/jpeg"
    assert header(request.headers, "x-model") == b"m/2"


async def test_client_spreads_requests_over_partitions(
    client: Client, responder: Responder
) -> None:
    """Without a key each partition gets 16 KiB, and then the next has its turn."""
    for _ in range(6):
        await client.infer("m", {"x": np.zeros(4096, np.float32)})
    partitions = [record.partition for record in responder.seen]
    assert sorted(partitions[:3]) == sorted(partitions[3:]) == [0, 1, 2]


async def test_client_key_selects_partition(client: Client, responder: Responder) -> None:
    """Requests of one key stay together, where Kafka's own clients would put them."""
    for _ in range(2):
        await client.infer("m", {"x": PIXELS}, key=b"patient-17")
    assert {(record.key, record.partition) for record in responder.seen} == {
        (b"patient-17", partition_for_key(b"patient-17", 3))
    }


async def test_calls_side_by_side_get_their_own_answers(
    client: Client, responder: Responder
) -> None:
    """A hundred calls at once, answered in any order, each get what they asked."""
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(client.infer("m", {"x": np.array([number])}), name=f"call {number}")
            for number in range(100)
        ]
    assert [call.result().outputs["x"].item() for call in calls] == list(range(100))


async def test_two_clients_on_one_partition_do_not_mix(
    log: MemoryLog, settings: Settings, client: Client, responder: Responder
) -> None:
    """An answer for another client is dropped, and counted as foreign."""
    async with Client(log=log, settings=settings, reply_partition=1) as other:
        await other.infer("m", {"x": PIXELS})
        await client.infer("m", {"x": PIXELS})
    assert (client.foreign_answers, client.late_answers) == (1, 0)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_invalid_client_timeout_is_refused(client: Client, timeout_s: float) -> None:
    """A call has an end that can be told."""
    with pytest.raises(ValueError, match="timeout_s: expected a positive number"):
        await client.infer("m", {"x": PIXELS}, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([[0.5, 1.0]], "FP32"),
        ([[0, 1]], "INT64"),
        ([[True, False]], "BOOL"),
        (0.5, "FP32"),
        ([["a"]], "BYTES"),
        (np.array([[0.5]]), "FP64"),
        (np.float64(0.5), "FP64"),
    ],
)
async def test_value_without_dtype_gets_default_datatype(
    client: Client, responder: Responder, value: object, datatype: str
) -> None:
    """Python floats become FP32; NumPy's own values keep their dtype."""
    await client.infer("m", {"x": value})  # type: ignore[dict-item]  # any array-like
    assert body(responder.seen[0])["inputs"][0]["datatype"] == datatype  # type: ignore[index]  # decoded without a type


async def test_explicit_namespace_overrides_environment(
    log: MemoryLog, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument of the client overrides the environment variable."""
    monkeypatch.setenv("HEADRACE_NAMESPACE", "elsewhere")
    async with Client(log=log, namespace="headrace") as client:
        await client.infer("m", {"x": PIXELS})
    assert responder.seen[0].topic == "headrace.requests"


def test_namespace_that_names_no_topic_is_refused() -> None:
    """A namespace with characters that Kafka does not allow is a configuration error."""
    with pytest.raises(ConfigurationError, match="got 'no spaces'"):
        Client("127.0.0.1:9092", namespace="no spaces")


async def test_checked_tensor_is_sent_as_it_is(client: Client, responder: Responder) -> None:
    """No element of it becomes an object, so that a large one takes no time."""
    content = join_elements([b"a", b"", b"\xff"])
    tensor = Tensor("text", "BYTES", (3, 1), content)
    response = await client.infer("m", {"text": tensor})

    assert body(responder.seen[0])["inputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": [3, 1], "data": content}
    ]
    assert response.outputs["text"].tolist() == [[b"a"], [b""], [b"\xff"]]


class CountingThreads(ThreadPoolExecutor):
    """Threads that count what they are given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given = 0

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        self.given += 1
        return super().submit(*args, **options)


@pytest.mark.parametrize(
    ("array", "given"),
    [
        (np.full(MANY, b"", dtype=object), 1),
        (np.full(1, b"", dtype=object), 0),
        (np.zeros(MANY, np.float32), 0),
    ],
    ids=["many texts", "one text", "many numbers"],
)
async def test_only_large_answer_of_texts_is_decoded_by_executor(
    log: MemoryLog, settings: Settings, responder: Responder, array: Any, given: int
) -> None:
    """Its elements would hold the event loop; numbers are a view of the record."""
    with CountingThreads() as threads:
        async with Client(log=log, settings=settings, executor=threads) as client:
            response = await client.infer("m", {"x": array})

    np.testing.assert_array_equal(response.outputs["x"], array)
    assert threads.given == given


async def test_error_in_large_answer_is_raised_from_executor(
    log: MemoryLog, settings: Settings, responder: Responder
) -> None:
    """Lengths that do not fit the answer are found where it is decoded."""
    output = {"name": "y", "datatype": "BYTES", "shape": [2 * MANY], "data": bytes(4 * MANY)}
    responder.script = lambda record: [answer(outputs=[output])]
    with CountingThreads() as threads:
        async with Client(log=log, settings=settings, executor=threads) as client:
            with pytest.raises(InferenceError, match="bytes for the lengths of BYTES"):
                await client.infer("m", {"x": PIXELS})

    assert threads.given == 1


class BusyThreads(Executor):
    """Threads that never come to what they are given, and keep it."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self.given.append(partial(call, *args, **options))
        return Future()


async def test_cancelled_call_leaves_no_answer_to_busy_executor(
    log: MemoryLog, settings: Settings, responder: Responder
) -> None:
    """Nobody waits for it, and nothing counts its bytes."""
    threads = BusyThreads()
    async with Client(log=log, settings=settings, executor=threads) as client:
        call = asyncio.create_task(client.infer("m", {"x": np.full(MANY, b"", dtype=object)}))
        await eventually(lambda: threads.given)
        call.cancel()
        await asyncio.wait([call])

    (decode,) = threads.given
    with pytest.raises(IndexError):
        decode()
