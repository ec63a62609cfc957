"""API keys at both doors: who is answered, who is refused, and what each key opens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as triton_grpc
from msgspec.structs import replace

from headrace.errors import ConfigurationError
from headrace.log.port import TopicPartition
from headrace.telemetry.logs import Event
from headrace.tuning import TUNING, AccessTuning
from tests.support.gateways import (
    HOST,
    Served,
    add_identities,
    files_noticed,
    gateway_of,
    values_of,
)
from tests.support.grpc_callers import Caller

QUICK = replace(TUNING.gateway, access=AccessTuning(file_check_interval_s=0.01))
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
NO_KEY: dict[str, str] = {}


def entry(name: str, key: str, *groups: str) -> str:
    """A caller in the file of keys."""
    lines = [f"[callers.{name}]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    if groups:
        lines.append(f"groups = {list(groups)}")
    return "\n".join(lines) + "\n"


def write(file: Path, text: str) -> None:
    """Write a file of keys, whatever its bytes."""
    file.write_bytes(text.encode("utf-8", "surrogateescape"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model for each datatype, which changes nothing."""
    models = tmp_path / "models"
    models.mkdir()
    add_identities(models)
    return models


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with two callers, of whom one may only look."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("team-a", "secret-a") + entry("watcher", "secret-w", "metadata"))
    return file


async def status_of_infer(served: Served, headers: Mapping[str, str]) -> int:
    """Return the status with which the door for HTTP answers a request."""
    return (await served.infer("FP32", BODY, headers=headers)).status


async def infer_over_grpc(served: Served, headers: Mapping[str, str]) -> Any:
    """Send a request with Triton's client."""
    values = values_of("FP32")
    tensor = triton_grpc.InferInput("x", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    async with triton_grpc.InferenceServerClient(served.grpc) as client:
        return await client.infer("FP32", [tensor], headers=dict(headers), client_timeout=20)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer secret-a"}, 200),
        ({"authorization": "bearer  secret-a "}, 200),
        ({"X-API-Key": "secret-a"}, 200),
        ({"X-API-Key": "of a proxy", "Authorization": "Bearer secret-a"}, 200),
        ({"X-API-Key": "secret-a", "Authorization": "Bearer of-a-proxy"}, 200),
        ({"X-API-Key": "secret-w", "Authorization": "Bearer secret-a"}, 403),
        ({"X-API-Key": "secret-b", "Authorization": "Bearer secret-b"}, 401),
        (NO_KEY, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer secret-b"}, 401),
        ({"Authorization": "Basic c2VjcmV0LWE="}, 401),
        ({"Authorization": "secret-a"}, 401),
        ({"X-API-Key": "team-a"}, 401),
        ({"X-API-Key": hashlib.sha256(b"secret-a").hexdigest()}, 401),
        ({"X-API-Key": "s" * 4000}, 401),
        ({"X-API-Key": "geh\u00f6rt mir"}, 401),
        ({"X-API-Key": "secret-w"}, 403),
    ],
)
async def test_key_decides_over_request_over_http(
    repository: Path, keys: Path, headers: Mapping[str, str], status: int
) -> None:
    """A key that is known and opens inference is answered; no error shows what was sent."""
    async with gateway_of(repository, keys_file=str(keys)) as served:
        answer = await served.infer("FP32", BODY, headers=headers)
        assert answer.status == status
        assert "secret" not in answer.body.decode()
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
        assert served.counted(status) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (NO_KEY, "UNAUTHENTICATED"),
        ({"authorization": "Bearer other"}, "UNAUTHENTICATED"),
        ({"x-api-key": "secret-w"}, "PERMISSION_DENIED"),
    ],
)
async def test_wrong_key_is_refused_over_grpc(
    repository: Path, keys: Path, headers: Mapping[str, str], status: str
) -> None:
    """Alone and in a stream."""
    async with gateway_of(repository, grpc_port=0, keys_file=str(keys)) as served:
        with pytest.raises(triton_grpc.InferenceServerException, match=status):
            await infer_over_grpc(served, headers)
        assert served.counted(status) == 1


@pytest.mark.parametrize("others", [["secret-w"], ["other"], [""]])
@pytest.mark.parametrize("name", ["x-api-key", "authorization"])
async def test_two_different_keys_in_one_header_are_refused(
    repository: Path, keys: Path, name: str, others: list[str]
) -> None:
    """At both doors and in either order: a proxy in front might go by the other one."""
    prefix = "Bearer " if name == "authorization" else ""
    found = []
    async with (
        gateway_of(repository, grpc_port=0, keys_file=str(keys)) as served,
        grpc.aio.insecure_channel(served.grpc) as channel,
    ):
        for values in (["secret-a", *others], [*others, "secret-a"], ["secret-a", "secret-a"]):
            given = [(name, prefix + value) for value in values]
            found.append((await served.infer("FP32", BODY, headers=given)).status)
            call = Caller(channel).call("ServerMetadata", b"", metadata=given)
            found.append((await call.code()).name)

    assert found == [401, "UNAUTHENTICATED", 401, "UNAUTHENTICATED", 200, "OK"]


