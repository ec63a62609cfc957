"""The codings of values on topics and of bodies over HTTP: gzip, deflate, zstd and br.

Sizes are bounded before the bytes are made. Names and qualities are those of RFC 9110 (8.4.1 and
12.5.3), in which `deflate` is zlib's format (RFC 1950); the others are RFC 1952 (gzip), RFC 8878
(zstd) and RFC 7932 (br).
"""

from __future__ import annotations

import zlib

import brotli
import cramjam
import numpy as np

from headrace.errors import Code, Rejected
from headrace.protocol.negotiation import read_qualities
from headrace.tuning import TUNING

GZIP = "gzip"
DEFLATE = "deflate"
ZSTD = "zstd"
BROTLI = "br"
CODINGS = (ZSTD, GZIP, DEFLATE, BROTLI)
"""The known codings; of those that a caller accepts equally, the first one is taken."""

_WINDOW_BITS = {GZIP: 16 + zlib.MAX_WBITS, DEFLATE: zlib.MAX_WBITS}
_MAX_INFLATION = 1032
"""Bytes that one byte of deflate becomes at most, see "Maximum compression factor" in zlib's
technical details.
"""
_TUNING = TUNING.protocol


def read_coding(text: str) -> str | None:
    """Return the coding that a header `content-encoding` names, empty for none; None if it is not
    known.
    """
    coding = text.strip().lower()
    if coding in ("", "identity"):
        return ""
    return coding if coding in CODINGS else None


def choose_coding(accepted: str) -> str:
    """Return the coding that `accept-encoding` gives the highest quality, empty for none.

    `*` stands for the codings that are not named. Among equal qualities zstd is preferred, then
    gzip.
    """
    qualities = read_qualities(accepted)
    others = qualities.get("*", 0.0)
    best = max(CODINGS, key=lambda coding: qualities.get(coding, others))
    quality = qualities.get(best, others)
    return best if quality > 0 and quality >= qualities.get("identity", 0.0) else ""


def compress(content: bytes, coding: str) -> bytes:
    """Return the content in a coding."""
    if coding == ZSTD:
        return bytes(cramjam.zstd.compress(content, level=_TUNING.zstd_level))
    if coding == BROTLI:
        return bytes(brotli.compress(content, quality=_TUNING.brotli_quality))
    return zlib.compress(content, _TUNING.deflate_level, _WINDOW_BITS[coding])


def decompress(content: bytes | memoryview, coding: str, limit_bytes: int, where: str) -> bytes:
    """Return what was compressed.

    Args:
        content: one stream of gzip, deflate or br, or any number of frames of zstd.
        coding: one of `CODINGS`.
        limit_bytes: largest result.
        where: name of the content, for messages.

    Raises:
        Rejected: `TOO_LARGE` for a larger result, of which only `limit_bytes` and one are made
            (up to 0.5 MiB more with br);
            `INVALID_REQUEST` for content that is damaged or not whole.
    """
    if coding == ZSTD:
        return _decompress_zstd(content, limit_bytes, where)
    if coding == BROTLI:
        return _decompress_brotli(content, limit_bytes, where)
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        plain = stream.decompress(content, min(limit_bytes, _TUNING.first_inflated_bytes) + 1)
        if not stream.eof and len(plain) <= limit_bytes:
            left = stream.unconsumed_tail
            is_dense = len(plain) > _TUNING.dense_ratio * (len(content) - len(left))
            if is_dense and _exceeds(content, coding, limit_bytes):
                raise too_large(where, limit_bytes)
            plain += stream.decompress(left, limit_bytes + 1 - len(plain))
    except zlib.error as error:
        place = _locate_damage(content, coding)
        raise _damaged(where, f"{coding} without damage", f"{error} {place}") from error
    if len(plain) > limit_bytes:
        raise too_large(where, limit_bytes)
    if stream.unused_data:
        end = len(content) - len(stream.unused_data)
        raise _damaged(where, f"one {coding} stream", f"other bytes from byte {end} on")
    if not stream.eof:
        raise _ends_early(where, coding, content, plain)
    return plain


def may_hide_its_size(content: bytes | memoryview, coding: str) -> bool:
    """Return True if a few bytes may take as long to decompress as 16 MiB do, which `decompress`
    cannot prevent. A br stream of several meta-blocks may: each can fill the window before the
    library returns a byte.
    """
    return coding == BROTLI and not _read_first_block(content)[0]


