"""The example of orders: records in, scores out, in each format."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from csv import DictReader
from datetime import datetime
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

from headrace.client import Client, InferenceError
from headrace.client.rpc import RpcClient
from headrace.config import Settings, make_settings
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import Answer, decode_response
from headrace.protocol.compression import compress
from headrace.protocol.messages import ErrorResponse
from headrace.topics import STAGES, Topic
from tests.support.pipelines import Caller, log_for, serving
from tests.support.tree import ROOT

EXAMPLE = ROOT / "examples" / "orders"
ORDERS = (EXAMPLE / "orders.json").read_bytes()
TOGETHER, APART = [STAGES], [[stage] for stage in STAGES]


def settings_of(repository: Path, **limits: int) -> Settings:
    """Settings with this repository."""
    return make_settings(
        {"topics": {"partitions": 4}, "models": {"repository": str(repository)}, "limits": limits}
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with the example's model, which answers with scores alone."""
    shutil.copytree(EXAMPLE / "models", tmp_path / "models")
    path = tmp_path / "models" / "fraud" / "model.toml"
    path.write_text(path.read_text().replace("pass_through = true", ""))
    return settings_of(tmp_path / "models")


def expected_scores() -> list[float]:
    """The scores of the orders, as a few lines of Python find them."""
    return [_score(order) for order in json.loads(ORDERS)]


def _score(order: dict[str, Any]) -> float:
    amount = (order["amount"] - 120) / 80
    age = (order["customer"].get("age", 40) - 40) / 15
    is_elsewhere = order["country"] not in ("DE", "FR", "PL")
    at_night = datetime.fromisoformat(order["ordered_at"]).utctimetuple().tm_hour < 6
    logit = 1.5 * amount - 0.4 * age + 2 * is_elsewhere + at_night - 3
    return float(1 / (1 + np.exp(-logit)))


def avro_schema() -> Any:
    """The schema of the example."""
    return fastavro.schema.load_schema(str(EXAMPLE / "models" / "fraud" / "order.avsc"))


def typed_orders() -> Iterator[dict[str, Any]]:
    """Each order with a date and all fields, as Avro has it."""
    for order in json.loads(ORDERS):
        at = datetime.fromisoformat(order["ordered_at"])
        customer = {"age": order["customer"].get("age")}
        yield order | {"ordered_at": at, "customer": customer}


def avro_orders() -> Iterator[bytes]:
    """Each order in Avro."""
    schema = avro_schema()
    for order in typed_orders():
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, order)
        yield stream.getvalue()


def orders_in_container() -> bytes:
    """All orders in an object container file."""
    stream = io.BytesIO()
    fastavro.writer(stream, avro_schema(), list(typed_orders()), codec="deflate")
    return stream.getvalue()


@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("compression", ["", "zstd"])
async def test_orders_get_scores_in_each_format(
    settings: Settings, grouping: Any, compression: str
) -> None:
    """The same orders have the same scores, in one request or several."""
    log = await log_for(settings)
    async with (
        serving(settings, log, grouping),
        Client(log=log, settings=settings, compression=compression) as client,
    ):
        in_json = await client.infer_raw("fraud", ORDERS, "application/json")
        csv = (EXAMPLE / "orders.csv").read_bytes()
        in_csv = await client.infer_raw("fraud", csv, "text/csv; charset=utf-8")
        in_avro = [
            (await client.infer_raw("fraud", order, "avro/binary")).outputs["score"]
            for order in avro_orders()
        ]
    expected = np.array(expected_scores())[:, np.newaxis]

    np.testing.assert_allclose(in_json.outputs["score"], expected, rtol=1e-4)
    np.testing.assert_allclose(in_csv.outputs["score"], expected, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(in_avro), expected, rtol=1e-4)


@pytest.mark.parametrize("inline_bytes", [8192, 0], ids=["in topics", "by reference"])
@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("compression", ["", "gzip"])
async def test_orders_come_back_with_scores_in_their_format(
    grouping: Any, compression: str, inline_bytes: int
) -> None:
    """The example: every field is there, and the score behind it."""
    settings = settings_of(EXAMPLE / "models", inline_payload_bytes=inline_bytes)
    log = await log_for(settings)
    orders = json.loads(ORDERS)
    lines = b"".join(json.dumps(order).encode() + b"\n" for order in orders)
    async with (
        serving(settings, log, grouping),
        Client(log=log, settings=settings, compression=compression) as client,
    ):

        async def enriched(payload: bytes, content_type: str) -> tuple[bytes, str]:
            answer = await client.infer_raw("fraud", payload, content_type)
            assert (answer.model_name, answer.model_version) == ("fraud", "1")
            found = dict(answer.headers)["content-type"] or b""
            return answer.outputs["record"].item(), found.decode()

        in_json = await enriched(ORDERS, "application/json")
        many = await enriched(json.dumps(orders * 300).encode(), "application/json")
        one = await enriched(json.dumps(orders[1]).encode(), "application/vnd.order+json")
        in_lines = await enriched(lines, "application/x-ndjson")
        csv = await enriched((EXAMPLE / "orders.csv").read_bytes(), "text/csv; charset=utf-8")
        avro = [await enriched(order, "avro/binary") for order in avro_orders()]
        container = await enriched(orders_in_container(), "avro/container")
    expected = [
        order | {"score": pytest.approx(score, rel=1e-4)}
        for order, score in zip(orders, expected_scores(), strict=True)
    ]

    assert (json.loads(in_json[0]), in_json[1]) == (expected, "application/json")
    assert json.loads(many[0]) == expected * 300
    assert (json.loads(one[0]), one[1]) == (expected[1], "application/vnd.order+json")
    assert [json.loads(line) for line in in_lines[0].splitlines()] == expected
    assert csv[1] == "text/csv; charset=utf-8"
    read = list(DictReader(io.StringIO(csv[0].decode())))
    assert list(read[0]) == ["id", "amount", "customer.age", "country", "ordered_at", "score"]
    assert [float(row["score"]) for row in read] == pytest.approx(expected_scores(), rel=1e-4)
    assert [_read_avro(order)["score"] for order, _ in avro] == pytest.approx(
        expected_scores(), rel=1e-4
    )
    assert [_read_avro(order)["id"] for order, _ in avro] == ["a-1", "a-2", "a-3"]
    contained: list[Any] = list(fastavro.reader(io.BytesIO(container[0])))
    assert [order["score"] for order in contained] == pytest.approx(expected_scores(), rel=1e-4)


