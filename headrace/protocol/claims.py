"""Claims: references to objects in stores that stand for the values of records.

A value that is too large for a record is put into a store, and the record has the header `x-claim`
instead, with the object's URL, size and SHA-256, one space between them. The pattern is known as
claim check (Hohpe and Woolf, "Enterprise Integration Patterns").
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from headrace.errors import Code, Rejected
from headrace.protocol.headers import HeaderName
from headrace.urls import Address, parse_address

MAX_CLAIM_BYTES = 4096
"""Largest header: URLs that a store has signed are long."""

_FORM = re.compile(rb"(\S+) ([0-9]{1,15}) ([0-9a-fA-F]{64})")


class Claim(NamedTuple):
    """Reference to an object.

    Attributes:
        address: where it is.
        size_bytes: its size, as it is in the store.
        sha256: its digest, in lower-case hexadecimal digits.
    """

    address: Address
    size_bytes: int
    sha256: str


def describe_claim(url: str, content: bytes) -> Claim:
    """Return the claim for content that is put at a URL. Raises `ValueError` for a wrong URL."""
    return Claim(parse_address(url), len(content), hashlib.sha256(content).hexdigest())


def write_claim(claim: Claim) -> bytes:
    """Return the header of a claim."""
    return f"{claim.address.url} {claim.size_bytes} {claim.sha256}".encode()


def parse_claim(header: bytes) -> Claim:
    """Return the claim in a header.

    Raises:
        Rejected: `INVALID_REQUEST`.
    """
    if len(header) > MAX_CLAIM_BYTES:
        raise refuse_claim(f"at most {MAX_CLAIM_BYTES} bytes", str(len(header)))
    match = _FORM.fullmatch(header)
    if match is None:
        raise refuse_claim(
            "a URL, a size in bytes and a SHA-256 in 64 hexadecimal digits, one space between them",
            "another form",
        )
    try:
        address = parse_address(match[1].decode("ascii", "replace"))
    except ValueError as error:
        raise refuse_claim(str(error).removeprefix("expected "), "another one") from error
    if not address.parts:
        raise refuse_claim("a URL with the path of an object", address.origin)
    return Claim(address, int(match[2]), match[3].decode().lower())


def refuse_claim(expected: str, got: str, code: Code = Code.INVALID_REQUEST) -> Rejected:
    """Return the error for a claim that cannot be used."""
    return Rejected.mismatch(code, f"header {HeaderName.CLAIM}", expected=expected, got=got)
