"""Addresses of objects, and the header that refers to one."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import make_settings
from headrace.errors import ConfigurationError, Rejected
from headrace.protocol.claims import describe_claim, parse_claim, write_claim
from headrace.urls import parse_address

SHA = "0" * 64
PREFIX = parse_address("https://files.example/in/a")


@pytest.mark.parametrize(
    "url",
    [
        "https://files.example/in/a",
        "https://files.example/in/a/b?X-Signature=%2F..",
        "https://FILES.example:443/in/a/b",
        "https://files.example/in/%61/b/",
    ],
)
def test_address_below_prefix_is_within(url: str) -> None:
    """However its host, port and path are written."""
    assert parse_address(url).is_within(PREFIX)


@pytest.mark.parametrize(
    "url",
    [
        "https://files.example/in/ab",
        "https://files.example/in",
        "https://files.example/IN/a/b",
        "https://files.example:8443/in/a/b",
        "https://files.example.evil/in/a/b",
        "https://evil/in/a/b?files.example",
        "http://files.example/in/a/b",
    ],
)
def test_address_elsewhere_is_not_within(url: str) -> None:
    """Scheme, host and port are compared exactly, and the path part by part."""
    assert not parse_address(url).is_within(PREFIX)


@pytest.mark.parametrize(
    "url",
    [
        "https://files.example/in/a/../../etc",
        "https://files.example/in/a/%2e%2e/etc",
        "https://files.example/in/a/.%2E/etc",
        "https://files.example/in/a/..%2fetc",
        "https://files.example/in/a/%252e%252e/etc",
        "https://files.example/in/a/..;x/etc",
        "https://files.example/in/a//b",
        "https://files.example/in/a//",
        "https://files.example/in/a/%c0%ae%c0%ae/b",
        "https://files.example/in/a/%ff",
        "https://files.example/in/a/.",
        "https://files.example/in/a\\..\\b",
        "https://files.example/in/a/%5c..",
        "https://files.example/in/a/%00",
        "https://files.example/in/a/%zz",
        "https://files.example/in/a/\u2025/b",
        "https://files.example/in/a#b",
        "https://user@files.example/in/a",
        "https://files.example@evil/in/a",
        "https://files.example:443@evil/in/a",
        "https://files.example:0/in/a",
        "https://files.example:x/in/a",
        "https://files.example./in/a",
        "https:///in/a",
        "https:/files.example/in/a",
        "HTTPS://files.example/in/a",
        "ftp://files.example/in/a",
        "file://host/in/a",
        "s3:///key",
        "s3://bucket/key?versionId=1",
        "",
        "in/a",
    ],
)
def test_address_of_two_meanings_is_refused(url: str) -> None:
    """An address that another program could read as another place is refused."""
    with pytest.raises(ValueError, match=r"^expected "):
        parse_address(url)


@given(st.text(max_size=40))
def test_parts_of_accepted_path_stay_below(path: str) -> None:
    """No accepted path leaves the prefix."""
    try:
        address = parse_address(f"file:///root/{path}")
    except ValueError:
        return
    assert address.parts[0] == "root"
    assert not {"", ".", ".."} & set(address.parts)
    assert not any("/" in part or "\\" in part or "\0" in part for part in address.parts)


def test_claim_is_read_as_written() -> None:
    """URL, size and SHA-256, with one space between them."""
    header = write_claim(describe_claim("s3://bucket/a%20b", b"content"))

    digest = hashlib.sha256(b"content").hexdigest()
    assert header == f"s3://bucket/a%20b 7 {digest}".encode()
    claim = parse_claim(header)
    assert (claim.address.key, claim.size_bytes, claim.sha256) == ("a b", 7, digest)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", "a URL, a size in bytes and a SHA-256"),
        (b"s3://b/k", "a URL, a size in bytes and a SHA-256"),
        (f"s3://b/k -1 {SHA}".encode(), "a URL, a size in bytes and a SHA-256"),
        (f"s3://b/k 1  {SHA}".encode(), "a URL, a size in bytes and a SHA-256"),
        (f"s3://b/k 1 {SHA[1:]}".encode(), "a URL, a size in bytes and a SHA-256"),
        (f"s3://b/../k 1 {SHA}".encode(), "a path without empty parts"),
        (f"s3://b 1 {SHA}".encode(), "a URL with the path of an object, got s3://b"),
        (f"s3://b/\xff 1 {SHA}".encode("latin-1"), "a URL of ASCII characters"),
        (b"s3://b/" + b"k" * 4096 + f" 1 {SHA}".encode(), "at most 4096 bytes"),
    ],
)
def test_claim_of_another_form_is_refused_with_reason(header: bytes, expected: str) -> None:
    """The code is `INVALID_REQUEST`."""
    with pytest.raises(Rejected, match=expected) as raised:
        parse_claim(header)
    assert raised.value.code == "INVALID_REQUEST"


def test_settings_refuse_prefixes_that_are_no_addresses() -> None:
    """Each by its place in the list; and claims that the budget could not hold."""
    with pytest.raises(ConfigurationError, match=r"claims.allowed.0: .*without a login"):
        make_settings({"claims": {"allowed": ["https://u:p@host/x"]}})
    with pytest.raises(ConfigurationError, match=r"claims.allowed.0: .*without a query"):
        make_settings({"claims": {"allowed": ["https://host/x?y=1"]}})
    with pytest.raises(ConfigurationError, match=r"claims.max_bytes: expected at most"):
        make_settings({"claims": {"allowed": ["s3://b"], "max_bytes": 2**30}})
