"""JSON Web Tokens at both doors: who is answered, who is refused, and whose tenant a request is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton_grpc

from tests.support.gateways import Served, gateway_of, values_of
from tests.support.models import add_version, identity
from tests.support.tokens import Provider, jwt_settings

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that changes nothing."""
    models = tmp_path / "models"
    models.mkdir()
    add_version(models, "FP32", 1, identity("FP32"), "probe = false")
    return models


@pytest.fixture
def jwks(tmp_path: Path) -> Path:
    return tmp_path / "jwks.json"


@pytest.fixture
def provider(jwks: Path) -> Provider:
    """A provider whose keys are in the file."""
    provider = Provider()
    provider.write(jwks)
    return provider


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def status_over_grpc(served: Served, headers: Mapping[str, str]) -> str:
    """Send a request with Triton's client; the status of its answer."""
    values = values_of("FP32")
    tensor = triton_grpc.InferInput("x", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    async with triton_grpc.InferenceServerClient(served.grpc) as client:
        try:
            await client.infer("FP32", [tensor], headers=dict(headers), client_timeout=20)
        except triton_grpc.InferenceServerException as error:
            return str(error.status())
    return "OK"


async def test_signed_tokens_are_answered_for_their_tenants(
    repository: Path, jwks: Path, provider: Provider
) -> None:
    """At both doors, with each kind of signature; a tenant that the caller names has no effect."""
    async with gateway_of(repository, grpc_port=0, jwt=jwt_settings(jwks)) as served:
        answers: list[int | str] = []
        for algorithm in provider.private:
            headers = {**bearer(provider.token(algorithm, sub=algorithm)), "x-tenant": "other"}
            answers.append((await served.infer("FP32", BODY, headers=headers)).status)
            answers.append(await status_over_grpc(served, headers))
        tenants = await served.tenants()

    assert answers == [200, "OK"] * 3
    assert tenants == {b"RS256", b"ES256", b"EdDSA"}


async def test_tokens_that_are_not_valid_are_refused_and_not_shown(
    repository: Path, jwks: Path, provider: Provider
) -> None:
    """401 and 403, UNAUTHENTICATED and PERMISSION_DENIED; nothing reaches the log."""
    wrong = {
        "expired": bearer(provider.token(exp=1)),
        "unknown key": bearer(provider.token(kid="other")),
        "garbage": bearer("a.b.c"),
        "huge": bearer(provider.token(extra="x" * 5000)),
        "in the key's header": {"x-api-key": provider.token()},
        "none": {},
        "without the group": bearer(provider.token(scope="metadata")),
    }
    async with gateway_of(repository, grpc_port=0, jwt=jwt_settings(jwks)) as served:
        found, grpc_statuses = {}, {}
        for name, headers in wrong.items():
            found[name] = await served.infer("FP32", BODY, headers=headers)
            grpc_statuses[name] = await status_over_grpc(served, headers)
        tenants = await served.tenants()

    http_statuses = {name: answer.status for name, answer in found.items()}
    assert http_statuses.pop("without the group") == 403
    assert set(http_statuses.values()) == {401}
    assert grpc_statuses.pop("without the group") == "StatusCode.PERMISSION_DENIED"
    assert set(grpc_statuses.values()) == {"StatusCode.UNAUTHENTICATED"}
    assert found["expired"].headers["WWW-Authenticate"] == "Bearer"
    assert found["expired"].json["error"] == (
        "inference: expected a valid token in Authorization: Bearer, got one that has expired"
    )
    for answer in found.values():
        assert b"eyJ" not in answer.body  # how each token begins
    assert not tenants


async def test_keys_and_tokens_are_used_beside_each_other(
    repository: Path, jwks: Path, provider: Provider, tmp_path: Path
) -> None:
    """A Bearer is looked up as a key first."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[callers.team-k]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    async with gateway_of(repository, keys_file=str(keys), jwt=jwt_settings(jwks)) as served:
        statuses = [
            (await served.infer("FP32", BODY, headers=headers)).status
            for headers in (
                bearer("secret"),
                {"x-api-key": "secret"},
                bearer(provider.token()),
                bearer("other"),
            )
        ]
        tenants = await served.tenants()

    assert statuses == [200, 200, 200, 401]
    assert tenants == {b"team-k", b"team-a"}