async def test_right_key_is_answered_over_grpc(repository: Path, keys: Path) -> None:
    """In either of its headers."""
    async with gateway_of(repository, grpc_port=0, keys_file=str(keys)) as served:
        for headers in ({"authorization": "Bearer secret-a"}, {"x-api-key": "secret-a"}):
            assert (await infer_over_grpc(served, headers)).as_numpy("y") is not None


async def test_health_is_public_and_metadata_is_not(repository: Path, keys: Path) -> None:
    """Balancers have no keys; what is served is nobody else's business."""
    async with gateway_of(repository, grpc_port=0, keys_file=str(keys)) as served:
        statuses = {
            path: (await served.get(path)).status
            for path in ("/v2/health/live", "/v2/models/FP32/ready", "/v2", "/v2/models/FP32")
        }
        unknown = (await served.get("/nothing")).status
        async with triton_grpc.InferenceServerClient(served.grpc) as client:
            assert await client.is_server_live(client_timeout=20)
            with pytest.raises(triton_grpc.InferenceServerException, match="UNAUTHENTICATED"):
                await client.get_server_metadata(client_timeout=20)
    assert list(statuses.values()) == [200, 200, 401, 401]
    assert unknown == 401


async def test_model_named_like_health_path_is_not_public(repository: Path, keys: Path) -> None:
    """The route decides, not how a path ends."""
    async with gateway_of(repository, keys_file=str(keys)) as served:
        assert (await served.get("/v2/models/ready")).status == 401
        assert (await served.get("/v2/models/live")).status == 401


async def test_public_groups_need_no_key(repository: Path, keys: Path) -> None:
    """The file says which they are."""
    write(keys, 'public = ["health", "metadata"]\n' + entry("team-a", "secret-a"))
    async with gateway_of(repository, keys_file=str(keys)) as served:
        assert (await served.get("/v2")).status == 200
        assert await status_of_infer(served, NO_KEY) == 401


async def test_caller_is_tenant_of_its_requests(repository: Path, keys: Path) -> None:
    """The log has its name, and nothing of its key."""
    async with gateway_of(repository, keys_file=str(keys)) as served:
        headers = {"X-API-Key": "secret-a", "x-tenant": "somebody-else"}
        assert await status_of_infer(served, headers) == 200
        info = (await served.log.describe_topics(["headrace.requests"]))["headrace.requests"]
        assert info is not None
        sent = await records_of(served, info.partitions)
    (found,) = [dict(record.headers) for record in sent]
    assert found["x-tenant"] == b"team-a"
    assert not any(b"secret" in (value or b"") for value in found.values())


async def records_of(served: Served, partitions: int) -> list[Any]:
    """The requests on the log."""
    return [
        record
        for number in range(partitions)
        for record in await served.log.fetch(
            TopicPartition("headrace.requests", number), 0, 10, 1 << 20
        )
    ]


async def test_changed_file_holds_for_further_calls(repository: Path, keys: Path) -> None:
    """A key that is taken away opens nothing any more."""
    async with gateway_of(repository, tuning=QUICK, keys_file=str(keys)) as served:
        old, new = {"X-API-Key": "secret-a"}, {"X-API-Key": "secret-new"}
        assert await status_of_infer(served, old) == 200

        async with files_noticed(Event.ACCESS_FILES_RELOADED):
            write(keys, entry("team-a", "secret-new"))

        assert await status_of_infer(served, old) == 401
        assert await status_of_infer(served, new) == 200


async def test_unusable_new_file_leaves_former_keys_in_use(repository: Path, keys: Path) -> None:
    """A slip of an editor neither opens nor closes the doors."""
    async with gateway_of(repository, tuning=QUICK, keys_file=str(keys)) as served:
        async with files_noticed(Event.ACCESS_FILES_REJECTED):
            write(keys, "[callers")

        assert await status_of_infer(served, {"X-API-Key": "secret-a"}) == 200
        assert await status_of_infer(served, NO_KEY) == 401


@pytest.mark.parametrize(
    "content",
    [
        "",
        "callers = 3",
        '[callers.a]\nsha256 = "secret-a"',
        '[callers.a]\nsha256 = "' + "0" * 64 + '"\ngroups = ["everything"]',
        '[callers.a]\nsha256 = "' + "0" * 64 + '"\nkey = "secret"',
        '[callers."a b"]\nsha256 = "' + "0" * 64 + '"',
        entry("a", "same") + entry("b", "same"),
        "\udcff",
    ],
    ids=["empty", "type", "key instead of hash", "group", "field", "name", "same key", "bytes"],
)
async def test_unusable_file_is_named_at_start(repository: Path, keys: Path, content: str) -> None:
    """The gateway does not start without the protection that it was told to have."""
    write(keys, content)
    with pytest.raises(ConfigurationError, match=r"gateway\.keys_file: .*keys\.toml: expected"):
        async with gateway_of(repository, keys_file=str(keys)):
            pass


async def test_without_file_anybody_is_answered(repository: Path) -> None:
    """A gateway without a file of keys, as on a developer's machine, requires none."""
    async with gateway_of(repository) as served:
        assert served.url.startswith(HOST)
        assert await status_of_infer(served, NO_KEY) == 200
