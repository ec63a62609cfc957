"""Models change on the control topic under load: no request fails, each name means its version."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from aiohttp import ClientSession
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec.structs import replace
from onnx import helper
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from headrace.cli.outcome import Exit
from headrace.client import Client, InferenceError
from headrace.config import GatewaySettings, Settings, make_settings
from headrace.control.processes import open_processes
from headrace.control.topic import ControlTopic
from headrace.errors import Code
from headrace.log.memory import MemoryLog
from headrace.models.config import make_model_config
from headrace.models.packing.files import make_manifest, read_manifest, write_manifest
from headrace.models.packing.signatures import sign
from headrace.models.signature import Signature, read_onnx_signature
from headrace.models.wanted import (
    Author,
    Change,
    fold,
    load,
    remove_label,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.protocol.control import WantedModel
from headrace.protocol.events import NOT_READ
from headrace.runtime.process import Pipeline, running
from headrace.runtime.shutdown import Stop
from headrace.telemetry.instruments import Instruments
from headrace.telemetry.metrics import Metrics
from headrace.topics import STAGES, Topic
from headrace.tuning import TUNING
from tests.support.command_line import Call
from tests.support.conditions import DEADLINE_S, eventually
from tests.support.gateways import pipeline_with_doors
from tests.support.kept_topic import KeptTopic, copy_records
from tests.support.models import add_version, digits
from tests.support.pipelines import log_for, serving
from tests.support.python_models import GATE, with_hooks
from tests.support.spans import role_of, tracing_settings, tracing_spans

VERSIONS = ("1", "2", "3", "4")
NAMES = ("digits", "digits@stable", "digits@canary")
CHANGES = 50
CALLERS = 8
KILLED_CHANGES = 15
SEEDS = 3


def controlled(repository: Path) -> Settings:
    """Settings of a deployment that follows the control topic; version n multiplies by n."""
    for number in map(int, VERSIONS):
        add_version(repository, "digits", number, digits(number), "probe = false")
    return make_settings(
        {
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},  # for its settings alone
            "topics": {"partitions": 4},
            "models": {
                "repository": repository,
                "mode": "explicit",
                "keep_replaced_s": 0.5,
                "trial_load": False,  # each takes a second; see below for the tests of it
            },
        }
    )


class Operator:
    """Makes changes, one after the other, and waits until every process has followed."""

    def __init__(self, settings: Settings, log: MemoryLog, pipelines: Sequence[Pipeline]) -> None:
        self.topic = ControlTopic(log, settings)
        self.generation = 0
        self._pipelines = pipelines

    async def change(self, change: Change, *, wait: bool = True) -> None:
        """Write a change; by default until all wanted versions are ready everywhere."""
        record = await self.topic.write(change, self.generation, Author("test"), time.time_ns())
        assert record is not None
        self.generation = record.generation
        if wait:
            await eventually(self.followed, what=f"generation {self.generation} everywhere")

    def unready(self) -> list[str]:
        """Return the wanted entries that are not ready in the first process."""
        found: list[str] = self._pipelines[0].state.status()["control"]["unready"]
        return found

    def shown(self, metric: str, labels: dict[str, str] | None = None) -> float | None:
        """A metric of the first process."""
        return self._pipelines[0].metrics.registry.get_sample_value(metric, labels)

    def models_of(self, name: str) -> list[dict[str, Any]]:
        """Return the status entries of a model's versions in the first process."""
        entries = self._pipelines[0].state.status()["models"]
        return [each for each in entries if each["name"] == name]

    def model_entry(self, version: str) -> dict[str, Any]:
        """Return the status entry of a version in the first process."""
        entries = self._pipelines[0].state.status()["models"]
        [entry] = [each for each in entries if each["version"] == version]
        return dict(entry)

    def followed(self) -> bool:
        """Whether all processes are at the last generation, with all wanted versions ready."""
        for pipeline in self._pipelines:
            control = pipeline.state.status()["control"]
            if control != {"generation": self.generation, "unready": []}:
                return False
        return True


