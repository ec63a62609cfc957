"""Requests whose values are in a store: fetched within the budget and the deadline."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.cli.replay import PipelineJob, replay_into_models
from headrace.client import Client, InferenceError
from headrace.client.rpc import RpcClient
from headrace.config import Settings, make_settings
from headrace.crash_isolation.markers import NOBODY, CrashMarkers
from headrace.crash_isolation.poison_search import CrashMarker
from headrace.log.memory import MemoryLog
from headrace.log.port import NewRecord, Record, TopicPartition
from headrace.primitives.backoff import Backoff
from headrace.protocol.claims import parse_claim
from headrace.protocol.codec import Answer, decode_response, encode_request
from headrace.protocol.compression import compress
from headrace.protocol.headers import JSON, MSGPACK
from headrace.protocol.messages import ErrorResponse
from headrace.runtime.process import Pipeline
from headrace.tools.dead_letters import Redrive, RedriveJob
from headrace.tools.replay.capture import CaptureWriter
from headrace.tools.replay.jobs import RecordingSource
from headrace.tools.replay.recording import Selection
from headrace.tools.replay.replay import Unpaced
from headrace.tools.replay.sinks import Marking
from headrace.topics import STAGES, Topic
from headrace.tuning import TUNING, ClaimTuning, Tuning
from tests.support.claim_store import StandInStore
from tests.support.conditions import eventually
from tests.support.gateways import gateway_of
from tests.support.logs import read as read_records
from tests.support.logs import write_to
from tests.support.models import add_version, digits
from tests.support.pipelines import Caller, log_for, serving
from tests.support.recordings import START_MS
from tests.support.tree import ROOT

EXAMPLE = ROOT / "examples" / "orders"
TOGETHER, APART = [STAGES], [[stage] for stage in STAGES]
EXECUTOR_TOGETHER = [STAGES[:1], STAGES[1:3], STAGES[3:]]
QUICK = replace(TUNING, claims=ClaimTuning(backoff=Backoff(0.01, 0.05)))
PATIENT = replace(QUICK, consumer=replace(QUICK.consumer, revocation_timeout_s=3600))
MIB = 1024 * 1024
WAITING_BYTES = "headrace_claim_waiting_answer_bytes"


def claiming(directory: Path, store: StandInStore, **more: Any) -> Settings:
    """Settings with `digits`, whose claims may be in a store."""
    add_version(directory, "digits", 1, digits())
    claims = {"allowed": [f"{store.url}/in"], **more.pop("claims", {})}
    return make_settings(
        {
            "topics": {"partitions": 4, **more.pop("topics", {})},
            "models": {"repository": directory},
            "claims": claims,
            **more,
        }
    )


def put(
    store: StandInStore, name: str, rows: int, content_type: str = MSGPACK, coding: str = ""
) -> bytes:
    """Put a request for `digits` whose pixels are all 1; return its claim."""
    inputs = {"pixels": np.ones((rows, 64), np.float32)}
    content = encode_request(content_type, "digits", inputs, id=name)
    return store.put(f"/in/{name}", compress(content, coding) if coding else content)


def record_of(claim: bytes, *more: tuple[str, bytes], value: bytes | None = None) -> NewRecord:
    """A request record with a claim."""
    return NewRecord(b"key", value, [("x-model", b"digits"), ("x-claim", claim), *more])


def read(record: Record, rows: int) -> str:
    """Check an answer; return its status."""
    answer = decode_response(record.headers, record.value)
    if isinstance(answer, Answer):
        assert answer.outputs["scores"].shape == (rows, 10)
        np.testing.assert_allclose(answer.outputs["scores"][-1], 64 * np.arange(10.0), rtol=1e-4)
        return "ok"
    return answer.error_details.code


def error_of(record: Record) -> ErrorResponse:
    """The error in an answer."""
    answer = decode_response(record.headers, record.value)
    assert isinstance(answer, ErrorResponse), answer
    return answer


async def called(
    settings: Settings, log: MemoryLog, records: Sequence[NewRecord], grouping: Any = TOGETHER
) -> list[Record]:
    """The answers to records, in their order."""
    async with serving(settings, log, grouping, QUICK), RpcClient(log, settings) as client:
        return list(await asyncio.gather(*map(client.call, records)))


@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@pytest.mark.parametrize("coding", ["", "gzip"])
async def test_object_of_claim_is_run_as_if_it_were_value(
    tmp_path: Path, content_type: str, coding: str, grouping: Any
) -> None:
    """Objects in either encoding, compressed or not, are run; they may be larger than a request."""
    rows = 300
    async with StandInStore() as store:
        settings = claiming(tmp_path, store, limits={"max_request_bytes": 1024})
        log = await log_for(settings)
        claim = put(store, "a", rows, content_type, coding)
        about = [("content-type", content_type.encode()), ("mine", b"1")]
        about += [("content-encoding", coding.encode())] if coding else []
        (answer,) = await called(settings, log, [record_of(claim, *about)], grouping)

    assert read(answer, rows) == "ok"
    headers = dict(answer.headers)
    assert headers["mine"] == b"1"
    assert "x-claim" not in headers


@pytest.mark.parametrize("order", ["none", "key"])
async def test_many_claims_stay_within_budget_while_store_is_slow_and_fails(
    tmp_path: Path, order: str
) -> None:
    """40 of 2 MiB under a budget of 8 MiB: each is answered, and few are here at a time."""
    rows, count, budget_bytes = 2 * MIB // 256, 40, 8 * MIB
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"max_in_flight_bytes": budget_bytes, "model_share": 1, "tenant_share": 1},
            delivery={"order": order},
            claims={"max_bytes": 3 * MIB, "concurrency": 32},
        )
        log = await log_for(settings)
        claims = [put(store, str(number), rows) for number in range(count)]
        store.failures_left = 20
        store.pause_s = 0.001
        answers = await called(settings, log, [record_of(claim) for claim in claims])

    assert [read(answer, rows) for answer in answers] == ["ok"] * count
    assert 1 < store.most_reads <= budget_bytes // (2 * MIB)


async def test_claims_over_their_models_share_are_left_in_log(tmp_path: Path) -> None:
    """Another model's requests find room beside them."""
    rows, count = 2 * MIB // 256, 12
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"max_in_flight_bytes": 8 * MIB},
            claims={"max_bytes": 3 * MIB},
        )
        add_version(tmp_path, "other", 1, digits())
        log = await log_for(settings)
        claims = [put(store, str(number), rows) for number in range(count)]
        store.holds = True
        small = encode_request(MSGPACK, "other", {"pixels": np.ones((1, 64), np.float32)})
        async with (
            serving(settings, log, TOGETHER, QUICK) as (pipeline,),
            RpcClient(log, settings) as client,
            asyncio.TaskGroup() as tasks,
        ):
            waiting = [tasks.create_task(client.call(record_of(claim))) for claim in claims]
            await eventually(lambda: store.reads > 0, what="objects are fetched")
            assert read(await client.call(NewRecord(None, small)), 1) == "ok"
            assert not any(each.done() for each in waiting)
            registry = pipeline.metrics.registry
            charged = registry.get_sample_value(
                "headrace_in_flight_bytes", {"topic": settings.topic(Topic.REQUESTS)}
            )
            store.held.set()
        statuses = [read(each.result(), rows) for each in waiting]

    assert 2 * MIB < (charged or 0.0) < 8 * MIB
    assert statuses == ["ok"] * count
    assert store.most_reads <= 2