def _read_avro(content: bytes) -> dict[str, Any]:
    """An enriched order: the fields of the example's schema, and the score as the last."""
    schema = json.loads((EXAMPLE / "models" / "fraud" / "order.avsc").read_text())
    schema["fields"].append({"name": "score", "type": "float"})
    read: Any = fastavro.schemaless_reader(io.BytesIO(content), fastavro.parse_schema(schema), None)
    assert isinstance(read, dict)
    return read


async def test_wrong_order_and_tensors_are_answered_as_ever() -> None:
    """Only what was a record comes back as one."""
    settings = settings_of(EXAMPLE / "models")
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), Client(log=log, settings=settings) as client:
        with pytest.raises(InferenceError) as raised:
            await client.infer_raw("fraud", b'{"amount": "much"}', "application/json")
        response = await client.infer("fraud", {"features": np.zeros((2, 4), np.float32)})

    assert raised.value.code == "INVALID_TENSOR"
    assert response.outputs["score"].shape == (2, 1)


async def test_order_that_does_not_fit_names_row_and_path(settings: Settings) -> None:
    """A caller with a thousand orders finds the wrong one."""
    orders = json.loads(ORDERS)
    orders[2]["amount"] = "much"
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), Client(log=log, settings=settings) as client:
        with pytest.raises(InferenceError) as raised:
            await client.infer_raw("fraud", json.dumps(orders).encode(), "application/json")

    assert raised.value.code == "INVALID_TENSOR"
    assert raised.value.message == 'rows[2].amount: expected a number, got "much"'


async def test_large_payload_of_records_is_answered(settings: Settings) -> None:
    """Its inputs are made on the thread."""
    orders = json.loads(ORDERS) * 500
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), Client(log=log, settings=settings) as client:
        payload = json.dumps(orders).encode()
        response = await client.infer_raw("fraud", payload, "application/json")

    expected = np.array(expected_scores() * 500)[:, np.newaxis]
    np.testing.assert_allclose(response.outputs["score"], expected, rtol=1e-4)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_large_payload_for_absent_model_is_refused_for_its_model(
    settings: Settings, isolation: str
) -> None:
    """A small one is, too: were the model only loading, it could be sent again."""
    ingest = settings.ingest.model_copy(update={"transform_isolation": isolation})
    settings = settings.model_copy(update={"ingest": ingest})
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), Client(log=log, settings=settings) as client:
        payload = json.dumps(json.loads(ORDERS) * 500).encode()
        with pytest.raises(InferenceError) as raised:
            await client.infer_raw("frauds", payload, "application/json")

    assert raised.value.code == "UNKNOWN_MODEL"


@pytest.mark.parametrize("padding", [0, 100_000])
async def test_error_of_compressed_record_has_its_id(settings: Settings, padding: int) -> None:
    """A large one is converted by a worker."""
    record = {"id": "a-1", "amount": "much", "note": "x" * padding}
    value = compress(json.dumps(record).encode(), "gzip")
    headers = [("x-model", b"fraud"), ("content-type", b"application/json")]
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), RpcClient(log, settings) as client:
        news = NewRecord(None, value, [*headers, ("content-encoding", b"gzip")])
        answer = await client.call(news)

    error = decode_response(answer.headers, answer.value)
    assert isinstance(error, ErrorResponse)
    assert error.id == "a-1"


async def test_orders_of_topic_are_answered_with_their_keys(settings: Settings) -> None:
    """A producer that sets only two headers gets answers with the keys of its orders."""
    log = await log_for(settings)
    headers = [("x-model", b"fraud"), ("content-type", b"application/json")]
    records = [
        NewRecord(order["id"].encode(), json.dumps(order).encode(), headers)
        for order in json.loads(ORDERS)
    ]
    caller = Caller(settings, log)
    async with serving(settings, log, TOGETHER), log.producer() as producer:
        target = TopicPartition(settings.topic(Topic.REQUESTS), 1)
        for sent in await producer.send(target, records):
            await sent.acknowledged
        caller.sent = len(records)
        await caller.all_answered()
    scores: dict[bytes | None, float] = {}
    for answer in await caller.answers():
        read = decode_response(answer.headers, answer.value)
        assert isinstance(read, Answer)
        scores[answer.key] = read.outputs["score"].item()

    keys = [record.key for record in records]
    assert [scores[key] for key in keys] == pytest.approx(expected_scores(), rel=1e-4)


async def test_model_of_records_takes_tensors(settings: Settings) -> None:
    """In MessagePack."""
    log = await log_for(settings)
    async with serving(settings, log, TOGETHER), Client(log=log, settings=settings) as client:
        features = np.zeros((1, 4), np.float32)
        response = await client.infer("fraud", {"features": features})

    assert response.outputs["score"].shape == (1, 1)
