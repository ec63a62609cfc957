"""Ed25519 signatures of manifests; keys are PEM files, as OpenSSL writes them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.errors import ConfigurationError
from headrace.models.packing.manifest import MANIFEST_NAME, Manifest, Signed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


class Trust(NamedTuple):
    """Signatures that a version needs before it is served.

    Attributes:
        require_signature: True if the manifest must be signed.
        keys: trusted public keys; the signature of one of them is enough.
    """

    require_signature: bool = False
    keys: tuple[Ed25519PublicKey, ...] = ()


def read_trust(require_signature: bool, trusted_keys: Sequence[Path]) -> Trust:
    """Read the trusted keys.

    Raises:
        ConfigurationError: a key cannot be read.
    """
    if not require_signature:
        return Trust()
    return Trust(True, tuple(_read_public_key(path) for path in trusted_keys))


def _read_public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = _read_key(path, "models.trusted_keys", load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigurationError(
            f"models.trusted_keys: {path}: expected an Ed25519 public key, got another one"
        )
    return key


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read the key to sign with.

    Raises:
        ConfigurationError: it cannot be read.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _read_key(path, "--sign-key", lambda pem: load_pem_private_key(pem, password=None))
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(
            f"--sign-key: {path}: expected an Ed25519 private key, got another one"
        )
    return key


def _read_key(path: Path, where: str, load: Any) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{where}: {path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{where}: {path}: expected an Ed25519 key in PEM") from error


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """Return the manifest with the signature of one key, and no other."""
    signed = Signed(
        base64.b64encode(key.public_key().public_bytes_raw()).decode(),
        base64.b64encode(key.sign(manifest.signed_bytes())).decode(),
    )
    return msgspec.structs.replace(manifest, signatures=(signed,))


def check_signature(manifest: Manifest, trust: Trust) -> None:
    """Check that a trusted key has signed the manifest, if that is required.

    Raises:
        ConfigurationError: none has.
    """
    if not trust.require_signature:
        return
    from cryptography.exceptions import InvalidSignature

    by_key = {base64.b64encode(key.public_bytes_raw()).decode(): key for key in trust.keys}
    content = manifest.signed_bytes()
    for signed in manifest.signatures:
        key = by_key.get(signed.key)
        if key is None:
            continue
        try:
            key.verify(base64.b64decode(signed.signature, validate=True), content)
        except (InvalidSignature, binascii.Error) as error:
            raise ConfigurationError(
                f"{MANIFEST_NAME}: signature: expected one of this manifest by the key "
                f"{signed.key}, got one of something else"
            ) from error
        return
    got = ", ".join(signed.key for signed in manifest.signatures) or "none"
    raise ConfigurationError(
        f"{MANIFEST_NAME}: signature: expected one by a key of models.trusted_keys, got {got}"
    )