async def test_claims_that_cannot_be_fetched_are_answered_within_deadline(tmp_path: Path) -> None:
    """An answer comes at the deadline, or is retriable after the time limit of one object."""
    async with StandInStore() as store:
        settings = claiming(tmp_path, store, claims={"timeout_ms": 1000})
        log = await log_for(settings)
        claim = put(store, "a", 1)
        store.failures_left = 1_000_000
        due = ("x-timeout-ms", b"100")
        late, away = await called(settings, log, [record_of(claim, due), record_of(claim)])

    assert error_of(late).error_details.code == "DEADLINE_EXCEEDED"
    assert error_of(away).error_details.code == "INTERNAL"
    assert error_of(away).error_details.retriable
    assert f"{store.url}: got status 503" in error_of(away).error


@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
async def test_claim_that_cannot_be_used_is_refused_with_reason(
    tmp_path: Path, grouping: Any
) -> None:
    """The error names the fault of the claim or its object; the dead letter has the reference."""
    async with StandInStore() as store, StandInStore() as evil:
        settings = claiming(tmp_path, store, claims={"max_bytes": 10_000})
        log = await log_for(settings)
        good, gone, other = (put(store, name, 1) for name in ("good", "gone", "other"))
        del store.objects["/in/gone"]
        store.objects["/in/other"] = store.objects["/in/other"][:-1] + b"x"
        junk = store.put("/in/junk", b"junk")
        large = store.put("/in/large", bytes(10_001))
        bomb = store.put("/in/bomb", compress(bytes(1_000_000), "gzip"))
        refused = {
            f"a URL that claims.allowed allows, got one of {evil.url}": (evil.put("/in/a", b"")),
            "got none": gone,
            "the SHA-256": other,
            "a URL, a size in bytes": b"good",
            "inputs": junk,
        }
        records = [record_of(claim) for claim in refused.values()]
        records += [
            record_of(good, value=b"beside"),
            NewRecord(None, None, [("x-claim", good)]),
            record_of(large),
            record_of(bomb, ("content-encoding", b"gzip")),
        ]
        answers = await called(settings, log, records, grouping)
        letters = await dead_letters(log, settings)

    errors = [error_of(answer) for answer in answers]
    assert [each.error_details.code for each in errors[:-2]] == ["INVALID_REQUEST"] * 7
    for expected, error in zip(refused, errors, strict=False):
        if expected != "inputs":
            assert expected in error.error
    assert "a record without a value" in errors[5].error
    assert "x-model" in errors[6].error
    assert [each.error_details.code for each in errors[-2:]] == ["TOO_LARGE"] * 2
    assert not evil.requests
    assert "GET /in/large" not in store.requests
    kept = Counter(dict(letter.headers)["x-claim"] for letter in letters)
    assert kept == Counter(dict(record.headers)["x-claim"] for record in records)
    assert {letter.value for letter in letters} == {None}


