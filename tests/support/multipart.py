"""Bodies of several files (RFC 2046, section 5.1)."""

from __future__ import annotations


def multipart(*contents: bytes, head: bytes = b"Content-Type: image/png\r\n") -> bytes:
    """A body with parts."""
    parts = [b"--x7\r\n" + head + b"\r\n" + content + b"\r\n" for content in contents]
    return b"".join(parts) + b"--x7--\r\n"
