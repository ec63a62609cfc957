"""Signed tokens of callers, and the keys of their provider."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://login.example", "headrace"
HOUR_S = 3600


class Provider:
    """An identity provider with a key for each kind of signature, named after its algorithm."""

    def __init__(self) -> None:
        rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        ec_key = ec.generate_private_key(ec.SECP256R1())
        ed_key = ed25519.Ed25519PrivateKey.generate()
        self.private: dict[str, Any] = {"RS256": rsa_key, "ES256": ec_key, "EdDSA": ed_key}
        self.jwks: dict[str, dict[str, Any]] = {
            "RS256": RSAAlgorithm.to_jwk(rsa_key.public_key(), as_dict=True),
            "ES256": ECAlgorithm.to_jwk(ec_key.public_key(), as_dict=True),
            "EdDSA": OKPAlgorithm.to_jwk(ed_key.public_key(), as_dict=True),
        }

    def write(self, file: Path, *names: str) -> None:
        """Write the key set: all keys, or those with the names."""
        chosen = names or tuple(self.jwks)
        keys = [{**self.jwks[name], "kid": name, "use": "sig"} for name in chosen]
        file.write_text(json.dumps({"keys": keys}))

    def token(self, algorithm: str = "ES256", kid: str | None = None, **claims: Any) -> str:
        """Return a token that is valid for an hour; a claim of None is left out."""
        now_s = int(time.time())
        every = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "team-a",
            "scope": "openid inference",
            "exp": now_s + HOUR_S,
            **claims,
        }
        return jwt.encode(
            {name: value for name, value in every.items() if value is not None},
            self.private[algorithm],
            algorithm=algorithm,
            headers={"kid": kid or algorithm},
        )


def jwt_settings(file: Path, **others: Any) -> dict[str, Any]:
    """Settings of a gateway that believes the provider."""
    return {"jwks_file": str(file), "issuer": ISSUER, "audience": AUDIENCE, **others}