async def dead_letters(log: MemoryLog, settings: Settings) -> list[Record]:
    """All dead letters."""
    topic = settings.topic(Topic.DEAD_LETTERS)
    count = (await log.describe_topics([topic]))[topic]
    assert count is not None
    names = [TopicPartition(topic, number) for number in range(count.partitions)]
    found: list[Record] = []
    async with log.reader(names) as reader:
        for name in names:
            reader.seek(name, 0)
        left = sum((await reader.end_offsets(names)).values())
        while len(found) < left:
            for records in (await reader.poll(0.1, 1000)).values():
                found += records
    return found


@pytest.mark.parametrize("grouping", [TOGETHER, APART], ids=["together", "apart"])
async def test_records_of_claim_are_enriched(tmp_path: Path, grouping: Any) -> None:
    """The answer has the record with the scores, which the object holds."""
    orders = (EXAMPLE / "orders.json").read_bytes()
    async with StandInStore() as store:
        shutil.copytree(EXAMPLE / "models" / "fraud", tmp_path / "fraud")
        settings = claiming(tmp_path, store, limits={"inline_payload_bytes": 100})
        log = await log_for(settings)
        about = [("content-type", b"application/json"), ("x-model", b"fraud")]
        record = NewRecord(None, None, [*about, ("x-claim", store.put("/in/orders", orders))])
        (answer,) = await called(settings, log, [record], grouping)

    scored = json.loads(answer.value or b"")
    assert [each.pop("score") > 0 for each in scored] == [True] * len(scored)
    assert scored == json.loads(orders)


async def test_redriven_dead_letter_fetches_object_again(tmp_path: Path) -> None:
    """It has the reference, and no value."""
    async with StandInStore() as store:
        settings = claiming(tmp_path, store)
        log = await log_for(settings)
        claim = put(store, "a", 3)
        content = store.objects.pop("/in/a")
        (refused,) = await called(settings, log, [record_of(claim)])
        store.objects["/in/a"] = content
        caller = Caller(settings, log)
        async with serving(settings, log, TOGETHER, QUICK):
            tally = await Redrive(log, settings, RedriveJob()).run()
            await eventually(lambda: caller.answered() == 2, what="the letter is answered")
        answers = await caller.answers()

    assert error_of(refused).error_details.code == "INVALID_REQUEST"
    assert tally.sent == {"INVALID_REQUEST": 1}
    assert sorted(read(answer, 3) for answer in answers) == ["INVALID_REQUEST", "ok"]


