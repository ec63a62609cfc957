"""The example of orders: records in, scores out, in each format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fastavro
import numpy as np
import pytest

from headrace.client import Client, InferenceError
from headrace.config import Settings, make_settings
from headrace.log.port import NewRecord, TopicPartition
from headrace.protocol.codec import Answer, decode_response
from headrace.topics import STAGES, Topic
from tests.support.pipelines import Caller, log_for, serving
from tests.support.tree import ROOT

EXAMPLE = ROOT / "examples" / "orders"
ORDERS = (EXAMPLE / "orders.json").read_bytes()
TOGETHER, APART = [STAGES], [[stage] for stage in STAGES]


@pytest.fixture
def settings() -> Settings:
    """Settings with the example's repository."""
    repository = str(EXAMPLE / "models")
    return make_settings({"topics": {"partitions": 4}, "models": {"repository": repository}})


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


def avro_orders() -> Iterator[bytes]:
    """Each order in Avro."""
    schema = fastavro.schema.load_schema(str(EXAMPLE / "models" / "fraud" / "order.avsc"))
    for order in json.loads(ORDERS):
        at = datetime.fromisoformat(order["ordered_at"])
        customer = {"age": order["customer"].get("age")}
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, order | {"ordered_at": at, "customer": customer})
        yield stream.getvalue()


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


async def test_orders_of_topic_are_answered_with_their_keys(settings: Settings) -> None:
    """As a producer writes them that knows nothing but two headers."""
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
