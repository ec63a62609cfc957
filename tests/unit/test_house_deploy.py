"""The container image and the Compose file, checked without Docker.

`make deploy-check` holds the Compose file against the Compose specification; here are the rules
that are Headrace's own. The Dockerfile is read with dockerfile-parse.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import re
import sys
import tomllib
from asyncio.subprocess import DEVNULL
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from prometheus_client import CollectorRegistry

from headrace.config import GatewaySettings, LimitSettings, TelemetrySettings
from headrace.models.registry import Models
from headrace.telemetry.health import Health, Phase
from headrace.telemetry.http import HttpServer
from headrace.tools.local_kafka.security import make_certificates
from headrace.topics import STAGES
from tests.support.models import settings_for
from tests.support.settings import all_settings
from tests.support.tree import ROOT

INSTRUCTIONS = {
    *("FROM", "ARG", "ENV", "LABEL", "WORKDIR", "COPY", "RUN", "VOLUME", "EXPOSE", "STOPSIGNAL"),
    *("HEALTHCHECK", "USER", "ENTRYPOINT", "CMD", "COMMENT"),
}
PROXY = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
"""As Docker sets it in every container where the user's config.json names a proxy."""
PINNED = re.compile(r"^[\w./-]+:v?\d+\.\d+\.\d+(-[\w.-]+)?$")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The Compose file, with its anchors resolved."""
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@pytest.fixture(scope="module")
def stages(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The services of the Compose file that run stages."""
    return {
        name: service
        for name, service in compose["services"].items()
        if service.get("command", [""])[0] == "run"
    }