async def test_captured_claim_is_replayed_by_its_reference(tmp_path: Path) -> None:
    """The file has no object; that is fetched when the copy runs."""
    async with StandInStore() as store:
        settings = claiming(tmp_path / "models", store)
        claim = put(store, "a", 3)
        headers = tuple(record_of(claim).headers)
        original = Record("requests", 0, 0, START_MS, None, None, headers)
        with CaptureWriter(tmp_path / "capture", "requests") as writer:
            writer.add([original])
        job = PipelineJob(tmp_path / "models", Unpaced(), Marking("run"))
        source = RecordingSource(tmp_path / "capture", Selection())
        outcome, statuses = await replay_into_models(settings, source, job, lambda _: unwatched)

    assert (outcome.records, statuses) == (1, {"ok": 1})
    assert store.requests == ["GET /in/a"]


def unwatched(*_: object) -> None:
    """Tell nobody of a replay's progress."""


async def test_executor_apart_fetches_object_itself(tmp_path: Path) -> None:
    """No topic between the stages holds it, and a failing store ends its request alone."""
    rows = 2000
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            topics={"partitions": 1},
            limits={"shared_values_bytes": 0},
            claims={"timeout_ms": 2000},
        )
        log = await log_for(settings)
        claims = [put(store, name, rows) for name in ("a", "b")]
        store.away_after["/in/b"] = 1  # ingest has it then
        (answer, away) = await called(settings, log, [record_of(each) for each in claims], APART)
        topics = [settings.topic(topic) for topic in (Topic.ITEMS, Topic.BATCHES)]
        between: list[Record] = []
        for topic in topics:
            between += await log.fetch(TopicPartition(topic, 0), 0, 10, 1 << 24)

    assert read(answer, rows) == "ok"
    assert error_of(away).error_details.code == "INTERNAL"
    assert store.requests.count("GET /in/a") == 2
    assert between
    assert all(len(record.value or b"") < 2000 for record in between)


async def test_executor_of_same_machine_needs_no_store(tmp_path: Path) -> None:
    """It finds in shared memory what ingest has fetched."""
    rows = 2000
    async with StandInStore() as store:
        settings = claiming(tmp_path, store, limits={"shared_values_dir": tmp_path})
        log = await log_for(settings)
        claim = put(store, "a", rows)
        store.away_after["/in/a"] = 1
        (answer,) = await called(settings, log, [record_of(claim)], APART)

    assert read(answer, rows) == "ok"
    assert store.requests == ["GET /in/a"]


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("coding", ["", "zstd"])
async def test_large_answers_are_put_into_store(
    tmp_path: Path, guarantee: str, coding: str
) -> None:
    """At the place of their request; small ones are in their records."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            delivery={"guarantee": guarantee},
            answers={"claim_store": f"{store.url}/out", "claim_above_bytes": 1000},
        )
        log = await log_for(settings)
        store.failures_left = 2
        about = [("accept-encoding", coding.encode())] if coding else []
        values = [
            encode_request(MSGPACK, "digits", {"pixels": np.ones((rows, 64), np.float32)})
            for rows in (100, 1)
        ]
        large, small = await called(
            settings, log, [NewRecord(None, each, about) for each in values]
        )

    headers = dict(large.headers)
    claim = parse_claim(headers["x-claim"] or b"")
    path = f"/{claim.address.key}"
    content = store.objects[path]
    expires = headers["x-claim-expires-ms"] or b""
    assert large.value is None
    assert path == f"/out/{(headers['x-request'] or b'').decode()}/{claim.sha256}"
    assert hashlib.sha256(content).hexdigest() == claim.sha256
    assert store.attributes[path]["headrace-expires-ms"] == expires.decode()
    assert (headers.get("content-encoding") or b"").decode() == coding
    assert read(large._replace(value=content), 100) == "ok"
    assert "x-claim" not in dict(small.headers)
    assert read(small, 1) == "ok"


async def test_claims_of_both_directions_apply_accepted_content_type(tmp_path: Path) -> None:
    """An object is not fetched if no answer is accepted; one of an answer has what is accepted."""
    async with StandInStore() as store:
        answers = {"claim_store": f"{store.url}/out", "claim_above_bytes": 1000}
        settings = claiming(tmp_path, store, answers=answers)
        log = await log_for(settings)
        records = [
            record_of(put(store, name, 100), ("accept", accept))
            for name, accept in (("image", b"image/png"), ("json", JSON.encode()))
        ]
        refused, stored = await called(settings, log, records)

    assert "header accept: expected at least one of application/msg" in error_of(refused).error
    assert [path for path in store.requests if "/in/" in path] == ["GET /in/json"]
    headers = dict(stored.headers)
    assert headers["content-type"] == JSON.encode()
    path = f"/{parse_claim(headers['x-claim'] or b'').address.key}"
    assert json.loads(store.objects[path])["outputs"][0]["shape"][0] == 100


async def test_answers_that_wait_for_a_slow_store_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Small requests may have large answers; those over the bound are not made yet, and a metric
    has the bytes of the others.
    """
    count = 24
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            claims={"concurrency": 100},
            answers={"claim_store": f"{store.url}/out", "claim_above_bytes": 1000},
        )
        tuning = replace(QUICK, responder=replace(QUICK.responder, max_stored_answer_bytes=5000))
        log = await log_for(settings)
        store.pause_s = 0.02
        value = encode_request(MSGPACK, "digits", {"pixels": np.ones((100, 64), np.float32)})

        def waiting_bytes() -> float:
            return pipeline.metrics.registry.get_sample_value(WAITING_BYTES) or 0.0

        async with (
            serving(settings, log, TOGETHER, tuning) as (pipeline,),
            RpcClient(log, settings) as client,
            asyncio.TaskGroup() as tasks,
        ):
            calls = [tasks.create_task(client.call(NewRecord(None, value))) for _ in range(count)]
            await eventually(lambda: waiting_bytes() > 5000, what="more outputs wait than may")
            answers = await asyncio.gather(*calls)
            assert waiting_bytes() == 0

    assert all("x-claim" in dict(answer.headers) for answer in answers)
    assert len(store.requests) == count
    assert store.most_writes < count / 2