@asynccontextmanager
async def deployment(
    settings: Settings, log: MemoryLog, processes: int = 2
) -> AsyncIterator[tuple[Operator, Client]]:
    """Fused processes, an operator and a client of them."""
    async with (
        serving(settings, log, [STAGES] * processes) as pipelines,
        Client(log=log, settings=settings) as client,
    ):
        yield Operator(settings, log, pipelines), client


async def version_of_answer(client: Client, name: str) -> str:
    """The version that answers a request for a name, by its outputs and by what it says."""
    response = await client.infer(name, {"pixels": np.ones((1, 64), np.float32)})
    computed = response.outputs["scores"][0][1] / 64
    assert response.model_version == f"{computed:.0f}"
    return response.model_version


async def refusal_of(client: Client, name: str) -> tuple[str, str]:
    """Code and message of the refusal of a request for a name."""
    with pytest.raises(InferenceError) as refused:
        await version_of_answer(client, name)
    return refused.value.code, str(refused.value)


class Meanings:
    """Versions that each name has had, and from which on it had them everywhere."""

    def __init__(self) -> None:
        self.versions: dict[str, list[str]] = {name: [] for name in NAMES}
        self.settled: dict[str, int] = dict.fromkeys(NAMES, 0)

    def written(self, meant: Mapping[str, str]) -> None:
        """Record what the names mean as soon as a process has read the change."""
        for name, version in meant.items():
            if self.versions[name][-1:] != [version]:
                self.versions[name].append(version)

    def followed(self) -> None:
        """Record that no process gives a name an older meaning any more."""
        self.settled = {name: len(self.versions[name]) - 1 for name in NAMES}


def meanings(model: WantedModel) -> dict[str, str]:
    """The version of each name."""
    labels = {f"digits@{label}": version for label, version in model.labels.items()}
    return {"digits": model.default} | labels


def random_change(chooser: random.Random, model: WantedModel) -> Change:
    """A change that is allowed and changes something; all names keep a version."""
    named = set(meanings(model).values())
    absent = [each for each in VERSIONS if each not in model.versions]
    free = [each for each in model.versions if each not in named]
    changes = [load("digits", each) for each in absent] + [unload("digits", each) for each in free]
    for version in model.versions:
        if version != model.default:
            changes += [set_default("digits", version)] * 2
        for label in ("stable", "canary"):
            if model.labels[label] != version:
                changes.append(set_label("digits", label, version))
    return chooser.choice(changes)


@pytest.mark.timeout(120)
async def test_every_request_is_answered_by_version_of_its_name_during_changes(
    tmp_path: Path,
) -> None:
    """50 changes of all kinds, some before the last one is followed, under continuous load."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    chooser = random.Random(4711)
    meant = Meanings()
    stopping = asyncio.Event()
    answered = 0

    async with deployment(settings, log) as (operator, client):

        async def call(name: str) -> None:
            nonlocal answered
            while not stopping.is_set():
                oldest = meant.settled[name]
                version = await version_of_answer(client, name)
                assert version in meant.versions[name][oldest:]
                answered += 1

        async def more_answers() -> None:
            wanted = answered + CALLERS
            await eventually(lambda: answered > wanted, what=f"{wanted} answers")

        await operator.change(load("digits", "1"))
        await operator.change(set_label("digits", "stable", "1"))
        await operator.change(set_label("digits", "canary", "1"))
        model = fold(await operator.topic.read()).models["digits"]
        meant.written(meanings(model))
        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                tasks.create_task(call(NAMES[number % len(NAMES)]))
            for _ in range(CHANGES):
                change = random_change(chooser, model)
                model = dict(change.apply({"digits": model}))["digits"]
                meant.written(meanings(model))
                waits = chooser.random() < 0.7
                await operator.change(change, wait=waits)
                if waits:
                    meant.followed()
                    await more_answers()
            stopping.set()
    assert operator.generation == CHANGES + 3
    assert answered > CHANGES * CALLERS / 2


async def test_process_announces_that_it_follows_topic_made_anew_no_more(tmp_path: Path) -> None:
    """Its generation is higher than any of the new topic, and says nothing about it."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    topic = ControlTopic(log, settings)
    for generation in range(2):
        await topic.write(load("digits", VERSIONS[generation]), generation, Author("test"), 0)
    async with running(Pipeline(settings, log)), open_processes(log, settings) as processes:
        log.faults.topics.replace(settings.topic(Topic.CONTROL))

        def has_stopped() -> bool:
            reports = processes.reports.values()
            return bool(reports) and not any(each.is_following for each in reports)

        assert await processes.listen(has_stopped, DEADLINE_S)
        (report,) = processes.reports.values()
    assert (report.generation, report.has_followed(1)) == (2, False)


