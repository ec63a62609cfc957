"""Tokens that were really signed: which are believed, what they say, and why others are refused."""

from __future__ import annotations

import base64
import hmac
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm

from headrace.access.callers import ApiGroup, Callers, Credentials, Denied
from headrace.access.limits import Limits
from headrace.access.tokens import Claims, JwtVerifier
from headrace.config import GatewaySettings, JwtSettings
from headrace.errors import ConfigurationError, Rejected
from headrace.tuning import TUNING
from tests.support.tokens import HOUR_S, Provider, jwt_settings


@pytest.fixture(scope="module")
def provider() -> Provider:
    """A provider, for all tests: keys of RSA take a while."""
    return Provider()


@pytest.fixture
def jwks(provider: Provider, tmp_path: Path) -> Path:
    """The file with its keys."""
    file = tmp_path / "jwks.json"
    provider.write(file)
    return file


def tokens_of(file: Path, **others: Any) -> JwtVerifier:
    """Return what verifies the tokens of the provider; it looks at the file each time."""
    return JwtVerifier(
        "gateway", JwtSettings(**jwt_settings(file, **others)), TUNING.gateway.access
    )


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_signed_token_names_tenant_and_groups(
    provider: Provider, jwks: Path, algorithm: str
) -> None:
    """The token is checked with the key that it names."""
    claims = tokens_of(jwks).read(provider.token(algorithm))

    assert claims == Claims("team-a", frozenset({"openid", "inference"}))


def test_claims_for_tenant_and_groups_can_be_others(provider: Provider, jwks: Path) -> None:
    """Groups are words or a list; those without the prefix are not meant for Headrace."""
    tokens = tokens_of(jwks, tenant_claim="org", groups_claim="roles", groups_prefix="headrace:")
    token = provider.token(org="acme", roles=["headrace:inference", "metadata", 7])

    assert tokens.read(token) == Claims("acme", frozenset({"inference"}))


def test_token_without_groups_opens_nothing(provider: Provider, jwks: Path) -> None:
    """It is known all the same."""
    for scope in (None, 7, "", {"inference": True}):
        assert tokens_of(jwks).read(provider.token(scope=scope)) == ("team-a", frozenset())


def encoded(content: bytes) -> str:
    """Return a part of a token."""
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def unsigned(provider: Provider) -> str:
    """A token of the algorithm `none`."""
    _, payload, _ = provider.token().split(".")
    header = encoded(json.dumps({"alg": "none", "kid": "ES256"}).encode())
    return f"{header}.{payload}."


def signed_with_public_key(provider: Provider) -> str:
    """A token whose shared secret is the public key, which everybody knows."""
    public = provider.private["RS256"].public_key()
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _, payload, _ = provider.token("RS256").split(".")
    signed = f"{encoded(json.dumps({'alg': 'HS256', 'kid': 'RS256'}).encode())}.{payload}"
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), 'sha256'))}"


def with_other_payload(provider: Provider) -> str:
    """A token whose claims were changed after it was signed."""
    header, _, signature = provider.token().split(".")
    _, payload, _ = provider.token(sub="somebody-else").split(".")
    return f"{header}.{payload}.{signature}"