async def test_small_answer_does_not_overtake_large_one_of_its_key(tmp_path: Path) -> None:
    """It waits for the store too, where answers are in order."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            delivery={"order": "key"},
            answers={"claim_store": f"{store.url}/out", "claim_above_bytes": 1000},
        )
        log = await log_for(settings)
        store.pause_s = 0.05
        caller = Caller(settings, log)
        values = [
            encode_request(MSGPACK, "digits", {"pixels": np.ones((rows, 64), np.float32)})
            for rows in (100, 1, 100, 1)
        ]
        async with serving(settings, log, TOGETHER, QUICK), RpcClient(log, settings) as client:
            await asyncio.gather(*[client.call(NewRecord(b"key", each)) for each in values])
        answers = await caller.answers()

    offsets = [
        int((dict(each.headers)["x-request"] or b"").rpartition(b"/")[2]) for each in answers
    ]
    assert offsets == [0, 1, 2, 3]
    assert ["x-claim" in dict(each.headers) for each in answers] == [True, False, True, False]


async def test_answer_that_cannot_be_put_is_an_error(tmp_path: Path) -> None:
    """Retriable after the time for one object; other answers do not wait for it."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            claims={"timeout_ms": 200},
            answers={"claim_store": f"{store.url}/out", "claim_above_bytes": 1000},
        )
        log = await log_for(settings)
        store.failures_left = 1_000_000
        value = encode_request(MSGPACK, "digits", {"pixels": np.ones((100, 64), np.float32)})
        due = [("x-timeout-ms", b"100")]
        away, late = await called(
            settings, log, [NewRecord(None, value), NewRecord(None, value, due)]
        )

    assert error_of(away).error_details.code == "INTERNAL"
    assert "answers.claim_store" in error_of(away).error
    assert error_of(late).error_details.code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
@pytest.mark.parametrize("compression", ["", "gzip"])
async def test_client_puts_requests_and_fetches_answers_by_itself(
    tmp_path: Path, content_type: str, compression: str
) -> None:
    """Small ones pass through the log alone."""
    rng = np.random.default_rng(1)
    async with StandInStore() as store:
        settings = through_store(tmp_path, store)
        log = await log_for(settings)
        async with (
            serving(settings, log, TOGETHER, QUICK),
            Client(
                log=log, settings=settings, content_type=content_type, compression=compression
            ) as client,
        ):
            small = await client.infer("digits", {"pixels": np.ones((1, 64), np.float32)})
            assert not store.requests
            pixels = rng.standard_normal((200, 64), np.float32)
            large = await client.infer("digits", {"pixels": pixels}, version="1", id="mine")

    assert small.outputs["scores"].shape == (1, 10)
    expected = pixels.sum(axis=1, keepdims=True) * np.arange(10)
    np.testing.assert_allclose(large.outputs["scores"], expected, rtol=1e-3, atol=1e-3)
    assert large.id == "mine"
    assert [each.split("/")[0:2] for each in store.requests] == [
        ["PUT ", "in"],
        ["GET ", "in"],
        ["PUT ", "out"],
        ["GET ", "out"],
    ]


