"""Requests that take long to decode: workers make of them what the event loop would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.config import LimitSettings
from headrace.delivery.inflight import InFlightAck
from headrace.models.registry import Models
from headrace.protocol.codec import encode_request
from headrace.protocol.messages import Request
from headrace.protocol.tensors import to_array
from headrace.services.ingest.decode import IngestRules
from headrace.services.ingest.service import IngestService
from headrace.transforms.process import TransformProcess
from headrace.transforms.workers import TransformPool, TransformThread
from tests.support.models import add_version, identity, settings_for
from tests.support.services import RecordSource, counted, delivery, make_instruments
from tests.support.work import Tray

JSON = "application/json"
MSGPACK = "application/msgpack"
NEVER = 1 << 40


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """With a model of numbers and one of texts."""
    add_version(tmp_path, "numbers", 1, identity("UINT8", ("batch", "n")))
    add_version(tmp_path, "texts", 1, identity("BYTES", ("batch",)))
    models = Models(settings_for(tmp_path))
    models.open()
    return models


def numbers(content_type: str = JSON, *, size: int = 100_000) -> bytes:
    """A request with numbers from 0 to 255."""
    pixels = (np.arange(size) % 256).astype(np.uint8)[np.newaxis]
    return encode_request(content_type, "numbers", {"x": pixels}, id="mine")


def texts() -> bytes:
    """A request with many texts."""
    elements = np.array([b"%d" % number for number in range(50_000)], object)
    return encode_request(MSGPACK, "texts", {"x": elements})


async def ingest(
    models: Models, where: str, content_type: str, values: Sequence[bytes]
) -> tuple[list[Request], list[Request], float]:
    """Requests that can run, those that have ended, and the bytes of inputs that workers made."""
    instruments = make_instruments()
    rules = IngestRules(models.catalog, LimitSettings())
    if where == "inline":
        rules = replace(rules, inline_json_bytes=NEVER, inline_texts_bytes=NEVER)
    pool = TransformPool([TransformThread(), TransformThread()])
    if where == "process":
        pool = TransformPool([TransformProcess(3, NEVER, instruments.metrics)])
    items, answers = Tray(), Tray()
    service = IngestService(
        RecordSource(  # type: ignore[arg-type]  # what is used of it
            delivery(*values, headers=[("content-type", content_type.encode())])
        ),
        items,
        answers,
        rules,
        instruments,
        transforms=pool,
    )
    await service.run()
    return items.requests, answers.requests, counted(instruments, "transform_bytes_total", model="")


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_large_json_on_worker_equals_that_of_event_loop(models: Models, where: str) -> None:
    """Inputs, identity, version and charge; a small request is none of the workers'."""
    values = [numbers(), numbers(size=10)]
    inline, _, none = await ingest(models, "inline", JSON, values)
    made, ended, made_bytes = await ingest(models, where, JSON, values)

    assert (none, made_bytes, ended) == (0, 100_000, [])
    made.sort(key=lambda request: request.offset)
    assert [described(each) for each in made] == [described(each) for each in inline]


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_large_json_that_is_wrong_is_refused_alone(models: Models, where: str) -> None:
    """With the code, the reason and the caller's id that the event loop would give."""
    values = [
        numbers().replace(b'"UINT8"', b'"FP99"'),
        numbers().replace(b'"numbers"', b'"nothing"'),
        numbers()[:-10],
        numbers(),
    ]
    _, expected, _ = await ingest(models, "inline", JSON, values)
    made, ended, _ = await ingest(models, where, JSON, values)

    ended.sort(key=lambda request: request.offset)  # two workers: either may be first
    assert [each.offset for each in made] == [3]
    assert [each.failure for each in ended] == [each.failure for each in expected]
    assert [each.id for each in ended] == [each.id for each in expected]
    assert [charge(each) for each in ended] == [charge(each) for each in expected]


@pytest.mark.parametrize("where", ["thread", "process"])
async def test_large_texts_on_worker_equal_those_of_event_loop(models: Models, where: str) -> None:
    """They are views of the value in both cases, and charged with it."""
    inline, _, none = await ingest(models, "inline", MSGPACK, [texts()])
    made, ended, made_bytes = await ingest(models, where, MSGPACK, [texts()])

    assert (none, ended) == (0, [])
    assert made_bytes > 256 * 1024
    assert [described(each) for each in made] == [described(each) for each in inline]


def described(request: Request) -> tuple[object, ...]:
    """All that decoding sets."""
    (tensor,) = request.inputs
    return (
        *(request.model, request.version, request.id, request.rows, request.shape_class),
        *(request.size_bytes, request.wanted, tensor.name, tensor.datatype, tuple(tensor.shape)),
        *(to_array(tensor).tolist(), charge(request)),
    )


def charge(request: Request) -> int:
    """The bytes charged for a request."""
    assert isinstance(request.ack_handle, InFlightAck)
    return request.ack_handle.size_bytes