class Member:
    """A process that dies at any moment, and is started again."""

    def __init__(self, settings: Settings, log: MemoryLog, tasks: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._log = log
        self._tasks = tasks
        self._stop = Stop()
        self._start()

    def _start(self) -> None:
        self.pipeline = Pipeline(self._settings, self._log)
        self._task = self._tasks.create_task(self.pipeline.run(self._stop), name="member")

    async def kill(self) -> None:
        """End it without a drain, and start another one."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._start()

    def stop(self) -> None:
        """Let it drain."""
        self._stop.request()


async def change_and_kill(
    chooser: random.Random, topic: ControlTopic, members: Sequence[Member], until: int
) -> WantedModel:
    """Make random changes up to a generation, and kill processes in between; the wanted model."""
    records = await topic.read()
    model = fold(records).models["digits"]
    for generation in range(len(records), until):
        change = random_change(chooser, model)
        model = dict(change.apply({"digits": model}))["digits"]
        await topic.write(change, generation, Author("test"), 0)
        for _ in range(chooser.choice([0, 1, 5, 20, 100, 400])):
            await asyncio.sleep(0)
        if chooser.random() < 0.5:
            await chooser.choice(members).kill()
    return model


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_processes_killed_during_changes_end_in_wanted_state(
    tmp_path: Path, seed: int
) -> None:
    """Kills meet every step of a change, and no request for a name is refused meanwhile."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    topic = ControlTopic(log, settings)
    await topic.write(load("digits", "1"), 0, Author("test"), 0)
    for generation, label in enumerate(("stable", "canary"), 1):
        await topic.write(set_label("digits", label, "1"), generation, Author("test"), 0)
    stopping = asyncio.Event()
    async with Client(log=log, settings=settings) as client, asyncio.TaskGroup() as tasks:
        members = [Member(settings, log, tasks) for _ in range(2)]

        async def call(name: str) -> None:
            while not stopping.is_set():
                await version_of_answer(client, name)

        def followed() -> bool:
            found = [each.pipeline.state.status().get("control") for each in members]
            return found == [{"generation": KILLED_CHANGES, "unready": []}] * len(members)

        async with asyncio.TaskGroup() as callers:  # has its answers before the processes drain
            for name in NAMES:
                callers.create_task(call(name))
            model = await change_and_kill(random.Random(seed), topic, members, KILLED_CHANGES)
            await eventually(followed, deadline_s=30.0, what="both have followed")
            stopping.set()
        for each in members:
            lookup = each.pipeline.models.catalog.lookup
            assert {name: lookup(name).version for name in NAMES} == meanings(model)
            each.stop()


async def test_process_that_starts_later_serves_wanted_versions(tmp_path: Path) -> None:
    """It reads the topic from its beginning before it opens the repository."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    topic = ControlTopic(log, settings)
    for generation, change in enumerate(
        (load("digits", "3"), load("digits", "1"), set_label("digits", "canary", "1"))
    ):
        await topic.write(change, generation, Author("test"), 0)
    async with deployment(settings, log, 1) as (_, client):
        assert await version_of_answer(client, "digits") == "3"
        assert await version_of_answer(client, "digits@canary") == "1"


async def test_version_that_fails_does_not_take_name_from_one_that_works(tmp_path: Path) -> None:
    """The default stays, the process says what it waits for, and a rollback ends that."""
    settings = controlled(tmp_path)
    (tmp_path / "digits" / "9").mkdir()
    (tmp_path / "digits" / "9" / "model.onnx").write_bytes(b"garbage")
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, client):
        await operator.change(load("digits", "1"))
        await operator.change(load("digits", "9"), wait=False)
        await operator.change(set_default("digits", "9"), wait=False)
        await operator.change(load("digits", "2"), wait=False)
        await operator.change(unload("digits", "1"), wait=False)
        await eventually(
            lambda: ["model.onnx" in each for each in operator.unready()] == [True],
            what="version 2, and not 9",
        )
        assert await version_of_answer(client, "digits") == "1"
        earlier = fold(await operator.topic.read(), until=1).models
        await operator.change(roll_back(earlier))
        assert await version_of_answer(client, "digits") == "1"


async def test_files_of_serving_version_that_vanish_do_not_end_its_service(tmp_path: Path) -> None:
    """A wanted version that is ready still answers; the status says that its files are gone."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, client):
        await operator.change(load("digits", "1"))
        shutil.rmtree(tmp_path / "digits")
        await operator.change(set_label("digits", "canary", "1"), wait=False)
        await eventually(operator.unready, what="the files are missed")
        assert await version_of_answer(client, "digits") == "1"
        assert await version_of_answer(client, "digits@canary") == "1"


async def test_metrics_show_last_change_and_number_of_unready_versions(tmp_path: Path) -> None:
    """An alert on these two metrics tells which process does not follow a change."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, _):
        await operator.change(load("digits", "1"))
        before = operator.shown("headrace_control_unready_versions")
        assert operator.shown("headrace_control_following") == 1
        shutil.rmtree(tmp_path / "digits" / "2")
        await operator.change(load("digits", "2"), wait=False)
        await eventually(operator.unready, what="the version is missed")

        assert operator.shown("headrace_control_generation") == operator.generation == 2
        assert (before, operator.shown("headrace_control_unready_versions")) == (0, 1)


async def test_spans_of_changes_name_generation_that_caused_them(tmp_path: Path) -> None:
    """Loads, a move of the default, a version that is missing, with the reason."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    with tracing_spans(tracing_settings(ratio=0.0)) as (tracing, spans):
        instruments = Instruments(Metrics(CollectorRegistry()), tracing)
        async with running(Pipeline(settings, log, STAGES, instruments=instruments)) as pipeline:
            operator = Operator(settings, log, [pipeline])
            await operator.change(load("digits", "1"))
            await operator.change(load("digits", "2"))
            await operator.change(set_default("digits", "2"))
            await operator.change(load("digits", "9"), wait=False)
            await eventually(
                lambda: any("9" in each and NOT_READ not in each for each in operator.unready()),
                what="the version is missed",
            )

    def describe(span: ReadableSpan) -> tuple[object, ...]:
        found = span.attributes or {}
        number = found.get("headrace.model.version") or found.get("headrace.default")
        return role_of(span), number, found["headrace.control.generation"], span.status.is_ok

    assert list(map(describe, spans.all)) == [
        ("load", "1", 1, True),
        ("label", "1", 1, True),
        ("load", "2", 2, True),
        ("label", "2", 3, True),
        ("load", "9", 4, False),
    ]


async def test_unknown_label_is_refused_with_those_there_are(tmp_path: Path) -> None:
    """A label that was removed is unknown as well."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, client):
        await operator.change(load("digits", "1"))
        await operator.change(set_label("digits", "stable", "1"))
        await operator.change(set_label("digits", "canary", "1"))
        await operator.change(remove_label("digits", "canary"))
        code, message = await refusal_of(client, "digits@canary")
    assert code == Code.UNKNOWN_MODEL
    assert 'expected one of stable as a label of digits, got "canary"' in message


async def test_label_stands_in_paths_of_gateway(tmp_path: Path) -> None:
    """Its metadata is that of the labelled version, and so is the answer."""
    settings = controlled(tmp_path).model_copy(
        update={"gateway": GatewaySettings(http_port=0, grpc_port="off")}
    )
    log = await log_for(settings)
    body = {
        "inputs": [
            {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64},
        ]
    }
    async with (
        pipeline_with_doors(settings, log, STAGES, TUNING.gateway) as (pipeline, doors),
        ClientSession(f"http://127.0.0.1:{doors.ports['http']}") as http,
    ):
        operator = Operator(settings, log, [pipeline])
        await operator.change(load("digits", "1"))
        await operator.change(load("digits", "3"))
        await operator.change(set_label("digits", "canary", "3"))
        async with http.post("/v2/models/digits@canary/infer", json=body) as response:
            answer = await response.json()
        async with http.get("/v2/models/digits@canary/ready") as response:
            status = response.status
    assert (answer["model_name"], answer["model_version"]) == ("digits", "3")
    assert status == 200


async def test_header_adds_label_to_model_that_value_names(tmp_path: Path) -> None:
    """Values need not change for a trial; another model in the header is still a contradiction."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    pixels = {"pixels": np.ones((1, 64), np.float32)}
    async with deployment(settings, log, 1) as (operator, client):
        await operator.change(load("digits", "1"))
        await operator.change(load("digits", "4"))
        await operator.change(set_label("digits", "canary", "4"))
        answer = await client.infer("digits", pixels, headers=[("x-model", b"digits@canary")])
        with pytest.raises(InferenceError) as refused:
            await client.infer("digits", pixels, headers=[("x-model", b"other@canary")])
    assert answer.model_version == "4"
    assert refused.value.code == Code.INVALID_REQUEST


# --- bad versions ---------------------------------------------------------------------------------


class Keys(NamedTuple):
    """Keys that manifests are signed with; processes trust the first."""

    trusted: Ed25519PrivateKey
    other: Ed25519PrivateKey


def pack(directory: Path, key: Ed25519PrivateKey | None) -> None:
    """Write the manifest of a version, signed if there is a key."""
    config = make_model_config({}, make_settings({}))
    signature = read_onnx_signature(directory / "model.onnx")
    manifest = make_manifest(directory, config, signature, datetime.now(UTC), {})
    write_manifest(directory, manifest if key is None else sign(manifest, key))


def rewrite(directory: Path, model: onnx.ModelProto, key: Ed25519PrivateKey) -> None:
    """Put another model into a version, and pack it."""
    onnx.save(model, directory / "model.onnx")
    pack(directory, key)


def make_garbage(directory: Path, keys: Keys) -> None:
    """A file that is no model, under a sound manifest."""
    (directory / "model.onnx").write_bytes(b"garbage")
    config = make_model_config({}, make_settings({}))
    empty = Signature((), (), batched=False)
    manifest = make_manifest(directory, config, empty, datetime.now(UTC), {})
    write_manifest(directory, sign(manifest, keys.trusted))


def tamper(directory: Path, keys: Keys) -> None:
    """One bit of the file differs from its manifest."""
    pack(directory, keys.trusted)
    content = bytearray((directory / "model.onnx").read_bytes())
    content[-1] ^= 1
    (directory / "model.onnx").write_bytes(content)


def change_after_signing(directory: Path, keys: Keys) -> None:
    """The signature is one by the trusted key, of another manifest."""
    pack(directory, keys.trusted)
    manifest = read_manifest(directory)
    assert manifest is not None
    write_manifest(directory, replace(manifest, metadata={"accuracy": 1}))


def digits_of_image() -> onnx.ModelProto:
    """Version 2 with another name of its input, which requests for version 1 do not have."""
    model = digits(2)
    model.graph.input[0].name = model.graph.node[0].input[0] = "image"
    return model


def rename_input(directory: Path, keys: Keys) -> None:
    """Requests do not have the input."""
    rewrite(directory, digits_of_image(), keys.trusted)


def expect_other_outputs(directory: Path, keys: Keys) -> None:
    """The golden sample is that of another model."""
    (directory / "golden").mkdir()
    sample: dict[str, Any] = {
        "inputs.pixels": np.ones((1, 64), np.float32),
        "outputs.scores": np.ones((1, 10), np.float32),
    }
    np.savez(directory / "golden" / "one.npz", **sample)
    pack(directory, keys.trusted)


def use_unknown_operator(directory: Path, keys: Keys) -> None:
    """The installed runtime does not have it, so that loading fails."""
    model = digits(2)
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    rewrite(directory, model, keys.trusted)


def need_too_much_memory(directory: Path, keys: Keys) -> None:
    """Each run makes a tensor of 4 PB, which its golden sample shows before it serves."""
    model = digits(2)
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["computed" if each == output else each for each in node.output]
    model.graph.initializer.append(helper.make_tensor("size", onnx.TensorProto.INT64, [1], [2**50]))
    model.graph.node.extend(
        [
            helper.make_node("ConstantOfShape", ["size"], ["large"]),
            helper.make_node("ReduceSum", ["large"], ["sum"], keepdims=0),
            helper.make_node("Add", ["computed", "sum"], [output]),
        ]
    )
    onnx.save(model, directory / "model.onnx")
    expect_other_outputs(directory, keys)


BAD = {
    "garbage": (make_garbage, "expected an ONNX model"),
    "signed-by-other": (
        lambda directory, keys: pack(directory, keys.other),
        "signature: expected one by a key of models.trusted_keys, got",
    ),
    "signature-of-other-content": (change_after_signing, "got one of something else"),
    "unsigned": (lambda directory, _: pack(directory, None), "models.trusted_keys, got none"),
    "tampered": (tamper, "model.onnx: expected"),
    "other-inputs": (rename_input, "input image: expected none of this name"),
    "other-outputs": (expect_other_outputs, "one.npz: scores: expected a difference of at most"),
    "fails-to-load": (use_unknown_operator, "is not a registered function/op"),
    "too-large": (need_too_much_memory, "Failed to allocate memory"),
}


@pytest.mark.parametrize(("spoil", "reason"), BAD.values(), ids=BAD)
async def test_bad_version_never_serves_and_its_reason_is_shown(
    tmp_path: Path, spoil: Callable[[Path, Keys], None], reason: str
) -> None:
    """The old one answers as before, although the default is to move to the bad one."""
    keys = Keys(Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate())
    public = keys.trusted.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "release.pub").write_bytes(public)
    settings = controlled(tmp_path / "models")
    trust = {"require_signature": True, "trusted_keys": (tmp_path / "release.pub",)}
    settings = settings.model_copy(update={"models": settings.models.model_copy(update=trust)})
    pack(tmp_path / "models" / "digits" / "1", keys.trusted)
    spoil(tmp_path / "models" / "digits" / "2", keys)
    log = await log_for(settings)
    with capture_logs() as lines:
        async with deployment(settings, log, 1) as (operator, client):
            await operator.change(load("digits", "1"))
            await operator.change(load("digits", "2"), wait=False)
            await operator.change(set_default("digits", "2"), wait=False)
            await eventually(
                lambda: any(reason in each for each in operator.unready()),
                what="the reason among what the process waits for",
            )
            for _ in range(CALLERS):
                assert await version_of_answer(client, "digits") == "1"
            # The change of the default tries it again, and it is loading meanwhile.
            await eventually(lambda: any(reason in each for each in operator.unready()))
            [unready] = operator.unready()
            shown = operator.model_entry("2")
            failed = operator.shown(
                "headrace_model_state", {"model": "digits", "version": "2", "state": "failed"}
            )
            counted = operator.shown("headrace_control_unready_versions")
    assert reason in unready
    assert (shown["state"], reason in shown["reason"]) == ("failed", True)
    assert (failed, counted) == (1, 1)
    assert any(reason in str(line) for line in lines if line["event"] == "model.failed")