async def test_client_without_store_of_answer_says_so(tmp_path: Path) -> None:
    """The same for an object that is no longer there."""
    pixels = np.ones((200, 64), np.float32)
    async with StandInStore() as store:
        settings = through_store(tmp_path, store)
        log = await log_for(settings)
        plain = make_settings({"topics": {"partitions": 4}})
        async with (
            serving(settings, log, TOGETHER, QUICK),
            Client(log=log, settings=plain) as client,
            Client(log=log, settings=settings) as putting,
        ):
            with pytest.raises(InferenceError, match="INTERNAL: answer: expected its store"):
                await client.infer("digits", {"pixels": pixels})
            store.forgets = "/out"
            with pytest.raises(InferenceError, match=r"answer: .* got none") as raised:
                await putting.infer("digits", {"pixels": pixels})

    assert raised.value.code == "INTERNAL"


async def test_gateway_puts_and_fetches_for_its_callers(tmp_path: Path) -> None:
    """They see tensors as always."""
    async with StandInStore() as store:
        add_version(tmp_path, "digits", 1, digits())
        given = {"claims": claims_of(store), "answers": answers_of(store)}
        async with gateway_of(tmp_path, sections=given) as served:
            pixels = {"name": "pixels", "datatype": "FP32", "shape": [200, 64], "data": [1] * 12800}
            reply = await served.infer("digits", {"inputs": [pixels]})

    assert reply.status == 200
    (scores,) = (each for each in reply.json["outputs"] if each["name"] == "scores")
    assert scores["data"][-10:] == [64.0 * number for number in range(10)]
    assert sorted(each.split("/")[1] for each in store.requests) == ["in", "in", "out", "out"]


def claims_of(store: StandInStore) -> dict[str, Any]:
    """Settings by which requests of more than 2000 bytes are put into a store."""
    return {"allowed": [f"{store.url}/in"], "store": f"{store.url}/in", "above_bytes": 2000}


def answers_of(store: StandInStore) -> dict[str, Any]:
    """Settings by which answers of more than 2000 bytes are put into a store."""
    return {"claim_store": f"{store.url}/out", "claim_above_bytes": 2000}


def through_store(directory: Path, store: StandInStore) -> Settings:
    """Settings with both."""
    return claiming(directory, store, claims=claims_of(store), answers=answers_of(store))


async def test_claims_are_refused_where_none_are_allowed(tmp_path: Path) -> None:
    """Only settings allow them."""
    async with StandInStore() as store:
        settings = claiming(tmp_path, store, claims={"allowed": []})
        log = await log_for(settings)
        (answer,) = await called(settings, log, [record_of(put(store, "a", 1))])

    assert "claims.allowed is empty" in error_of(answer).error
    assert not store.requests


async def test_cancelled_claim_is_not_waited_for(tmp_path: Path) -> None:
    """Its request is answered while its store still sends."""
    async with StandInStore() as store:
        settings = claiming(tmp_path, store)
        log = await log_for(settings)
        caller = Caller(settings, log)
        claim = put(store, "a", 1)
        store.holds = True
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        async with serving(settings, log, TOGETHER, QUICK), log.producer() as producer:
            await producer.send(place, [record_of(claim), record_of(claim)])
            await eventually(lambda: store.reads == 2, what="both objects are fetched")
            cancel = ("x-cancel", f"{place.topic}/0/0".encode())
            await producer.send(place, [NewRecord(b"key", None, [cancel])])
            await eventually(lambda: caller.answered() == 1, what="the cancelled one is answered")
            store.held.set()
        answers = await caller.answers()

    assert Counter(read(answer, 1) for answer in answers) == {"CANCELLED": 1, "ok": 1}


