"""Payloads of several files: the parts of a MIME multipart body (RFC 2046, section 5.1)."""

from __future__ import annotations

from headrace.errors import Code, Rejected


def split_parts(payload: bytes, max_parts: int, setting: str) -> list[tuple[str, bytes]]:
    """Return content type and content of each part of a multipart body.

    The boundary is that of the first line, so that a header of Kafka needs no parameter for it.

    Args:
        payload: the body.
        max_parts: most parts.
        setting: that says so in messages.

    Raises:
        Rejected: `INVALID_REQUEST` for another body, `TOO_LARGE` for too many parts.
    """
    line, line_end, _ = payload.partition(b"\r\n")
    boundary = line.rstrip()
    # Where lines end with LF alone, the first CRLF is somewhere in a file.
    is_text = boundary.isascii() and boundary.decode("ascii", "replace").isprintable()
    if not (line_end and is_text and boundary.startswith(b"--") and 2 < len(boundary) <= 72):
        raise _no_parts("a line with a boundary, --..., and CRLF at byte 0", f"{payload[:12]!r}")
    *contents, rest = (b"\r\n" + payload).split(b"\r\n" + boundary, max_parts + 2)
    if len(contents) > max_parts + 1:
        raise Rejected.mismatch(
            Code.TOO_LARGE, "payload", expected=f"at most {setting} = {max_parts}", got="more"
        )
    if not rest.startswith(b"--"):
        raise _no_parts(
            f"the boundary {boundary.decode('ascii', 'replace')}-- at the end",
            f"a body that ends at byte {len(payload)}",
        )
    if len(contents) < 2:
        raise _no_parts("at least one part", "none")
    return [_read_part(content, number) for number, content in enumerate(contents[1:])]


def _read_part(content: bytes, number: int) -> tuple[str, bytes]:
    head, found, body = content.partition(b"\r\n\r\n")
    if not found:
        raise _no_parts(f"headers and an empty line in part {number}", "none")
    named_type = ""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-type":
            named_type = value.decode("ascii", "replace").partition(";")[0].strip().lower()
    return named_type, body


def _no_parts(expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, "payload: multipart", expected=expected, got=got)