async def test_command_allows_version_that_breaks_callers(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is refused by the process until `--allow-breaking` is given; then it answers."""
    settings = controlled(tmp_path / "models")
    onnx.save(digits_of_image(), tmp_path / "models" / "digits" / "2" / "model.onnx")
    topic = KeptTopic(settings)
    topic.use(monkeypatch)
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, client):

        async def command_load(*arguments: str) -> None:
            before = len(topic.records)
            ended = await asyncio.to_thread(
                call, "models", "load", "digits", *arguments, obj=settings
            )
            assert ended.exit_code == Exit.DONE, ended.output
            await copy_records(log, settings, topic.records[before:])
            operator.generation = topic.records[-1].generation

        await command_load("1")
        await command_load("2")
        await eventually(
            lambda: any("input image: expected none of this name" in e for e in operator.unready()),
            what="the difference among what the process waits for",
        )
        assert operator.model_entry("2")["state"] == "failed"
        await command_load("2", "--allow-breaking")
        await eventually(operator.followed, what="the version is ready")
        image = {"image": np.ones((1, 64), np.float32)}
        answer = await client.infer("digits", image, version="2")
        assert await version_of_answer(client, "digits") == "1"
    assert answer.model_version == "2"


async def test_version_that_hangs_at_load_never_serves_and_delays_nobody(tmp_path: Path) -> None:
    """It fails at `max_load_s`; meanwhile and afterwards the old one answers."""
    for number, code in ((1, "pass"), (2, "GATE.wait()")):
        (tmp_path / "slow" / str(number)).mkdir(parents=True)
        hooks = with_hooks(imported="from tests.support.python_models import GATE", load=code)
        (tmp_path / "slow" / str(number) / "model.py").write_text(hooks)
    config = 'backend = "python"\nprobe = false\nmax_load_s = 0.5\n'
    (tmp_path / "slow" / "model.toml").write_text(config)
    settings = controlled(tmp_path)
    log = await log_for(settings)
    GATE.clear()
    try:
        async with deployment(settings, log, 1) as (operator, client):
            await operator.change(load("slow", "1"))
            await operator.change(load("slow", "2"), wait=False)
            await operator.change(set_default("slow", "2"), wait=False)
            ones = {"x": np.ones((1, 1), np.float32)}
            before = await client.infer("slow", ones)
            await eventually(
                lambda: "max_load_s" in "".join(operator.unready()), what="the time limit"
            )
            after = await client.infer("slow", ones)
            state = [each["state"] for each in operator.models_of("slow") if each["version"] == "2"]
    finally:
        GATE.set()
    assert [each.model_version for each in (before, after)] == ["1", "1"]
    assert state == ["failed"]


ENDINGS = {
    "crashes-at-load": ("pass", "os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    "hangs-at-import": ("import time; time.sleep(3600)", "pass", "max_load_s"),
}
"""Of each kind one; tests/unit/services/test_trial.py has the others, and one that hangs busily."""

TRIALS_S = 4 * DEADLINE_S
"""Deadline of what waits for several child processes, one after the other."""


@pytest.mark.timeout(3 * TRIALS_S)
@pytest.mark.parametrize(("imported", "loaded", "reason"), ENDINGS.values(), ids=ENDINGS)
async def test_version_that_ends_or_stops_its_process_is_refused_while_old_one_answers(
    tmp_path: Path, imported: str, loaded: str, reason: str
) -> None:
    """It ends the child process of its trial; a process that starts later serves likewise."""
    for number, code in ((1, with_hooks()), (2, with_hooks(imported=imported, load=loaded))):
        (tmp_path / "model" / str(number)).mkdir(parents=True)
        (tmp_path / "model" / str(number) / "model.py").write_text(code)
    (tmp_path / "model" / "model.toml").write_text(
        'backend = "python"\nprobe = false\nmax_load_s = 2\n'
    )
    settings = controlled(tmp_path)
    trying = settings.models.model_copy(update={"trial_load": True})
    settings = settings.model_copy(update={"models": trying})
    log = await log_for(settings)
    ones = {"x": np.ones((1, 1), np.float32)}
    answered_by: list[str | None] = []
    async with deployment(settings, log, 1) as (operator, client):
        await operator.change(load("model", "1"), wait=False)
        await eventually(operator.followed, deadline_s=TRIALS_S)
        await operator.change(load("model", "2"), wait=False)
        await operator.change(set_default("model", "2"), wait=False)

        async def is_refused() -> bool:
            answered_by.append((await client.infer("model", ones)).model_version)
            return reason in "".join(operator.unready())

        await eventually(is_refused, deadline_s=TRIALS_S, recheck_s=0.05)
        answered_by.append((await client.infer("model", ones)).model_version)
        state = [each["state"] for each in operator.models_of("model") if each["version"] == "2"]
    async with deployment(settings, log, 1) as (operator, client):
        await eventually(lambda: reason in "".join(operator.unready()), deadline_s=TRIALS_S)
        restarted = (await client.infer("model", ones)).model_version
    assert set(answered_by) == {"1"}
    assert len(answered_by) > 1
    assert state == ["failed"]
    assert restarted == "1"
