"""JSON Web Tokens of callers (RFC 7519): which ones are believed, and what they say.

Only signatures with the public keys of `jwt.jwks_file` are believed. A key fixes the
algorithms that it verifies, whatever the token's header says, so that no public key is taken for a
shared secret (RFC 8725, section 3.1).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from msgspec import Struct

from headrace.access.watched import Watched, read_file
from headrace.config import JwtSettings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.primitives.bounded_cache import BoundedCache
from headrace.protocol.headers import MAX_HEADER_BYTES
from headrace.protocol.messages import MAX_NAME_LENGTH
from headrace.tuning import AccessTuning

_ALGORITHMS = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Algorithms by `kty` and `crv` of a key. RFC 7517 asks for keys of other kinds to be ignored."""
_LEAST_RSA_BITS = 2048

_EXPIRED = "one that has expired"
_FAULTS: tuple[tuple[type[Exception], str], ...] = (
    (jwt.ExpiredSignatureError, _EXPIRED),
    (jwt.ImmatureSignatureError, "one that is not valid yet"),
    (jwt.InvalidIssuerError, "one of another issuer"),
    (jwt.InvalidAudienceError, "one for another audience"),
    (jwt.InvalidAlgorithmError, "one with an algorithm that is not allowed"),
    (jwt.InvalidSignatureError, "one whose signature is wrong"),
)
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors that a malformed token can cause: 2,000 brackets exceed the recursion limit."""


class Claims(NamedTuple):
    """Claims of a token about its caller.

    Attributes:
        tenant: of its requests.
        groups: words of the claim for groups, without their prefix.
    """

    tenant: str
    groups: frozenset[str]


class _Key(NamedTuple):
    public: Any
    algorithms: list[str]


class _Jwk(Struct):
    kty: str
    crv: str | None = None
    alg: str | None = None
    use: str = "sig"
    kid: str = ""

    def algorithms(self) -> list[str]:
        """Return those that the key can verify; none if it is for something else."""
        known = _ALGORITHMS.get((self.kty, self.crv), ()) if self.use == "sig" else ()
        return [name for name in known if self.alg in (None, name)]


class _KeySet(Struct):
    keys: list[dict[str, Any]]


class _Verified(NamedTuple):
    keys: dict[str, _Key]
    until_s: float
    claims: Claims


class JwtVerifier:
    """Verifies tokens. One that was valid is not verified again while its key set and its time
    last: a signature takes 150 to 250 µs of the event loop, and a remembered token takes 2.

    Args:
        section: name of the section that the settings are in, for errors.
        settings: see there.
        tuning: limits of a token and of the cache.
        now_s: the wall clock, in epoch seconds, for the tokens of the cache; PyJWT reads its own.

    Attributes:
        keys: the key set, which is to be refreshed while the tokens are in use.

    Raises:
        ConfigurationError: the file cannot be used.
    """

    def __init__(
        self,
        section: str,
        settings: JwtSettings,
        tuning: AccessTuning,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._max_bytes = tuning.max_token_bytes
        self._now_s = now_s
        file = settings.jwks_file
        load = partial(_load, f"{section}.jwt.jwks_file", file, frozenset(settings.algorithms))
        self.keys = Watched([file], load)
        self._verified: BoundedCache[bytes, _Verified] = BoundedCache(tuning.cached_tokens)

    def read(self, token: str) -> Claims:
        """Return what a token says.

        Raises:
            Rejected: it is not believed; the text completes "got ...", and shows nothing of it.
        """
        content = token.encode("utf-8", "replace")
        if len(content) > self._max_bytes:
            raise _refusal(f"one of more than {self._max_bytes} bytes")
        keys = self.keys.current()
        digest = hashlib.sha256(content).digest()
        found = self._verified.get(digest)
        if found is None or found.keys is not keys:
            found = self._verified.add(digest, self._verify(token, keys))
        if self._now_s() >= found.until_s:
            raise _refusal(_EXPIRED)
        return found.claims

    def _verify(self, token: str, keys: dict[str, _Key]) -> _Verified:
        settings = self._settings
        try:
            key = _find_key(jwt.get_unverified_header(token).get("kid"), keys)
            claims = jwt.decode(
                token,
                key.public,
                algorithms=key.algorithms,
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": ["exp", "iss", "aud", settings.tenant_claim]},
            )
            until_s = int(claims["exp"]) + settings.leeway_s
        except jwt.MissingRequiredClaimError as error:
            raise _refusal(f"one without the claim {error.claim}") from error
        except _UNREADABLE as error:
            told = (text for kind, text in _FAULTS if isinstance(error, kind))
            raise _refusal(next(told, "one that cannot be read")) from error
        tenant = claims[settings.tenant_claim]
        if not _is_tenant(tenant):
            raise _refusal(f"one whose claim {settings.tenant_claim} names no tenant")
        words = _words(claims.get(settings.groups_claim))
        prefix = settings.groups_prefix
        groups = frozenset(word.removeprefix(prefix) for word in words if word.startswith(prefix))
        return _Verified(keys, until_s, Claims(tenant, groups))


def _refusal(got: str) -> Rejected:
    return Rejected(Code.INVALID_REQUEST, got)


def _find_key(kid: str | None, keys: dict[str, _Key]) -> _Key:
    """Return the key of a token; one without a `kid` is for a set of one key."""
    if kid is None and len(keys) == 1:
        return next(iter(keys.values()))
    found = keys.get(kid or "")
    if found is None:
        raise _refusal("one that names no known key")
    return found


def _is_tenant(value: object) -> bool:
    """Return True if a value can be the header `x-tenant`, and stand in a line of text."""
    if not isinstance(value, str) or not value or not value.isprintable():
        return False
    return len(value) <= MAX_NAME_LENGTH and len(value.encode()) <= MAX_HEADER_BYTES


def _words(claim: object) -> list[str]:
    """Return the words of a claim: a list, or text with spaces between them (RFC 8693)."""
    if isinstance(claim, str):
        return claim.split()
    return [each for each in claim if isinstance(each, str)] if isinstance(claim, list) else []


def _load(setting: str, file: Path, allowed: frozenset[str]) -> dict[str, _Key]:
    """Return the keys of a JSON Web Key Set (RFC 7517) for the algorithms, by `kid`.

    A key that cannot be used is ignored beside others, as the RFC asks (section 5): else it would
    keep out the new keys of a provider, and keep in those that it has withdrawn.
    """
    where = f"{setting}: {file}"
    content = read_file(setting, file)
    try:
        given = msgspec.json.decode(content, type=_KeySet).keys
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: expected a JSON Web Key Set: {error}") from error
    keys: dict[str, _Key] = {}
    names = ", ".join(sorted(allowed))
    fault = f"{where}: expected a public key for one of {names}, got none"
    for number, all_of_it in enumerate(given):
        place = f"{where}: keys[{number}]"
        try:
            jwk = msgspec.convert(all_of_it, _Jwk)
            algorithms = [name for name in jwk.algorithms() if name in allowed]
            if not algorithms:
                continue
            if "d" in all_of_it:
                raise ConfigurationError(f"{place}: expected a public key, got a private one")
            public = _public_key(all_of_it, algorithms[0])
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            fault = f"{place}: expected a key as RFC 7517 has it: {error}"
            continue
        if jwk.kid in keys:
            raise ConfigurationError(f"{place}: expected a kid of its own, got that of another key")
        keys[jwk.kid] = _Key(public, algorithms)
    if not keys:
        raise ConfigurationError(fault)
    return keys


def _public_key(given: dict[str, Any], algorithm: str) -> object:
    public = jwt.PyJWK.from_dict(given, algorithm).key
    if isinstance(public, RSAPublicKey) and public.key_size < _LEAST_RSA_BITS:
        raise ValueError(f"expected RSA of at least {_LEAST_RSA_BITS} bits, got {public.key_size}")
    return public
