"""Addresses of objects in stores: parsed strictly, and compared with allowed prefixes.

Two programs that read one URL differently are how a check is passed by, so only the plain form of a
URL is accepted: no login, no fragment, no `.` or `..`, nothing encoded that means something plain,
no empty part of a path. What is left has one meaning, and is compared part by part.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

STORE_SCHEMES = ("https", "http", "s3", "gs", "az", "file")
"""Schemes of stores whose objects a claim may name."""

_SHAPE = re.compile(r"([a-z0-9]+)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?")
_HOST = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z0-9_-]+|\[[0-9a-f:.]+\]")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_UNSAFE = re.compile(r'[^!-~]|[\\"<>^`{|}]')
_ENCODED = re.compile(r"%(?:2[eEfF5]|5[cC]|[01][0-9a-fA-F]|7[fF]|(?![0-9a-fA-F]{2}))")
"""Encodings of `.`, `/`, `%`, `\\`, and of control characters; or no encoding at all."""

_DEFAULT_PORTS = {"https": "443", "http": "80"}


class Address(NamedTuple):
    """Place of an object, or of all objects below it.

    Attributes:
        authority: host and port, without the default port; the bucket of a store; empty for files.
        parts: of the path, decoded.
        url: the text that was parsed.
    """

    scheme: str
    authority: str
    parts: tuple[str, ...]
    url: str

    @property
    def origin(self) -> str:
        """Scheme and host, or bucket: the part of the address that is no secret."""
        return f"{self.scheme}://{self.authority}"

    @property
    def key(self) -> str:
        """The path, decoded, without a slash before it."""
        return "/".join(self.parts)

    def is_within(self, prefix: Address) -> bool:
        """Return True if the address is the prefix, or lies below it."""
        return (self.scheme, self.authority) == (prefix.scheme, prefix.authority) and (
            self.parts[: len(prefix.parts)] == prefix.parts
        )


def parse_address(url: str) -> Address:
    """Return the address of an object.

    Raises:
        ValueError: with what was expected. The URL itself is not in the text, since its path and
            query may be secrets.
    """
    match = _SHAPE.fullmatch(url)
    if match is None or match[1] not in STORE_SCHEMES:
        raise ValueError(f"expected a URL that begins with one of {', '.join(STORE_SCHEMES)}")
    scheme, authority, path, query = match[1], match[2], match[3] or "", match[4]
    if _UNSAFE.search(url) or _ENCODED.search(path):
        raise ValueError(
            "expected a URL of ASCII characters, with others encoded, and no encoded dots, slashes "
            "or control characters"
        )
    if query and scheme not in _DEFAULT_PORTS:
        raise ValueError(f"expected no query in a URL of {scheme}")
    parts = tuple(path.removesuffix("/").split("/")[1:])
    if any(part.partition(";")[0] in ("", ".", "..") for part in parts):
        raise ValueError("expected a path without empty parts, `.` and `..`")
    try:
        decoded = tuple(unquote(part, errors="strict") for part in parts)
    except UnicodeDecodeError as error:  # some servers read overlong forms as dots and slashes
        raise ValueError("expected a path whose encoded bytes are UTF-8") from error
    return Address(scheme, _read_authority(scheme, authority), decoded, url)


def _read_authority(scheme: str, authority: str) -> str:
    if scheme == "file":
        if authority:
            raise ValueError("expected file:/// and no host")
        return ""
    if scheme not in _DEFAULT_PORTS:
        if not _BUCKET.fullmatch(authority):
            raise ValueError(f"expected {scheme}:// and the name of a bucket")
        return authority
    host, colon, port = authority.lower(), "", ""
    if not host.endswith("]"):
        host, colon, port = host.rpartition(":") if ":" in host else (host, "", "")
    if not _HOST.fullmatch(host) or (colon and not _PORT.fullmatch(port)):
        raise ValueError(f"expected {scheme}:// and a host, without a login")
    return host if not port or port == _DEFAULT_PORTS[scheme] else f"{host}:{port}"