async def test_claim_that_is_cancelled_in_its_chunk_is_not_fetched(tmp_path: Path) -> None:
    """The record that cancels it was read together with it."""
    async with StandInStore() as store:
        settings = claiming(tmp_path, store)
        log = await log_for(settings)
        caller = Caller(settings, log)
        claim = put(store, "a", 1)
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        cancel = ("x-cancel", f"{place.topic}/0/0".encode())
        store.holds = True
        await write_to(log, place, record_of(claim), NewRecord(b"key", None, [cancel]))
        async with serving(settings, log, TOGETHER, QUICK):
            await eventually(lambda: caller.answered() == 1, what="it is answered")
        answers = await caller.answers()

    assert [read(answer, 1) for answer in answers] == ["CANCELLED"]
    assert store.requests == []


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_claims_that_wait_at_stop_are_answered_by_next_process(
    tmp_path: Path, guarantee: str
) -> None:
    """They were left in the log, and the stop did not wait for the store."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"drain_timeout_s": 3600},
            delivery={"guarantee": guarantee},
        )
        log = await log_for(settings)
        caller = Caller(settings, log)
        claims = [put(store, str(number), 1) for number in range(5)]
        store.holds = True
        async with RpcClient(log, settings) as client, asyncio.TaskGroup() as tasks:
            async with serving(settings, log, TOGETHER, QUICK):
                waiting = [tasks.create_task(client.call(record_of(claim))) for claim in claims]
                await eventually(lambda: store.reads == 5, what="objects are fetched")
            store.held.set()
            async with serving(settings, log, TOGETHER, QUICK):
                await asyncio.wait(waiting)
        answered = caller.answered()

    assert [read(each.result(), 1) for each in waiting] == ["ok"] * 5
    assert answered == 5 or guarantee == "exactly_once"  # transactions have markers


@pytest.mark.parametrize("grouping", [APART, EXECUTOR_TOGETHER], ids=["apart", "with batcher"])
async def test_claim_that_waits_in_executor_at_stop_is_answered_by_next_process(
    tmp_path: Path, grouping: Any
) -> None:
    """Ingest has checked its object; the stop does not wait until the executor has it again."""
    rows = 2000  # smaller ones travel with their requests
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"drain_timeout_s": 3600, "shared_values_bytes": 0},
            claims={"timeout_ms": 3_600_000},
        )
        log = await log_for(settings)
        claim = put(store, "a", rows)
        store.holds_repeats = True
        async with RpcClient(log, settings) as client, asyncio.TaskGroup() as tasks:
            async with serving(settings, log, grouping, QUICK):
                waiting = tasks.create_task(client.call(record_of(claim)))
                await eventually(
                    lambda: store.reads == 1 and len(store.requests) > 1,
                    what="the object is fetched again",
                )
            store.held.set()
            async with serving(settings, log, grouping, QUICK):
                await asyncio.wait([waiting])

    assert read(waiting.result(), rows) == "ok"


@pytest.mark.parametrize("order", ["none", "key", "partition"])
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_claims_that_wait_at_rebalance_do_not_hold_it(
    tmp_path: Path, guarantee: str, order: str
) -> None:
    """They are left in the log, and fetched by who owns their partitions then."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"drain_timeout_s": 3600},
            delivery={"guarantee": guarantee, "order": order},
        )
        statuses, ended = await rebalanced(settings, store, PATIENT)

    assert statuses == ["ok"] * 5
    assert ended == 5