@pytest.fixture(scope="module")
def processes(
    compose: dict[str, Any], stages: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The services of the Compose file that run until they are stopped: stages and the gateway."""
    return {**stages, "gateway": compose["services"]["gateway"]}


@pytest.fixture(scope="module")
def dockerfile() -> DockerfileParser:
    """The Dockerfile, parsed into instructions."""
    return DockerfileParser(str(ROOT / "deploy" / "Dockerfile"))


# --- deploy/compose.yaml -----------------------------------------------------------------------


def test_compose_runs_each_stage_once(stages: dict[str, dict[str, Any]]) -> None:
    """The `run` commands together name the four stages, each once."""
    run = [stage for service in stages.values() for stage in service["command"][1].split(",")]

    assert sorted(run) == sorted(STAGES)


def test_compose_gateway_is_reached_from_this_machine_alone(compose: dict[str, Any]) -> None:
    """Its doors listen outside of the container, at their default ports; anybody may call them."""
    gateway = compose["services"]["gateway"]
    defaults = GatewaySettings()

    assert gateway["command"] == ["gateway"]
    assert gateway["environment"]["HEADRACE_GATEWAY__HTTP_HOST"] == "0.0.0.0"
    assert gateway["environment"]["HEADRACE_GATEWAY__GRPC_HOST"] == "0.0.0.0"
    assert gateway["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (defaults.http_port, defaults.grpc_port)
    ]


def test_compose_prometheus_reads_every_process(processes: dict[str, dict[str, Any]]) -> None:
    """By the names that the services have in the network of the containers."""
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (found,) = job["dns_sd_configs"]

    assert sorted(found["names"]) == sorted(processes)
    assert [str(found["port"])] == processes["gateway"]["expose"]


def test_compose_uses_one_image_of_this_version(compose: dict[str, Any]) -> None:
    """Every service of Headrace uses one image, whose tag is the project's version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    built = {service["image"] for service in compose["services"].values() if "build" in service}

    assert built == {f"headrace:{version}"}


def test_compose_pins_images_of_others(compose: dict[str, Any]) -> None:
    """An image that is pulled has a full version in its tag."""
    pulled = [
        service["image"] for service in compose["services"].values() if "build" not in service
    ]

    assert [image for image in pulled if not PINNED.match(image)] == []


def test_compose_sets_only_known_settings(compose: dict[str, Any]) -> None:
    """Every HEADRACE_ variable of a container is one that the settings read."""
    known = {setting.variable for setting in all_settings()}
    named = {
        variable
        for service in compose["services"].values()
        for variable in service.get("environment", {})
        if variable.startswith("HEADRACE_")
    }

    assert named - known == set()


def test_compose_stop_time_covers_drain(processes: dict[str, dict[str, Any]]) -> None:
    """The grace period of every process is longer than the drain time-out it runs with."""
    for service in processes.values():
        drain_s = float(
            service["environment"].get(
                "HEADRACE_LIMITS__DRAIN_TIMEOUT_S", LimitSettings().drain_timeout_s
            )
        )

        assert float(service["stop_grace_period"].removesuffix("s")) > drain_s


def test_compose_starts_processes_after_topics_are_created(
    processes: dict[str, dict[str, Any]],
) -> None:
    """None starts before Kafka is healthy and the topics have been created."""
    for service in processes.values():
        conditions = {name: on["condition"] for name, on in service["depends_on"].items()}

        assert conditions["kafka"] == "service_healthy"
        assert conditions["topics"] == "service_completed_successfully"


def test_compose_health_checks_use_port_of_processes(
    processes: dict[str, dict[str, Any]],
) -> None:
    """The health check and the exposed port are those of the telemetry settings."""
    for service in processes.values():
        port = service["environment"]["HEADRACE_TELEMETRY__HTTP_PORT"]

        assert service["expose"] == [port]
        assert f"127.0.0.1:{port}/health/ready" in service["healthcheck"]["test"][-1]


async def test_compose_health_check_goes_through_no_proxy(
    processes: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """The process is in the same container, which Docker may have told of a proxy."""
    health, models = Health(), Models(settings_for(tmp_path))
    health.enter(Phase.READY)
    [check] = {each["healthcheck"]["test"][-1] for each in processes.values()}
    async with HttpServer(("127.0.0.1", 0), health, models.catalog, CollectorRegistry()) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", check.replace(":8080/", f":{server.port}/")),
            env=os.environ | PROXY,
            stderr=DEVNULL,
        )
        assert await process.wait() == 0


def test_compose_uses_listeners_that_kafka_has(compose: dict[str, Any]) -> None:
    """The stages and the outside are given addresses that the broker advertises."""
    services = compose["services"]
    advertised = services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    addresses = {listener.split("://")[1] for listener in advertised.split(",")}
    (published,) = services["kafka"]["ports"]

    assert services["ingest"]["environment"]["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"] in addresses
    assert published.rpartition(":")[0] in addresses


# --- deploy/Dockerfile -------------------------------------------------------------------------


def test_dockerfile_has_only_known_instructions(dockerfile: DockerfileParser) -> None:
    """Every instruction exists; ADD, which can fetch and unpack, is none of them."""
    assert {step["instruction"] for step in dockerfile.structure} <= INSTRUCTIONS


def test_dockerfile_starts_from_pinned_images(dockerfile: DockerfileParser) -> None:
    """Every stage of the build starts from a full version of a slim image."""
    for image in dockerfile.parent_images:
        assert PINNED.match(image), image
        assert "slim" in image


def test_image_runs_as_unprivileged_user(dockerfile: DockerfileParser) -> None:
    """The last user of the image is not root, and nothing is built after the change to it."""
    last_stage = instructions_of_last_stage(dockerfile)
    user = last_stage.index("USER")

    assert int(value_of(dockerfile, "USER").split(":")[0]) > 0
    assert not {"RUN", "COPY", "USER"} & set(last_stage[user + 1 :])


def test_image_stop_signal_drains(dockerfile: DockerfileParser) -> None:
    """The stop signal is SIGTERM, and goes to headrace itself, not to a shell around it."""
    assert value_of(dockerfile, "STOPSIGNAL") == "SIGTERM"
    assert value_of(dockerfile, "ENTRYPOINT") == '["headrace"]'


def test_image_sets_only_known_settings(dockerfile: DockerfileParser) -> None:
    """Every HEADRACE_ variable of the image is one that the settings read."""
    known = {setting.variable for setting in all_settings()}
    named = {name for name in dockerfile.envs if name.startswith("HEADRACE_")}

    assert named
    assert named <= known


def test_image_has_cache_of_models_that_its_user_may_write(dockerfile: DockerfileParser) -> None:
    """The user has no home for the default, so a directory of its own is made for it."""
    cache_dir = dockerfile.envs["HEADRACE_MODELS__CACHE_DIR"]

    assert f"--owner headrace --group headrace {cache_dir}" in value_of(dockerfile, "RUN")


def test_image_keeps_nothing_in_home_of_its_user(dockerfile: DockerfileParser) -> None:
    """There is none: CuPy could compile no kernel for its cache there."""
    assert "--no-create-home" in value_of(dockerfile, "RUN")
    assert dockerfile.envs["CUPY_CACHE_IN_MEMORY"] == "1"


def test_image_listens_on_exposed_port(dockerfile: DockerfileParser) -> None:
    """The exposed port is the one of the settings, on all interfaces, and is asked for health."""
    assert dockerfile.envs["HEADRACE_TELEMETRY__HTTP_HOST"] == "0.0.0.0"
    assert dockerfile.envs["HEADRACE_TELEMETRY__HTTP_PORT"] == value_of(dockerfile, "EXPOSE")
    assert "/health/live" in value_of(dockerfile, "HEALTHCHECK")


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "stopped"])
async def test_image_health_check_is_liveness_with_and_without_tls(
    dockerfile: DockerfileParser, tmp_path: Path, secured: bool, is_live: bool
) -> None:
    """It looks at no certificate, like the kubelet: a container with TLS would never be healthy.

    Nor does it go through a proxy that the container was told of.
    """
    access = TelemetrySettings(
        tls_cert_file=make_certificates(tmp_path).broker if secured else None
    )
    health, models = Health(), Models(settings_for(tmp_path))
    if not is_live:
        health.enter(Phase.STOPPED)
    line = value_of(dockerfile, "HEALTHCHECK")
    _, *arguments = json.loads(line[line.index("[") :])
    async with HttpServer(
        ("127.0.0.1", 0), health, models.catalog, CollectorRegistry(), access=access
    ) as server:
        variables = {"HEADRACE_TELEMETRY__HTTP_PORT": str(server.port)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env={**os.environ, **PROXY, **variables}, stderr=DEVNULL
        )
        code = await process.wait()

    assert code == (0 if is_live else 1)


def test_image_copies_only_files_in_build_context(dockerfile: DockerfileParser) -> None:
    """Files copied from the working tree exist, and .dockerignore lets them through."""
    let_through = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for step in dockerfile.structure
        if step["instruction"] == "COPY" and not step["value"].startswith("--from=")
        for source in step["value"].split()[:-1]
    ]

    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_through), source


def test_image_can_be_built_for_each_device(dockerfile: DockerfileParser) -> None:
    """The default of EXTRAS, and `gpu`, are extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (default,) = [
        step["value"].removeprefix("EXTRAS=")
        for step in dockerfile.structure
        if step["instruction"] == "ARG" and step["value"].startswith("EXTRAS=")
    ]

    assert {*default.split(","), "gpu"} <= set(project["optional-dependencies"])


def instructions_of_last_stage(dockerfile: DockerfileParser) -> list[str]:
    """The instructions of the stage that becomes the image, in order."""
    names = [step["instruction"] for step in dockerfile.structure]
    return names[len(names) - names[::-1].index("FROM") :]


def value_of(dockerfile: DockerfileParser, instruction: str) -> str:
    """The text of the only, or last, instruction of a kind."""
    return str(
        [step["value"] for step in dockerfile.structure if step["instruction"] == instruction][-1]
    )
