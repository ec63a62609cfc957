"""Certificates of a gateway's callers, by an authority of their own."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


class CallerFiles(NamedTuple):
    """The certificate of a caller and its key, in PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs the certificates of callers; `file` has its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = directory / "callers-ca.pem"
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Callers")])
        own = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        content = own.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        self.file.write_bytes(content)

    def sign(self, name: str, *others: x509.GeneralName, valid_days: float = 1) -> CallerFiles:
        """Return a certificate with a common name, and with other names.

        One whose days are negative has expired; it was valid until then, since two days ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key(), valid_days)
        if others:
            builder = builder.add_extension(x509.SubjectAlternativeName(others), critical=False)
        files = CallerFiles(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        signed = builder.sign(self._key, hashes.SHA256())
        files.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, valid_days: float = 1
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        own_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=valid_days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own_id),
                critical=False,
            )
        )