@pytest.mark.parametrize("order", ["key", "partition"])
@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_answers_held_behind_claim_do_not_hold_stop(
    tmp_path: Path, guarantee: str, order: str
) -> None:
    """They stay in the log with it, and the next process answers in order."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"drain_timeout_s": 3600},
            delivery={"guarantee": guarantee, "order": order},
        )
        log = await log_for(settings)
        inputs = {"pixels": np.ones((1, 64), np.float32)}
        plain = NewRecord(b"key", encode_request(MSGPACK, "digits", inputs))
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        store.holds = True
        async with serving(settings, log, TOGETHER, QUICK) as (pipeline,):
            await write_to(log, place, record_of(put(store, "a", 1)), plain, plain)
            await eventually(lambda: store.reads == 1, what="the object is fetched")
            await eventually(lambda: runs_of(pipeline) == 2, what="the others have run")
        store.held.set()
        responses = TopicPartition(settings.topic(Topic.RESPONSES), 0)
        written = log.faults.partitions.end_offset(responses)
        async with log.reader([responses]) as reader, serving(settings, log, TOGETHER, QUICK):
            answers = await read_records(reader, 3)

    assert written == 0
    assert [read(answer, 1) for answer in answers] == ["ok"] * 3
    requests = [dict(answer.headers)["x-request"] for answer in answers]
    assert requests == [f"{place.topic}/0/{offset}".encode() for offset in range(3)]


def runs_of(pipeline: Pipeline) -> float:
    """How many requests have run."""
    labels = {"model": "digits", "version": "1"}
    counted = pipeline.metrics.registry.get_sample_value("headrace_batch_rows_sum", labels)
    return counted or 0.0


async def test_claim_that_runs_alone_does_not_hold_stop(tmp_path: Path) -> None:
    """It is left in the log, and a suspect as before: it has not run."""
    async with StandInStore() as store:
        settings = claiming(
            tmp_path,
            store,
            limits={"drain_timeout_s": 3600},
            claims={"timeout_ms": 20_000},
        )
        log = await log_for(settings)
        caller = Caller(settings, log)
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        await write_to(log, place, *[record_of(put(store, name, 1)) for name in ("a", "b")])
        markers = CrashMarkers(log, settings.namespace)
        suspects = CrashMarker(is_open=True, suspects=((0, 2),))
        await markers.write({place: suspects}, NOBODY)
        store.holds = True
        async with serving(settings, log, TOGETHER, QUICK):
            await eventually(lambda: store.reads == 1, what="an object is fetched")
        answered = caller.answered()
        marker, _ = (await markers.read([place]))[place]
        store.held.set()
        async with serving(settings, log, TOGETHER, QUICK):
            await eventually(lambda: caller.answered() == 2, what="both are answered")
        answers = await caller.answers()

    assert answered == 0
    assert (marker.is_open, marker.suspects) == (False, ((0, 2),))
    assert [read(answer, 1) for answer in answers] == ["ok", "ok"]


async def test_claim_that_runs_alone_in_executor_does_not_hold_stop(tmp_path: Path) -> None:
    """The executor has the object again before it runs the request: it leaves it in the log."""
    rows = 2000  # smaller ones travel with their requests
    async with StandInStore() as store:
        settings = claiming(
            tmp_path, store, limits={"drain_timeout_s": 3600}, claims={"timeout_ms": 3_600_000}
        )
        log = await log_for(settings)
        items = TopicPartition(settings.topic(Topic.ITEMS), 0)
        caller = Caller(settings, log)
        place = TopicPartition(settings.topic(Topic.REQUESTS), 0)
        store.holds_repeats = True
        async with serving(settings, log, EXECUTOR_TOGETHER[:1], QUICK):
            await write_to(log, place, record_of(put(store, "a", rows)))
            await eventually(lambda: log.faults.partitions.end_offset(items) == 1)
        markers = CrashMarkers(log, f"{settings.namespace}.batcher")
        await markers.write({items: CrashMarker(is_open=True, suspects=((0, 1),))}, NOBODY)
        async with serving(settings, log, EXECUTOR_TOGETHER[1:], QUICK):
            await eventually(
                lambda: store.reads == 1 and len(store.requests) > 1,
                what="the object is fetched again",
            )
        answered = caller.answered()
        marker, _ = (await markers.read([items]))[items]
        store.held.set()
        async with serving(settings, log, EXECUTOR_TOGETHER[1:], QUICK):
            await eventually(lambda: caller.answered() == 1, what="it is answered")
        answers = await caller.answers()

    assert answered == 0
    assert (marker.is_open, marker.suspects) == (False, ((0, 1),))
    assert [read(answer, rows) for answer in answers] == ["ok"]


async def rebalanced(
    settings: Settings, store: StandInStore, tuning: Tuning
) -> tuple[list[str], float | None]:
    """Statuses of five claims that wait for their store at a rebalance, and how many of their
    fetches ended at it.
    """
    log = await log_for(settings)
    claims = [put(store, str(number), 1) for number in range(5)]
    store.holds = True
    async with (
        serving(settings, log, TOGETHER, tuning) as (pipeline,),
        RpcClient(log, settings) as client,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = [tasks.create_task(client.call(record_of(claim))) for claim in claims]
        await eventually(lambda: store.reads == 5, what="objects are fetched")
        log.faults.groups.force_rebalance(settings.namespace)
        await eventually(lambda: len(store.requests) == 10, what="objects are fetched again")
        ended = pipeline.metrics.registry.get_sample_value(
            "headrace_claims_total", {"operation": "fetch", "outcome": "cancelled"}
        )
        store.held.set()
    return [read(each.result(), 1) for each in waiting], ended