def too_large(where: str, limit_bytes: int, got: str = "more") -> Rejected:
    """Return the error for content that is larger than its limit, before or after decompression."""
    expected = f"at most {limit_bytes} bytes"
    return Rejected.mismatch(Code.TOO_LARGE, where, expected=expected, got=got)


def _exceeds(content: bytes | memoryview, coding: str, limit_bytes: int) -> bool:
    """Return True if content certainly becomes more than `limit_bytes`.

    Bombs are runs of equal bytes, which this library copies ten times as fast as zlib; it is slower
    at other content, and does not say where damage is.
    """
    if len(content) * _MAX_INFLATION <= limit_bytes:
        return False
    room = np.empty(limit_bytes, np.uint8)  # memory only as it is written
    try:
        (cramjam.gzip if coding == GZIP else cramjam.zlib).decompress_into(content, room.data)
    except cramjam.DecompressionError as error:
        return _is_full(error)
    return False


def _is_full(error: cramjam.DecompressionError) -> bool:
    """Return True if the room was too small: `std::io::ErrorKind::WriteZero`."""
    return "whole buffer" in str(error)


def _decompress_brotli(content: bytes | memoryview, limit_bytes: int, where: str) -> bytes:
    # The library fills its window, of up to 16 MiB, before it returns a byte of a block.
    if _read_first_block(content)[1] > limit_bytes:
        raise too_large(where, limit_bytes)
    stream = brotli.Decompressor()
    parts, part = [], b""
    size = done = 0
    step = _TUNING.brotli_piece_bytes
    try:
        # Dense parts are decompressed in small steps, so that it ends soon after the limit.
        while size <= limit_bytes and (part or done < len(content)):
            piece = content[done : done + step] if stream.can_accept_more_data() else b""
            part = stream.process(piece, output_buffer_limit=_TUNING.brotli_part_bytes)
            parts.append(part)
            done, size = done + len(piece), size + len(part)
            is_dense = len(part) > _TUNING.dense_ratio * step
            step = _TUNING.brotli_piece_bytes if is_dense else 2 * step
    except brotli.error as error:
        raise _damaged(where, "one br stream without damage", str(error)) from error
    if size > limit_bytes:
        raise too_large(where, limit_bytes)
    plain = b"".join(parts)
    if not stream.is_finished():
        raise _ends_early(where, BROTLI, content, plain)
    return plain


def _read_first_block(content: bytes | memoryview) -> tuple[bool, int]:
    """Return whether the first meta-block of a br stream is the last one, and its declared
    decompressed size; 0 if it has no data (RFC 7932, 9.1 and 9.2).
    """
    bits = int.from_bytes(content[:8], "little")  # WBITS begins with the lowest bit
    bits >>= 1 if not bits & 1 else 4 if bits & 0b1110 else 7
    is_last, bits = bits & 1, bits >> 1
    if is_last:
        is_empty, bits = bits & 1, bits >> 1
        if is_empty:
            return True, 0
    nibbles, bits = 4 + (bits & 3), bits >> 2  # MNIBBLES, and MLEN - 1
    return bool(is_last), 0 if nibbles == 7 else (bits & (1 << 4 * nibbles) - 1) + 1


def _decompress_zstd(content: bytes | memoryview, limit_bytes: int, where: str) -> bytes:
    room_bytes = _TUNING.first_zstd_bytes + 8 * len(content)
    while True:
        plain = np.empty(min(room_bytes, limit_bytes), np.uint8)  # memory only as it is written
        try:
            size = cramjam.zstd.decompress_into(content, plain.data)
        except cramjam.DecompressionError as error:
            if not _is_full(error):
                got = f"{error}, in {len(content)} bytes"
                raise _damaged(where, f"whole {ZSTD} frames", got) from error
            if room_bytes >= limit_bytes:
                raise too_large(where, limit_bytes) from None
            room_bytes *= 8
        else:
            return plain[:size].tobytes()


def _locate_damage(content: bytes | memoryview, coding: str) -> str:
    """Return where content that cannot be decompressed is damaged, to a few bytes."""
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    step = _TUNING.located_damage_bytes
    for start in range(0, len(content), step):
        try:
            stream.decompress(content[start : start + step])
        except zlib.error:
            return f"in bytes {start} to {min(start + step, len(content))} of {len(content)}"
    return f"in {len(content)} bytes"


def _ends_early(where: str, coding: str, content: bytes | memoryview, plain: bytes) -> Rejected:
    got = f"{len(content)} bytes that end early, after {len(plain)} decompressed ones"
    return _damaged(where, f"a whole {coding} stream", got)


def _damaged(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=got)
