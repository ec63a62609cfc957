"""Models change on the control topic under load: no request fails, each name means its version."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import ClientSession

from headrace.client import Client, InferenceError
from headrace.config import GatewaySettings, Settings, make_settings
from headrace.control.topic import ControlTopic
from headrace.errors import Code, ConfigurationError
from headrace.log.memory import MemoryLog
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
from headrace.runtime.process import Pipeline
from headrace.runtime.topic_plan import is_controlled
from headrace.topics import STAGES, Stage
from headrace.tuning import TUNING
from tests.support.conditions import eventually
from tests.support.gateways import pipeline_with_doors
from tests.support.models import add_version, digits
from tests.support.pipelines import log_for, serving

VERSIONS = ("1", "2", "3", "4")
NAMES = ("digits", "digits@stable", "digits@canary")
CHANGES = 50
CALLERS = 8


def controlled(repository: Path) -> Settings:
    """Settings of a deployment that follows the control topic; version n multiplies by n."""
    for number in map(int, VERSIONS):
        add_version(repository, "digits", number, digits(number), "probe = false")
    return make_settings(
        {
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},  # for its settings alone
            "topics": {"partitions": 4},
            "models": {"repository": repository, "mode": "explicit", "keep_replaced_s": 0.5},
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
        """What the first process waits for."""
        found: list[str] = self._pipelines[0].state.status()["control"]["unready"]
        return found

    def shown(self, metric: str) -> float | None:
        """A metric of the first process."""
        return self._pipelines[0].metrics.registry.get_sample_value(metric)

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
        await eventually(lambda: len(operator.unready()) == 1, what="version 2, and not 9")
        assert await version_of_answer(client, "digits") == "1"
        assert "model.onnx" in operator.unready()[0]
        earlier = fold(await operator.topic.read(), until=1).models
        await operator.change(roll_back(earlier))
        assert await version_of_answer(client, "digits") == "1"


async def test_files_of_serving_version_that_vanish_do_not_end_its_service(tmp_path: Path) -> None:
    """What is wanted and ready serves on; the process says that the files are gone."""
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
    """So that an alert tells which process does not follow."""
    settings = controlled(tmp_path)
    log = await log_for(settings)
    async with deployment(settings, log, 1) as (operator, _):
        await operator.change(load("digits", "1"))
        before = operator.shown("headrace_control_unready_versions")
        shutil.rmtree(tmp_path / "digits" / "2")
        await operator.change(load("digits", "2"), wait=False)
        await eventually(operator.unready, what="the version is missed")

        assert operator.shown("headrace_control_generation") == operator.generation == 2
        assert (before, operator.shown("headrace_control_unready_versions")) == (0, 1)


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


async def test_stages_apart_are_refused_in_explicit_mode(tmp_path: Path) -> None:
    """The error says what is needed."""
    settings = controlled(tmp_path)
    assert is_controlled(settings)
    log = await log_for(settings)
    with pytest.raises(ExceptionGroup) as refused:
        async with serving(settings, log, [(Stage.INGEST,)]):
            pass
    assert refused.group_contains(ConfigurationError, match="needs all four services in one proc")


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