NOW_S = int(time.time())
REFUSED: dict[str, tuple[Callable[[Provider], str], str]] = {
    "expired": (lambda it: it.token(exp=NOW_S - HOUR_S), "one that has expired"),
    "early": (lambda it: it.token(nbf=NOW_S + HOUR_S), "one that is not valid yet"),
    "issuer": (lambda it: it.token(iss="https://evil.example"), "one of another issuer"),
    "audience": (lambda it: it.token(aud="other"), "one for another audience"),
    "kid": (lambda it: it.token(kid="other"), "one that names no known key"),
    "without exp": (lambda it: it.token(exp=None), "one without the claim exp"),
    "without tenant": (lambda it: it.token(sub=None), "one without the claim sub"),
    "tenant with a line end": (
        lambda it: it.token(sub="a\nb"),
        "one whose claim sub names no tenant",
    ),
    "long tenant": (lambda it: it.token(sub="a" * 257), "one whose claim sub names no tenant"),
    "tenant of many bytes": (
        lambda it: it.token(sub="\u20ac" * 200),
        "one whose claim sub names no tenant",
    ),
    "signature": (with_other_payload, "one whose signature is wrong"),
    "key of another kind": (
        lambda it: it.token("ES256", kid="RS256"),
        "one with an algorithm that is not allowed",
    ),
    "none": (unsigned, "one with an algorithm that is not allowed"),
    "shared secret": (signed_with_public_key, "one with an algorithm that is not allowed"),
    "huge": (lambda it: it.token(extra="x" * 5000), "one of more than 6144 bytes"),
    "garbage": (lambda _: "a.b.c", "one that cannot be read"),
    "not ASCII": (lambda _: "\u00e4.\u00f6.\udcff", "one that cannot be read"),
    "brackets": (lambda _: f"{encoded(b'[' * 4000)}.e30.AAAA", "one that cannot be read"),
    "header is no object": (lambda _: f"{encoded(b'[]')}.e30.AAAA", "one that cannot be read"),
    "kid is no text": (
        lambda _: encoded(b'{"alg": "ES256", "kid": ["ES256"]}') + ".e30.AAAA",
        "one that cannot be read",
    ),
    "exp is infinite": (lambda it: it.token(exp=float("inf")), "one that cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_token_that_is_not_valid_is_refused(provider: Provider, jwks: Path, case: str) -> None:
    """The text says which rule it breaks, and shows nothing of it."""
    make, reason = REFUSED[case]

    with pytest.raises(Rejected) as caught:
        tokens_of(jwks).read(make(provider))

    assert caught.value.message == reason


def test_algorithm_outside_of_settings_is_refused(provider: Provider, jwks: Path) -> None:
    """Its key is then no key of the gateway's."""
    tokens = tokens_of(jwks, algorithms=("EdDSA",))

    tokens.read(provider.token("EdDSA"))
    with pytest.raises(Rejected, match="names no known key"):
        tokens.read(provider.token("RS256"))


def test_clocks_may_differ_by_leeway(provider: Provider, jwks: Path) -> None:
    """Both of a token's times are widened by it."""
    tokens = tokens_of(jwks, leeway_s=300)
    now_s = int(time.time())

    tokens.read(provider.token(exp=now_s - 60, nbf=now_s + 60))


def test_token_without_kid_is_for_only_key(provider: Provider, tmp_path: Path) -> None:
    """With several keys there is no telling."""
    file = tmp_path / "jwks.json"
    provider.write(file, "ES256")
    token = jwt.encode(
        jwt.decode(provider.token(), options={"verify_signature": False}),
        provider.private["ES256"],
        algorithm="ES256",
    )
    tokens = tokens_of(file)
    assert tokens.read(token).tenant == "team-a"

    provider.write(file)
    tokens.keys.refresh()

    with pytest.raises(Rejected, match="names no known key"):
        tokens.read(token)


def test_verified_token_is_refused_once_it_expires(provider: Provider, jwks: Path) -> None:
    """Its signature is not verified again, its time is."""
    now_s = [time.time()]
    tokens = JwtVerifier(
        "gateway", JwtSettings(**jwt_settings(jwks)), TUNING.gateway.access, now_s=lambda: now_s[0]
    )
    token = provider.token()
    tokens.read(token)

    now_s[0] += 2 * HOUR_S

    with pytest.raises(Rejected, match="one that has expired"):
        tokens.read(token)


def test_key_that_leaves_file_verifies_nothing_more(provider: Provider, jwks: Path) -> None:
    """A token that was verified before is refused as well."""
    tokens = tokens_of(jwks)
    token = provider.token("ES256")
    tokens.read(token)

    provider.write(jwks, "EdDSA")
    tokens.keys.refresh()

    with pytest.raises(Rejected, match="names no known key"):
        tokens.read(token)
    tokens.read(provider.token("EdDSA"))


def weak_key() -> dict[str, Any]:
    """A key of RSA that can be broken."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    return {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "weak"}


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda _: [], "expected a public key for one of ES256, .* got none"),
        (lambda _: {}, "expected a JSON Web Key Set"),
        (lambda _: [{"kty": "oct", "k": "AAAA"}], "got none"),
        (lambda _: [{"kty": ["RSA"]}], r"keys\[0\]: expected a key as RFC 7517"),
        (lambda _: [{"kty": "RSA", "n": "AQAB"}], r"keys\[0\]: expected a key as RFC 7517"),
        (lambda it: [it["ES256"], it["ES256"]], r"keys\[1\]: expected a kid of its own"),
        (lambda it: [{**it["ES256"], "d": "AA"}], "expected a public key, got a private one"),
        (lambda it: [{**it["ES256"], "use": "enc"}], "got none"),
        (lambda it: [{**it["RS256"], "alg": "HS256"}], "got none"),
        (lambda _: [weak_key()], "expected RSA of at least 2048 bits, got 1024"),
    ],
    ids=["empty", "type", "secret", "kty", "half", "same kid", "private", "use", "alg", "weak"],
)
def test_unusable_key_set_is_named(
    provider: Provider, tmp_path: Path, make: Callable[[Any], Any], fault: str
) -> None:
    """The gateway does not start without the protection that it was told to have."""
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": make(provider.jwks)}))

    with pytest.raises(ConfigurationError, match=rf"gateway\.jwt\.jwks_file: .*{fault}"):
        tokens_of(file)


@pytest.mark.parametrize(
    "unusable",
    [{"kty": "RSA", "n": "AQAB"}, {"kty": ["RSA"]}, {"kid": "none"}, weak_key()],
    ids=["half", "kty", "no kty", "weak"],
)
def test_unusable_key_beside_others_is_ignored(
    provider: Provider, jwks: Path, unusable: dict[str, Any]
) -> None:
    """One that a provider publishes while it rotates keys keeps no other key out."""
    tokens = tokens_of(jwks)
    next_key = {**provider.jwks["EdDSA"], "kid": "EdDSA"}
    jwks.write_text(json.dumps({"keys": [unusable, next_key]}))
    tokens.keys.refresh()

    assert tokens.read(provider.token("EdDSA")).tenant == "team-a"
    with pytest.raises(Rejected, match="names no known key"):
        tokens.read(provider.token("ES256"))


def test_missing_package_is_named_with_its_extra(
    jwks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel alone does not bring it."""
    monkeypatch.delitem(sys.modules, "headrace.access.tokens")
    monkeypatch.setitem(sys.modules, "jwt", None)
    settings = GatewaySettings(jwt=JwtSettings(**jwt_settings(jwks)))

    with pytest.raises(ConfigurationError, match=r"pip install 'headrace\[jwt\]'"):
        Callers(settings, TUNING.gateway.access)


def bearer(token: str) -> Credentials:
    return Credentials(authorization=f"Bearer {token}")


def test_public_groups_need_no_token(provider: Provider, jwks: Path) -> None:
    """Health, for balancers; a token that is not valid changes nothing about that."""
    callers = Callers(GatewaySettings(jwt=JwtSettings(**jwt_settings(jwks))), TUNING.gateway.access)

    assert callers.admit(ApiGroup.HEALTH, bearer(provider.token(exp=1))).tenant == ""
    with pytest.raises(Denied, match=r"metadata: expected a valid token in .*, got none$"):
        callers.admit(ApiGroup.METADATA, Credentials())


def test_token_and_key_of_same_name_are_counted_apart(provider: Provider, jwks: Path) -> None:
    """Their limits may differ, and a change of limits gives all tokens of the rate back."""
    settings = GatewaySettings(jwt=JwtSettings(**jwt_settings(jwks)))
    callers = Callers(settings, TUNING.gateway.access, Limits(max_in_flight=1))
    caller = callers.admit(ApiGroup.INFERENCE, bearer(provider.token()))

    assert (caller.tenant, caller.limited_as) == ("team-a", "token of team-a")
